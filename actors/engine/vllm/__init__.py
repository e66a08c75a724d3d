"""The real engine runs vLLM's AsyncLLM behind the engine protocol."""
