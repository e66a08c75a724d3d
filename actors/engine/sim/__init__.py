"""The sim engine: the engine protocol on a timing model with virtual KV."""
