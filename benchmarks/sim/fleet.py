"""A simulated fleet that changes while it serves, by the plans of a scaling policy (`policies.scaling`).

`Fleet` does the autoscaler's part. Once a period it freezes an observation (the live `Observer` counts the requests),
asks the policy for a plan, and carries its moves out:

    start       a place is taken; after the five steps (`fleet_setup.StartSteps`) the engine exists and is warm
    activate    after `activate_s` the router knows the engine as ready in its role
    switch      after `switch_s` the router knows the engine in its new role; work under way ends where it is
    deactivate  the router gives the engine no more work; it finishes what it has and stays warm
    stop        the same, and the engine leaves once it has no work, no lease and no request under way to it

A fleet that may sleep (`policies.scaling.sleep`) has the router know its phase, and a request that finds it asleep has
the policy asked at once, as the live router has it (`actors.router.autoscaler`).

An engine counts in `FleetStats.engine_s` from the start of its first step until it has left, whatever its duty. A
later order replaces one that has not arrived. Deviations from the live system: engines do not fail; the policy gets the
true timing profile and the true leads in place of learned ones; the prefix hits of an arrival are the mean of its class
so far.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from benchmarks.sim.build import build_worker
from benchmarks.sim.config import SimConfig
from benchmarks.sim.engine import Meter, StepGroup, Worker
from benchmarks.sim.ingress import Ingress, SimRequest
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.metrics import tpot_s, ttft_s
from benchmarks.sim.records import FleetStats
from benchmarks.sim.reports import Reports
from benchmarks.sim.roles import announcement
from policies.dispatch.actions import Action, RouteDecode, RoutePrefill
from policies.dispatch.dispatcher import Dispatcher
from policies.engine_model.scheduler import EngineModel
from policies.request.stage import Outcome as Ended
from policies.request.stage import Stage
from policies.routing.flowkv.load_score import LoadWeights
from policies.routing.flowkv.regimes import role_scores
from policies.scaling.base import Move, Way
from policies.scaling.observation import (
    Capability,
    Duty,
    EngineAges,
    EngineView,
    Leads,
    Observation,
    Observer,
    Outcome,
)
from policies.scaling.sleep import MaySleep, PhaseSince, phase_after
from policies.state import events as ev
from policies.state.standby import AWAKE, Phase, Standby
from policies.state.views import Health, Role

_HEALTH = {Duty.ACTIVE: Health.READY, Duty.WARM: Health.WARM, Duty.DRAINING: Health.DRAINING}
_OUTCOMES: dict[Ended, Outcome] = {
    "finished": Outcome.SERVED,
    "rejected": Outcome.REFUSED,
    "expired": Outcome.EXPIRED,
}
# Weight of a request in the share of its class's prompts that is cached.
_HIT_GAIN = 0.02

Slos = tuple[float | None, float | None]


@dataclass(slots=True)
class Engine:
    """One engine of the fleet. `worker` is None while it starts; `orders` counts what it has been told. Its duty began
    at `since_s`; it became ready, was activated, or changed its role last at `active_since_s`.
    """

    name: str
    role: Role
    duty: Duty
    since_s: float
    active_since_s: float
    place: str | None = None
    worker: Worker | None = None
    distance: float = 0.0
    orders: int = 0
    leaves_by_s: float = 0.0


class Fleet:
    """The engines of a run with `SimConfig.scaling`, and the autoscaler that decides on them."""

    def __init__(
        self,
        config: SimConfig,
        kernel: Kernel,
        ingress: Ingress,
        meter: Meter,
        groups: list[StepGroup],
        reports: Reports,
        dispatcher: Dispatcher,
        tier: Callable[[str, str], int],
        feed: Callable[[ev.Event], None],
    ) -> None:
        assert config.scaling is not None
        self.setup, self._config, self._kernel, self._ingress = config.scaling, config, kernel, ingress
        self._meter, self._groups, self._reports = meter, groups, reports
        self._dispatcher, self._tier, self._feed = dispatcher, tier, feed
        self._template = config.engines[0]
        spec = self._template
        kv_tokens = spec.kv_blocks * spec.block_size_tokens
        self._capability = Capability(spec.profile, spec.slots, kv_tokens)
        setup = self.setup
        self._leads = Leads(setup.switch_s, setup.activate_s, setup.start.total_s)
        self._observer = Observer(setup.window_s, setup.settle_s, max(setup.every_s, setup.window_s))
        self.policy, self._state = setup.policy, setup.policy.initial()
        # Only FlowKV's rule reads load scores, and they cost a snapshot each time.
        self._scored = setup.policy.name == "regime_rule"
        self.engines = {
            name: Engine(
                name,
                worker.spec.role,
                Duty.ACTIVE,
                -setup.settle_s,
                -setup.settle_s,
                worker.node if setup.places else None,
                worker,
            )
            for name, worker in ingress.workers.items()
        }
        self._phase = PhaseSince()
        self._standby = AWAKE
        self._free = list(setup.places)
        self._made = 0
        self._hits: dict[str, float] = {}
        self._ages = EngineAges()
        self._outcomes: dict[str, tuple[Ended, float]] = {}
        self.stats = FleetStats()
        # The models of engines that have left, for what they counted.
        self.gone: list[EngineModel] = []
        self._metered_s: float | None = None
        self._counted: tuple[int, ...] = ()

    def begin(self) -> None:
        """Adds the engines that wait warm from the beginning; the others have announced themselves."""
        for _ in range(self.setup.warm):
            self._ready(self._new(Role.DECODE, Duty.STARTING))

    # -------------------------------------------------------------------------------------------------- the requests

    def arrived(self, request_class: str, prompt_tokens: int, forecast: float | None, slos: Slos) -> None:
        """Counts a request that has arrived, with its (TTFT, TPOT) objectives in seconds."""
        hits = int(prompt_tokens * self._hits.get(request_class, 0.0))
        self._observer.arrived(request_class, self._kernel.now_s, prompt_tokens, hits, forecast or 0.0, *slos)

    def attempt_ended(self, request: SimRequest, outcome: Ended) -> None:
        """Notes how an attempt of a request ended; the last one's outcome and engines are the request's."""
        self._outcomes[request.work.request_id] = outcome, self._ages.take(request.attempt_id)

    def ended(self, request: SimRequest) -> None:
        """Counts the end of a request."""
        record, now_s = request.record, self._kernel.now_s
        ended, active_s = self._outcomes.pop(record.request_id, ("failed", math.inf))
        outcome = _OUTCOMES.get(ended, Outcome.FAILED)
        name = record.request_class
        if outcome is Outcome.SERVED:
            share = record.prefill_hit_tokens / record.prompt_tokens
            known = self._hits.get(name, 0.0)
            self._hits[name] = known + _HIT_GAIN * (share - known)
        self._observer.closed(
            name, now_s, outcome, ttft_s(record), tpot_s(record), record.output_tokens, active_s
        )

    def routed(self, action: Action) -> None:
        """Notes the engine of a decision, unless it has left."""
        if not isinstance(action, (RoutePrefill, RouteDecode)):
            return
        engine = self.engines.get(action.decision.worker)
        if engine is not None:
            note = self._ages.decodes if isinstance(action, RouteDecode) else self._ages.prefills
            note(action.attempt_id, self._kernel.now_s - engine.active_since_s)

    # ------------------------------------------------------------------------------------------------- the autoscaler

    def look(self) -> None:
        """Asks the policy for a plan and carries it out."""
        now_s = self._kernel.now_s
        self._observer.heard(now_s)
        for engine in list(self.engines.values()):
            if engine.duty is Duty.DRAINING:
                self._drain(engine)
        seen = self.observation()
        step = self.policy.step(seen, self._state)
        self._state = step.state
        self._look_after_phase(seen)
        for move in step.plan.moves:
            self._follow(move)
        counted = self._counts()
        if counted != self._counted:
            self._counted = counted
            self.stats.timeline.append((now_s, *counted))

    def ring(self) -> None:
        """Asks the policy at once if a request waits and the fleet sleeps."""
        if self._standby.phase is Phase.ASLEEP and self._dispatcher.queue_size:
            self.look()

    def _look_after_phase(self, seen: Observation) -> None:
        """Tells the router the fleet's phase where it has changed."""
        if not isinstance(self.policy, MaySleep):
            return
        limit_s = self.policy.sleep.wake_limit_s
        self._phase = phase_after(self._phase, seen, self._state.asleep, limit_s)
        roles = tuple(role for role in Role if self.policy.limits.least.of(role))
        standby = Standby(self._phase.phase, roles, limit_s)
        if standby != self._standby:
            self._standby = standby
            self._feed(ev.StandbyChanged(self._kernel.now_s, standby))

    def observation(self) -> Observation:
        """Returns what the policy sees at this moment."""
        now_s, state = self._kernel.now_s, self._dispatcher.state
        scores: dict[str, float] = {}
        if self._scored:
            prefill, decode = role_scores(state.snapshot(now_s, ()), LoadWeights(), LoadWeights())
            scores = {**prefill, **decode}
        queued, pooled = self._dispatcher.queue_size, state.pool_size
        waiting = self._ingress.live.values() if queued or pooled else ()
        queued_s = [r.record.arrived_s for r in waiting if r.stage is Stage.QUEUED]
        pooled_s = [r.record.prefill_done_s or now_s for r in waiting if r.stage is Stage.POOLED]
        return self._observer.freeze(
            now_s,
            tuple(_view(engine, scores) for engine in self.engines.values()),
            self._capability,
            self._leads,
            queued,
            pooled,
            now_s - min(queued_s, default=now_s),
            now_s - min(pooled_s, default=now_s),
        )

    def _follow(self, move: Move) -> None:
        if move.way is Way.START:
            self._start(move.role)
            return
        engine, setup = self.engines[move.engine], self.setup
        self._settle()
        engine.since_s = self._kernel.now_s
        match move.way:
            case Way.SWITCH:
                self.stats.switches += 1
                engine.role, engine.active_since_s = move.role, self._kernel.now_s
                self._order(engine, setup.switch_s)
            case Way.ACTIVATE:
                self.stats.activations += 1
                engine.role, engine.duty = move.role, Duty.ACTIVE
                engine.active_since_s = self._kernel.now_s
                self._order(engine, setup.activate_s)
            case Way.DEACTIVATE:
                self.stats.deactivations += 1
                engine.duty = Duty.WARM
                self._order(engine, self._config.control.hop_s)
            case Way.STOP:
                self.stats.stops += 1
                engine.duty, engine.leaves_by_s = Duty.DRAINING, self._kernel.now_s + setup.drain_s
                self._order(engine, self._config.control.hop_s)

    def _order(self, engine: Engine, delay_s: float) -> None:
        """Tells an engine its role and duty; it announces them `delay_s` seconds later."""
        engine.orders += 1
        order = engine.orders

        def obey() -> None:
            worker = engine.worker
            if worker is None or engine.orders != order or engine.name not in self.engines:
                return
            worker.health = _HEALTH[engine.duty]
            worker.decodes = worker.decodes or engine.role is not Role.PREFILL
            self._feed(announcement(worker, engine.role, self._kernel.now_s))

        self._kernel.after(delay_s, obey)

    # ------------------------------------------------------------------------------------------- engines come and go

    def _start(self, role: Role) -> None:
        if self.setup.places and not self._free:
            return
        self.stats.starts += 1
        engine = self._new(role, Duty.STARTING)
        self._kernel.after(self.setup.start.total_s, lambda: self._ready(engine))

    def _new(self, role: Role, duty: Duty) -> Engine:
        self._settle()
        name = f"scaled-{self._made}"
        self._made += 1
        place = self._free.pop(0) if self._free else None
        engine = self.engines[name] = Engine(name, role, duty, self._kernel.now_s, self._kernel.now_s, place)
        return engine

    def _ready(self, engine: Engine) -> None:
        """Makes the worker of an engine that has started: it is warm, and the router knows it."""
        self._settle()
        config, now_s = self._config, self._kernel.now_s
        node = engine.name if engine.place is None else engine.place
        worker = build_worker(
            self._template,
            engine.name,
            node,
            self._kernel,
            self._ingress,
            self._meter,
            config.control.kv_events,
        )
        engine.worker, engine.duty = worker, Duty.WARM
        engine.since_s = engine.active_since_s = now_s
        worker.health, worker.decodes = _HEALTH[Duty.WARM], engine.role is not Role.PREFILL
        peers = [e.worker.node for e in self.engines.values() if e.worker and e.duty is Duty.ACTIVE]
        engine.distance = fmean([self._tier(peer, node) for peer in peers]) if peers else 0.0
        self._ingress.workers[engine.name] = worker
        self._groups.append(worker.group)
        self._reports.joined(worker)
        self._feed(announcement(worker, engine.role, now_s))

    def _drain(self, engine: Engine) -> None:
        """Removes an engine that has nothing left; moves its streams away when its time is over."""
        worker, now_s = engine.worker, self._kernel.now_s
        assert worker is not None
        if now_s >= engine.leaves_by_s:
            self.stats.moved += self._ingress.engine_fails(worker, "draining")
        if worker.health is not Health.DRAINING or self._busy(worker):
            return
        self._settle()
        del self.engines[engine.name], self._ingress.workers[engine.name]
        self._groups.remove(worker.group)
        self._reports.left(engine.name)
        self.gone.append(worker.model)
        if engine.place is not None:
            self._free.append(engine.place)
        self._feed(ev.EngineDown(now_s, engine.name))

    def _busy(self, worker: Worker) -> bool:
        """Returns whether the worker has work or leases, or the router has given it work that is on its way."""
        known = self._dispatcher.state.worker(worker.name)
        charged = known is not None and (known.prefilling or known.slots_used or known.sending)
        return bool(
            worker.n_active or worker.n_waiting or len(worker.leases) or worker.group.stepping or charged
        )

    # ------------------------------------------------------------------------------------------------------ metering

    def measure(self) -> None:
        """Begins to count engine-seconds."""
        self._metered_s = self._kernel.now_s

    def close(self) -> None:
        """Ends the count of engine-seconds."""
        self._settle()
        self._metered_s = None

    def _settle(self) -> None:
        """Adds the engine-seconds since the last change."""
        if self._metered_s is None:
            return
        passed_s, self._metered_s = self._kernel.now_s - self._metered_s, self._kernel.now_s
        if passed_s > 0.0:
            for engine in self.engines.values():
                self.stats.engine_s[engine.duty] = self.stats.engine_s.get(engine.duty, 0.0) + passed_s

    def _counts(self) -> tuple[int, ...]:
        """Returns the numbers of active engines by role, then of warm, starting and draining ones."""
        found = dict.fromkeys((*Role, Duty.WARM, Duty.STARTING, Duty.DRAINING), 0)
        for engine in self.engines.values():
            found[engine.role if engine.duty is Duty.ACTIVE else engine.duty] += 1
        return tuple(found.values())


def _view(engine: Engine, scores: dict[str, float]) -> EngineView:
    worker = engine.worker
    return EngineView(
        engine.name,
        engine.role,
        engine.duty,
        engine.since_s,
        0 if worker is None else worker.n_active,
        0 if worker is None else worker.n_waiting,
        0.0 if worker is None else worker.pool.used / worker.pool.total,
        scores.get(engine.name, 0.0),
        engine.distance,
    )
