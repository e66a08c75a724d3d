"""Configuration, OpenAI-compatible ingress and the Serve application graph."""
