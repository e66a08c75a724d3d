"""The gate: the dispatcher's side of an admission policy (`policies.admission`).

The gate measures service rates at each tick, makes the outlook from them and from the state, and has the policy judge a
request at its arrival, at its turn, and while it waits in the pool. It refuses nothing itself: the dispatcher carries
judgements out. For a policy that does not watch, the gate does nothing at all.

The gate is awake while a request with an objective waits, in the queue or for a decode slot, and for `REMEMBERS_S`
after the last one came. Else there is nobody whose objective a judgement could keep, so no request is judged: the
dispatcher decides as with `open`, and users without objectives see nothing of the policy. Meanwhile the gate only
counts what comes and measures the workers once in `DOZES_S`, so that it knows the rates when it wakes.
"""

import math
from bisect import bisect_left

from policies.admission.base import (
    AdmissionPolicy,
    Case,
    DecodeTier,
    Judgement,
    Moment,
    Outlook,
    Prefiller,
    PrefillTier,
)
from policies.admission.rates import HALF_LIFE_S, Rate, Rates, WorkerRates
from policies.dispatch.feasibility import WorkerPools, fresh
from policies.state.reducer import ClusterState
from policies.state.standby import Standby
from policies.state.standing import PROMPT_TOKENS
from policies.state.views import PoolEntry, Request, Role, Snapshot, Worker, WorkerId
from policies.state.waiting import NOTHING, Backlog

REMEMBERS_S = 60.0
"""Time for which the gate stays awake after a request with an objective has come. ASSUMPTION: a client that has
objectives sends its next request within it, and what is judged needlessly costs little.
"""

DOZES_S = 1.0
"""Time between two looks at the workers while the gate is not awake. ASSUMPTION: a tenth of the half-life of the rates,
and the time between two ticks of an idle router.
"""

FADES_S = HALF_LIFE_S
"""Half-life of the arrivals of more urgent work, which is that of the rates."""

PER_S = math.log(2.0) / FADES_S
"""The rate of arrivals for each unit of their sum, which fades: at a constant rate it is the rate times h / ln 2, where
h is the half-life.
"""


class Arrivals:
    """Prompt tokens and sequences of the requests that were admitted of late, by priority, as rates that fade.

    To count a request does not depend on the number of priorities, and neither does a look, unless a request was
    counted since the last one: the sums are kept as they would be at `_at_s`, and fade themselves once in `FADES_S`.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[float, float]] = {}
        self._at_s = -math.inf
        # ascending priorities, and the sums before each of them and over all; None: to be summed up anew
        self._before: tuple[list[int], list[float], list[float]] | None = None

    def add(self, request: Request, now_s: float) -> None:
        """Counts a request that was admitted now."""
        kept = self._fade(now_s)
        tokens, sequences = self._of.get(request.terms.priority, (0.0, 0.0))
        prompt = request.prompt_tokens + PROMPT_TOKENS
        self._of[request.terms.priority] = tokens + prompt / kept, sequences + request.slots / kept
        self._before = None

    def above(self, priority: int, now_s: float) -> tuple[float, float]:
        """Returns the prompt tokens and sequences per second of requests that are more urgent than this priority."""
        per_s = PER_S * self._fade(now_s)
        if self._before is None:
            ascending = sorted(self._of)
            tokens, sequences = [0.0], [0.0]
            for one in ascending:
                of = self._of[one]
                tokens.append(tokens[-1] + of[0])
                sequences.append(sequences[-1] + of[1])
            self._before = ascending, tokens, sequences
        priorities, tokens_before, sequences_before = self._before
        place = bisect_left(priorities, priority)
        return per_s * tokens_before[place], per_s * sequences_before[place]

    def within(self, seconds: float, now_s: float) -> dict[int, Backlog]:
        """Returns what is expected to come in this time, by priority."""
        share = PER_S * self._fade(now_s) * seconds
        return {
            priority: Backlog(0, math.ceil(share * tokens), math.ceil(share * sequences))
            for priority, (tokens, sequences) in sorted(self._of.items())
        }

    def _fade(self, now_s: float) -> float:
        """Returns the share that is left of the sums now."""
        passed_s = max(0.0, now_s - self._at_s)
        kept: float = 0.5 ** (passed_s / FADES_S)
        if passed_s < FADES_S:
            return kept
        faded = {priority: (kept * a, kept * b) for priority, (a, b) in self._of.items()}
        self._of = {priority: of for priority, of in faded.items() if of[1] > 1e-6}
        self._at_s, self._before = now_s, None
        return 1.0


class Gate:
    """The gate of one dispatcher, with its present policy."""

    def __init__(self, state: ClusterState, policy: AdmissionPolicy) -> None:
        self._state = state
        self.policy = policy
        self._rates = Rates()
        self._arrivals = Arrivals()
        self._awake_until_s = -math.inf
        """Until when the last request with an objective keeps the gate awake."""
        self._looked_s = -math.inf
        self._tiers: tuple[PrefillTier | None, DecodeTier | None, DecodeTier | None] = (None, None, None)
        self._tiers_of: tuple[object, ...] = ()
        """The inputs from which the tiers were made; many requests may be judged by the same ones."""

    @property
    def watches(self) -> bool:
        """Whether the policy may be asked at all."""
        return self.policy.watches

    def is_awake(self, now_s: float) -> bool:
        """Whether the policy is asked now. While it is not, every request is admitted unseen, and none is held."""
        return self.policy.watches and (now_s < self._awake_until_s or self._state.objectives_wait)

    def change(self, policy: AdmissionPolicy) -> None:
        """Replaces the policy. What was measured stays, unless the former one did not watch."""
        if policy.watches and not self.policy.watches:
            self._rates, self._arrivals = Rates(), Arrivals()
            self._looked_s = -math.inf
        self.policy = policy

    def came(self, request: Request, now_s: float) -> None:
        """Notes that a request has arrived, whatever becomes of it. One with an objective wakes the gate."""
        if request.terms.has_objective:
            self._awake_until_s = now_s + REMEMBERS_S

    def look(self, now_s: float) -> None:
        """Measures what the workers have done since the last look, which may be put off while the gate is not awake."""
        if now_s - self._looked_s < DOZES_S and not self.is_awake(now_s):
            return
        self._looked_s = now_s
        self._rates.look(self._state.works(now_s), now_s)
        self._tiers_of = ()

    def arrived(self, request: Request, snapshot: Snapshot, fleet: "Fleet") -> Judgement:
        """Judges a request that has arrived, and is in the queue already."""
        case = Case(
            request,
            Moment.ARRIVAL,
            snapshot.now_s,
            max(request.ttft_from_s, fleet.woken_s),
            self._state.queued_before(request, self._coming(request, snapshot.now_s)),
            self._state.without_slot_before(request),
            self._state.is_committed(request),
        )
        return self.policy.judge(case, self._outlook(request, snapshot, fleet))

    def has_turn(self, request: Request, snapshot: Snapshot, fleet: "Fleet") -> Judgement:
        """Judges a queued request as one whose prompt would be computed now."""
        coming = self._coming(request, snapshot.now_s)
        case = Case(
            request,
            Moment.TURN,
            snapshot.now_s,
            max(request.ttft_from_s, fleet.woken_s),
            NOTHING,
            self._state.without_slot_before(request, coming),
            self._state.is_committed(request),
            None if coming is None else self._state.without_slot_before(request),
            fleet.gang_slots,
        )
        return self.policy.judge(case, self._outlook(request, snapshot, fleet))

    def pooled(self, entry: PoolEntry, snapshot: Snapshot, fleet: "Fleet") -> Judgement:
        """Judges a request that waits in the pool."""
        request = entry.request
        case = Case(
            request,
            Moment.POOLED,
            snapshot.now_s,
            max(request.ttft_from_s, fleet.woken_s),
            committed=self._state.is_committed(request, 1),
        )
        return self.policy.judge(case, self._outlook(request, snapshot, fleet))

    def admitted(self, request: Request, now_s: float) -> None:
        """Counts a request that was admitted, for those that it will overtake."""
        self._arrivals.add(request, now_s)

    def _coming(self, request: Request, now_s: float) -> dict[int, Backlog] | None:
        """Returns what is expected to come until the request is late, by priority, where classes share; else None.

        Of other classes a request waits for no more than a share then (`Waiting.before`), so no rate of theirs lowers
        the service that is left for it, as the rate of more urgent classes does where they get all.
        """
        if not self._state.shares_among_classes:
            return None
        budget_s = request.terms.ttft_slo_s
        return self._arrivals.within(FADES_S if budget_s is None else budget_s, now_s)

    # -------------------------------------------------------------------------------------------------- the outlook

    def _outlook(self, request: Request, snapshot: Snapshot, fleet: "Fleet") -> Outlook:
        pools, stale_s = fleet.pools, fleet.status_stale_s
        if fleet.standby.wakes or not pools.any_ready:
            return Outlook(sleeps=True)
        urgent = (0.0, 0.0)
        if not self._state.shares_among_classes:
            urgent = self._arrivals.above(request.terms.priority, snapshot.now_s)
        usual = snapshot.usual_output_tokens
        # a snapshot has the workers of the one before as long as none has changed
        made_of = (snapshot.workers, pools, snapshot.now_s, usual, stale_s)
        if len(self._tiers_of) != len(made_of) or not all(map(_same, made_of, self._tiers_of)):
            self._tiers_of = made_of
            self._tiers = (
                self._prefill(fresh(snapshot, pools.prefill, stale_s), snapshot.now_s),
                self._decode(fresh(snapshot, pools.decode, stale_s), Role.DECODE, usual),
                self._decode(fresh(snapshot, pools.colocated, stale_s), Role.COLOCATED, usual),
            )
        return Outlook(*self._tiers, *urgent)

    def _of(self, worker: WorkerId) -> WorkerRates | None:
        return self._rates.workers.get(worker)

    def _prefill(self, workers: list[Worker], now_s: float) -> PrefillTier | None:
        if not workers:
            return None
        rates = [self._of(w.id) for w in workers]
        known = {
            w.id: of.prompt_token.value
            for w, of in zip(workers, rates, strict=True)
            if of is not None and of.prompt_token.value
        }
        usual = sum(value for value in known.values() if value) / len(known) if known else 0.0
        found = []
        for w in workers:
            token_s = known.get(w.id) or usual
            left_s = token_s * (w.prefilling_tokens + PROMPT_TOKENS * w.prefilling)
            busy_s = max(0.0, left_s - self._state.computing_for_s(w.id, now_s))
            found.append(Prefiller(busy_s, 1.0 / token_s if token_s else math.inf))
        return PrefillTier(tuple(sorted(found)))

    def _decode(self, workers: list[Worker], role: Role, usual: float | None) -> DecodeTier | None:
        if not workers:
            return None
        used = sum(w.slots_used for w in workers)
        line = self._rates.lines.get(role)
        of = [rates for w in workers if (rates := self._of(w.id)) is not None]
        first = _mean([rates.first for rates in of])
        split = role is Role.DECODE
        return DecodeTier(
            workers=len(workers),
            slots=sum(_slots(w) for w in workers),
            used=used,
            token_s=None if line is None else line.at(used / len(workers)),
            token_per_sequence_s=0.0 if line is None else line.slope,
            output_tokens=usual,
            start_s=_mean([rates.start for rates in of]) if split else None,
            first_step_s=first if split else None,
            prompt_token_s=None if split else first,
        )


class Fleet:
    """The facts about the fleet that the gate needs beside a snapshot: the workers that take work, the phase of a fleet
    that sleeps, when it has woken, the age from which a report is stale, and the slots with which a request of several
    choices begins (`FairnessPolicy.gang_slots`).
    """

    __slots__ = ("gang_slots", "pools", "standby", "status_stale_s", "woken_s")

    def __init__(
        self,
        pools: WorkerPools,
        standby: Standby,
        woken_s: float,
        status_stale_s: float,
        gang_slots: int | None = None,
    ) -> None:
        self.pools, self.standby = pools, standby
        self.woken_s, self.status_stale_s = woken_s, status_stale_s
        self.gang_slots = gang_slots


def _same(one: object, other: object) -> bool:
    """Whether two values are one object, or equal numbers."""
    return one is other or (isinstance(one, float) and one == other)


def _slots(worker: Worker) -> int:
    """Returns the sequences that a worker can hold, in slots and in the KV that the present ones take on average."""
    if not worker.slots_used or not worker.kv_tokens_in_use:
        return worker.slots
    fit = int(worker.kv_capacity_tokens * worker.slots_used / worker.kv_tokens_in_use)
    return min(worker.slots, max(worker.slots_used, fit))


def _mean(rates: list[Rate]) -> float | None:
    """Returns seconds for each unit of work over several workers; None where none has done any."""
    work = sum(rate.work for rate in rates)
    return sum(rate.seconds for rate in rates) / work if work > 0 else None
