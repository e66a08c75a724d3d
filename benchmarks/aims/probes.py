"""Small simulations behind docs/causes.md: a number of an experiment's setup is changed, and the others stay.

    python -m benchmarks.aims.probes NAME --seeds 10 11      prints a line of JSON for each run; without NAME: the names

Each probe takes a minute or two of one core. The results are no committed files: docs/causes.md has the figures, the
seeds and the command that gives them again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

from benchmarks.experiments import (
    flowkv_hetero,
    mfs_breakdown,
    mfs_common,
    mfs_dense,
    mfs_moe,
    mfs_permits,
    mfs_testbed,
    scaling_diurnal,
)
from benchmarks.experiments.base import Config, Metrics
from benchmarks.experiments.scaling_common import OURS
from benchmarks.experiments.scaling_tuned import FORESEEN_HEADROOM, TUNED
from benchmarks.sim.config import EngineSpec
from benchmarks.workloads.record import WorkloadRequest
from policies.state.views import Role

Run = tuple[str, Config, AbstractContextManager[Any]]
"""A run's label, its variant's config, and the change of the setup under which it runs."""

BREAKDOWN: Config = {"requests": 512, "warmup": 128, "instances": 4}
DENSE: Config = {"requests": 512, "warmup": 200, "instances": 4}
MOE: Config = {"requests": 512, "warmup": 256, "instances": 8}
TESTBED: Config = {"requests": 400, "warmup": 100}
PERMITS: Config = {"requests": 300, "warmup": 100}
"""The sizes of the experiments' runs."""

SHOWN = (
    "ttft_slo_share",
    "ttft_mean_s",
    "tpot_mean_s",
    "jct_mean_s",
    "cct_mean_s",
    mfs_common.EARLY,
    "transfer_mean_s",
    "slo_share",
    "fleet/engine_s",
)
LINK = "link_use/nic"

REUSE_LOST = 0.19
"""Share of the prompts of Mooncake's synthetic trace that lose their prefix, so that about 61 % of the tokens are
reused instead of 80 %."""

PAPERS_LINK_BYTES_PER_S = 2 * 25e9
"""A port of DBRX's two GPUs with the paper's 200 Gbit/s a GPU (MFS 6.1)."""

CUTS_TOKENS = (7_500, 3_500)
"""The limits at which LongBench's code cuts prompts for models of 8k and of 4k tokens (its model2maxlen)."""


def _model(name: str, **changed: Any) -> AbstractContextManager[Any]:
    """Returns the change by which a model of the MFS experiments has other fields."""
    models = {**mfs_common.MODELS, name: dataclasses.replace(mfs_common.MODELS[name], **changed)}
    return mock.patch.object(mfs_common, "MODELS", models)


def _busy(share: float) -> AbstractContextManager[Any]:
    """Returns the change by which a testbed instance is busy for another share of the time (`mfs_common.BUSY`)."""
    compute_s = mfs_common.MODELS["mixtral-8x7b"].compute_s * share / mfs_common.BUSY
    return _model("mixtral-8x7b", compute_s=compute_s)


def testbed() -> Iterator[Run]:
    """Yields the testbed's agents at other loads, and with less KV: contention, and MFS against fair sharing. The last
    run has conversations at the higher load."""
    kv_bytes = mfs_common.MODELS[mfs_testbed.MODEL].kv_bytes
    changes: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [
        *((f"busy {share:g}", partial(_busy, share)) for share in (0.35, 0.5, 0.65)),
        *((f"KV / {n}", partial(_model, mfs_testbed.MODEL, kv_bytes=kv_bytes // n)) for n in (2, 8)),
    ]
    for label, change in changes:
        for policy, isolated in (("fair", True), ("fair", False), ("mfs", False)):
            more = {"isolated": True} if isolated else {}
            config = mfs_common.config(
                mfs_testbed.MODEL, "agent", policy, mfs_testbed.RATE, **TESTBED, **more
            )
            yield f"{label}, {policy}{', isolated' if isolated else ''}", config, change()
    conversation = mfs_common.config(mfs_testbed.MODEL, "conversation", "fair", mfs_testbed.RATE, **TESTBED)
    yield "busy 0.5, conversation, fair", conversation, _busy(0.5)


def breakdown() -> Iterator[Run]:
    """Yields the breakdown without contention and with it, and with the link that the paper prints."""
    compute_s = mfs_common.MODELS["dbrx"].compute_s
    exchange_s = (
        mfs_common.MODELS["dbrx"].exchanged_bytes / mfs_common.MODELS["dbrx"].ranks / PAPERS_LINK_BYTES_PER_S
    )
    for policy, isolated in (("fair", True), ("fair", False), ("mfs", False)):
        more = {"isolated": True} if isolated else {}
        config = mfs_common.config(
            "dbrx", mfs_breakdown.WORK, policy, mfs_breakdown.MIDDLE, **BREAKDOWN, **more
        )
        yield (
            f"{policy}{', isolated' if isolated else ''} at {mfs_breakdown.MIDDLE:g}/s",
            config,
            nullcontext(),
        )
    for rate, policy in product((mfs_breakdown.PAPER_RATE, 1.0), ("fair", "mfs")):
        config = mfs_common.config("dbrx", mfs_breakdown.WORK, policy, rate, **BREAKDOWN)
        change = _model("dbrx", exchange=exchange_s / (exchange_s + compute_s))
        yield f"{policy} at {rate:g}/s, 400 Gbit/s a port", config, change


def moe() -> Iterator[Run]:
    """Yields DBRX at rates between those at which `mfs_moe` reads."""
    for work, rate in (("conversation", 0.55), ("agent", 1.4)):
        for policy in ("fair", "karuna", "mfs"):
            yield (
                f"{work} at {rate:g}/s, {policy}",
                mfs_common.config("dbrx", work, policy, rate, **MOE),
                nullcontext(),
            )


def _dense(policy: str, rate: float) -> Config:
    trace, history = mfs_common.MOONCAKE["mooncake-agent"], mfs_dense.HISTORY["agent"]
    return mfs_common.config(
        mfs_dense.MODEL, "mooncake-agent", policy, rate, trace=trace, history=history, **DENSE
    )


def dense() -> Iterator[Run]:
    """Yields the dense model's agents at rates above those of `mfs_dense`."""
    for rate in (0.27, 0.3):
        for policy in ("fair", "karuna", "mfs"):
            yield f"{policy} at {rate:g}/s", _dense(policy, rate), nullcontext()


def dense_reuse() -> Iterator[Run]:
    """Yields the dense model's agents with nearly as much reuse as in the paper (65 %)."""
    drawn = mfs_common._drawn

    def less(*of: Any) -> tuple[WorkloadRequest, ...]:
        rng = random.Random(99)
        return tuple(
            dataclasses.replace(row, block_hashes=tuple(hash((n, at)) for at in range(len(row.block_hashes))))
            if rng.random() < REUSE_LOST
            else row
            for n, row in enumerate(drawn(*of))
        )

    for rate in (0.15, 0.18, 0.21):
        for policy in ("fair", "karuna", "mfs"):
            yield (
                f"{policy} at {rate:g}/s",
                _dense(policy, rate),
                mock.patch.object(mfs_common, "_drawn", less),
            )


def permits() -> Iterator[Run]:
    """Yields fair permits by chunk, window, delay of messages, and with collectives that do not wait."""
    base = mfs_permits.BASE
    forms: dict[str, mfs_permits.Permits | None] = {"ideal": None, "base": base}
    forms |= {f"{1e3 * chunk_s:g} ms": (chunk_s, *base[1:]) for chunk_s in (0.000625, 0.010)}
    forms |= {f"window {window}": (base[0], window, *base[2:]) for window in (1, 4, 8)}
    forms |= {f"window {window}, 0 ms": (base[0], window, 0.0, *base[3:]) for window in (2, 4, 32)}
    forms |= {f"collectives free, {1e3 * s:g} ms": (*base[:2], s, *base[3:5], False) for s in (base[2], 0.0)}
    for label, form in forms.items():
        more = {} if form is None else {"permits": list(form)}
        config = mfs_common.config(
            mfs_permits.MODEL, mfs_permits.WORK, "fair", mfs_permits.RATE, **PERMITS, **more
        )
        yield label, config, nullcontext()


def hetero() -> Iterator[Run]:
    """Yields FlowKV's setups on fewer GPUs, and with shorter prompts or longer answers."""
    engines = flowkv_hetero.engines

    def half(setup: str, host_s: float) -> tuple[EngineSpec, ...]:
        made = engines(setup, host_s)
        return tuple(dataclasses.replace(spec, count=flowkv_hetero.EACH // 2) for spec in made)

    def only(kind: str) -> Callable[[str, float], tuple[EngineSpec, ...]]:
        return lambda setup, host_s: (flowkv_hetero._on(kind, Role.COLOCATED, host_s),)

    longest = {task: (words, 1e5) for task, (words, _) in flowkv_hetero.TASKS.items()}
    both = (flowkv_hetero.OURS, "colocated")
    changes: list[tuple[str, Sequence[str], dict[str, Any]]] = [
        ("as it is", both, {}),
        ("answers of 512 tokens", both, {"TASKS": longest}),
        *((f"prompts of {most} tokens at most", both, {"MOST_PROMPT_TOKENS": most}) for most in CUTS_TOKENS),
        ("2 L20, 2 H20", ("colocated",), {"engines": half}),
        ("4 L20", ("colocated",), {"engines": only("L20")}),
        ("4 H20", ("colocated",), {"engines": only("H20")}),
    ]
    for label, setups, values in changes:
        for task in flowkv_hetero.TASKS:
            cut = values.get("MOST_PROMPT_TOKENS")
            rates = {
                share: flowkv_hetero.rate_per_s(task, share) if cut is None else _rate_per_s(task, share, cut)
                for share in flowkv_hetero.SHARES
            }
            for share, setup in product(rates, setups):
                config = {"task": task, "setup": setup, "share": share, "rate_per_s": rates[share]}
                config |= {"host_s": 0.0, "requests": 300}
                change = mock.patch.multiple(flowkv_hetero, **values) if values else nullcontext()
                yield f"{label}: {task}, {setup} at {share:g}", config, change


def _rate_per_s(task: str, share: float, most_tokens: int) -> float:
    """Returns the requests/s of `flowkv_hetero.rate_per_s` for prompts that are cut."""
    with mock.patch.object(flowkv_hetero, "MOST_PROMPT_TOKENS", most_tokens):
        mean = statistics.fmean(row.prompt_tokens for row in flowkv_hetero.work(task, 1.0, 3_000.0, 5))
    l20 = flowkv_hetero.PROFILES["L20"]
    return share * flowkv_hetero.EACH / (l20.prefill_base_s + l20.prefill_per_token_s * mean)


def day() -> Iterator[Run]:
    """Yields the day of `scaling_diurnal`, and one that is four times as long while starts and windows take what they
    took: ours, ours that gives engines back at once, and the plan that foresees.
    """
    ours = TUNED[OURS]
    forms: dict[str, Config] = {
        "ours": {"policy": OURS, "params": ours},
        "ours, no calm": {
            "policy": OURS,
            "params": {**ours, "calm_s": 0.0, "cool_down_s": 0.0},
        },
        "foreseen": {"policy": scaling_diurnal.FORESEEN, "params": {"headroom": FORESEEN_HEADROOM}},
    }
    for times, (label, config) in product((1, 4), forms.items()):
        yield (
            f"{times} times as long, {label}",
            config,
            mock.patch.multiple(
                scaling_diurnal,
                DAY_S=times * scaling_diurnal.DAY_S,
                # the cache goes by the seed alone
                work=scaling_diurnal.work.__wrapped__,
            ),
        )


PROBES: Mapping[str, tuple[Callable[[], Iterator[Run]], Callable[[Config, int], Metrics]]] = {
    "testbed": (testbed, mfs_common.run_one),
    "breakdown": (breakdown, mfs_breakdown.run_one),
    "moe": (moe, mfs_moe.run_one),
    "dense": (dense, mfs_dense.run_one),
    "dense_reuse": (dense_reuse, mfs_dense.run_one),
    "permits": (permits, mfs_permits.run_one),
    "hetero": (hetero, flowkv_hetero.run_one),
    "day": (day, scaling_diurnal.run_one),
}
"""The probes by name: what makes the runs, and what carries one out."""


def main() -> None:
    """Runs a probe and prints its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=sorted(PROBES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    asked = parser.parse_args()
    if asked.name is None:
        print("\n".join(sorted(PROBES)))
        return
    runs, run_one = PROBES[asked.name]
    for label, config, change in runs():
        with change:
            for seed in asked.seeds:
                found = run_one(config, seed)
                shown = {name: found[name] for name in (*SHOWN, LINK) if found.get(name) is not None}
                print(json.dumps([label, seed, shown]), flush=True)


if __name__ == "__main__":
    main()
