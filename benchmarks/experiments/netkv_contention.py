"""NetKV's self-contention: why its count of own transfers loses to no count, and three forms that are learnt instead.

The cause: B_eff = B / (1 + n) says that one more own transfer costs as much again as the time alone. Where each
transfer draws one of many NICs and uplinks it costs a small part of that. What does slow transfers is a level that all
senders of the rack make together, which hardly depends on n, and which is there between pods as well. So Full sends
transfers between pods, where B is half, to avoid others that they would hardly have met. With one NIC an instance the
cost of one more grows with the load, and from some n on a transfer between pods is as fast; only there can a count pay.
docs/results.md has the time of a transfer over its time alone by n, for both forms of the paper.

The forms (`NetKV.contention`, `policies.network.contention`) predict the slowdown of a tier as level + slope * count,
fitted by ridge regression on the transfers of the last 60 s, whose prior is Topo-Only (level 1, slopes 0). They differ
in what they count:

    own     transfers of the sender on the tier: the paper's count, with the uplinks learnt
    fleet   transfers of all senders on the tier
    ends    transfers that leave the sender on any tier, and transfers that enter the receiver from any sender: two
            slopes, so that receivers of one tier differ

The rule, which was written down before the first run of any of them: the form of least worst cell is chosen, where a
cell counts as its mean TTFT over that of the better of Topo-Only and Full there. It is chosen on the part "choose",
which has the even ones of 20 windows of the trace and seeds from 900 on; the part "report" has the odd windows and
other seeds. Windows are disjoint; only the requests behind a window that keep its load up may belong to another one.

Aims, for the chosen form in the part "report": in every cell its mean TTFT is at most 1 % above that of Topo-Only, and
at most 1 % above that of the better of Topo-Only and Full. NetKV-Uplinks, whose uplinks an operator tells, stands
beside without an aim.

Where its report missed an aim, `netkv_shared` has a second round with a form that was made for the cause found there.

Not claimed: a live router, which learns contention from coarser facts (`actors.router.network.feed`); transfers that
other routers have in flight; the queue for a decode slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import netkv_common as common
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.netkv_common import named, reduction, share
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise
from benchmarks.sim.network.clusters import netkv_cluster
from benchmarks.sim.records import RequestRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV's self-contention: the paper's count of own transfers beside three forms that learn its cost"
SEEDS = (10, 2)
CHOOSE, REPORT = "choose", "report"
WINDOWS = 20
FIRST_SEED = {CHOOSE: 900, REPORT: 1_001}
"""The seed of each part's first run, which with a step of 2 has even windows in one part and odd ones in the other."""
TOPO, FULL, TOLD = "NetKV-Topo-Only", "NetKV-Full", "NetKV-Uplinks"
# The forms of the first round; `netkv_shared` has the second.
LEARNT = {form: f"NetKV-Learnt-{form.capitalize()}" for form in ("own", "fleet", "ends")}
SCHEDULERS = (TOPO, FULL, TOLD, *LEARNT.values())
_ONE_NIC = {"fixed_nic": True}
CELLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rag 100%": ("rag", {"load": 1.0}),
    "rag 250%": ("rag", {"load": 2.5}),
    "rag 100% one NIC": ("rag", {"load": 1.0, **_ONE_NIC}),
    "rag 250% one NIC": ("rag", {"load": 2.5, **_ONE_NIC}),
    "rag 100% 8:1 40%": ("rag", {"load": 1.0, "oversubscription": 8.0, "background": 0.4}),
    "rag 100% 1:1": ("rag", {"load": 1.0, "oversubscription": 1.0}),
    "rag 100% switching": ("rag", {"load": 1.0, "switching": 0.4}),
    "chatbot 100%": ("chatbot", {"load": 1.0}),
    "chatbot 250% one NIC": ("chatbot", {"load": 2.5, **_ONE_NIC}),
    "long 100%": ("long", {"load": 1.0}),
    "long 100% one NIC": ("long", {"load": 1.0, **_ONE_NIC}),
}
QUICK = ("rag 100%", "rag 250% one NIC")
TTFT = "ttft_mean_s"
MOST = 1.0  # per cent
MOST_N = 4
# A mean of fewer transfers is not shown.
LEAST_MOVED = 20


def variants(quick: bool) -> list[Variant]:
    made = []
    for part in FIRST_SEED:
        for cell in QUICK if quick else CELLS:
            workload, options = CELLS[cell]
            for scheduler in SCHEDULERS:
                one = named(workload, scheduler, windows=WINDOWS, **options)
                made.append(
                    Variant(cell_name(part, cell, scheduler), {**one.config, "part": part, "cell": cell})
                )
    return made


def cell_name(part: str, cell: str, scheduler: str) -> str:
    """Returns the name of a variant: a scheduler in a cell of a part."""
    return f"{part}, {cell}, {scheduler}"


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one window; returns its metrics, and the sums and numbers of slowdowns (`slowdowns`)."""
    drawn = seed_of(config["part"], seed)
    result = simulate(common.sim_config(config, drawn), common.requests(config, drawn))
    topology = netkv_cluster(64, config.get("oversubscription", 4.0), config.get("nics", 8))
    return {**summarise(result), **slowdowns(result.requests, topology.tier_bytes_per_s)}


def slowdowns(records: Sequence[RequestRecord], bytes_per_s: Mapping[int, float]) -> dict[str, float]:
    """Returns the sum over transfers of their time over the time alone at B, and their number, by tier and by n.

    n is the number of other transfers of the sender on the tier at the beginning, as far as they are measured; `MOST_N`
    stands for all from there on.
    """
    by_link: dict[tuple[str | None, int], list[tuple[float, float, int]]] = {}
    for r in records:
        if r.tier is not None and r.transfer_bytes and r.transfer_started_s is not None and r.transfer_done_s:
            link = by_link.setdefault((r.prefill_worker, r.tier), [])
            link.append((r.transfer_started_s, r.transfer_done_s, r.transfer_bytes))
    found: dict[str, float] = {}
    for (_, tier), transfers in by_link.items():
        transfers.sort()
        for i, (start_s, done_s, n_bytes) in enumerate(transfers):
            n = min(MOST_N, sum(end_s > start_s for _, end_s, _ in transfers[:i]))
            for key, value in (("slow", (done_s - start_s) * bytes_per_s[tier] / n_bytes), ("moved", 1.0)):
                name = f"{key}/{tier}/{n}"
                found[name] = found.get(name, 0.0) + value
    return found


def seed_of(part: str, seed: int) -> int:
    """Returns the seed of a part's run. Its window is `seed % WINDOWS`: even ones choose, odd ones report."""
    return FIRST_SEED[part] + 2 * seed


def chosen(results: Results) -> tuple[str, dict[str, float]]:
    """Returns the form of least worst cell in the part "choose", and the worst cell of each form, as a ratio."""
    worst = {
        form: max(_ratio(results, CHOOSE, cell, scheduler) for cell in _cells(results))
        for form, scheduler in LEARNT.items()
    }
    return min(worst, key=lambda form: worst[form]), worst


def _cells(results: Results) -> list[str]:
    return list(dict.fromkeys(config["cell"] for config in results.variants.values()))


def _ratio(results: Results, part: str, cell: str, scheduler: str) -> float:
    """Returns the mean TTFT over that of the better of Topo-Only and Full."""
    rivals = [results.mean(cell_name(part, cell, rival), TTFT) for rival in (TOPO, FULL)]
    return results.mean(cell_name(part, cell, scheduler), TTFT) / min(rivals)


def compare(results: Results) -> list[Row]:
    form, worst = chosen(results)
    rows = [
        Row("the form of least worst cell, part choose", None, 100.0 * (worst[form] - 1.0), "%", note=form)
    ]
    rows += [
        Row(
            f"{one}: worst cell over the better of Topo-Only and Full, part choose",
            None,
            100.0 * (w - 1.0),
            "%",
        )
        for one, w in worst.items()
    ]
    for cell in _cells(results):
        rows += _aims(results, cell, form)
    for cell in _cells(results):
        for scheduler in (TOPO, FULL):
            rows += _cause(results, cell, scheduler)
    for cell in _cells(results):
        for scheduler in SCHEDULERS[1:]:
            rows.append(against(results, cell, scheduler, TOPO))
        for scheduler in SCHEDULERS:
            name = cell_name(REPORT, cell, scheduler)
            rows.append(
                share(results, f"{cell}, {scheduler}: transfers in the pod", name, "tier_share/2", None)
            )
    return rows


def _aims(results: Results, cell: str, form: str) -> Sequence[Row]:
    """Returns the rows of the chosen form against Topo-Only, and against the better of Topo-Only and Full."""
    better = min((TOPO, FULL), key=lambda rival: results.mean(cell_name(REPORT, cell, rival), TTFT))
    made = []
    for rival, what in ((TOPO, "Topo-Only"), (better, "the better of Topo-Only and Full")):
        row, name = (
            against(results, cell, LEARNT[form], rival),
            f"{cell}, chosen form vs {what}: mean TTFT",
        )
        made.append(aimed(replace(row, name=name, note=f"{form} vs {rival}"), "at most +1 %", most=MOST))
    return made


def _cause(results: Results, cell: str, scheduler: str) -> list[Row]:
    """Returns rows with the time of a transfer over its time alone, by the sender's others on the tier."""
    name, rows = cell_name(REPORT, cell, scheduler), []
    for tier, where in ((2, "in the pod"), (3, "between pods")):
        for n in range(MOST_N + 1):
            slow, moved = (sum(results.values(name, f"{key}/{tier}/{n}", 0.0)) for key in ("slow", "moved"))
            if moved >= LEAST_MOVED:
                what = (
                    f"{cell}, {scheduler}: time over that alone {where}, n = {n}{' or more' * (n == MOST_N)}"
                )
                rows.append(
                    Row(
                        what, None, slow / moved, note=f"{moved:.0f} transfers; the paper's form says {1 + n}"
                    )
                )
    return rows


def against(results: Results, cell: str, scheduler: str, rival: str) -> Row:
    """Returns what a scheduler has less than a rival in a cell of the report."""
    base, ours = (cell_name(REPORT, cell, one) for one in (rival, scheduler))
    return reduction(results, f"{cell}, {scheduler} vs {rival}", base, ours, None)


def plots(results: Results) -> Mapping[str, Figure]:
    return {}
