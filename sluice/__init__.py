"""Sluice's SDK: clients for a Sluice server, typed results, typed errors.

    from sluice import Sluice

    with Sluice() as client:
        print(client.chat("Why is the sky blue?", max_tokens=64).text)
        with client.stream_chat("Tell me a story", max_tokens=200) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)

`AsyncSluice` is the same with coroutines. The package needs httpx and pydantic only. `sluice.cli` is the command.
"""

from ._version import __version__
from .aclient import AsyncSluice
from .admin import Decision, Explanation, Policies, Policy
from .astream import AsyncStream
from .client import Sluice
from .core import Timeouts
from .errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    ConfigurationError,
    ConnectionFailedError,
    EngineFailedError,
    ErrorDetail,
    InvalidResponseError,
    NotFoundError,
    RateLimitedError,
    RequestTimeoutError,
    ServerError,
    SluiceError,
    StreamInterruptedError,
    UnavailableError,
)
from .metrics import Metrics, Sample
from .options import SLO, ChatOptions, CompletionOptions, PriorityClass
from .retry import RetryPolicy
from .stream import Stream
from .types import (
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChunk,
    EngineStatus,
    Health,
    Model,
    Status,
    Usage,
    Version,
)

__all__ = [
    "SLO",
    "ApiError",
    "AsyncSluice",
    "AsyncStream",
    "AuthenticationError",
    "BadRequestError",
    "ChatChunk",
    "ChatCompletion",
    "ChatMessage",
    "ChatOptions",
    "Completion",
    "CompletionChunk",
    "CompletionOptions",
    "ConfigurationError",
    "ConnectionFailedError",
    "Decision",
    "EngineFailedError",
    "EngineStatus",
    "ErrorDetail",
    "Explanation",
    "Health",
    "InvalidResponseError",
    "Metrics",
    "Model",
    "NotFoundError",
    "Policies",
    "Policy",
    "PriorityClass",
    "RateLimitedError",
    "RequestTimeoutError",
    "RetryPolicy",
    "Sample",
    "ServerError",
    "Sluice",
    "SluiceError",
    "Status",
    "Stream",
    "StreamInterruptedError",
    "Timeouts",
    "UnavailableError",
    "Usage",
    "Version",
    "__version__",
]
