"""One request on its way through the simulation: its state, what it holds, what its ingress may ask of the router."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from benchmarks.sim.engine import Worker
from benchmarks.sim.kernel import Timer
from benchmarks.sim.pull import Pull
from benchmarks.sim.records import RequestRecord
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.scheduler import Sequence
from policies.request.terms import Terms
from policies.state import events as ev


class State(Enum):
    """What the job waits for."""

    SUBMITTED = "submitted"
    PREFILLING = "prefilling"
    POOLED = "pooled"
    ADMITTING = "admitting"
    DECODING = "decoding"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. `seq` is what its engine works on; `generated` counts tokens from before a preemption that
    sent it back to the router: they are part of its prompt now.
    """

    work: WorkloadRequest
    record: RequestRecord
    hashes: tuple[int, ...]
    terms: Terms
    deadline_s: float
    attempt_id: str
    state: State = State.SUBMITTED
    attempts: int = 0
    avoid: tuple[str, ...] = ()
    generated: int = 0
    prefill: Worker | None = None
    decode: Worker | None = None
    seq: Sequence | None = None
    pull: Pull | None = None
    layers: tuple[int, int] = (1, 1)  # groups of layers whose KV may leave, of how many
    lease: str | None = None
    guard: Timer | None = None
    timeout: Timer | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.work.prompt_tokens + self.generated


class Router(Protocol):
    """What an ingress tells the router."""

    def feed(self, event: ev.Event) -> None: ...
    def predicted(self, job: Job, now_s: float) -> float | None:
        """Expected output tokens, where the router predicts them at arrival."""

    def closed(self, job: Job, outcome: ev.Outcome, tokens: int) -> None: ...
    def ended(self, job: Job) -> None: ...
