"""FlowKV's heterogeneous setups: requests of the published means, roles by GPU, a request's time by hand, the rows."""

import pytest

from benchmarks.experiments import flowkv_hetero as hetero
from benchmarks.experiments.base import Results
from policies.state.views import Role


def test_a_task_has_the_published_means() -> None:
    """8,734 and 553 words at 1.3 tokens each: 11,354 + 64 and 719 tokens, of which 512 are the most."""
    made = hetero.work("gov_report", 2.0, 1_000.0, 0)
    assert len(made) == pytest.approx(2_000, rel=0.1)
    assert sum(r.prompt_tokens for r in made) / len(made) == pytest.approx(11_418, rel=0.05)
    assert max(r.output_tokens for r in made) == 512
    short = hetero.work("qmsum", 2.0, 1_000.0, 0)
    assert sum(r.output_tokens for r in short) / len(short) == pytest.approx(91, rel=0.05)


def test_the_load_is_a_share_of_what_four_l20_prefill() -> None:
    """A mean prompt of multi_news has 2,810.9 tokens: 5 ms + 2,810.9 x 0.269 ms = 0.761 s; four do 5.255/s."""
    assert hetero.rate_per_s("multi_news", 1.0) == pytest.approx(5.255, rel=1e-3)
    assert hetero.rate_per_s("multi_news", 0.5) == pytest.approx(5.255 / 2, rel=1e-3)


def test_roles_follow_the_setup() -> None:
    kinds = {setup: [spec.role for spec in hetero.engines(setup, 0.0)] for setup in hetero.SETUPS}
    assert kinds["P-L20/D-H20"] == [Role.PREFILL, Role.DECODE]
    assert kinds["P-H20/D-L20"] == [Role.DECODE, Role.PREFILL]
    assert kinds["colocated"] == kinds["colocated, chunked"] == [Role.COLOCATED, Role.COLOCATED]
    assert [s.chunked_prefill for s in hetero.engines("colocated, chunked", 0.0)] == [True, True]
    slow, fast = hetero.engines("P-L20/D-H20", 0.01)
    assert slow.profile.decode_base_s == pytest.approx(0.0333)
    assert fast.profile.decode_base_s == pytest.approx(0.01503)


def test_decode_on_the_faster_memory_is_faster() -> None:
    """Few requests and long outputs: the step of the decode engine, 5 against 23 ms, decides the TPOT."""
    config = {"task": "multi_news", "share": 0.2, "rate_per_s": 1.0, "host_s": 0.0, "requests": 30}
    ours, reverse = (
        hetero.run_one({**config, "setup": setup}, 3) for setup in ("P-L20/D-H20", "P-H20/D-L20")
    )
    assert 0.005 < ours["tpot_mean_s"] < 0.007
    assert 0.023 < reverse["tpot_mean_s"] < 0.030
    assert ours["unfinished"] == reverse["unfinished"] == 0


def _results(factor: dict[str, float]) -> Results:
    """Returns results in which a setup takes `factor` times its rate's number in seconds (1, 2, and so on)."""
    variants = {v.name: v.config for v in hetero.variants(True)}
    runs = {}
    for name, c in variants.items():
        seconds = factor[c["setup"]] * (1.0 + 4.0 * c["share"])
        runs[name] = {0: dict.fromkeys(hetero.KEPT, seconds) | {"unfinished": 0.0}}
    return Results("flowkv_hetero", True, variants, runs)


def test_rows_are_reductions_of_the_mean_over_the_rates() -> None:
    """Ours takes half as long as the reverse, and as long as each colocated setup."""
    factor = dict.fromkeys(hetero.SETUPS, 1.0) | {"P-H20/D-L20": 2.0}
    rows = {row.name: row for row in hetero.compare(_results(factor))}
    row = rows["gov_report: E2E below P-H20/D-L20"]
    assert (row.ours, row.paper, row.met) == (pytest.approx(50.0), 34.67, True)
    assert rows["gov_report: E2E below colocated"].met is False
    assert rows["gov_report: E2E below P-H20/D-L20; host 10 ms a step"].met is None
    # rates 20 and 60 %: (1.8 + 3.4) / 2
    assert rows["qmsum, colocated: mean E2E"].ours == pytest.approx(2.6)
