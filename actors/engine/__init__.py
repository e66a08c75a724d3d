"""Engines: one protocol (`protocol`), two kinds (`vllm`, `sim`; `registry` lists them), one front (`server`)."""
