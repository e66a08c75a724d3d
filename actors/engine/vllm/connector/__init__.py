"""Sluice's KV connector: vLLM's NIXL pull connector with leases that can be given back, checked, and accounted."""
