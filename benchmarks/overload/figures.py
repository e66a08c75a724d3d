"""The figures of one side at one load, made of the outcomes of its requests.

Goodput counts the output tokens of the requests that were planned in the window and had their first text within the
objective of their class. Their times to the first text count from the planned moment; an answer that was cut without
any counts with the time that it had waited by then, which is above every objective.

The service of a tenant is what its requests cost that had their first text in the window: the virtual token counter's
tokens, 1 for a token of the prompt and 2 for one of the answer. Its fair share is that of weighted max-min fairness, as
in the experiment `fairness`, in each class for itself, because classes go before shares: what a class was served in the
window is shared out by weights, no tenant is given more than it asked for there, and what one leaves goes to the
others. What a tenant asked for are its requests that came before the end of the window and were neither served nor
refused before its beginning; those whose objective ends after the window count only if they were served in it. A
tenant's part is its service over the sum of its fair shares. So the parts say how a side shares what it serves, and its
goodput how much that is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.experiments.fairness import COST, fair_shares
from benchmarks.live.stats import percentile
from benchmarks.overload.load import CLASSES, MODEST, SLO_S, WEIGHTS, Times, Work
from benchmarks.overload.outcomes import Outcome

AT_ARRIVAL = frozenset({"ttft_objective", "tpot_objective"})
"""The codes with which Sluice refuses at the arrival. `late` is the code of a request that waited and became late, and
`queue_full` that of the least urgent one in a full queue, which may have waited, too.
"""


def figures(outcomes: Sequence[Outcome], times: Times) -> dict[str, Any]:
    """Returns the figures of one load. Rates are those of the window; a figure is None where nothing was measured."""
    window = [one for one in outcomes if times.holds(one.work.at_s)]
    good = [one for one in window if in_time(one)]
    refused = [one for one in window if one.end == "refused"]
    found: dict[str, Any] = {
        "requests": len(window),
        "offered_tokens_per_s": _tokens(window) / times.window_s,
        "goodput_tokens_per_s": _tokens(good) / times.window_s,
        "goodput_per_s": len(good) / times.window_s,
        "refused_share": len(refused) / max(1, len(window)),
        "failed": sum(one.end == "failed" for one in window),
        "refusal_p50_s": _percentile(_refusals_s(refused), 0.5),
        "refusal_at_arrival_p99_s": _percentile(
            _refusals_s([one for one in refused if at_arrival(one)]), 0.99
        ),
        "ends": dict(Counter(f"{one.end} {one.reason}".strip() for one in window)),
        "late_sending_p99_s": _percentile([one.sent_s - one.work.at_s for one in window], 0.99),
    }
    for name in CLASSES:
        of = [one for one in window if one.work.request_class == name]
        waits_s = [_waited_s(one) for one in of if one.end in ("whole", "cut")]
        found[f"in_time/{name}"] = _share(of)
        found[f"ttft_p50_s/{name}"] = _percentile(waits_s, 0.5)
        found[f"ttft_p99_s/{name}"] = _percentile(waits_s, 0.99)
    found["in_time/modest"] = _share([one for one in window if one.work.tenant in MODEST])
    return found | _tenants(outcomes, times)


def in_time(one: Outcome) -> bool:
    """Returns whether the first text came within the objective, of an answer that did not fail."""
    ttft_s = one.ttft_s
    return one.served_s is not None and ttft_s is not None and ttft_s <= SLO_S[one.work.request_class]


def at_arrival(one: Outcome) -> bool:
    """Returns whether a refused request was refused at its arrival. Servers that give no code know no other refusal."""
    return one.reason in AT_ARRIVAL or one.reason.startswith("status ")


def cost(work: Work) -> float:
    """Returns the tokens for which a request counts."""
    return COST.cost(work.prompt_tokens, work.output_tokens)


def _tenants(outcomes: Sequence[Outcome], times: Times) -> dict[str, float | None]:
    """Returns what each tenant was served, in the counter's tokens a second, and its part of its fair share."""
    served, fair = dict.fromkeys(WEIGHTS, 0.0), dict.fromkeys(WEIGHTS, 0.0)
    for name in CLASSES:
        own = [one for one in outcomes if one.work.request_class == name]
        got = _by_tenant([one.work for one in own if _served_in(one, times)])
        asked = _by_tenant([one.work for one in own if _asked_in(one, times)])
        for tenant, share in fair_shares(sum(got.values()), asked).items():
            served[tenant] += got[tenant]
            fair[tenant] += share
    found: dict[str, float | None] = {}
    for tenant in WEIGHTS:
        found[f"served_per_s/{tenant}"] = served[tenant] / times.window_s
        found[f"part_of_share/{tenant}"] = served[tenant] / fair[tenant] if fair[tenant] else None
    return found


def _by_tenant(works: Sequence[Work]) -> dict[str, float]:
    found = dict.fromkeys(WEIGHTS, 0.0)
    for work in works:
        found[work.tenant] += cost(work)
    return found


def _served_in(one: Outcome, times: Times) -> bool:
    return one.served_s is not None and times.holds(one.served_s)


def _asked_in(one: Outcome, times: Times) -> bool:
    """Returns whether the request wanted service in the window."""
    over = any(at_s is not None and at_s < times.ramp_s for at_s in (one.served_s, one.refused_s))
    ends_s = one.work.at_s + SLO_S[one.work.request_class]
    return not over and one.work.at_s < times.until_s and (ends_s < times.until_s or _served_in(one, times))


def _waited_s(one: Outcome) -> float:
    return one.ended_s - one.work.at_s if one.ttft_s is None else one.ttft_s


def _refusals_s(refused: Sequence[Outcome]) -> list[float]:
    """Returns how long each refused request waited for that answer; the client's own delay does not count."""
    return [one.ended_s - one.sent_s for one in refused]


def _tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(one.work.output_tokens for one in outcomes)


def _share(outcomes: Sequence[Outcome]) -> float | None:
    return sum(map(in_time, outcomes)) / len(outcomes) if outcomes else None


def _percentile(values: Sequence[float], q: float) -> float | None:
    return percentile(values, q) if values else None


def worst_part(found: Mapping[str, Any]) -> float | None:
    """Returns the least part of its fair share that a tenant got, or None."""
    parts = [found[f"part_of_share/{tenant}"] for tenant in WEIGHTS]
    return min((one for one in parts if one is not None), default=None)
