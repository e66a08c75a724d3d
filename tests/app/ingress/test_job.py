"""The request's state machine: every state meets every event, and every way out gives back exactly what was
held.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.wire.messages import (
    Admitted,
    Adopt,
    Cancel,
    Closed,
    Decode,
    Failed,
    Message,
    Out,
    Prefill,
    PrefillDone,
    Prefilled,
    Reject,
    ReleaseKV,
    RouteDecode,
    RoutePrefill,
    Submit,
)
from app.api.errors import ApiError
from app.ingress.job import TABLE, Job
from app.ingress.job_parts import EngineFailed, EngineLost, RouterLost, State, Work
from policies.request.terms import Mode, Terms


@dataclass
class Recorder:
    """Ports and owner in one: remembers what the job did."""

    max_retries: int = 2
    lease_margin_s: float = 2.0
    now: float = 100.0
    epoch: int | None = 1
    down: set[str] = field(default_factory=set)
    local_prefill: RoutePrefill | None = None
    local_decode: RouteDecode | None = None
    to_router_log: list[Message] = field(default_factory=list)
    to_engine_log: list[tuple[str, Message]] = field(default_factory=list)
    ties: set[tuple[str, str]] = field(default_factory=set)
    live: dict[str, Job] = field(default_factory=dict)
    refusals: list[object] = field(default_factory=list)
    outs: list[Out] = field(default_factory=list)
    ends: list[object] = field(default_factory=list)
    retries: list[tuple[str, str]] = field(default_factory=list)
    failed_transfers: int = 0
    attempt_ids: int = 0

    def now_s(self) -> float:
        return self.now

    def new_attempt_id(self, work: Work) -> str:
        self.attempt_ids += 1
        return f"r{self.attempt_ids}"

    def register(self, job: Job) -> None:
        self.live[job.attempt_id] = job

    def forget(self, job: Job, outcome: str) -> None:
        del self.live[job.attempt_id]

    def hints_of(self, work: Work) -> bytes:
        return b""

    def block_hashes_of(self, work: Work) -> tuple[bytes, int]:
        return b"", 0

    def router_epoch(self) -> int | None:
        return self.epoch

    def to_router(self, message: Message) -> None:
        self.to_router_log.append(message)

    def to_engine(self, engine_id: str, job: Job, message: Message) -> bool:
        if engine_id in self.down:
            return False
        self.to_engine_log.append((engine_id, message))
        self.ties.add((engine_id, job.attempt_id))
        return True

    def leave_engine(self, engine_id: str, job: Job) -> None:
        self.ties.discard((engine_id, job.attempt_id))

    def choose_prefill(self, job: Job) -> RoutePrefill | None:
        return self.local_prefill

    def choose_decode(self, job: Job) -> RouteDecode | None:
        return self.local_decode

    def admitted(self, job: Job) -> None: ...

    def retried(self, job: Job, stage: str, code: str) -> None:
        self.retries.append((stage, code))

    def transfer_failed(self, job: Job) -> None:
        self.failed_transfers += 1

    def refused(self, job: Job, event: object) -> None:
        self.refusals.append(event)

    def job_output(self, job: Job, out: Out) -> None:
        self.outs.append(out)

    def job_finished(self, job: Job) -> None:
        self.ends.append("finished")

    def job_failed(self, job: Job, error: ApiError) -> None:
        self.ends.append(error)

    def sent(self, engine_id: str, kind: type) -> list[Any]:
        return [m for e, m in self.to_engine_log if e == engine_id and isinstance(m, kind)]

    def told(self, kind: type) -> list[Any]:
        return [m for m in self.to_router_log if isinstance(m, kind)]


def work(**more: Any) -> Work:
    fields: dict[str, Any] = {
        "tokens": [1, 2, 3], "params": {"max_tokens": 5}, "max_tokens": 5, "choices": 1, "arrived_s": 100.0,
        "terms": Terms(timeout_s=600.0),
    }  # fmt: skip
    return Work(**(fields | more))


def done(attempt_id: str) -> PrefillDone:
    return PrefillDone(attempt_id, b"h", 3, 1, 30.0, 0.1, 0.2, 999)


def token(attempt_id: str, finish: str | None = None, index: int = 0) -> Out:
    return Out(attempt_id, "x", 1, index=index, finish=finish)


def at(state: State, world: Recorder, **more: Any) -> Job:
    """A job that has come to `state` by the ordinary way (engines p and d)."""
    job = Job(work(**more), world, world)
    job.start()
    steps: list[Callable[[], object]] = [
        lambda: job.on(RoutePrefill(job.attempt_id, "p", "prefill")),
        lambda: job.on(done(job.attempt_id)),
        lambda: job.on(RouteDecode(job.attempt_id, "d")),
        lambda: job.on(Admitted(job.attempt_id, 9, 0.1, 3, 0)),
        lambda: job.on(token(job.attempt_id, finish="stop")),
    ]
    for step, reached in zip(steps, list(State)[1:], strict=True):
        if job.state is state:
            break
        step()
        assert now(job) is reached
    return job


def now(job: Job) -> State:
    """Its state (a call, so that a type checker does not take it for unchanged)."""
    return job.state


def event_of(kind: type, attempt_id: str) -> object:
    made: dict[type, object] = {
        RoutePrefill: RoutePrefill(attempt_id, "p", "prefill"),
        RouteDecode: RouteDecode(attempt_id, "d"),
        Reject: Reject(attempt_id, 429, "queue_full", 3.0),
        PrefillDone: done(attempt_id),
        Admitted: Admitted(attempt_id),
        Out: token(attempt_id),
        EngineFailed: EngineFailed("p", Failed(attempt_id, "prefill", "internal", "x", False)),
        EngineLost: EngineLost("p", "gone"),
        RouterLost: RouterLost(),
    }
    return made[kind]


KINDS = [RoutePrefill, RouteDecode, Reject, PrefillDone, Admitted, Out, EngineFailed, EngineLost, RouterLost]


UNLISTED = [(state, kind) for state in State for kind in KINDS if (state, kind) not in TABLE]


@pytest.mark.parametrize(
    ("state", "kind"), UNLISTED, ids=lambda x: x.value if isinstance(x, State) else x.__name__
)
def test_what_the_table_does_not_list_changes_nothing(state: State, kind: type) -> None:
    world = Recorder()
    job = at(state, world)
    before = (
        job.state,
        job.attempt_id,
        list(world.to_router_log),
        list(world.to_engine_log),
        set(world.ties),
    )
    job.on(event_of(kind, job.attempt_id))
    assert (job.state, job.attempt_id, world.to_router_log, world.to_engine_log, world.ties) == before
    assert len(world.refusals) == 1


def test_the_ordinary_way_says_everything_once() -> None:
    world = Recorder()
    job = at(State.DONE, world)
    kinds = [type(m) for m in world.to_router_log]
    assert kinds == [Submit, Prefilled, Closed]
    assert world.told(Closed) == [Closed(job.attempt_id, "finished", 1)]
    assert [(e, type(m)) for e, m in world.to_engine_log] == [("p", Prefill), ("d", Decode)]
    assert world.sent("d", Decode)[0].handle == b"h"
    assert world.ends == ["finished"]
    assert not world.live
    assert not world.ties


def test_a_colocated_decision_decodes_without_a_handle() -> None:
    world = Recorder()
    job = at(State.SUBMITTED, world)
    job.on(RoutePrefill(job.attempt_id, "c", "colocated"))
    assert now(job) is State.ADMITTING
    assert world.sent("c", Decode)[0].handle is None
    job.cancel()
    assert len(world.sent("c", Cancel)) == 1
    assert not world.ties


CANCELLED = {
    State.SUBMITTED: [],
    State.PREFILLING: [("p", Cancel)],
    State.POOLED: [("p", ReleaseKV)],
    State.ADMITTING: [("d", Cancel)],  # the decode engine gives the prefill engine's copy back
    State.DECODING: [("d", Cancel)],
    State.DONE: [],
}


@pytest.mark.parametrize("state", list(State), ids=lambda s: s.value)
def test_a_cancellation_gives_back_what_the_state_holds(state: State) -> None:
    world = Recorder()
    job = at(state, world)
    before = len(world.to_engine_log)
    job.cancel()
    job.cancel()
    assert [(e, type(m)) for e, m in world.to_engine_log[before:]] == CANCELLED[state]
    assert len(world.told(Closed)) == 1
    assert world.told(Closed)[0].outcome == ("finished" if state is State.DONE else "cancelled")
    assert not world.live
    assert not world.ties


@pytest.mark.parametrize(
    ("state", "lost", "expected"),
    [
        (State.PREFILLING, "p", []),
        (State.POOLED, "p", []),
        (State.ADMITTING, "d", [("p", ReleaseKV)]),  # nobody will pull it now
        (State.ADMITTING, "p", [("d", Cancel)]),  # it would read freed blocks
        (State.DECODING, "d", []),
    ],
)
def test_a_lost_engine_before_the_first_token_is_a_retry(
    state: State, lost: str, expected: list[tuple[str, type]]
) -> None:
    world = Recorder()
    job = at(state, world)
    first, before = job.attempt_id, len(world.to_engine_log)
    job.on(EngineLost(lost, "killed"))
    assert [(e, type(m)) for e, m in world.to_engine_log[before:]] == expected
    assert now(job) is State.SUBMITTED
    assert job.attempt_id != first
    stage = "decode" if lost == "d" else "prefill"
    assert world.told(Closed) == [Closed(first, "failed", 0, lost, stage)]
    assert [s.attempt_id for s in world.told(Submit)] == [first, job.attempt_id]
    assert world.told(Submit)[1].avoid == (lost,)
    assert list(world.live) == [job.attempt_id]
    assert world.retries == [(stage, "engine_dead")]


def test_retries_are_bounded_and_the_last_failure_is_the_answer() -> None:
    world = Recorder()
    job = at(State.SUBMITTED, world)
    for _ in range(3):
        job.on(RoutePrefill(job.attempt_id, "p", "prefill"))
        job.on(EngineFailed("p", Failed(job.attempt_id, "prefill", "overloaded", "full", True)))
    assert now(job) is State.DONE
    assert len(world.told(Submit)) == 3
    assert len(world.told(Closed)) == 3
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.retry_after_s) == (503, "overloaded", 1.0)
    assert not world.live
    assert not world.ties


def test_after_the_first_token_a_failure_is_an_error() -> None:
    world = Recorder()
    job = at(State.DECODING, world)
    job.on(token(job.attempt_id))
    job.on(EngineLost("d", "killed"))
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert error.status == 502
    assert world.told(Closed) == [Closed(job.attempt_id, "failed", 1, "d", "decode")]
    assert len(world.told(Submit)) == 1


@pytest.mark.parametrize(
    ("code", "retryable", "status", "released"),
    [
        ("bad_request", False, 400, [("p", ReleaseKV)]),
        ("internal", False, 502, [("p", ReleaseKV)]),
        ("deadline", False, 504, [("p", ReleaseKV)]),
        ("draining", False, 503, [("p", ReleaseKV)]),
    ],
)
def test_a_decode_that_fails_before_admission_releases_the_prefill(
    code: str, retryable: bool, status: int, released: list[tuple[str, type]]
) -> None:
    world = Recorder()
    job = at(State.ADMITTING, world)
    before = len(world.to_engine_log)
    job.on(EngineFailed("d", Failed(job.attempt_id, "decode", code, "why", retryable, "stop")))
    assert [(e, type(m)) for e, m in world.to_engine_log[before:]] == released
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert error.status == status
    assert error.param == ("stop" if status == 400 else None)
    culprit = None if status == 400 else "d"  # the request's own fault is not the engine's
    assert [c.engine_id for c in world.told(Closed)] == [culprit]


def test_a_failed_transfer_is_counted_and_tried_again() -> None:
    world = Recorder()
    job = at(State.ADMITTING, world)
    job.on(EngineFailed("d", Failed(job.attempt_id, "decode", "kv_load", "torn", True)))
    assert world.failed_transfers == 1
    assert now(job) is State.SUBMITTED


@pytest.mark.parametrize("state", [State.SUBMITTED, State.POOLED], ids=lambda s: s.value)
def test_a_rejection_ends_it_without_another_word_to_the_router(state: State) -> None:
    world = Recorder()
    job = at(state, world)
    job.on(Reject(job.attempt_id, 429, "queue_full", 3.0))
    assert not world.told(Closed)  # the router gave everything back when it rejected
    assert len(world.sent("p", ReleaseKV)) == (state is State.POOLED)
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.retry_after_s) == (429, "queue_full", 3.0)


def test_the_router_may_send_a_pooled_request_to_prefill_again() -> None:
    world = Recorder()
    job = at(State.POOLED, world)
    job.on(RoutePrefill(job.attempt_id, "q", "prefill"))
    assert now(job) is State.PREFILLING
    assert len(world.sent("p", ReleaseKV)) == 1
    assert len(world.sent("q", Prefill)) == 1
    assert world.ties == {("q", job.attempt_id)}
    assert not world.told(Closed)


def test_an_unconnected_engine_is_avoided() -> None:
    world = Recorder(down={"p"})
    job = at(State.SUBMITTED, world)
    job.on(RoutePrefill(job.attempt_id, "p", "prefill"))
    assert now(job) is State.SUBMITTED
    assert world.told(Submit)[-1].avoid == ("p",)
    world.down = {"d"}
    job.on(RoutePrefill(job.attempt_id, "q", "prefill"))
    job.on(done(job.attempt_id))
    job.on(RouteDecode(job.attempt_id, "d"))
    assert len(world.sent("q", ReleaseKV)) == 1
    assert world.told(Submit)[-1].avoid == ("p", "d")


def test_without_a_router_everything_is_decided_here_and_the_router_hears_nothing() -> None:
    world = Recorder(
        epoch=None, local_prefill=RoutePrefill("", "p", "prefill"), local_decode=RouteDecode("", "d")
    )
    job = Job(work(), world, world)
    job.start()
    assert now(job) is State.PREFILLING
    job.on(done(job.attempt_id))
    assert now(job) is State.ADMITTING
    job.on(Admitted(job.attempt_id))
    job.on(token(job.attempt_id, finish="stop"))
    assert world.ends == ["finished"]
    assert world.to_router_log == []


@pytest.mark.parametrize(
    ("state", "after"), [(State.SUBMITTED, State.PREFILLING), (State.POOLED, State.ADMITTING)]
)
def test_a_lost_router_leaves_no_request_undecided(state: State, after: State) -> None:
    world = Recorder(local_prefill=RoutePrefill("", "p", "prefill"), local_decode=RouteDecode("", "d"))
    job = at(state, world)
    world.epoch = None
    job.on(RouterLost())
    assert now(job) is after
    world.epoch = 2  # another router, which must not hear `Closed` of what it never knew
    job.cancel()
    assert not world.told(Closed)


@pytest.mark.parametrize(
    ("state", "stage", "engines"),
    [
        (State.PREFILLING, "prefilling", ("p", None)),
        (State.ADMITTING, "decoding", ("p", "d")),
        (State.DECODING, "decoding", ("p", "d")),
    ],
)
def test_a_new_router_adopts_what_is_under_way(
    state: State, stage: str, engines: tuple[str, str | None]
) -> None:
    world = Recorder()
    job = at(state, world)
    world.epoch = None
    job.on(RouterLost())
    world.epoch = 2
    job.router_up(2)
    (adopt,) = world.told(Adopt)
    assert (adopt.submit.attempt_id, adopt.stage, adopt.engine_id, adopt.decode_engine_id) == (
        job.attempt_id,
        stage,
        *engines,
    )
    job.cancel()
    assert [c.attempt_id for c in world.told(Closed)] == [job.attempt_id]


def test_a_router_without_engines_is_overruled_by_what_we_are_connected_to() -> None:
    world = Recorder(local_prefill=RoutePrefill("", "p", "prefill"))
    job = at(State.SUBMITTED, world)
    job.on(Reject(job.attempt_id, 503, "no_engine", 1.0))
    assert now(job) is State.PREFILLING
    world.local_prefill = None
    other = at(State.SUBMITTED, world)
    other.on(Reject(other.attempt_id, 503, "no_engine", 1.0))
    assert now(other) is State.DONE


def test_a_mode_without_engines_is_told_as_such() -> None:
    world = Recorder()
    job = at(State.SUBMITTED, world, terms=Terms(mode=Mode.DISAGGREGATED))
    assert world.told(Submit)[0].terms == Terms(mode=Mode.DISAGGREGATED)
    job.on(Reject(job.attempt_id, 503, "no_disaggregated_engine", 1.0))
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (503, "no_disaggregated_engine")
    assert "no disaggregated engine" in error.message


def test_no_engine_and_no_router_is_503_with_retry_after() -> None:
    world = Recorder(epoch=None)
    job = Job(work(), world, world)
    job.start()
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (503, "no_engine")
    assert error.retry_after_s is not None
    assert not world.live


def test_a_pooled_request_whose_lease_is_about_to_end_is_computed_again() -> None:
    """The router would have looked after it long before, had it not stood still."""
    world = Recorder()  # lease 30 s from 100.0, margin 2 s: until 128
    job = at(State.POOLED, world)
    first = job.attempt_id
    job.sweep(127.9)
    assert now(job) is State.POOLED
    job.sweep(128.0)
    assert now(job) is State.SUBMITTED
    assert len(world.sent("p", ReleaseKV)) == 1
    assert world.told(Closed) == [Closed(first, "expired", 0)]
    assert [submit.attempt_id for submit in world.told(Submit)] == [first, job.attempt_id]
    assert world.told(Submit)[1].avoid == ()  # the engine has done nothing wrong
    assert world.retries == [("decode", "pool_timeout")]
    assert world.ends == []


def test_a_pooled_request_is_given_up_before_its_lease_ends_once_too_often() -> None:
    world = Recorder(max_retries=0)  # lease 30 s from 100.0, margin 2 s: until 128
    job = at(State.POOLED, world)
    job.sweep(127.9)
    assert now(job) is State.POOLED
    job.sweep(128.0)
    assert now(job) is State.DONE
    assert len(world.sent("p", ReleaseKV)) == 1
    assert world.told(Closed)[0].outcome == "expired"
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert (error.status, error.retry_after_s) == (503, 1.0)


@pytest.mark.parametrize("state", [s for s in State if s is not State.DONE], ids=lambda s: s.value)
def test_the_total_deadline_ends_every_state(state: State) -> None:
    world = Recorder()
    job = at(state, world, terms=Terms(timeout_s=10.0))
    job.sweep(109.0)
    assert now(job) is state
    job.sweep(110.0)
    assert now(job) is State.DONE
    (error,) = world.ends
    assert isinstance(error, ApiError)
    assert error.status == 504
    assert world.told(Closed)[0].outcome == "expired"
    assert not world.ties


def test_a_job_that_never_started_has_nothing_to_give_back() -> None:
    world = Recorder()
    Job(work(), world, world).cancel()
    assert (world.to_router_log, world.to_engine_log, world.ends) == ([], [], [])


def test_it_is_finished_when_its_last_choice_is() -> None:
    world = Recorder()
    job = at(State.DECODING, world, choices=2)
    job.on(token(job.attempt_id, finish="stop", index=1))
    assert now(job) is State.DECODING
    job.on(token(job.attempt_id, finish="length", index=0))
    assert world.ends == ["finished"]
    assert world.told(Closed)[0].output_tokens == 2


def test_tokens_before_admitted_count_as_admission() -> None:
    world = Recorder()
    job = at(State.ADMITTING, world)
    job.on(token(job.attempt_id))
    assert now(job) is State.DECODING
    assert len(world.outs) == 1
