"""The page of what could not be reproduced, and the causes on it."""

from fnmatch import fnmatchcase

import pytest

from benchmarks.aims import page
from benchmarks.aims.causes import ABSENT, CAUSES, SAID, Said, cause_of
from benchmarks.aims.whose import whose
from benchmarks.checkout import ROOT
from benchmarks.document import RESULTS, Section
from benchmarks.experiments import registry
from benchmarks.experiments.base import Row
from benchmarks.results_io import load

PEAK = "long 200%, NetKV-Full vs RR, the peak: mean TTFT"


def section(experiment: str, *rows: Row) -> Section:
    return Section(f"experiments/{experiment}.json", experiment, "a title", rows, "", "", "", "")


def made(monkeypatch: pytest.MonkeyPatch, *shown: Section) -> str:
    monkeypatch.setattr(page, "sections", lambda results: list(shown))
    return page.page()


def lines(text: str) -> list[str]:
    """The rows of the page's tables about one experiment, without their headers, and the causes above them."""
    found = text[text.index("### a title") :].splitlines()
    return [line for line in found if line.startswith(("| rag", "| long", "| x", "Cause"))]


def test_rows_with_a_papers_aim_that_is_missed_or_open_are_shown_by_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        Row("rag 100%, NetKV-Full vs RR: mean TTFT", -18.8, -18.6, "%", 1.0, "within 3 points", True),
        Row("rag 250%, NetKV-Full vs RR: mean TTFT", -19.4, -12.0, "%", 1.5, "within 3 points", False),
        Row("rag 200%, NetKV-Full vs CLA*: mean TTFT", -14.3, -9.5, "%", 1.6, "within 3 points", False),
        Row(PEAK, -23.9, -15.0, "%", None, "within 3 points", None, "a note"),
        Row(
            "rag-conversation 200%, NetKV-Full vs CLA*: mean TTFT",
            -14.3,
            -10.3,
            "%",
            3.3,
            "within 3 points",
            False,
        ),
        Row("rag 100% RR: TTFT", 1969.0, 1000.0, "ms"),
        Row("rag 100%: our own", None, 1.0, aim="2", met=False),
    ]
    text = made(monkeypatch, section("netkv_load", *rows))
    cla, long = (cause_of("netkv_load", rows[i].name) for i in (2, 3))
    assert cla is not None and long is not None
    assert lines(text) == [
        "Cause not found.",
        "| rag 250%, NetKV-Full vs RR: mean TTFT | the paper's | -19.40 % | -12.00 ± 1.500 % | +7.4 points | within 3"
        " points: missed |",
        f"Cause: {cla.text} (`{cla.said_in}`)",
        "| rag 200%, NetKV-Full vs CLA*: mean TTFT | the paper's | -14.30 % | -9.500 ± 1.600 % | +4.8 points | within 3"
        " points: missed |",
        "| rag-conversation 200%, NetKV-Full vs CLA*: mean TTFT | the paper's | -14.30 % | -10.30 ± 3.300 % |"
        " +4.0 points | within 3 points: missed |",
        f"Cause: {long.text} (`{long.said_in}`)",
        f"| {PEAK} (a note) | the paper's | -23.90 % | -15.00 % | +8.9 points | within 3 points: open |",
    ]
    summary = f"| [NetKV](#netkv) | 1 of 5 met, 3 missed, 1 open | – | 1 | {len(ABSENT['NetKV'])} |"
    assert summary in text
    assert "[results.md](results.md#experiments-netkv_load)" in text


def test_a_form_of_ours_that_misses_a_papers_figure_is_shown_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row(f"x: imbalance of JSQ over {form} oracle", 9.1, ours, "x", None, ">= 9", ours >= 9)
        for form, ours in (("ours", 11.0), ("ours_leased", 4.9), ("br_h", 3.1))
    ]
    text = made(monkeypatch, section("balance_route_table1", *rows))
    assert [line.split(" | ")[1] for line in lines(text) if line.startswith("| x")] == ["ours", "the paper's"]
    assert "| [BalanceRoute](#balanceroute) | 0 of 1 met, 1 missed | 1 of 2 met, 1 missed | 0 |" in text


def test_an_experiment_of_our_own_or_one_whose_aims_are_met_is_not_on_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missed = Row("a", None, 1.0, aim="2", met=False)
    reached = Row(
        "1024 tokens, NetKV-Full vs RR: mean TTFT", -9.1, -8.7, "%", aim="within 3 points", met=True
    )
    text = made(
        monkeypatch, section("overload", missed), section("", missed), section("netkv_context", reached)
    )
    assert "### a title" not in text
    assert f"| [NetKV](#netkv) | 1 of 1 met | – | 0 | {len(ABSENT['NetKV'])} |" in text


@pytest.mark.parametrize(
    ("ours", "half_width", "shown"),
    [(-57.0, 27.0, True), (-5.0, 6.0, False), (3.0, None, False), (-1.0, None, True)],
)
def test_words_of_a_paper_are_contradicted_where_the_whole_interval_lies_below(
    monkeypatch: pytest.MonkeyPatch, ours: float, half_width: float | None, shown: bool
) -> None:
    said = Said("deepflow_scheduling", "PD-aware, k = 0: *", "It outperforms.", 0.0)
    monkeypatch.setattr(page, "SAID", (said,))
    row = Row("PD-aware, k = 0: JCT below RR at 10/s", None, ours, "%", half_width)
    text = made(monkeypatch, section("deepflow_scheduling", row, Row("combined: JCT", None, -9.0)))
    assert ("The paper: It outperforms. Cause not found.\n\n| figure | ours |" in text) is shown
    assert ("| PD-aware, k = 0: JCT below RR at 10/s |" in text) is shown and "combined: JCT" not in text


def test_an_open_row_without_a_cause_says_that_its_interval_holds_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = Row("rag 250%, NetKV-Full vs RR: mean TTFT", -19.4, -16.0, "%", 1.5, "within 3 points", None)
    text = made(monkeypatch, section("netkv_load", row))
    assert page.OPEN in text and "within 3 points: open |" in text and page.NO_CAUSE not in text


def test_an_experiment_without_a_result_stands_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.provenance, "MISSING", {"experiments/forecast_value.json"})
    text = made(monkeypatch)
    assert "### BalanceRoute: without a result yet\n\n- `forecast_value`: " in text
    monkeypatch.setattr(page.provenance, "MISSING", frozenset())
    assert "without a result yet" not in made(monkeypatch)


def test_every_paper_has_its_figures_without_an_experiment_on_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ABSENT.keys() == page.PAPERS.keys()
    text = made(monkeypatch)
    assert all(f"- {one.what}. {one.why}" in text for absent in ABSENT.values() for one in absent)


def test_experiments_belong_to_the_paper_of_their_name() -> None:
    owned = {name: page.paper_of(name) for name in registry.EXPERIMENTS}
    assert owned["scaling_fork"] == "DeepFlow" and owned["mfs_moe"] == "MFS" and owned["overload"] is None
    assert all(
        any(name.startswith(start) for name in owned) for starts in page.PAPERS.values() for start in starts
    )
    assert page.paper_of("") is None
    with_figures = {
        name
        for name in owned
        if (path := RESULTS / "experiments" / registry.place(name)).exists()
        and any(row.paper is not None for row in load(path).rows)
    }
    # The 0 of `scaling_steady` is no paper's (`benchmarks.aims.whose.NOT_A_PAPERS`).
    assert {name for name in with_figures if owned[name] is None} == {"scaling_steady"}


# ------------------------------------------------------------------------------------------------------------- causes


@pytest.mark.parametrize("experiment", CAUSES)
def test_every_cause_is_of_a_row_with_a_papers_aim_and_no_other_hides_it(experiment: str) -> None:
    rows = [row for row in load(RESULTS / "experiments" / registry.place(experiment)).rows if row.aim]
    for pattern, cause in CAUSES[experiment].items():
        named = [
            row for row in rows if whose(experiment, row) in page.FORMS and fnmatchcase(row.name, pattern)
        ]
        assert any(cause_of(experiment, row.name) is cause for row in named), pattern


def test_causes_stand_in_files_that_are_there_and_words_on_rows_that_are_there() -> None:
    causes = [cause for by_row in CAUSES.values() for cause in by_row.values()]
    causes += [said.cause for said in SAID if said.cause is not None]
    assert all((ROOT / cause.said_in).is_file() for cause in causes)
    for said in SAID:
        rows = load(RESULTS / "experiments" / registry.place(said.experiment)).rows
        assert any(fnmatchcase(row.name, said.rows) and not row.aim for row in rows), said.rows
