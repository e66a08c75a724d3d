"""A queue's waiting times: a small experiment with known answers, for the tests of what runs experiments."""

import time
from pathlib import Path

import numpy as np

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant

SUMMARY = "M/M/1 at three loads, against rho / (1 - rho)"
SEEDS = (4, 2)


def variants(quick: bool) -> list[Variant]:
    customers = 500 if quick else 2_000
    return [Variant(f"rho {rho}", {"rho": rho, "customers": customers}) for rho in (0.2, 0.5)]


def run_one(config: Config, seed: int) -> Metrics:
    if "log" in config:
        with Path(config["log"]).open("a") as log:
            log.write(f"{config['rho']} {seed}\n")
    if config.get("stays_on") == seed:
        time.sleep(600.0)
    if config.get("fails_on") == seed:
        raise RuntimeError("no such queue")
    if config.get("breaks"):
        return {"wait": float("nan")}
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0 / config["rho"], config["customers"])
    service = rng.exponential(1.0, config["customers"])
    wait = total = 0.0
    for gap, work in zip(gaps.tolist(), service.tolist(), strict=True):
        wait = max(0.0, wait - gap)
        total += wait
        wait += work
    return {"wait": total / config["customers"], "unmeasured": None}


def compare(results: Results) -> list[Row]:
    rows = []
    for name, config in results.variants.items():
        ours = results.spread(name, "wait")
        rows.append(
            Row(
                name,
                config["rho"] / (1 - config["rho"]),
                ours.mean,
                "services",
                ours.half_width,
                "closed form",
                True,
            )
        )
    return [*rows, Row("longer at 0.5", None, results.paired("rho 0.2", "rho 0.5", "wait").difference.mean)]


def plots(results: Results):
    # imported late, as experiments do: workers need none
    from benchmarks import plots as look

    made, [axes] = look.figure()
    x = [c["rho"] for c in results.variants.values()]
    y = [results.mean(n, "wait") for n in results.variants]
    look.lines(
        axes, {"ours": look.Series(x, y), "theory": look.Series(x, [0.25, 1.0], quiet=True)}, "load", "wait"
    )
    return {"wait": made}
