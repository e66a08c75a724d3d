"""A steady load for 24 hours: does the policy leave its fleet alone?

Requests come at 0.5 a second, without any pattern but Poisson's, between what two and three engines carry. This day is
not compressed, so all parameters are the policy's defaults. In a first run, with the delays of the compressed day and
fewer requests, the policy followed the noise; rate and delays were changed then. In a second one engines reported only
every 5 s, to save time, and the router held each for stale 2 s of these; and the quantile and headroom were those of
the compressed day. Afterwards `Forecast.drift` was added. The aim stayed. The first hour may settle. A change is any
change of the active engines by role.

A third version still made 58 changes on one seed. Replayed windows of other seeds (900 and on) showed what made the
plan cross. Most growths followed the mean length of the prompts over the last tens of requests, others that of the
outputs, the level of the arrivals, single windows taken for bursts, and the 0.9-quantile of few residuals. The rule
that was tried then: counting noise is no change. Mean lengths and level rest on many requests until their recent values
differ significantly; a quantile counts as far as it is significant; a burst is what chance brings once in a million
windows. It was developed on seeds from 900 on and written here before the reported seeds ran, which are four now.

The reported seeds missed the aim nevertheless, all of them. The plans of the worst seed and of one other were replayed
and name two causes. Late requests raise the headroom, which falls by `headroom_relax` an hour, so the fleet still
settles when the first hour is over. And the test of the mean lengths took the few long prompts, or long outputs, of
some windows for a change three times on the worst seed, and the fleet grew and shrank again.

Four things of the policy were changed after that, each for a reason that the result does not need: a late request
counts only against engines that it came to and that were enough, as far as the policy knew; the share of late requests
is evidence only where chance does not bring it (`policies.scaling.lateness`), as for rates and lengths; the headroom of
the beginning, a guess, ends with the first requests that are judged; and the test of the mean lengths knows that
lengths are skewed. They were developed on exact queues (`tests/policies/scaling/test_closed_loop.py`). As the reported
seeds had named the causes, the run with the changes has others (`SEEDS_FROM`), which nothing had run before.

Not claimed: the same for every rate. Where a load needs nearly all that its engines carry, less noise is enough. No
rival is run, since the aim counts the changes of this policy; so nothing is said of how often others change a fleet.

Aim, written before the first run: no change after the first hour on any seed, and 99 % of the requests in time.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from benchmarks.experiments.scaling_common import CHAT, OURS, fewest, kept, policy, requests, run
from policies.scaling.base import Limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "a steady load for 24 hours: changes of the fleet after the first"
SEEDS = (4, 1)
SEEDS_FROM = 3_000
RATE_PER_S, HOUR_S = 0.5, 3_600.0
LIMITS = Limits(prefill_max=12, decode_max=10, warm_max=4, budget=24)


def variants(quick: bool) -> list[Variant]:
    hours = 3 if quick else 24
    return [Variant(f"{OURS}, {hours} h", {"policy": OURS, "params": {}, "hours": hours})]


def run_one(config: Config, seed: int) -> Metrics:
    whole_s = config["hours"] * HOUR_S
    work = requests(CHAT, [RATE_PER_S], whole_s, seed)
    scaling = policy(config["policy"], config["params"], LIMITS)
    result = run(work, fewest(CHAT, RATE_PER_S), scaling, seed, HOUR_S, whole_s - HOUR_S)
    assert result.fleet is not None
    return kept(result) | {"changes": float(changes(result.fleet.timeline, HOUR_S))}


def changes(timeline: list[tuple[float, ...]], from_s: float) -> int:
    """Returns how often the active engines by role changed from `from_s` on."""
    before = [row[1:4] for row in timeline if row[0] < from_s]
    after = [*before[-1:], *(row[1:4] for row in timeline if row[0] >= from_s)]
    return sum(a != b for a, b in itertools.pairwise(after))


def compare(results: Results) -> list[Row]:
    (name,) = results.variants
    counts = results.values(name, "changes")
    count, note = max(counts), "most of any seed; by seed: " + ", ".join(f"{one:g}" for one in counts)
    share = 100.0 * results.mean(name, "slo_share")
    return [
        Row(
            f"{name}: changes after the first hour",
            0.0,
            count,
            "",
            None,
            "0",
            not count,
            note,
        ),
        Row(f"{name}: requests in time", None, share, "%", None, ">= 99", share >= 99.0),
        Row(f"{name}: engine time", None, results.mean(name, "fleet/engine_s") / HOUR_S, "h"),
        Row(f"{name}: requests", None, results.mean(name, "requests")),
    ]


def plots(results: Results) -> dict[str, Figure]:
    return {}
