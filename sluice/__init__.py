"""Sluice's SDK: clients for a Sluice server, typed results, typed errors.

    from sluice import Sluice

    with Sluice() as client:
        print(client.chat("Why is the sky blue?", max_tokens=64).text)
        with client.chat("Tell me a story", max_tokens=200, stream=True) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)

`AsyncSluice` is the same with coroutines. The names below are the API; `sluice.types` has the types of the fields of
results, `sluice.admin` the client of a dashboard, and `sluice.cli` is the command. The package needs httpx and pydantic
only.
"""

from ._aclient import AsyncSluice
from ._astream import AsyncStream
from ._client import Sluice
from ._core import Timeouts
from ._errors import (
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
from ._metrics import Metrics, Sample
from ._options import SLO, ChatOptions, CompletionOptions, PriorityClass
from ._retry import RetryPolicy
from ._stream import Stream
from ._version import __version__
from .types import (
    Assigned,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChunk,
    Decision,
    EngineStatus,
    Explanation,
    Health,
    KvFlow,
    KvTransfer,
    Logs,
    Model,
    Policies,
    Policy,
    Scaling,
    Status,
    Usage,
    Version,
)

__all__ = [
    "SLO",
    "ApiError",
    "Assigned",
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
    "KvFlow",
    "KvTransfer",
    "Logs",
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
    "Scaling",
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
