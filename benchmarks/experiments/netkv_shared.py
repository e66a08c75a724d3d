"""NetKV's self-contention, second round: a learnt form that was made for the cells in which the first round's loses.

In the first round (`netkv_contention`) the form "fleet" was chosen. Its report left three aims open, the worst of them
where background traffic switches, where its mean TTFT is above Topo-Only's (docs/results.md). By how the form works,
this may be the cause: it learns a level for each tier, and traffic of others raises the level of the tier that is in
use. A tier on which nothing has ended for a minute has the prior's level, 1, as if no traffic were there, so it looks
faster than it is, and bursts are sent to it. "shared" has one level for all tiers, and a slope for each
(`policies.network.contention.fit_shared`): what others cost is the same wherever nothing else is known, and only what
our own transfers cost can move one to another tier.

"NetKV-Congestion" is Topo-Only with the oracle's congestion and without any count. In the cells with background it
tells whether a form loses by its count or by c.

The rule, which was written down before the first run of the form: of "fleet" and "shared" the one of least worst cell
is chosen, where a cell counts as its mean TTFT over that of the better of Topo-Only and Full there. It is chosen on the
part "choose" and judged on the part "report", which have no window in common. The cells are those of the first round
and five more, four of them with switching traffic or one NIC, where the first round's form could lose.

The two rounds are less apart than the two parts. Seeds are others, so what is shared, the paths, the background and the
places of requests on the trace's clock are drawn anew. But the windows of both rounds cover most of one trace: 21
windows begin elsewhere than 20 (but for the first), and each overlaps with one of the first round. So "shared", which
was made in view of the first round's report, is judged on other draws of partly the same requests.

Aims, for the chosen form in the part "report": in every cell its mean TTFT is at most 1 % above that of Topo-Only, and
at most 1 % above that of the better of Topo-Only and Full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import netkv_common as common
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.netkv_common import named, share
from benchmarks.experiments.netkv_contention import CELLS as FIRST_CELLS
from benchmarks.experiments.netkv_contention import CHOOSE, FULL, MOST, REPORT, TOPO, TTFT, against, cell_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV's self-contention, second round: a learnt form with one level for all tiers, beside the first round's"
SEEDS = (10, 1)
WINDOWS = 21
FIRST_SEED = {CHOOSE: 2_000, REPORT: 2_001}
"""The seed of each part's first run. With a step of 2 and 21 windows, ten runs of a part have ten windows, and the two
parts none in common.
"""
LEARNT = {form: f"NetKV-Learnt-{form.capitalize()}" for form in ("fleet", "shared")}
CONGESTION = "NetKV-Congestion"
SCHEDULERS = (TOPO, FULL, *LEARNT.values())
CELLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **FIRST_CELLS,
    "rag 250% switching": ("rag", {"load": 2.5, "switching": 0.4}),
    "rag 100% switching one NIC": ("rag", {"load": 1.0, "switching": 0.4, "fixed_nic": True}),
    "rag 100% 2:1": ("rag", {"load": 1.0, "oversubscription": 2.0}),
    "chatbot 100% switching": ("chatbot", {"load": 1.0, "switching": 0.4}),
    "long 250% one NIC": ("long", {"load": 2.5, "fixed_nic": True}),
}
QUICK = ("rag 100% switching", "rag 250% one NIC")


def variants(quick: bool) -> list[Variant]:
    return [
        _variant(part, cell, scheduler)
        for part in FIRST_SEED
        for cell in (QUICK if quick else CELLS)
        for scheduler in _schedulers(part, cell)
    ]


def _schedulers(part: str, cell: str) -> tuple[str, ...]:
    """Returns the schedulers of a cell; the one that only shows a cause runs where there is background to tell."""
    _, options = CELLS[cell]
    shows = part == REPORT and ("switching" in options or "background" in options)
    return (*SCHEDULERS, CONGESTION) if shows else SCHEDULERS


def _variant(part: str, cell: str, scheduler: str) -> Variant:
    workload, options = CELLS[cell]
    one = named(workload, scheduler, windows=WINDOWS, **options)
    return Variant(cell_name(part, cell, scheduler), {**one.config, "part": part, "cell": cell})


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one window of the config's part."""
    return common.run_one(config, seed_of(config["part"], seed))


def seed_of(part: str, seed: int) -> int:
    """Returns the seed of a part's run; its window is the seed modulo `WINDOWS`."""
    return FIRST_SEED[part] + 2 * seed


def chosen(results: Results) -> tuple[str, dict[str, float]]:
    """Returns the form of least worst cell in the part "choose", and the worst cell of each form, as a ratio."""
    worst = {
        form: max(_ratio(results, cell, scheduler) for cell in _cells(results))
        for form, scheduler in LEARNT.items()
    }
    return min(worst, key=lambda form: worst[form]), worst


def _cells(results: Results) -> list[str]:
    return list(dict.fromkeys(config["cell"] for config in results.variants.values()))


def _ratio(results: Results, cell: str, scheduler: str) -> float:
    """Returns the mean TTFT over that of the better of Topo-Only and Full, in the part "choose"."""
    rivals = [results.mean(cell_name(CHOOSE, cell, rival), TTFT) for rival in (TOPO, FULL)]
    return results.mean(cell_name(CHOOSE, cell, scheduler), TTFT) / min(rivals)


def compare(results: Results) -> list[Row]:
    form, worst = chosen(results)
    rows = [
        Row("the form of least worst cell, part choose", None, 100.0 * (worst[form] - 1.0), "%", note=form)
    ]
    for one, ratio in worst.items():
        what = f"{one}: worst cell over the better of Topo-Only and Full, part choose"
        rows.append(Row(what, None, 100.0 * (ratio - 1.0), "%"))
    for cell in _cells(results):
        better = min((TOPO, FULL), key=lambda rival: results.mean(cell_name(REPORT, cell, rival), TTFT))
        for rival, what in ((TOPO, "Topo-Only"), (better, "the better of Topo-Only and Full")):
            row = against(results, cell, LEARNT[form], rival)
            name, note = f"{cell}, chosen form vs {what}: mean TTFT", f"{form} vs {rival}"
            rows.append(aimed(replace(row, name=name, note=note), "at most +1 %", most=MOST))
    for cell in _cells(results):
        shown = _schedulers(REPORT, cell)
        rows += [against(results, cell, scheduler, TOPO) for scheduler in shown[1:]]
        for scheduler in shown:
            name = cell_name(REPORT, cell, scheduler)
            what = f"{cell}, {scheduler}: transfers in the pod"
            rows.append(share(results, what, name, "tier_share/2", None))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    return {}
