"""The ingress listens for HTTP, drives the life cycle of each request, and connects to the router and the engines."""
