"""Sluice beside vLLM's own server and vllm-router on one GPU."""
