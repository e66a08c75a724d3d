"""Descriptors, prefix hits and posting cost of KV reads, by the order in which blocks are allocated and read."""
