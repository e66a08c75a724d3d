"""The real engine: vLLM's AsyncLLM behind the engine protocol."""
