"""Requests to send: trace files, arrival processes, length distributions, prefix sharing."""
