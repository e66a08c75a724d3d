"""The sim engine implements the engine protocol with a timing model and virtual KV."""
