"""Says whose an aim is: a paper's, a paper's that another form was held against, or our own.

The rule: an aim is a paper's if its row has a figure of a paper (`Row.paper`). The mappings below name the rows for
which the rule would be wrong, by experiment and by a pattern of the row's name (`fnmatch`). A test wants every pattern
to match a row of the committed results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from benchmarks.experiments.base import JUDGED, Row

Patterns = Mapping[str, tuple[str, ...]]
"""Patterns of row names by experiment."""


class Whose(Enum):
    """The owner of an aim. The value is the heading under which such aims are counted."""

    PAPER = "papers' aims"
    FORM = "papers' aims, forms of ours"
    OURS = "our own aims"
    NOBODY = "aims that are not counted"


IN_WORDS: Patterns = {
    # The first and second observation of section 5.3.1.
    "deepflow_map": ("mean cell, *", "largest win over largest loss *"),
    # Figure 4 and section 4.5: disaggregation "lowers TPOT with the same throughput" and "greatly improves throughput
    # under certain SLA", here one of both times.
    "deepflow_online": ("2P2D: TPOT below colocated at *", "2P2D over colocated: rate within the SLA, *"),
    # The three observations of section 5.3.2, on the paper's own policy.
    "deepflow_load": ("PD-aware, k = 0: JCT below RR at *",),
    # Section 5.2: the TE that "maximizes KV cache reuse".
    "deepflow_locality": ("*: prefix hits, on less off",),
    # The order of the gains in section 4.3.
    "flowkv_hetero": ("tasks with the paper's rank *",),
}
"""Aims that a paper states in words, so that their rows have no figure of it."""

OUR_FORMS: Patterns = {
    # The paper deploys no LightGBM in its tables; its figure for exact match stands beside.
    "balance_route_table1": ("*: imbalance of JSQ over ours*", "*: imbalance of JSQ over * lightgbm"),
    # The thresholds are those of `mfs_thresholds`. Pruning is the paper's own, with a budget that it does not name.
    "mfs_breakdown": ("*, MFS with Q_1 = 1*",),
    "mfs_dense": ("*, MFS with Q_1 = 1*",),
    "mfs_moe": ("*, MFS with Q_1 = 1*",),
    "mfs_testbed": ("*, MFS with Q_1 = 1*",),
}
"""Rows in which a rule, a predictor or constants of ours are held against a paper's figure. What they reach does not
say that the paper's own form reaches it. What is the paper's own form, in any reading of it, the experiment says.
"""

NOT_A_PAPERS: Patterns = {
    # The 0 is the aim; no paper prints it.
    "scaling_steady": ("*: changes after the first hour",),
}
"""Rows whose figure in the paper's place is our own."""


@dataclass(frozen=True, slots=True)
class NotCounted:
    """Rows of an experiment, by patterns, whose aim is not counted, and why."""

    patterns: tuple[str, ...]
    why: str


_PRUNED = NotCounted(
    ("*MFS with pruning*",),
    "The paper's figure is held against the form named MFS. Pruning is the paper's too, with a budget that it does not"
    " name, so the same figure would count twice.",
)
_LEARNT_AS_TOPO_ONLY = (
    "In these cells the runs are those of Topo-Only, so the difference is 0 and cannot fail."
)
NOT_COUNTED: Mapping[str, tuple[NotCounted, ...]] = {
    "balance_route_table1": (
        NotCounted(
            (
                "*: imbalance of JSQ over br_h_printed *",
                "*: imbalance of JSQ over br_h_pool *",
            ),
            "The paper's figure is held against one form, `br_h`. These are other readings of the same rule and of its"
            " parameters, so one figure would count several times.",
        ),
        NotCounted(
            (
                "recurring-long: share of the oracle's gain, *",
                "reasoning-long: share of the oracle's gain, *",
                "reasoning: share of the oracle's gain, *",
                *(
                    f"{case}: throughput, same load, of lightgbm over *"
                    for case in ("recurring-long", "reasoning-long", "reasoning", "azure2024")
                ),
            ),
            "LightGBM's runs are those of exact match, of survival given the client or of survival to the last digit."
            " So the difference is 0, and the share says nothing about LightGBM.",
        ),
    ),
    "composition": (
        NotCounted(
            ("composition, all cells: TTFT against BR-0, the paper's",),
            "Tuned, BR-0 has the paper's own parameters, so the row against BR-0 is the same.",
        ),
    ),
    "overload_shedding": (
        NotCounted(
            ("classes, *", "tenants, *", "shares, *", "conditions of the rule *"),
            "These are the conditions of one rule, which says what the default is. An option that misses some of them"
            " misses no aim of ours. Whether the default is what the rule names is counted.",
        ),
    ),
    "deepflow_colocation": (
        NotCounted(
            ("2P2D: *",),
            "The figure is the paper's Figure 4, which `deepflow_online` has with both times in the SLA and on seeds"
            " that nothing was tuned on. These rows keep the first, narrower aims.",
        ),
    ),
    "deepflow_heatmap": (
        NotCounted(
            ("cells of one sign at all rates", "mean cell up to ratio *", "largest win over largest loss *"),
            "The figure is the paper's Figure 5, which `deepflow_map` has at more rates and without the bound on the"
            " ratio. These rows keep the first, narrower aims.",
        ),
    ),
    "netkv_staleness": (
        NotCounted(
            ("quiet*",),
            "Without background traffic congestion is 0, and an oracle that says 0 is never stale. So the gains over"
            " CLA* at all periods are one number, which `netkv_load` compares with the paper, and their spread is 0"
            " whatever the policy does. The rows with switching traffic can tell a stale oracle from a fresh one.",
        ),
    ),
    "netkv_load": (
        NotCounted(
            ("rag *, the peak: mean TTFT",),
            "The paper's peaks for RAG are cells of its Table II, whose rows are counted, and ours are of the same"
            " runs.",
        ),
    ),
    "netkv_ladder": (
        NotCounted(
            ("*, NetKV-Full vs CLA*", "rag 100%, NetKV-Static vs CLA*"),
            "Without background there is no congestion to tell, so Full's runs are Static's, whose rows are counted;"
            " RAG's are also those of `netkv_load` at 100 %, where Table II's figure is counted.",
        ),
        NotCounted(
            (
                "* 100%, NetKV-Uplinks vs the better of *",
                "* 200%, NetKV-Uplinks vs the better of *",
                "* 250%, NetKV-Uplinks vs the better of *",
            ),
            f"{_LEARNT_AS_TOPO_ONLY} The rows with one NIC are counted.",
        ),
    ),
    "netkv_contention": (
        NotCounted(
            ("*, chosen form vs Topo-Only: mean TTFT",),
            "The better of Topo-Only and Full is Topo-Only in all cells but one, and the row against the better one is"
            " counted.",
        ),
        NotCounted(
            (
                "rag 100% 8:1 40%, chosen form vs the better of *",
                "chatbot 100%, chosen form vs the better of *",
            ),
            _LEARNT_AS_TOPO_ONLY,
        ),
    ),
    "netkv_shared": (
        NotCounted(
            ("*, chosen form vs Topo-Only: mean TTFT",),
            "The better of Topo-Only and Full is Topo-Only in all cells but two, and the row against the better one is"
            " counted.",
        ),
        NotCounted(("rag 100% 8:1 40%, chosen form vs the better of *",), _LEARNT_AS_TOPO_ONLY),
    ),
    "scaling_fork": (
        NotCounted(
            ("tree of *: serving TTFT",),
            "A fork at a lower priority takes only what KV leaves of a link, so TTFT is the same to the last digit"
            " whatever the tree.",
        ),
    ),
    "mfs_testbed": (_PRUNED,),
    "mfs_breakdown": (_PRUNED,),
    "mfs_moe": (_PRUNED,),
    "mfs_dense": (_PRUNED,),
}
"""Rows whose aim is not counted, by experiment. Such an aim is met whatever the code does, or says the same as another
row's: a pair of a paper's figure and a measurement counts once.
"""


def whose(experiment: str, row: Row) -> Whose | None:
    """Returns the owner of a row's aim, or None if the row has no aim. `experiment` is "" for rows of a live
    measurement, which no mapping names.
    """
    if not row.aim:
        return None
    if any(fnmatchcase(row.name, p) for one in NOT_COUNTED.get(experiment, ()) for p in one.patterns):
        return Whose.NOBODY
    if _named(NOT_A_PAPERS, experiment, row):
        return Whose.OURS
    if row.paper is None:
        return Whose.PAPER if _named(IN_WORDS, experiment, row) else Whose.OURS
    return Whose.FORM if _named(OUR_FORMS, experiment, row) else Whose.PAPER


def _named(patterns: Patterns, experiment: str, row: Row) -> bool:
    return any(fnmatchcase(row.name, pattern) for pattern in patterns.get(experiment, ()))


COUNTED = (Whose.PAPER, Whose.FORM, Whose.OURS)
"""The owners whose aims are counted, in the order of the columns."""


def counted(experiment: str, rows: Iterable[Row]) -> dict[Whose, str]:
    """Returns for each owner in `COUNTED` how many aims are met, missed and open, in words; "" without any."""
    by_owner: dict[Whose, list[Row]] = {owner: [] for owner in COUNTED}
    for row in rows:
        owner = whose(experiment, row)
        if owner in by_owner:
            by_owner[owner].append(row)
    return {owner: tally(found) for owner, found in by_owner.items()}


def tally(rows: Iterable[Row]) -> str:
    """Returns how many aims of the rows are met, missed and open, in words; "" without any."""
    judged = Counter(JUDGED[row.met] for row in rows if row.aim)
    total = judged.total()
    if not total:
        return ""
    rest = [f"{judged[word]} {word}" for word in (JUDGED[False], JUDGED[None]) if judged[word]]
    return ", ".join([f"{judged[JUDGED[True]]} of {total} {JUDGED[True]}", *rest])
