"""NetKV chooses the decode worker of least transfer + queue + first step (NetKV III-V, algorithm 1). Its ablation
ladder is included.

    b_eff  = b_r * (1 - lambda_r(d)/l_r)                   b_r -> PoolEntry.kv_bytes, lambda -> Snapshot.hits
    B_eff  = B[tau] * (1 - c[tau]) / (1 + n[tau][p])       B, c, L -> Oracle; n -> Worker.transfers of p, divided by
                                                           the tier's uplinks if known (`network_term`)
    T_xfer = b_eff / B_eff + L[tau]
    T_queue = max(0, q_d - (beta_max - beta_d)) * t_iter(beta_d)
    T_decode = t_iter(beta_d + 1),  t_iter(beta) = a + b * beta          a, b -> step_base_s, step_per_seq_s
    d* = argmin of the sum over the feasible workers

    beta_d + q_d -> Worker.slots_used, or what the engine reports if that is more
    beta_d       -> the batch that the engine reports if requests queue there, otherwise at most beta_max of all
    beta_max     -> Worker.slots
    feasible     -> by memory, with b_eff (`policies.dispatch.feasibility`), and by slots: at most
                    Snapshot.overcommit_slots more than beta_max. So an entry may queue on a near worker whose batch is
                    full rather than move its KV to a far one; each decision shows the queue as `queue_s`

`queue` "iterations" is the paper's term, one iteration for each blocked predecessor: it assumes that a full batch frees
a slot with every step. It does so where slots are about as many as output tokens. A batch of 8 with outputs of 1,000
tokens frees one in 125 steps. With `queue` "slot", ours and the default, the term is the wait for a slot, in which the
new request counts too:

    T_queue = max(0, q_d - (beta_max - beta_d) + 1) * o / beta_max * t_iter(beta_d)
    o: output tokens for each sequence that ends -> Snapshot.usual_output_tokens

Before the first sequence has ended, o is not known and the term is the paper's. With "slot" an entry queues only where
that is better than a free slot elsewhere. If no worker that it fits has one, it waits in the pool, where it can take
whatever slot frees first.

The default is not the paper's, because the paper's costs time wherever it is used: with one sequence beyond the slots,
its mean TTFT is above that with none in five of six cells of `python -m benchmarks run overcommit`, and further above
with each further one, as its queue has no bound of its own; that of "slot" does not change beyond its interval
(docs/results.md: "NetKV, the paper's, 1 beyond the slots"). Where a batch frees a slot with the next step, the default
too prefers a near worker that is full for one step to a far free one.

`contention` says what own transfers in flight cost, in the rungs "static" and "full". "counted" is the paper's 1 + n in
B_eff, and the default. The others are ours (`policies.network.contention`): T_xfer is the time without other transfers
of ours, times the slowdown that was learnt for the tier (`Oracle.contention`) by the transfers of the sender there
("own"), of all senders there ("fleet"), of the sender and to the receiver ("ends"), or of all senders with one level
for all tiers ("shared"). Where nothing is learnt yet, it is 1, as with "topo_only"; by "shared" a tier of which nothing
is learnt has the level of the others. `max_inflight` and `strict_priorities` do not apply to them. The time without
other transfers of ours is that on the tier's B, with the operator's c where there is one: estimates of pairs and a
learnt c come from the same transfers and would count their contention twice. So these forms do not tell apart the pairs
of a tier. They need the tiers of a network file (`router.network.file`); without tiers they count no own transfers and
use the estimates. In place of `own_flows`, `explain` shows the factor by which a candidate's transfer was multiplied as
`slowdown`, the number of ended transfers of its tier from which it was learnt as `learnt_from` (0: none has ended
there), and the transfers that it counts: `in_flight`, or `leaving` the sender and `entering` the receiver.

`variant` is the rung of the ladder: "cla" (CLA*: load_weight * load - cache_weight * hit ratio, no network; the paper
does not define its load, which is sequences / slots here and FlowKV's score in `cache_load_aware`), "topo_only" (static
tiers), "static" (+ own transfers n), "full" (+ congestion, pair estimates). Where data of the oracle are stale or
missing, the policy uses a lower rung (`oracle.Oracle.path`). Without any data the network term is left out for every
candidate.
Deviations: a request that fits nowhere waits in the pool instead of being rejected (docs/design.md 2). The paper does
not bound a worker's queue; ours is bounded, because a request that queues in an engine is no longer in the pool and
cannot go elsewhere when a slot frees there. With `strict_priorities`, n counts only transfers of the same or a higher
class (docs/design.md 3.3). ASSUMPTION: a request's class is the level of its flow.
Not claimed: overlap of transfer and computing, or joint optimality over concurrent requests.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.network.contention import COUNTS, FORMS, SHARED, Curve, InFlight
from policies.record import record
from policies.routing.base import Decision, Needs, Overcommit, Ranked, best_of, least_cost
from policies.routing.netkv.network_term import NetworkTerm, effective_bytes
from policies.routing.params import Number, OneOf, Whole, check
from policies.state.views import PoolEntry, Request, Snapshot, Worker, WorkerId

VARIANTS = ("cla", "topo_only", "static", "full")
QUEUES = ("iterations", "slot")
COUNTED = "counted"


@record
class Slowed:
    """The learnt factor of one transfer's time by `counts` others in flight, and the number of ended transfers from
    which it was learnt.
    """

    factor: float
    transfers: int
    counts: tuple[int, ...]


ALONE = Slowed(1.0, 0, ())
"""The factor where nothing is learnt."""


@dataclass(frozen=True, slots=True)
class NetKV:
    """Chooses the decode worker of least transfer, queue and first step."""

    paper: ClassVar[str] = "NetKV III-V, algorithm 1"
    needs: ClassVar[Needs] = Needs.HITS | Needs.NETWORK
    formula: ClassVar[str] = (
        "cost = transfer_s + queue_s + first_step_s"
        " (variant cla: cost = load_weight * load - cache_weight * hit_ratio)"
    )
    variant: Annotated[str, OneOf(VARIANTS)] = "full"
    """Rung of the ablation ladder, from no network at all to live congestion."""
    step_base_s: Annotated[float, Number(above=0.0, unit="s")] = 0.02  # ASSUMPTION
    """Fixed time a of a decode step; fit it to the engines deployed."""
    step_per_seq_s: Annotated[float, Number(low=0.0, unit="s")] = 0.0005  # ASSUMPTION
    """Time b that each sequence adds to a decode step; fit it to the engines deployed."""
    # The default is from NetKV V-C: roughly the flow count at which a NIC is saturated.
    max_inflight: Annotated[int, Whole(0, 1_000_000, "transfers")] = 16
    """Largest number of own transfers in flight that is counted per tier."""
    strict_priorities: bool = False
    """Whether only own transfers of the same or a higher class count."""
    # NetKV VI-A tuned the cache and load weights to (1.0, 1.0) for chat and RAG and to (1.5, 0.7) for long
    # contexts.
    cache_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the hit ratio in the variant "cla"."""
    load_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the load in the variant "cla"."""
    # "iterations" is the paper's; `python -m benchmarks run overcommit` compares the two.
    queue: Annotated[str, OneOf(QUEUES)] = "slot"
    """Queue term: a step for each blocked predecessor ("iterations"), or the steps until a full batch frees a slot by
    the usual output of a sequence ("slot").
    """
    contention: Annotated[str, OneOf((COUNTED, *FORMS))] = COUNTED
    """Cost of own transfers in flight: the paper's 1 + n ("counted"), or a slowdown learnt by the transfers of the
    sender on the tier ("own"), of all senders there ("fleet"), of the sender and to the receiver ("ends"), or of all
    senders, with a part that all tiers share ("shared").
    """
    name: str = "netkv"

    def __post_init__(self) -> None:
        check(self)

    @property
    def overcommits(self) -> Overcommit:
        """The paper sends a request at once, whatever the queues; by the wait for a slot it pays to wait for any."""
        return Overcommit.BESIDE_FREE_SLOTS if self.queue == "slot" else Overcommit.ALWAYS

    @property
    def needs_by_params(self) -> Needs:
        return Needs.CONTENTION if self._learns else Needs.NONE

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision | None:
        if self.queue == "slot" and not any(worker.slots_used < worker.slots for worker in workers):
            return None
        hits = snapshot.hits.tokens(entry.request)
        if self.variant == "cla":
            return least_cost(self.name, [self._cla(entry.request, worker, hits) for worker in workers], rng)
        network = self._network(entry, workers, snapshot)
        output_tokens = (snapshot.usual_output_tokens or 0.0) if self.queue == "slot" else 0.0
        transfers_s = transfer_seconds(entry, workers, hits, network)
        slowed: Sequence[Slowed | None] = [None] * len(workers)
        if self._learns and network.known:
            learnt = slowdowns(self.contention, entry.prefill_worker, workers, snapshot)
            transfers_s = [seconds * one.factor for seconds, one in zip(transfers_s, learnt, strict=True)]
            slowed = learnt
        costs = self._costs(workers, transfers_s, output_tokens)
        return best_of(
            self.name,
            workers,
            costs,
            lambda i: self._explain(workers[i], transfers_s[i], output_tokens, network, slowed[i]),
            rng,
        )

    def _cla(self, request: Request, worker: Worker, hits: Mapping[WorkerId, int]) -> Ranked:
        hit_ratio = hits.get(worker.id, 0) / max(1, request.prompt_tokens)
        load = sequences_on(worker) / worker.slots
        cost = self.load_weight * load - self.cache_weight * hit_ratio
        return Ranked(worker.id, cost, {"load": load, "hit_ratio": hit_ratio})

    def _network(self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot) -> NetworkTerm:
        most = None if self.variant == "topo_only" or self._learns else self.max_inflight
        lowest = entry.request.terms.priority if self.strict_priorities else None
        estimates = not (self._learns and snapshot.oracle is not None and snapshot.oracle.own_flows_excluded)
        return NetworkTerm(
            snapshot, entry.prefill_worker, workers, self.variant == "full", most, lowest, estimates
        )

    @property
    def _learns(self) -> bool:
        return self.contention != COUNTED and self.variant in ("static", "full")

    def _costs(
        self, workers: Sequence[Worker], transfers_s: Sequence[float], output_tokens: float
    ) -> list[float]:
        """Returns the sum of the three terms for each worker, in seconds."""
        first_s, per_seq_s = self.step_base_s + self.step_per_seq_s, self.step_per_seq_s
        costs: list[float] = []
        for worker, transfer_s in zip(workers, transfers_s, strict=True):
            total, running = worker.slots_used, worker.engine_running
            # `sequences_on` is written out here, because calling it for each worker makes a decision 5 to 10 %
            # longer (16 to 256 candidates of benchmarks.decisions.inputs.round_input).
            if running is not None:
                reported = running + (worker.engine_waiting or 0)
                total = reported if reported > total else total
            if total < worker.slots:  # a free slot means no queue
                costs.append(transfer_s + (first_s + per_seq_s * total))
            else:
                costs.append(transfer_s + sum(self._queue_and_step_s(worker, total, output_tokens)))
        return costs

    def _explain(
        self,
        worker: Worker,
        transfer_s: float,
        output_tokens: float,
        network: NetworkTerm,
        slowed: Slowed | None,
    ) -> dict[str, float]:
        queue_s, step_s = self._queue_and_step_s(worker, sequences_on(worker), output_tokens)
        terms = {"transfer_s": transfer_s, "queue_s": queue_s, "first_step_s": step_s}
        if queue_s:
            terms["queued"] = float(sequences_on(worker) - worker.slots)
        terms.update(network.terms(worker))
        if slowed is not None:
            terms.pop("own_flows", None)  # the form has counts of its own
            terms.update(slowdown=slowed.factor, learnt_from=float(slowed.transfers))
            terms.update(zip(COUNTS[self.contention], map(float, slowed.counts), strict=False))
        return terms

    def _queue_and_step_s(self, worker: Worker, total: int, output_tokens: float) -> tuple[float, float]:
        """Returns (T_queue, T_decode) in seconds for one more sequence on a worker with `total` of them. With 0 for
        `output_tokens` T_queue is the paper's.
        """
        base_s, per_seq_s, queued = self.step_base_s, self.step_per_seq_s, total - worker.slots
        steps = steps_of_queue(queued, worker.slots, output_tokens)
        if not steps:
            return 0.0, base_s + per_seq_s * (total + 1)
        running = batch_behind_queue(worker)
        return steps * (base_s + per_seq_s * running), base_s + per_seq_s * (running + 1)


def transfer_seconds(
    entry: PoolEntry, workers: Sequence[Worker], hits: Mapping[WorkerId, int], network: NetworkTerm
) -> list[float]:
    """Returns T_xfer for each worker. A worker that already holds some of the prompt gets only the rest."""
    seconds = network.seconds_each(workers, entry.kv_bytes)
    for i in [i for i, worker in enumerate(workers) if worker.id in hits] if hits else ():
        seconds[i] = network.seconds(workers[i], effective_bytes(entry, hits[workers[i].id]))
    return seconds


def slowdowns(form: str, sender: WorkerId, workers: Sequence[Worker], snapshot: Snapshot) -> list[Slowed]:
    """Returns the learnt slowdown of a transfer from `sender` to each worker by our transfers in flight. It is `ALONE`
    where none is learnt, and where the oracle cannot distinguish own flows from others (NetKV III-D).
    """
    oracle, source = snapshot.oracle, snapshot.workers.get(sender)
    curves = oracle.contention.get(form) if oracle is not None and oracle.own_flows_excluded else None
    if oracle is None or source is None or not curves:
        return [ALONE] * len(workers)
    flying = InFlight()
    for one in snapshot.workers.values():
        for to, _, flows in one.transfers:
            receiver = snapshot.workers.get(to)
            tier = None if receiver is None else oracle.tier(one.id, one.node, to, receiver.node)
            if tier is not None:
                flying.add(one.id, to, tier, flows)
    found: list[Slowed] = []
    for worker in workers:
        tier = oracle.tier(sender, source.node, worker.id, worker.node)
        curve = None if tier is None else curves.get(tier)
        if curve is None and form == SHARED:
            # The level is every tier's, also that of one on which nothing has ended.
            curve = Curve(next(iter(curves.values())).level, (0.0,))
        if tier is None or curve is None:
            found.append(ALONE)
        else:
            counts = flying.counts(form, sender, worker.id, tier)
            found.append(Slowed(curve.slowdown(counts), curve.transfers, counts))
    return found


def sequences_on(worker: Worker) -> int:
    """Returns q_d + beta_d, the sequences that run or wait on a worker: the router's charges, or the engine's
    report if that is larger.
    """
    running = worker.engine_running
    if running is None:
        return worker.slots_used
    return max(worker.slots_used, running + (worker.engine_waiting or 0))


def batch_behind_queue(worker: Worker) -> int:
    """Returns beta_d for a worker on which sequences queue: the batch that its engine reports, if it reports a queue,
    otherwise beta_max. An engine queues below beta_max while it lacks KV or waits for transfers.
    """
    if worker.engine_running is None or not worker.engine_waiting:
        return worker.slots
    return min(worker.engine_running, worker.slots)


def steps_of_queue(queued: int, slots: int, output_tokens: float) -> float:
    """Returns the steps that a request waits behind `queued` others for a slot of a worker, which has -queued free ones
    if `queued` is below 0. `output_tokens` is the usual output; 0: a full batch frees a slot with every step.
    """
    if not output_tokens:
        return max(0, queued)
    return max(0, queued + 1) * output_tokens / slots
