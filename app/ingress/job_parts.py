"""What a job is made of and may do: its states, the events that are no messages, its work, and the world's
interface.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from actors.wire.messages import Failed, Message, Out, RouteDecode, RoutePrefill
from app.api.errors import ApiError
from policies.request.terms import Terms

if TYPE_CHECKING:
    from app.ingress.job import Job


class State(enum.Enum):
    """What the job waits for. Held: nothing / work at prefill / lease at prefill / both / work at decode /
    nothing.
    """

    SUBMITTED = "submitted"
    PREFILLING = "prefilling"
    POOLED = "pooled"
    ADMITTING = "admitting"
    DECODING = "decoding"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The connection to `engine_id` is gone, and with it all that this job had there."""

    engine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """`Failed` of an engine, with the engine that said it."""

    engine_id: str
    failed: Failed


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The router is gone: whatever it had not decided is decided here."""


@dataclass(slots=True)
class Times:
    """Monotonic seconds of the stages of the last attempt, and what the engines measured themselves
    (durations).
    """

    submitted_s: float
    routed_s: float | None = None
    pooled_s: float | None = None
    decode_routed_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    engine_queue_s: float = 0.0
    prefill_s: float | None = None
    transfer_s: float | None = None
    transfer_bytes: int = 0
    descriptors: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What a job is to do; the same for all its attempts.

    `id` is the request's, behind the prefix in its answer; `client_id` the client's own x-request-id, if it sent one.
    """

    tokens: list[int]
    params: dict[str, Any]
    max_tokens: int
    choices: int
    terms: Terms
    arrived_s: float  # at this ingress, monotonic
    chat: bytes | None = None
    first_choice: int = 0  # index of its first choice in the answer
    id: str = ""
    client_id: str = ""
    user: str = ""
    text: str | None = (
        None  # the prompt as text, where the client sent text; only looked at for the router's hints
    )

    @property
    def deadline_s(self) -> float:
        """When the request must have ended, on the monotonic clock."""
        return self.terms.deadline_s(self.arrived_s)


class Owner(Protocol):
    """Who gets the job's results: the exchange with the client."""

    def job_output(self, job: "Job", out: Out) -> None: ...
    def job_finished(self, job: "Job") -> None: ...
    def job_failed(self, job: "Job", error: ApiError) -> None: ...


class Ports(Protocol):
    """What a job can do to the world; `hub.Hub` live, a recorder in the unit tests."""

    max_retries: int
    lease_margin_s: float

    def now_s(self) -> float: ...
    def new_attempt_id(self, work: Work) -> str:
        """An attempt_id of its own for each attempt, which begins with the request's id."""

    def register(self, job: "Job") -> None: ...
    def forget(self, job: "Job", outcome: str) -> None: ...
    def router_epoch(self) -> int | None:
        """Number of the current router connection; None without one."""

    def hints_of(self, work: Work) -> bytes:
        """`Submit.hints`; empty where the router wants none."""

    def block_hashes_of(self, work: Work) -> tuple[bytes, int]:
        """`Submit.block_hashes` and `block_tokens`; (b"", 0) where the router wants none."""

    def to_router(self, message: Message) -> None: ...
    def to_engine(self, engine_id: str, job: "Job", message: Message) -> bool:
        """Sends and ties the job to the engine. False if the engine is not connected."""

    def leave_engine(self, engine_id: str, job: "Job") -> None: ...
    def choose_prefill(self, job: "Job") -> RoutePrefill | None:
        """The local policy, where there is no router; None without an engine."""

    def choose_decode(self, job: "Job") -> RouteDecode | None: ...
    def admitted(self, job: "Job") -> None: ...
    def retried(self, job: "Job", stage: str, code: str) -> None: ...
    def transfer_failed(self, job: "Job") -> None: ...
    def refused(self, job: "Job", event: object) -> None: ...
