"""The application: its configuration, the OpenAI-compatible ingress, and the graph of Serve deployments."""
