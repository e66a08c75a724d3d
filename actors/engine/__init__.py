"""The engines: one protocol (`protocol`), two kinds (`vllm` and `sim`, listed in `registry`), and one server
(`server`).
"""
