"""The fleet as a scaling policy sees it, once a second: windows of each request class, every engine, and an engine's
capacity.

The ingresses say how each request went (`Closed.ended`), the engines their role, duty, counts and the totals of their
steps, to which a timing profile is fitted.

No report is not zero load. A connection that is silent ends within seconds, so while all ingresses stay connected, a
window without requests means that there were none. When an ingress comes or goes, some requests were decided without
this router, and the windows begin anew. They are cut at multiples of their length on the router's clock, which is Unix
time, so their numbers go on where those of an earlier router ended.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from actors.router.clock import clock_s
from actors.router.engines import Engines
from actors.router.workers import workers_of
from actors.wire.messages import EngineInfo, FleetObserved, Status
from policies.dispatch.dispatcher import Dispatcher
from policies.engine_model.timing import CPU_SMOLLM2
from policies.journal.codec import dumps, encoder
from policies.request.ended import RequestEnd
from policies.request.stage import Outcome as AttemptOutcome
from policies.routing.base import Needs
from policies.routing.flowkv.load_score import LoadWeights
from policies.routing.flowkv.regimes import role_scores
from policies.scaling.observation import (
    Capability,
    Duty,
    EngineAges,
    EngineView,
    Leads,
    Observation,
    Observer,
    Outcome,
    Room,
)
from policies.scaling.timing_fit import Fit, Totals
from policies.state.reducer import role_of
from policies.state.standby import Abilities
from policies.state.views import Request, RequestId, WorkerId

_ENCODE = encoder(Observation)

_OUTCOMES: dict[AttemptOutcome, Outcome] = {
    "finished": Outcome.SERVED,
    "rejected": Outcome.REFUSED,
    "expired": Outcome.EXPIRED,
    "failed": Outcome.FAILED,
}
"""The outcome of a request for its class; one whose client left counts as neither met nor missed."""

PRIOR = CPU_SMOLLM2
"""The profile of engines that have done nothing yet. ASSUMPTION: a plan must not depend on it (`Fit.whole`)."""

HANDOVER_S = 6.0
"""Seconds for which an ingress may go on to decide by itself after it has connected (5 s in
`app.ingress.connections`)."""


class Kind(NamedTuple):
    """Engines whose steps take equally long for the same work: of one kind and one compatibility group, which is one
    model. Their roles, slots and KV may differ, since these bound the work of a step only.
    """

    kind: str
    group: str


_KindOrRoom = TypeVar("_KindOrRoom", Kind, Room)


class FleetObserver:
    """Watches one router's fleet; `observed` returns the present observation as a message."""

    def __init__(self, dispatcher: Dispatcher, engines: Engines) -> None:
        self._dispatcher, self._engines = dispatcher, engines
        self._weights = LoadWeights()
        self._observer = Observer()
        self._ages = EngineAges()
        self._ingresses: int | None = None
        """The version of the set of ingresses from which the windows are counted."""
        self._from_s = math.inf
        """When the first window begins that will be whole."""
        self._fits: dict[tuple[Kind, str], Fit] = {}
        """The fits by kind and role; those of a kind are added up. Each forgets by its own rows, so that a role that
        has nothing to do for a while is not forgotten.
        """
        self._totals: dict[str, Totals] = {}
        self._last_kind: Kind | None = None
        self._rooms: dict[str, Room] = {}
        """The room of the commonest engine of each role, when the role had engines last."""

    # ---------------------------------------------------------------------------------------------------- requests

    def arrived(self, request: Request, with_hits: bool) -> None:
        """Counts a request that came. `with_hits`: look up how much of its prompt is cached, if policies use that."""
        hits, terms = 0, request.terms
        if clock_s() < self._from_s:
            return
        if with_hits and Needs.HITS in self._dispatcher.needs:
            hits = max(self._dispatcher.state.hits.tokens(request).values(), default=0)
        predicted = request.predicted_tokens
        self._observer.arrived(
            terms.request_class,
            clock_s(),
            request.prompt_tokens,
            min(hits, request.prompt_tokens),
            0.0 if predicted is None else predicted * request.slots,
            terms.ttft_slo_s,
            terms.tpot_slo_s,
        )

    def ended(self, attempt_id: RequestId, end: RequestEnd) -> None:
        """Counts a request that has ended with this attempt. A time of it that is no number was not measured."""
        outcome, now_s = _OUTCOMES.get(end.outcome), clock_s()
        if outcome is None or now_s < self._from_s:
            return
        self._observer.closed(
            end.request_class,
            now_s,
            outcome,
            _finite(end.ttft_s),
            _finite(end.tpot_s),
            end.output_tokens,
            self._ages.take(attempt_id),
        )

    def routed(self, attempt_id: RequestId, engine_id: str, decodes: bool) -> None:
        """Notes the engine that computes an attempt's prompt, or the one that `decodes` it."""
        since_s = self._engines.active_since_s(engine_id)
        if since_s is not None:
            note = self._ages.decodes if decodes else self._ages.prefills
            note(attempt_id, clock_s() - since_s)

    def forget(self, attempt_id: RequestId) -> None:
        """Forgets an attempt that has ended."""
        self._ages.take(attempt_id)

    # ------------------------------------------------------------------------------------------------------ engines

    def observed(self, ingresses: int, version: int, leads: Leads | None = None) -> FleetObserved:
        """Returns the observation now. `ingresses` are connected, and `version` is that of their set. `leads` are
        learned, except that of a start, which the autoscaler knows.
        """
        now_s, state = clock_s(), self._dispatcher.state
        if version != self._ingresses:
            self._ingresses, self._observer = version, Observer()
            length_s = self._observer.length_s
            self._from_s = math.ceil((now_s + HANDOVER_S) / length_s) * length_s
        if ingresses and now_s >= self._from_s:
            self._observer.heard(now_s)
        infos = self._engines.infos()
        statuses = {status.engine_id: status for status in self._engines.statuses()}
        self._fit(infos, statuses)
        capability, fit = self._capability(infos)
        queued_s = self._dispatcher.oldest_queued_s
        pooled_s = min((entry.entered_s for entry in state.waiting()), default=None)
        assert _ENCODE is not None
        seen = self._observer.freeze(
            now_s,
            self._views(infos, statuses, now_s),
            capability,
            leads,
            queued=self._dispatcher.queue_size,
            pooled=state.pool_size,
            oldest_queued_s=0.0 if queued_s is None else now_s - queued_s,
            oldest_pooled_s=0.0 if pooled_s is None else now_s - pooled_s,
        )
        observation = dumps(_ENCODE(seen)).encode("ascii")
        starts = {info.id: info.started for info in infos if info.started is not None}
        return FleetObserved(observation, fit.rows, fit.matrix, fit.vector, abilities_of(infos), starts)

    def _views(
        self, infos: list[EngineInfo], statuses: dict[str, Status], now_s: float
    ) -> tuple[EngineView, ...]:
        """Returns the engines that serve or could; one that is dead or stands still does neither. One whose connection
        has just ended is left out, too: it is back in a moment, or Serve replaces it, so nothing is to be started
        beside what Serve has.
        """
        distances, scores, views = self._distances(infos), self._scores(now_s), []
        for info in infos:
            duty, status = _duty(info), statuses.get(info.id)
            if duty is None or self._engines.is_lost(info.id):
                continue
            since_s = self._engines.duty_since_s(info.id)
            views.append(
                EngineView(
                    info.id,
                    role_of(info.role),
                    duty,
                    now_s if since_s is None else since_s,
                    status.running if status else 0,
                    status.waiting if status else 0,
                    status.kv_usage if status else 0.0,
                    _mean([scores[worker] for worker in workers_of(info) if worker in scores]),
                    distances.get(info.id, 0.0),
                )
            )
        return tuple(views)

    def _scores(self, now_s: float) -> dict[WorkerId, float]:
        """Returns FlowKV's load scores of the ready workers, with the queues of their role's phase only."""
        snapshot = self._dispatcher.state.snapshot(now_s, ())
        prefill, decode = role_scores(snapshot, self._weights, self._weights)
        return {**prefill, **decode}

    def _distances(self, infos: list[EngineInfo]) -> dict[str, float]:
        """Returns the mean tier of the network from each engine's node to the active engines of its group, which have
        the KV that it would pull, or pull its own. Without an oracle, or without such peers, all are equally near.
        """
        oracle = self._dispatcher.state.snapshot(clock_s(), ()).oracle
        if oracle is None:
            return {}
        # per node, because the cost of engine by engine grows with the square of the fleet
        peers: dict[str, Counter[str]] = {}
        for info in infos:
            if info.state == "ready" and info.duty == "active":
                peers.setdefault(info.group, Counter())[info.node] += 1
        known: dict[tuple[str, str], float] = {}
        for info in infos:
            if (info.group, info.node) in known or info.group not in peers:
                continue
            tiers = [
                (oracle.tier(node, node, info.node, info.node), n) for node, n in peers[info.group].items()
            ]
            far = sum((tier or 0) * n for tier, n in tiers)
            known[info.group, info.node] = far / sum(n for _, n in tiers)
        return {info.id: known.get((info.group, info.node), 0.0) for info in infos}

    # ----------------------------------------------------------------------------------------------------- capacity

    def _fit(self, infos: list[EngineInfo], statuses: dict[str, Status]) -> None:
        """Adds what each engine has done since the last call to the fit of its kind and role."""
        before, self._totals = self._totals, {}
        for info in infos:
            after = _totals(statuses.get(info.id))
            if after is None or not all(map(math.isfinite, (after.busy_s, *after.work()))):
                # an engine that does not count its steps, or counts nonsense, is fitted to nothing
                continue
            self._totals[info.id] = after
            if info.id in before:
                key = _kind(info), info.role
                self._fits[key] = self._fits.get(key, Fit(PRIOR)).added(before[info.id], after)

    def _capability(self, infos: list[EngineInfo]) -> tuple[Capability, Fit]:
        """Returns the capability of the commonest kind of engine with the guessed profile, and the fit from which its
        own profile follows. That is for the autoscaler to compute, because this loop has no milliseconds for it. While
        there is no engine, or none of a role, both have what was known last.
        """
        if infos:
            self._last_kind = _commonest(map(_kind, infos))
        kind, rooms = self._last_kind, dict[str, list[Room]]()
        for info in infos:
            if _kind(info) == kind:
                rooms.setdefault(info.role, []).append(_room(info))
        self._rooms |= {role: _commonest(own) for role, own in rooms.items()}
        fit = Fit(PRIOR)
        if kind is None:
            return Capability(PRIOR), fit
        for (fitted, _), one in self._fits.items():
            fit = fit.plus(one) if fitted == kind else fit
        colocated = self._rooms.get("colocated")
        decodes = self._rooms.get("decode") or colocated or self._rooms["prefill"]
        other = None if colocated == decodes else colocated
        return Capability(PRIOR, *decodes, other), fit


def abilities_of(infos: list[EngineInfo]) -> Abilities | None:
    """Returns what these engines can do together; None unless one of them decodes."""
    decoders = [info for info in infos if info.role != "prefill"]
    if not decoders:
        return None
    features = {feature for info in decoders for feature in info.features}
    return Abilities(min(info.max_model_len for info in infos), tuple(sorted(features)))


def _kind(info: EngineInfo) -> Kind:
    return Kind(info.kind, info.group)


def _room(info: EngineInfo) -> Room:
    return Room(info.slots, info.kv_blocks * info.block_size_tokens)


def _commonest(several: Iterable[_KindOrRoom]) -> _KindOrRoom:
    """Returns the commonest of at least one; of equally common ones the greatest."""
    counts = Counter(several)
    return max(counts, key=lambda one: (counts[one], one))


def _duty(info: EngineInfo) -> Duty | None:
    """Returns an engine's part in the fleet; None for one that can play none."""
    if info.state in ("ready", "quarantined"):
        return Duty(info.duty)
    return {"starting": Duty.STARTING, "draining": Duty.DRAINING}.get(info.state)


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _totals(status: Status | None) -> Totals | None:
    """Returns the sums over an engine's steps; None where the engine does not count them."""
    names = (
        "step_s",
        "prefill_steps",
        "prefill_step_tokens",
        "decode_steps",
        "decode_step_seqs",
        "decode_step_kv_tokens",
    )
    told = {} if status is None else status.totals
    return Totals(*(told[name] for name in names)) if all(name in told for name in names) else None
