"""Sluice beside others on real engines: one prefill and one decode engine of vLLM each."""
