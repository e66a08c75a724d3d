"""Namespaces of one machine that stand for hosts, for tests and benchmarks that need a network between processes."""
