"""Requests per second of one router by the number of ingress processes and engines, until it is full."""
