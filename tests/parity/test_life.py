"""One life cycle, two drivers: what the simulator let happen to its requests has the same effects in the live ingress.

A simulated run is recorded, event by event and effect by effect. Each request's events are then fed to a live request,
whose connections write their messages down. Both drivers must be asked for the same effects, and what they send to
router and engines must be the same in their own words.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from actors.wire import messages as wire
from actors.wire.channel import Identity
from app.api.chunks import Choice
from app.api.errors import ApiError
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.metrics import IngressMetrics
from app.ingress.request import IngressRequest, RequestSpec
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.config import ControlPlane, EngineSpec, SimConfig
from benchmarks.sim.ingress import SimRequest
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.request.effects import Effects
from policies.request.events import Event, Output, Preempted, RouteDecode
from policies.request.life import Life
from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.views import Role
from tests.benchmarks.sim import lending_cluster as lending

Fault = tuple[float, str, str]
"""When everything at an engine fails, the engine, and the code."""

EFFECTS = sorted(Effects.__abstractmethods__)

T = TimingProfile(
    source="test",
    prefill_base_s=1.0,
    prefill_per_token_s=0.1,
    decode_base_s=2.0,
    decode_per_seq_s=0.5,
    decode_per_kv_token_s=0.01,
    kv_bytes_per_token=1,
    transfer_bandwidth_bytes_per_s=10.0,
    transfer_latency_s=0.5,
)


@dataclass
class Story:
    """The events of one request and its effects; `sent` is in words that both drivers share."""

    events: list[tuple[Event, float]] = field(default_factory=list)
    effects: list[tuple[Any, ...]] = field(default_factory=list)
    sent: list[tuple[Any, ...]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)


def recorded(driver: type[Life], patch: pytest.MonkeyPatch, stories: dict[int, Story]) -> None:
    """From now on the drivers' requests write down their events and effects, each in the story of its own id()."""

    def wrap(name: str) -> None:
        plain = getattr(driver, name)

        def effect(life: Any, *args: Any) -> Any:
            story = stories.get(id(life))
            if story is not None:
                story.effects.append((name, life.attempts, *args))
            return plain(life, *args)

        patch.setattr(driver, name, effect)

    for name in EFFECTS:
        wrap(name)
    plain_on = driver.on

    def on(life: Any, event: Event, now_s: float) -> bool:
        story = stories.setdefault(id(life), Story())
        story.events.append((event, now_s))
        accepted = plain_on(life, event, now_s)
        story.stages.append(life.stage)
        return bool(accepted)

    patch.setattr(driver, "on", on)


def simulated(
    config: SimConfig, work: list[WorkloadRequest], patch: pytest.MonkeyPatch, faults: list[Fault]
) -> list[tuple[SimRequest, Story]]:
    """The requests of a simulated run with their stories."""
    stories: dict[int, Story] = {}
    kept: list[SimRequest] = []  # else an id() could come twice
    recorded(SimRequest, patch, stories)
    cluster = Cluster(config, iter(work), None, None)
    plain_start, plain_feed = SimRequest.__init__, cluster.feed

    def start(request: SimRequest, *args: Any) -> None:
        kept.append(request)
        plain_start(request, *args)

    def feed(event: ev.Event) -> None:
        for request in kept:
            words = router_words(event, request.attempt_id)
            if words is not None:
                stories[id(request)].sent.append(words)
        plain_feed(event)

    def heard(name: str, sent: Callable[[SimRequest, Any], tuple[Any, ...]]) -> None:
        """Has an effect write down what it sends to an engine."""
        plain = getattr(SimRequest, name)

        def send(request: SimRequest, order: Any, left_s: float) -> bool:
            stories[id(request)].sent.append(sent(request, order))
            return bool(plain(request, order, left_s))

        patch.setattr(SimRequest, name, send)

    heard("send_lend", lambda _, lend: ("prefill", lend.engine_id, False))
    heard("send_prefill", lambda request, route: ("prefill", route.engine_id, request.lent is not None))
    # a colocated engine computes the prompt itself
    heard("send_decode", lambda _, route: ("decode", route.engine_id, isinstance(route, RouteDecode)))
    patch.setattr(SimRequest, "__init__", start)
    patch.setattr(cluster, "feed", feed)
    ingress = cluster.ingress
    for at_s, engine_id, code in faults:
        worker = ingress.workers[engine_id]
        cluster.kernel.at(at_s, partial(ingress.engine_fails, worker, code))
    cluster.run()
    return [(request, stories[id(request)]) for request in kept]


def router_words(event: ev.Event, attempt_id: str) -> tuple[Any, ...] | None:
    """The words for an event that the simulated router hears of an attempt.

    `Closed` of an attempt comes when the next one has begun, so it counts for the request.
    """
    request_id = attempt_id.partition("~")[0]
    match event:
        case ev.Arrived(request=request) if request.attempt_id == attempt_id:
            assert request.waits_since_s is not None
            return ("submit", request.avoid, round(request.waits_since_s, 6), request.prompt_tokens)
        case ev.PrefillDone(attempt_id=told_id) if told_id == attempt_id:
            return ("prefilled", event.kv_bytes, event.cached_tokens, event.compute_s)
        case ev.LeaseRenewed(attempt_id=told_id) if told_id == attempt_id:
            return ("renewed",)
        case ev.Closed(attempt_id=told_id) if told_id.partition("~")[0] == request_id:
            return ("closed", event.outcome)
    return None


def engine_words(engine_id: str, message: wire.Message) -> tuple[Any, ...] | None:
    """The words for a message that a live engine hears, except those that the simulator has no message for."""
    match message:
        case wire.Prefill():
            return ("prefill", engine_id, message.prefix is not None)
        case wire.Decode():
            return ("decode", engine_id, message.handle is not None)
    return None


class Client:
    """Takes the answers of a live request."""

    def output(self, request: IngressRequest, out: wire.Out) -> None:
        request.parts[0].absorb(out)

    def split(self, others: list[IngressRequest]) -> None:
        raise AssertionError("a simulated request has one choice")

    def unsent(self) -> bool:
        return False

    def finished(self, request: IngressRequest) -> None: ...
    def failed(self, request: IngressRequest, error: ApiError) -> None: ...


@dataclass
class FakeLink:
    engine_id: str
    heard: list[tuple[Any, ...]]
    live: dict[str, Any] = field(default_factory=dict)

    def send(self, message: wire.Message) -> bool:
        words = engine_words(self.engine_id, message)
        if words is not None:
            self.heard.append(words)
        return True


def live(config: SimConfig, request: SimRequest, story: Story, patch: pytest.MonkeyPatch) -> Story:
    """The story of a live request to which the same happens."""
    control = config.control
    options = IngressConfig(
        served_names=("m",), max_retries=control.max_retries, lease_margin_s=control.lease_margin_s
    )

    async def nowhere() -> tuple[str, ...]:
        return ()

    connections = IngressConnections(options, Identity("ingress", "i"), nowhere, IngressMetrics("m"))
    connections.limits = request.limits
    sent: list[tuple[Any, ...]] = []
    links = {name: FakeLink(name, sent) for spec in config.engines for name, *_ in spec.workers()}

    def to_router(message: wire.Message) -> bool:
        match message:
            case wire.Submit():
                waits_since_s = round(clock_s[0] - message.waits_s, 6)
                sent.append(("submit", message.avoid, waits_since_s, message.prompt_tokens))
            case wire.Closed() if mine.router_knows:
                sent.append(("closed", message.outcome))
            case wire.Closed():
                # how the whole request went, for the router's figures; a simulated router makes none
                assert message.ended is not None
            case wire.LeaseRenewed():
                sent.append(("renewed",))
            case _:
                assert isinstance(message, wire.PrefillReported)
                sent.append(("prefilled", message.kv_bytes, message.cached_tokens, message.compute_s))
        return True

    clock_s = [0.0]
    patch.setattr(connections, "now_s", lambda: clock_s[0])
    patch.setattr(connections._router, "send", to_router)
    patch.setattr(connections._engines, "attached", lambda engine_id, _: links[engine_id])
    work = request.work
    spec = RequestSpec(
        [0] * work.prompt_tokens,
        {},
        work.max_tokens or 1,
        1,
        request.terms,
        request.deadline_s - control.request_timeout_s,
        request_id=work.request_id,
    )
    parts = [Choice(0, chat=False, logprobs=False, keep=False)]
    mine = IngressRequest(spec, parts, Client(), connections)
    stories: dict[int, Story] = {}
    with pytest.MonkeyPatch.context() as recording:
        recorded(IngressRequest, recording, stories)
        for event, now_s in story.events:
            if isinstance(event, Output):
                mine.out = wire.Out("", "", event.tokens, finish="stop" if event.last else None)
            clock_s[0] = now_s
            mine.on(event, now_s)
    assert not connections.live
    assert not any(link.live for link in links.values())
    stories[id(mine)].sent = sent
    return stories[id(mine)]


PREFILL = EngineSpec("p", Role.PREFILL, 1, T)
DECODE = EngineSpec("d", Role.DECODE, 1, T)
BOTH = EngineSpec("c", Role.COLOCATED, 1, T)
CONTROL = ControlPlane(hop_s=0.001, ingress_s=0.0)


FAULTS: dict[str, list[Fault]] = {
    # both requests decode at 30 s
    "migrated": [(30.0, "d-0", "engine_dead")],
    "migrated too often": [(t, f"d-{i}", "internal") for t in (30.0, 60.0, 90.0, 120.0) for i in (0, 1)],
    "engine dies before the first token": [(1.5, "p-0", "engine_dead"), (1.5, "p-1", "engine_dead")],
    "kills its engines": [(t, f"p-{i}", "engine_dead") for t in (1.5, 2.5, 3.5) for i in (0, 1)],
    # d borrows from p-0 from 20.003 on, until 20.014 s, and reads until 20.18 s
    "lender refuses": [(20.008, "p-0", "draining")],
    "lender dies in the middle of the read": [(20.1, "p-0", "engine_dead")],
    "borrower dies in the middle of the read": [(20.1, "p-1", "engine_dead")],
}


def scenario(name: str) -> tuple[SimConfig, list[WorkloadRequest], set[str]]:
    """A cluster, a workload, and the kinds of events and ends that it must have shown."""
    two_each = (dataclasses.replace(PREFILL, count=2), dataclasses.replace(DECODE, count=2))
    short = dataclasses.replace(PREFILL, lease_s=12.0, max_lease_s=12.0)
    renewed = dataclasses.replace(PREFILL, lease_s=12.0)
    one_slot = dataclasses.replace(DECODE, slots=1)
    late = DispatchConfig(lease_margin_s=0.0)
    two = [WorkloadRequest("a", 0.0, 10, 6), WorkloadRequest("b", 1.0, 10, 2)]
    long = [WorkloadRequest("a", 0.0, 10, 40), WorkloadRequest("b", 1.0, 10, 2)]
    match name:
        case "ordinary":
            return SimConfig((PREFILL, DECODE), control=CONTROL), two, {"Admitted", "Output"}
        case "colocated":
            return SimConfig((BOTH,), control=CONTROL), two, {"Admitted", "Output"}
        case "lease ends in the pool":
            return (
                SimConfig((short, one_slot), control=CONTROL, dispatch=late),
                two,
                {"StageOverdue", "retried"},
            )
        case "lease renewed in the pool":
            return (
                SimConfig((renewed, one_slot), control=CONTROL),
                long,
                {"RenewalDue", "Renewed", "renew_lease", "report_renewal", "finished"},
            )
        case "lease renewed at the decode engine":
            return (
                SimConfig(
                    (renewed, one_slot),
                    control=CONTROL,
                    decode=("netkv", {}),
                    dispatch=DispatchConfig(overcommit_slots=1),
                ),
                long,
                {"RenewalDue", "Renewed", "renew_lease", "finished"},
            )
        case "lease ends in the pool too often":
            return (
                SimConfig((short, one_slot), control=CONTROL, dispatch=late),
                long,
                {"StageOverdue", "failed"},
            )
        case "lease ends at the decode engine":
            long[0] = WorkloadRequest("a", 0.0, 10, 20)
            return SimConfig((short, one_slot), control=CONTROL), long, {"EngineFailed", "retried"}
        case "deadline":
            control = dataclasses.replace(CONTROL, request_timeout_s=12.0)
            long.append(WorkloadRequest("c", 1.0, 10, 2))
            return (
                SimConfig((PREFILL, one_slot), control=control),
                long,
                {"DeadlinePassed", "stop_work", "release_kv"},
            )
        case "too long":
            small = dataclasses.replace(BOTH, kv_blocks=2, block_size_tokens=4)
            return SimConfig((small,), control=CONTROL), two, {"EngineFailed", "failed"}
        case "rejected":
            slow = dataclasses.replace(PREFILL, slots=1)
            config = SimConfig((slow, DECODE), control=CONTROL, dispatch=DispatchConfig(max_queue=1))
            return config, [WorkloadRequest(f"r{i}", 0.0, 10, 2) for i in range(4)], {"Reject", "failed"}
        case "preempted":
            tight = dataclasses.replace(DECODE, block_size_tokens=4, kv_blocks=14, preempted="router")
            config = SimConfig(
                (dataclasses.replace(PREFILL, lease_s=1000.0), tight),
                control=CONTROL,
                dispatch=DispatchConfig(queue_timeout_s=1000.0),
            )
            return config, [WorkloadRequest(f"r{i}", 0.1 * i, 8, 20) for i in range(6)], {"Preempted"}
        case "migrated":
            long[1] = WorkloadRequest("b", 1.0, 10, 40)
            return SimConfig(two_each, control=CONTROL), long, {"migrated", "resumed", "finished"}
        case "migrated too often":
            long[0] = WorkloadRequest("a", 0.0, 10, 100)
            return SimConfig(two_each, control=CONTROL), long, {"migrated", "failed"}
        case "engine dies before the first token":
            return SimConfig(two_each, control=CONTROL), two, {"retried", "finished"}
        case "kills its engines":
            return SimConfig(two_each, control=CONTROL), two[:1], {"retried", "failed"}
        case "prefix lent" | "lender refuses" | "lender dies in the middle of the read":
            return lending.config(control=CONTROL), lending.WORK, {"send_lend", "lending", "finished"}
        case "borrower dies in the middle of the read":
            return lending.config(control=CONTROL), lending.WORK, {"send_lend", "retried", "finished"}
        case "lender takes too long":
            slow = dataclasses.replace(lending.PROFILE, prefill_base_s=5.0)
            decode = dataclasses.replace(lending.DECODE, prefix_cache=True, profile=slow)
            config = lending.config(control=CONTROL, engines=(lending.PREFILL, decode))
            return config, lending.WORK, {"send_lend", "StageOverdue", "lending", "finished"}
    raise AssertionError(name)


SCENARIOS = [
    "ordinary", "colocated", "lease ends in the pool", "lease ends in the pool too often",
    "lease renewed in the pool", "lease renewed at the decode engine", "lease ends at the decode engine",
    "deadline", "too long", "rejected", "preempted", "prefix lent", "lender takes too long",
    *FAULTS,
]  # fmt: skip


def shown(stories: list[Story]) -> Iterator[str]:
    """The names of the events, effects and stages of these stories."""
    for story in stories:
        yield from (type(event).__name__ for event, _ in story.events)
        yield from (effect[0] for effect in story.effects)
        yield from (stage.value for stage in story.stages)


def words(sent: list[tuple[Any, ...]], sizes: bool) -> Counter[tuple[Any, ...]]:
    """The words of a story; without `sizes` those to the router leave out the length of the prompt."""
    return Counter(word if sizes or word[0] != "submit" else word[:3] for word in sent)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_the_same_events_have_the_same_effects_in_both_drivers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, work, expected = scenario(name)
    with monkeypatch.context() as patch:
        simulation = simulated(config, work, patch, FAULTS.get(name, []))
    assert len(simulation) == len(work)
    for request, story in simulation:
        with monkeypatch.context() as patch:
            mine = live(config, request, story, patch)
        assert mine.effects == story.effects
        assert mine.stages == story.stages
        assert mine.stages[-1] is Stage.DONE
        # a simulated engine that takes a slot back makes the output part of the prompt; no live engine does so
        sizes = not any(isinstance(event, Preempted) for event, _ in story.events)
        assert words(mine.sent, sizes) == words(story.sent, sizes)
    assert expected <= set(shown([story for _, story in simulation]))
