"""DeepFlow's engines and workloads (DeepFlow 5; Figures 4-6): a 34B model at TP = 4 on Ascend, without a network.

DeepFlow's traces are internal. Figure 4's trace is "roughly 2K input with 200 output". ASSUMPTION: both lengths are
lognormal with a coefficient of variation of 0.5. Figure 6's trace comes from a code-generation service. Azure's code
trace of 2023 stands in for it (2,048 in, 28 out), or a synthetic one with the same means where that is not available.

The trace has two halves by time: constants are tuned on the first (`deepflow_tuning`) and measured on the second.

The KV of a prefill moves over fixed links (the profile's 100 Gbit/s). Azure's trace does not say what its prompts
share. ASSUMPTION: half of them begin with one of 32 texts (repositories, templates), which covers a quarter to three
quarters of the prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from benchmarks.experiments.base import Config
from benchmarks.sim import profiles
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, Forecasting, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.workloads import transform
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.catalog import WorkloadSpec, build
from benchmarks.workloads.lengths import Fixed, Lengths, Lognormal
from benchmarks.workloads.prefixes import Sharing, share_prefixes
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from policies.dispatch.dispatcher import DispatchConfig
from policies.routing.deepflow.heatmap import Heatmap, combine
from policies.state.views import Role
from predictors.oracle import Oracle
from predictors.protocol import Predictor

PROFILE = profiles.load("deepflow_34b_tp4_ascend")
BLOCK_TOKENS = 128
KV_TOKENS = (
    4 * 32 * 10**9 // PROFILE.kv_bytes_per_token
)  # ASSUMPTION: 64 GB a chip, 17 GB of weights, some activations
SLOTS = 128  # ASSUMPTION
CHUNK_TOKENS = 2_048  # of chunked prefill; ASSUMPTION
TRACE = "azure2023-code"
SHARING = Sharing(0.5, groups=32, covered=(0.25, 0.75), block_tokens=BLOCK_TOKENS)
CODE_MEANS = (2_048.0, 28.0)  # of that trace
PREFILL_AXIS = (256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0)
RATIO_AXIS = (0.01, 0.05, 0.2, 0.5, 1.0, 2.0)
TUNED, MEASURED = "first half", "second half"
"""The parts of the trace, for constants and for what they are measured by."""


def engines(prefill: int, decode: int, colocated: int) -> tuple[EngineSpec, ...]:
    """Returns the given numbers of prefill, decode and colocated engines, all with the same hardware."""
    kinds = (("p", Role.PREFILL, prefill), ("d", Role.DECODE, decode), ("c", Role.COLOCATED, colocated))
    return tuple(
        EngineSpec(
            name,
            role,
            count,
            PROFILE,
            slots=SLOTS,
            kv_blocks=KV_TOKENS // BLOCK_TOKENS,
            block_size_tokens=BLOCK_TOKENS,
            prefill_budget_tokens=CHUNK_TOKENS if role is Role.COLOCATED else 8_192,
            lease_s=120.0,
        )
        for name, role, count in kinds
        if count
    )


def generated(
    prompt: Lengths, output: Lengths, rate_per_s: float, end_s: float, seed: int
) -> list[WorkloadRequest]:
    """Returns requests with Poisson arrivals before `end_s` and lengths from the two distributions."""
    made = Synthetic("deepflow", Poisson(rate_per_s), prompt, output, block_tokens=BLOCK_TOKENS)
    return list(takewhile(lambda r: r.at_s < end_s, made.stream(seed)))


def chat_like(rate_per_s: float, end_s: float, seed: int) -> list[WorkloadRequest]:
    """Returns Figure 4's requests, with roughly 2K input tokens and 200 output tokens."""
    return generated(
        Lognormal.of_mean(2_048, 0.5, 8_192), Lognormal.of_mean(200, 0.5, 1_024), rate_per_s, end_s, seed
    )


@lru_cache(maxsize=1)
def halves() -> dict[str, tuple[WorkloadRequest, ...]]:
    """Returns the rows of the two parts of the trace."""
    rows = tuple(build(WorkloadSpec(name=TRACE), 0))
    return {TUNED: rows[: len(rows) // 2], MEASURED: rows[len(rows) // 2 :]}


def code(workload: str, part: str, rate_per_s: float, end_s: float, seed: int) -> list[WorkloadRequest]:
    """Returns Figure 6's requests: a stretch of a half of Azure's trace that the seed chooses, compressed to the rate.

    `part` is TUNED or MEASURED. Where `workload` is not that trace, the requests are synthetic with the same mean
    lengths, and the seeds alone tell the two apart.
    """
    if workload != TRACE:
        prompt, output = (
            Lognormal.of_mean(CODE_MEANS[0], 1.0, 7_436),
            Lognormal.of_mean(CODE_MEANS[1], 2.0, 1_000),
        )
        return list(share_prefixes(generated(prompt, output, rate_per_s, end_s, seed), SHARING, seed))
    rows = halves()[part]
    count = int(rate_per_s * end_s) + 1
    first = random.Random(seed).randrange(len(rows) - count)
    made = transform.at_rate(transform.rebase(rows[first : first + count]), rate_per_s)
    return list(share_prefixes(made, SHARING, seed))


class Guesses(Mapping[str, int]):
    """Guessed lengths by request: the true length for a share `accuracy` of them, else one drawn from `others`.

    DeepFlow's predictors have "varying accuracy" (5.3.2), which it does not define. ASSUMPTION: it is the share of
    lengths that are right.
    """

    def __init__(
        self, lengths: Mapping[str, int], accuracy: float, others: tuple[int, ...], seed: int
    ) -> None:
        self._lengths, self._accuracy, self._others, self._seed = lengths, accuracy, others, seed

    def __getitem__(self, request_id: str) -> int:
        rng = random.Random(f"{self._seed}/{request_id}")
        return self._lengths[request_id] if rng.random() < self._accuracy else rng.choice(self._others)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)


def forecasting(accuracy: float, others: tuple[int, ...], seed: int) -> Forecasting:
    """Returns forecasts of total lengths at arrival that are right for a share `accuracy` of the requests."""

    def source(lengths: Mapping[str, int]) -> Predictor:
        return Oracle(Guesses(lengths, accuracy, others, seed))

    return Forecasting(source, total_at_arrival=True)


def sim_config(
    specs: tuple[EngineSpec, ...], prefill: tuple[str, Mapping[str, Any]], seed: int, **more: Any
) -> SimConfig:
    """Returns the configuration of a cluster with least-loaded decode and queues without limits."""
    return SimConfig(
        specs,
        prefill=prefill,
        decode=("join_shortest_queue", {}),
        dispatch=DispatchConfig(
            max_queue=1_000_000,
            queue_timeout_s=3_600.0,
            starvation_s=math.inf,
            overdue_by_slo=False,
            seed=seed,
        ),
        control=ControlPlane(
            progress_s=0.2,
            request_timeout_s=3_600.0,
            prefill_limit_s=math.inf,
            transfer_limit_s=math.inf,
        ),
        seed=seed,
        **more,
    )


def mean_jct_s(specs: tuple[EngineSpec, ...], work: list[WorkloadRequest], seed: int) -> float:
    """Simulates `work` and returns the mean JCT of all its requests in seconds."""
    found = summarise(simulate(sim_config(specs, ("join_shortest_queue", {}), seed), work))["jct_mean_s"]
    if found is None:
        raise ValueError("no request of a heatmap's cell has ended: lower the rate")
    return found


@lru_cache(maxsize=8)
def heatmap(rate_per_s: float, length_s: float, seed: int) -> Heatmap:
    """Returns Figure 5's heatmap at one rate.

    Identical requests run on two colocated engines, and on one prefill and one decode engine.
    """
    cells = np.empty((len(PREFILL_AXIS), len(RATIO_AXIS)))
    for i, prompt in enumerate(PREFILL_AXIS):
        for j, ratio in enumerate(RATIO_AXIS):
            lengths = Fixed(int(prompt)), Fixed(max(1, round(prompt * ratio)))
            work = generated(*lengths, rate_per_s, length_s, seed)
            split, whole = (mean_jct_s(engines(*kind), work, seed) for kind in ((1, 1, 0), (0, 0, 2)))
            cells[i, j] = whole / split - 1.0
    return Heatmap(PREFILL_AXIS, RATIO_AXIS, tuple(map(tuple, cells.tolist())))


def combined_heatmap(rates: tuple[float, ...], length_s: float, seed: int) -> Heatmap:
    """Returns the heatmap whose cells are the sums over all rates (5.3.2)."""
    return combine([heatmap(rate, length_s, seed) for rate in rates])


def outputs(config: Config, seed: int) -> tuple[int, ...]:
    """Returns output lengths of the first half of the workload, from which wrong guesses are drawn."""
    return tuple(r.output_tokens for r in code(config["workload"], TUNED, 10.0, 60.0, seed + 1_000))
