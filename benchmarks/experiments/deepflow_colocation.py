"""DeepFlow Figure 4: prefill and decode apart or together, over rate (34B, TP = 4, about 2K in, 200 out).

Three setups: 2 prefill + 2 decode engines, 2 prefill + 1 decode, 4 colocated with chunked prefill. The figure's values
are not in the text, which says: "Disaggregation greatly improves throughput under certain SLA and lowers TPOT with the
same throughput" (4.5), the SLA being a TPOT of 50 ms (4.1). So compared here: TPOT at equal rates, and the highest rate
of the sweep at which the mean TPOT is within 50 ms: alone, and with a mean TTFT within 2 s, as two prefill engines are
half of what four colocated ones have for prompts, and a queue before them makes any TPOT easy.

ASSUMPTION: the figure's rates (0.2 to 1.2 a second) are per engine, as 1.2 a second leaves four engines of this profile
nearly idle; ours are for the whole cluster and go from 0.8 to where each setup is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.experiments import deepflow_setup as setup
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "DeepFlow Figure 4: P/D against colocated over rate (2P2D, 2P1D, 4 colocated); synthetic requests"
SETUPS = {"2P2D": (2, 2, 0), "2P1D": (2, 1, 0), "4 colocated": (0, 0, 4)}
RATES = (0.8, 1.6, 2.4, 3.2, 4.8, 6.4, 8.0, 9.6)
TPOT_SLA_S, TTFT_LIMIT_S = 0.05, 2.0
KEPT = (
    "ttft_mean_s",
    "ttft_p95_s",
    "tpot_mean_s",
    "tpot_p95_s",
    "jct_mean_s",
    "throughput_tok_s",
    "unfinished",
    "rejected",
)


def variants(quick: bool) -> list[Variant]:
    rates = RATES[1::2] if quick else RATES
    length_s = 60.0 if quick else 150.0
    return [
        Variant(
            f"{name} at {rate:g}/s",
            {"setup": name, "engines": list(kinds), "rate_per_s": rate, "length_s": length_s},
        )
        for name, kinds in SETUPS.items()
        for rate in rates
    ]


def run_one(config: Config, seed: int) -> Metrics:
    work = setup.chat_like(config["rate_per_s"], config["length_s"], seed)
    specs = setup.engines(*config["engines"])
    run = setup.sim_config(
        specs,
        ("join_shortest_queue", {}),
        seed,
        warmup_s=config["length_s"] / 5,
        measure_s=config["length_s"] * 0.8,
    )
    found = summarise(simulate(run, work))
    return {name: found[name] for name in KEPT}


def compare(results: Results) -> list[Row]:
    rates = sorted({config["rate_per_s"] for config in results.variants.values()})
    rows = []
    for rate in rates:
        for name in ("2P2D", "2P1D"):
            gain, half = results.reduction_percent(
                f"4 colocated at {rate:g}/s", f"{name} at {rate:g}/s", "tpot_mean_s"
            )
            row = Row(f"{name}: TPOT below colocated at {rate:g}/s", None, gain, "%", half)
            rows.append(aimed(row, "lower TPOT at the same rate", above=0.0) if name == "2P2D" else row)
    sweep = f"of {rates[0]:g} to {rates[-1]:g}/s"
    for limit_s, what in ((None, "TPOT"), (TTFT_LIMIT_S, "TPOT and TTFT")):
        best = {name: _highest(results, name, rates, limit_s) for name in SETUPS}
        for name, rate in best.items():
            aim, met = "", None
            if name == "2P2D" and limit_s is None:
                aim, met = "above colocated", rate > best["4 colocated"]
            rows.append(
                Row(f"{name}: highest rate within the SLA, {what}", None, rate, "/s", None, aim, met, sweep)
            )
    return rows


def _highest(results: Results, name: str, rates: Sequence[float], ttft_limit_s: float | None) -> float:
    """Returns the highest rate of the sweep up to which the limits on mean TPOT and mean TTFT hold, or 0 if none does.

    With `ttft_limit_s` None, only TPOT is limited.
    """
    held = 0.0
    for rate in rates:
        variant = f"{name} at {rate:g}/s"
        slow = results.mean(variant, "tpot_mean_s") > TPOT_SLA_S
        if slow or (ttft_limit_s is not None and results.mean(variant, "ttft_mean_s") > ttft_limit_s):
            break
        held = rate
    return held


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(3)
    rates = sorted({config["rate_per_s"] for config in results.variants.values()})
    shown = (
        ("tpot_mean_s", "TPOT, ms", 1e3),
        ("ttft_mean_s", "TTFT, s", 1.0),
        ("throughput_tok_s", "tokens/s", 1.0),
    )
    for axis, (metric, label, factor) in zip(axes, shown, strict=True):
        series = {}
        for name in SETUPS:
            spreads = [results.spread(f"{name} at {rate:g}/s", metric) for rate in rates]
            halves = [None if s.half_width is None else factor * s.half_width for s in spreads]
            series[name] = look.Series(rates, [factor * s.mean for s in spreads], halves)
        look.lines(axis, series, "requests/s", label)
    return {"deepflow_colocation": made}
