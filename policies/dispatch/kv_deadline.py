"""The joint deadline of a KV transfer: how long the KV of a pool entry may take to reach its decode worker (MFS 3).

MFS gives stage 3, prefill to decode, an explicit deadline: what the request's TTFT objective leaves for the transfer.
The router knows what follows the transfer, because its decode policy has just weighed it:

    kv_due_s = ttft_from_s + ttft_slo_s - now_s - queue_s - first_step_s

`queue_s` (the wait for a slot on the chosen worker) and `first_step_s` (the step that makes the first token) are the
terms of the decision. A policy that names neither is offered workers with a free slot only, so its queue is 0, and its
first step counts as 0. A request without an objective of its own has that of its class where the operator gives one
(`class_slo`). One without any has until `margin_s` before its KV's lease ends, or a fifth of what is left of it where
that is less: nothing starves, and what the lease rescue sends late is urgent, not hopeless. A request that has missed
its objective is due at once (0), and the flow policy decides whether that is worth bandwidth. A retry keeps the
objective of the first attempt, because its client's clock began then (`Request.ttft_from_s`); an attempt that resumes
output has an objective from the last token on, because its client waits for the next one.

The result is a duration from the decision on, because no two processes share a clock.
"""

from policies.request.life import LEASE_PARTS
from policies.routing.base import Decision
from policies.state.views import PoolEntry


def kv_due_s(entry: PoolEntry, decision: Decision, now_s: float, margin_s: float) -> float:
    """Returns the seconds from `now_s` in which the entry's KV is due at the worker that `decision` chose (>= 0)."""
    slo_s = entry.request.terms.ttft_slo_s
    if slo_s is None:
        left_s = max(0.0, entry.lease_until_s - now_s)
        return left_s - min(margin_s, left_s / LEASE_PARTS)
    terms = next((ranked.terms for ranked in decision.ranking if ranked.worker == decision.worker), {})
    after_s = terms.get("queue_s", 0.0) + terms.get("first_step_s", 0.0)
    return max(0.0, entry.request.ttft_from_s + slo_s - now_s - after_s)
