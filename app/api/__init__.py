"""The OpenAI-compatible surface as pure functions: bytes of a request in, a plan or an `ApiError` out; output
in, JSON out.
"""
