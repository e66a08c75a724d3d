"""The OpenAI-compatible API as pure functions from requests to plans or errors, and from output to JSON."""
