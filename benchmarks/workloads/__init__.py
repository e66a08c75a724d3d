"""Workloads: the requests that a simulation or a load test sends.

They are read from trace files, or generated from arrival processes, length distributions and shared prefixes.
"""
