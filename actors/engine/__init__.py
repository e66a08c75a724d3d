"""Engines: one protocol (`protocol`), two implementations (`vllm_engine`, `sim_engine`), one front (`server`)."""
