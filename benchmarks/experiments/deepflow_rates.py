"""Requests and maps for DeepFlow's experiments from idle to overload: sampled requests, lone ones, maps of batches.

`deepflow_setup.code` takes stretches of the trace, whose bursts queue at any mean rate, so that no rate is idle. The
paper's trace is "sampled from a code generation service" and run at several rates (Figure 6). Here requests are drawn
from the rows of one half of the trace, without replacement, and come by a Poisson process: the lengths are the
trace's, the rate is what is asked for, and seeds are independent but for the rows that they share. `alone` sends the
same requests one at a time, so that each finds the cluster idle.

Figure 5's map is measured with "a batch of identical requests at a fixed RPS" on one unit of two engines: two colocated
ones, or a prefill and a decode engine. Figure 6's cluster has both units. At R requests/s each unit has R / 2 where the
load is even, so a map for R is measured at R / 2 (`UNIT_RATES`). A batch ends by itself, also where the unit is
overloaded; nothing is given up, so that the mean is that of all requests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice

import numpy as np

from benchmarks.experiments import deepflow_setup as setup
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import EngineSpec, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.lengths import Fixed
from benchmarks.workloads.prefixes import share_prefixes
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from policies.routing.deepflow.heatmap import Heatmap, combine

RATES = (0.05, 0.5, 2.0, 4.0, 8.0, 10.0, 12.0, 16.0)
"""Requests/s of the whole cluster. At the first hardly two requests ever meet; at the last prompts come faster than the
three engines that compute them can. Both follow from the profile and are checked by the rows.
"""
UNIT_RATES = tuple(rate / 2.0 for rate in RATES)
# ASSUMPTION: the paper does not say how large its batches are.
BATCH = 32
ALONE_S = 40.0
"""Seconds between requests that are sent alone: more than the longest of the trace takes on an idle engine."""
FOREVER_S = 1e7
"""Seconds for which a request of a map waits, and for which its KV is held: longer than any batch."""


def drawn(workload: str, part: str, count: int, seed: int) -> list[WorkloadRequest]:
    """Returns `count` requests of a half of the trace in a random order, all at time 0.

    Where `workload` is not the trace, they are the synthetic ones of `deepflow_setup.code`.
    """
    rows: Sequence[WorkloadRequest]
    if workload == setup.TRACE:
        rows = random.Random(f"{part}/{seed}").sample(setup.halves()[part], count)
    else:
        rows = setup.code(workload, part, 1.0, 2.0 * count, seed)[:count]
    return [dataclasses.replace(r, at_s=0.0) for r in rows]


def sampled(
    workload: str, part: str, rate_per_s: float, count: int, seed: int, p_share: float | None = None
) -> list[WorkloadRequest]:
    """Returns the requests of `drawn` with Poisson arrivals and shared prefixes.

    `p_share` replaces the share of the prompts that begin with a shared text (`deepflow_setup.SHARING`).
    """
    times_s = islice(Poisson(rate_per_s).times(np.random.default_rng((seed, 1))), count)
    return _shared(drawn(workload, part, count, seed), list(times_s), seed, p_share)


def alone(workload: str, part: str, count: int, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of `sampled`, whatever its rate, each `ALONE_S` after the one before."""
    return _shared(drawn(workload, part, count, seed), [i * ALONE_S for i in range(count)], seed, None)


def _shared(
    requests: Sequence[WorkloadRequest], times_s: Sequence[float], seed: int, p_share: float | None
) -> list[WorkloadRequest]:
    sharing = setup.SHARING if p_share is None else dataclasses.replace(setup.SHARING, p_share=p_share)
    timed = [dataclasses.replace(r, at_s=at_s) for r, at_s in zip(requests, times_s, strict=True)]
    return list(share_prefixes(timed, sharing, seed))


@lru_cache(maxsize=64)
def batch_map(
    rate_per_s: float, batch: int, prefills: tuple[float, ...], ratios: tuple[float, ...], seed: int
) -> Heatmap:
    """Returns the map of one rate: each cell is the ratio of the mean JCTs of a batch on the two units, less 1."""
    cells = []
    for prompt in prefills:
        row = []
        for ratio in ratios:
            lengths = Fixed(int(prompt)), Fixed(max(1, round(prompt * ratio)))
            made = Synthetic("deepflow-map", Poisson(rate_per_s), *lengths, block_tokens=setup.BLOCK_TOKENS)
            work = list(islice(made.stream(seed), batch))
            split, whole = (_mean_jct_s(setup.engines(*kind), work, seed) for kind in ((1, 1, 0), (0, 0, 2)))
            row.append(whole / split - 1.0)
        cells.append(tuple(row))
    return Heatmap(prefills, ratios, tuple(cells))


def summed_map(
    rates: Sequence[float], batch: int, prefills: Sequence[float], ratios: Sequence[float], seed: int
) -> Heatmap:
    """Returns the map whose cells are the sums over all rates (5.3.2)."""
    return combine([batch_map(rate, batch, tuple(prefills), tuple(ratios), seed) for rate in rates])


def check_ended(found: Mapping[str, float | None]) -> None:
    """Raises ValueError where a measured request of a run has not finished, because means would lack it."""
    if found["unfinished"] or found["rejected"]:
        raise ValueError(
            f"{found['unfinished']} requests have not finished and {found['rejected']} were rejected: all have to end"
        )


def _mean_jct_s(specs: tuple[EngineSpec, ...], work: list[WorkloadRequest], seed: int) -> float:
    """Simulates `work` and returns the mean JCT of all its requests. Raises ValueError where one has not ended."""
    patient = tuple(dataclasses.replace(s, lease_s=FOREVER_S, max_lease_s=FOREVER_S) for s in specs)
    base = setup.sim_config(patient, ("join_shortest_queue", {}), seed)
    found = summarise(simulate(_endless(base), work))
    if found["jct_mean_s"] is None or found["finished"] != len(work):
        raise ValueError(
            f"{found['finished']} of {len(work)} requests of a map's cell have ended: all have to"
        )
    return found["jct_mean_s"]


def _endless(config: SimConfig) -> SimConfig:
    """Returns the configuration with limits of time that no batch reaches."""
    return dataclasses.replace(
        config,
        dispatch=dataclasses.replace(config.dispatch, queue_timeout_s=FOREVER_S),
        control=dataclasses.replace(config.control, request_timeout_s=FOREVER_S),
    )
