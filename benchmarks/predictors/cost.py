"""Measures the cost of predictors: a call on a batch, a fit to 20,000 requests, and memory.

The workload is synthetic and seeded, so it needs no trace; lengths depend on the client and the template. It fills
every feature that text and metadata can fill, which is the most expensive case.
"""

from __future__ import annotations

import os
import resource
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from predictors.features import replay
from predictors.lgbm_fit import LgbmConfig, fit_lgbm
from predictors.memorise import CLIENT, PROMPT, TEMPLATE, Memorised
from predictors.protocol import Arrival, Features, Outcome, Predictor, Sampling, TextSignals
from predictors.survival import EmpiricalSurvival
from predictors.traces import finish_time_s

BATCH = 1_024
REQUESTS = 20_000
WINDOW = 48


def workload(requests: int, seed: int) -> list[Outcome]:
    """Returns outcomes of chat-like requests from 200 clients and 2,000 templates, with some 300 tokens each."""
    rng = np.random.default_rng(seed)
    client_scale, template_scale = rng.lognormal(5.3, 0.7, 200), rng.lognormal(0.0, 0.5, 2_000)
    made = []
    for i in range(requests):
        client, template = int(rng.zipf(1.3)) % 200, int(rng.zipf(1.2)) % 2_000
        output = max(1, int(client_scale[client] * template_scale[template] * rng.lognormal(0.0, 0.4)))
        at_s, prompt = i / 8.0, int(rng.lognormal(6.0, 1.0)) + 1
        arrival = Arrival(
            f"r{i}",
            at_s,
            prompt,
            max_tokens=4_096,
            sampling=Sampling(0.7, 0.95, 50, 1, 1, False),
            traffic_class="interactive" if i % 3 else "batch",
            model="m",
            client=f"c{client}",
            session=f"s{i // 4}",
            turn=i % 4,
            prompt_key=f"p{client}-{template}-{i % 5}",
            template_key=f"t{template}",
            wall_clock_s=1.7e9 + at_s,
            text=TextSignals(4 * prompt, prompt, i % 3, 0, i % 2, None),
        )
        made.append(Outcome(arrival, min(output, 4_096), finish_time_s(at_s, output)))
    return made


def measure(config: LgbmConfig, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the cost: milliseconds per batch, seconds per fit, and memory."""
    outcomes = workload(REQUESTS + BATCH, seed)
    progress("features")
    start_s = time.perf_counter()
    features = replay(outcomes)
    per_request_us = (time.perf_counter() - start_s) / len(outcomes) * 1e6
    progress(f"fit on {REQUESTS} requests")
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    model = fit_lgbm(outcomes[:REQUESTS], features[:REQUESTS], config, lambda line: progress(f"  {line}"))
    fit_s, fit_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    survival = EmpiricalSurvival.fit(outcomes[:REQUESTS])
    memorised = Memorised((CLIENT, TEMPLATE, PROMPT))
    for outcome in outcomes[:REQUESTS]:
        memorised.observe(outcome)
    batch = features[REQUESTS:]
    ages = np.array([o.output_tokens // 2 for o in outcomes[REQUESTS:]], dtype=np.int64)
    progress(f"batches of {BATCH}")
    calls = {
        "survival": _call(survival, batch, ages, False),
        "memorised": _call(memorised, batch, ages, False),
        "lightgbm": _call(model, batch, ages, False),
        "lightgbm, total length too": _call(model, batch, ages, True),
        "lightgbm, total length too, batch of 32": _call(model, batch[:32], ages[:32], True),
    }
    progress("memory")
    return {
        "batch": BATCH,
        "window_tokens": WINDOW,
        "call_ms": calls,
        "features_us_per_request": per_request_us,
        "fit_requests": REQUESTS,
        "fit_s": fit_s,
        "fit_cpu_s": fit_cpu_s,
        "fit_threads": config.threads,
        "trees": {
            "classifier": 0 if model.model.classifier is None else model.model.classifier.num_trees(),
            "regressor": 0 if model.model.regressor is None else model.model.regressor.num_trees(),
        },
        "load_average": os.getloadavg()[0],
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "state_mib": _state_mib(outcomes),
    }


def _call(predictor: Predictor, batch: list[Features], ages: Any, with_total: bool) -> dict[str, float]:
    """Returns the wall and CPU time of a call.

    The CPU time is the calling thread's, which does all the work. On a busy machine only the CPU time is meaningful.
    """
    wall_ms, cpu_ms = [], []
    for _ in range(200):
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        predictor.predict(batch, ages, WINDOW, with_total)
        cpu_ms.append((time.thread_time() - start_cpu_s) * 1e3)
        wall_ms.append((time.perf_counter() - start_s) * 1e3)
    return {
        "cpu_p50": float(np.median(cpu_ms)),
        "wall_p50": float(np.median(wall_ms)),
        "wall_p99": float(np.quantile(wall_ms, 0.99)),
        "wall_least": min(wall_ms),
    }


def _state_mib(outcomes: list[Outcome]) -> dict[str, float]:
    """Returns the memory in MiB, after 20,000 requests, of the two things that grow with traffic.

    The number of entries in their tables is bounded.
    """
    from predictors.features import FeatureTracker

    sizes = {}
    for name in ("feature tracker", "memorised"):
        tracemalloc.start()
        held: Any
        if name == "memorised":
            held = Memorised((CLIENT, TEMPLATE, PROMPT))
            for outcome in outcomes:
                held.observe(outcome)
        else:
            held = FeatureTracker()
            for outcome in outcomes:
                held.arrive(outcome.arrival)
                held.finish(outcome)
        sizes[name] = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
        del held
    return sizes


def lines(cost: dict[str, Any]) -> list[str]:
    """Returns the cost as lines of Markdown."""
    made = [
        f"A call on a batch of {cost['batch']} (one thread), milliseconds; synthetic workload with every feature "
        f"present; load average of the machine {cost['load_average']:.1f}; "
        f"{cost['trees']['classifier']} + {cost['trees']['regressor']} trees:",
        "",
        "| realisation | CPU p50 | wall p50 | wall p99 | wall least |",
        "|---|---|---|---|---|",
    ]
    made += [
        f"| {n} | {t['cpu_p50']:.2f} | {t['wall_p50']:.2f} | {t['wall_p99']:.2f} | {t['wall_least']:.2f} |"
        for n, t in cost["call_ms"].items()
    ]
    state = ", ".join(f"{n} {size:.0f} MiB" for n, size in cost["state_mib"].items())
    return [
        *made,
        "",
        f"Features at arrival: {cost['features_us_per_request']:.0f} µs a request. "
        f"A fit of {cost['fit_requests']} requests: "
        f"{cost['fit_s']:.0f} s wall, {cost['fit_cpu_s']:.0f} s CPU on {cost['fit_threads']} threads. State after "
        f"{cost['fit_requests']} requests: {state}. Peak of the benchmark's process: {cost['peak_rss_mib']:.0f} MiB.",
    ]
