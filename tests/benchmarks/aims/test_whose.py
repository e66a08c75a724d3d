"""The owner of an aim, and counts of aims by owner."""

from fnmatch import fnmatchcase

import pytest

from benchmarks import provenance
from benchmarks.aims.whose import IN_WORDS, NOT_A_PAPERS, NOT_COUNTED, OUR_FORMS, Whose, counted, whose
from benchmarks.document import RESULTS
from benchmarks.experiments import registry
from benchmarks.experiments.base import Row
from benchmarks.results_io import load


def aimed(name: str, paper: float | None = None, met: bool | None = True, aim: str = "a") -> Row:
    return Row(name, paper, 1.0, aim=aim, met=met)


@pytest.mark.parametrize(
    ("experiment", "row", "owner"),
    [
        ("netkv_load", aimed("rag 100%, NetKV-Full vs RR: mean TTFT", -18.8), Whose.PAPER),
        ("netkv_load", aimed("rag 100%, NetKV-Full vs RR: mean TTFT"), Whose.OURS),
        ("netkv_load", aimed("rag 100%, NetKV-Full vs RR: mean TTFT", -18.8, aim=""), None),
        ("", aimed("a live measurement"), Whose.OURS),
        ("mfs_testbed", aimed("agent: mean CCT, MFS vs fair", -43.1), Whose.PAPER),
        ("mfs_testbed", aimed("agent: mean CCT, MFS with pruning vs fair", -43.1), Whose.NOBODY),
        # before and after `mfs_thresholds` named the number of levels
        ("mfs_testbed", aimed("agent: mean CCT, MFS with Q_1 = 1 vs fair", -43.1), Whose.FORM),
        ("mfs_testbed", aimed("agent: mean CCT, MFS with Q_1 = 1, K = 2 vs fair", -43.1), Whose.FORM),
        ("mfs_testbed", aimed("agent: mean TTFT, MFS vs sjf"), Whose.OURS),
        ("balance_route_table1", aimed("x: imbalance of JSQ over br_h oracle", 9.1), Whose.PAPER),
        ("balance_route_table1", aimed("x: imbalance of JSQ over br_h lightgbm", 5.9), Whose.FORM),
        ("balance_route_table1", aimed("x: imbalance of JSQ over br_h_pool oracle", 9.1), Whose.NOBODY),
        ("balance_route_table1", aimed("x: imbalance of JSQ over ours_leased oracle", 9.1), Whose.FORM),
        ("deepflow_heatmap", aimed("largest win over largest loss of disaggregation"), Whose.NOBODY),
        ("deepflow_map", aimed("largest win over largest loss of disaggregation"), Whose.PAPER),
        ("deepflow_map", aimed("mean cell, longer prompts less shorter"), Whose.PAPER),
        ("deepflow_online", aimed("2P2D over colocated: rate within the SLA, TPOT"), Whose.PAPER),
        ("deepflow_load", aimed("PD-aware, k = 0: JCT below RR at 10/s"), Whose.PAPER),
        ("deepflow_load", aimed("PD-aware: JCT below RR at 10/s"), Whose.OURS),
        ("deepflow_locality", aimed("all engines, sharing 0.5, 4/s: prefix hits, on less off"), Whose.PAPER),
        (
            "deepflow_locality",
            aimed("all engines, sharing 0.5, 4/s: JCT below that without locality"),
            Whose.OURS,
        ),
        ("balance_route_plain", aimed("azure2024: imbalance of BR-0 over br_h oracle", 1.53), Whose.PAPER),
        (
            "balance_route_bypass",
            aimed("long near, 5 GB/s, bypass, cap 1: imbalance of JSQ over it"),
            Whose.OURS,
        ),
        ("scaling_steady", aimed("joint, 24 h: changes after the first hour", 0.0), Whose.OURS),
        ("netkv_staleness", aimed("quiet: longest over shortest mean TTFT", 0.0), Whose.NOBODY),
        ("netkv_staleness", aimed("switching: longest over shortest mean TTFT", 0.0), Whose.PAPER),
    ],
)
def test_the_owner_of_an_aim(experiment: str, row: Row, owner: Whose | None) -> None:
    assert whose(experiment, row) is owner


def test_aims_of_a_paper_of_forms_of_ours_and_our_own_are_counted_apart() -> None:
    rows = [
        aimed("agent: mean TTFT, MFS vs fair", -32.3),
        aimed("agent: mean CCT, MFS vs fair", -43.1, False),
        aimed("agent: mean CCT, MFS with Q_1 = 1 vs fair", -43.1, None),
        aimed("agent: mean TTFT, MFS vs sjf"),
        aimed("agent: mean TTFT, MFS vs edf", met=None),
        aimed("agent: in time, fair", aim=""),
    ]
    assert counted("mfs_testbed", rows) == {
        Whose.PAPER: "1 of 2 met, 1 missed",
        Whose.FORM: "0 of 1 met, 1 open",
        Whose.OURS: "1 of 2 met, 1 open",
    }
    quiet = [aimed("quiet, refreshed every 1 s, vs CLA*: mean TTFT", -11.0)]
    assert set(counted("netkv_staleness", quiet).values()) == {""}


MAPPINGS = {
    "IN_WORDS": IN_WORDS,
    "OUR_FORMS": OUR_FORMS,
    "NOT_A_PAPERS": NOT_A_PAPERS,
    "NOT_COUNTED": {name: [p for one in found for p in one.patterns] for name, found in NOT_COUNTED.items()},
}


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_pattern_names_a_row_with_an_aim_that_the_rule_alone_would_give_to_another(
    mapping: str,
) -> None:
    for experiment, patterns in MAPPINGS[mapping].items():
        if f"experiments/{registry.place(experiment)}" in provenance.MISSING:
            continue  # not measured yet, so there are no rows
        rows = load(RESULTS / "experiments" / registry.place(experiment)).rows
        for pattern in patterns:
            named = [row for row in rows if row.aim and fnmatchcase(row.name, pattern)]
            has_figure = {row.paper is not None for row in named}
            assert named, (experiment, pattern)
            # Aims of our own may say the same twice, too.
            wanted = {True, False} if mapping == "NOT_COUNTED" else {mapping != "IN_WORDS"}
            assert wanted & has_figure, (experiment, pattern)


def test_no_pair_of_a_papers_figure_and_a_measurement_counts_twice() -> None:
    seen: dict[tuple[float | None, float | None, float | None], str] = {}
    for name in registry.EXPERIMENTS:
        path = RESULTS / "experiments" / registry.place(name)
        for row in load(path).rows if path.exists() else ():
            if (
                whose(name, row) in (Whose.PAPER, Whose.FORM)
                and row.paper is not None
                and row.ours is not None
            ):
                pair = (row.paper, row.ours, row.half_width)
                assert pair not in seen, (name, row.name, seen[pair])
                seen[pair] = f"{name}: {row.name}"
