"""FlowKV's comprehensive load score C_i of one node (appendix B.2 and lines 8-11 of its algorithm 1).

    C_i = ( w_r L_r + w_w L_w + w_sw L_sw + w_se L_se + w_t T_b + w_kv KV_u + w_g G_u + w_mb MB_u ) / sum of the w used

    L_r, L_w, L_sw   running, waiting, swapped queue / slots      -> Worker.indicators, smoothed; see below for L_w
    L_se             sending queue / slots                        -> Indicators.sending (Worker.sending before a report)
    T_b              share of the step's token budget in use      -> Indicators.token_budget
    KV_u             KV-cache utilisation                         -> Worker.kv_usage (our charges: exact at any time)
    G_u, MB_u        compute, memory-bandwidth utilisation        -> Indicators.compute, .memory_bandwidth
    w                one set per policy, hence per role           -> LoadWeights

A policy that places requests scores a node by all its queues. The means of a role (`regimes`) take only those of the
role's phase, as lines 10 and 11 of the algorithm do (L_r^{i,prefill} and L_r^{i,decode}), because an engine that has
switched roles still has work of its former one. The sending queue is prefill's.

A term that the engine does not report is left out and the weights of the others are renormalised, so scores of
engines that report different things stay comparable.
Deviations: queues are divided by the node's own slots and not by the largest of the fleet, because a score must not
change when another node comes. L_w also counts the requests routed to the node since its last report; otherwise all
requests that arrive between two reports would go to one node.
Not claimed: the paper's weights, which it does not print.
"""

from dataclasses import dataclass
from typing import Annotated

from policies.routing.params import BadParameter, Number, check
from policies.state.views import Indicators, Queues, Role, Worker

LOAD_FORMULA = (
    "cost = (w.running * running + w.waiting * waiting + w.swapped * swapped + w.sending * sending"
    " + w.token_budget * token_budget + w.kv_usage * kv_usage + w.compute * compute"
    " + w.memory_bandwidth * memory_bandwidth) / (sum of the w of what is reported)"
)
"""The load score for `explain`; `w.x` is the parameter x."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """The weights w of the load score. Each is >= 0, and one of running, waiting and kv_usage is above 0. A weight
    of 0 removes its term.
    """

    running: Annotated[float, Number(low=0.0)] = 1.0  # ASSUMPTION: all eight
    """Weight of the running requests, as a share of the slots."""
    waiting: Annotated[float, Number(low=0.0)] = 2.0
    """Weight of the waiting requests, as a share of the slots."""
    swapped: Annotated[float, Number(low=0.0)] = 2.0
    """Weight of the swapped-out requests, as a share of the slots."""
    sending: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the finished prefills whose KV is still held, as a share of the slots."""
    token_budget: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the share of a step's token budget that is used."""
    kv_usage: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the share of KV in use."""
    compute: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of compute utilisation."""
    memory_bandwidth: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of memory-bandwidth utilisation."""
    name: str = "load_score"

    def __post_init__(self) -> None:
        """Raises BadParameter for a weight below 0, or if the weights of all terms that every engine reports are 0."""
        check(self)
        if self.running + self.waiting + self.kv_usage <= 0:
            raise BadParameter(
                f"policy {self.name}: running, waiting and kv_usage are all 0: give one of them a weight above 0"
            )


def load_score(
    worker: Worker, weights: LoadWeights, phase: Role | None = None
) -> tuple[float, dict[str, float]]:
    """Returns the score of a worker (0 is idle, about 1 is full, more means a queue) and its normalised terms by
    name. The queues are those of one `phase`, Role.PREFILL or Role.DECODE; None: all that the worker has.
    """
    terms = load_terms(worker, phase)
    used = {name: getattr(weights, name) for name in terms}
    total = sum(used.values())
    return sum(used[name] * value for name, value in terms.items()) / total, terms


def load_terms(worker: Worker, phase: Role | None = None) -> dict[str, float]:
    """Returns the normalised indicators of a worker by the names of LoadWeights, with the queues of one phase (None:
    all). Before its first report they come from the router's own charges.
    """
    seen, slots = worker.indicators, worker.slots
    if seen is None:
        running = worker.prefilling if (phase or worker.role) is Role.PREFILL else worker.slots_used
        return {
            "running": running / slots,
            "waiting": 0.0,
            "sending": 0.0 if phase is Role.DECODE else worker.sending / slots,
            "kv_usage": worker.kv_usage,
        }
    queues = _queues(worker, seen, phase)
    terms = {
        "running": queues.running / slots,
        "waiting": queues.waiting / slots,
        "kv_usage": worker.kv_usage,
    }
    sending = 0.0 if phase is Role.DECODE and seen.sending is not None else seen.sending
    counted = {"swapped": queues.swapped, "sending": sending}
    terms |= {name: value / slots for name, value in counted.items() if value is not None}
    shares = {
        "token_budget": seen.token_budget,
        "compute": seen.compute,
        "memory_bandwidth": seen.memory_bandwidth,
    }
    return terms | {name: value for name, value in shares.items() if value is not None}


def _queues(worker: Worker, seen: Indicators, phase: Role | None) -> Queues:
    """Returns the queues of one phase (None: of both), with what was routed to the worker since its last report."""
    waiting, prompts = seen.waiting + worker.unreported, seen.prefill
    if phase is None:
        return Queues(seen.running, waiting, seen.swapped)
    prompts_waiting = prompts.waiting + worker.unreported_prefills
    if phase is Role.PREFILL:
        return Queues(prompts.running, prompts_waiting, prompts.swapped)
    swapped = None if seen.swapped is None else seen.swapped - (prompts.swapped or 0.0)
    return Queues(seen.running - prompts.running, waiting - prompts_waiting, swapped)
