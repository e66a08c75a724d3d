"""The worth of lending prefixes (MFS stage 1, `router.dispatch.lend_prefixes`) on traces with real shared prefixes.

The paper has no such figure: MFS 2.2 takes remote reuse for granted, and here it is decided request by request.

Ten engines of Llama-3.1-8B on H20 (`flowkv_llama31_8b_h20`), six prefill and four decode, each on a node of its own
with one NIC, under one switch. All of them cache prefixes (521,000 tokens of KV each), and any may lend. Bytes of
prefixes and those from prefill to decode share the NICs fairly; no flow policy orders them. Requests are stretches of
Mooncake's traces with their own block hashes (`mooncake-synthetic` stands for agents, at 25 Gbit/s only), 1.6 and 1.3
requests/s, which is 70 % of what the prefill engines could compute without any hit. A seed begins at its own place of
the trace, and both sides of a comparison have the same requests.

A token of KV is 128 KiB and takes 217 us to compute, so that a link of 4.8 Gbit/s moves what an engine computes.

Two prefill policies: `join_shortest_queue`, the default, which does not look at caches, and `predicted_ttft`, which
sends a prompt where its prefix is unless the queue there is too long.

Aims, written before the first run: with lending mean TTFT is lower at 25 Gbit/s and above under both policies, and at
no bandwidth is it more than 2 % higher; prefill engines compute fewer tokens. The rule written down with them was that
lending is on by default if all of them are met; docs/design.md 5 says why it is still off.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.sim import profiles
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.network.topology import Topology, TopologyConfig
from benchmarks.workloads import transform
from benchmarks.workloads.catalog import WorkloadSpec, available, build, or_excerpt
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.state.views import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "lending prefixes between engines, on and off, by bandwidth: TTFT and computed tokens on Mooncake's traces"
SEEDS = (5, 2)
PROFILE = profiles.load("flowkv_llama31_8b_h20")
PREFILL, DECODE = 6, 4
SLOTS, KV_TOKENS, BLOCK_TOKENS = 128, 521_000, 128
GBIT_PER_S = (10.0, 25.0, 100.0)
POLICIES = ("join_shortest_queue", "predicted_ttft")
# workload -> trace, requests/s
WORKS = {"conversation": ("mooncake-conversation", 1.6), "agent": ("mooncake-synthetic", 1.3)}
PLACES = 5  # of a trace, at which seeds begin
KEPT = (
    "ttft_mean_s",
    "ttft_p95_s",
    "jct_mean_s",
    "finished",
    "unfinished",
    "peak/prefill_tokens",
    "peak/prompt_tokens",
    "peak/loans",
    "peak/prefixes_read",
    "peak/prefixes_failed",
    "peak/prefix_bytes",
)


def variants(quick: bool) -> list[Variant]:
    size = {"requests": 60, "warmup": 30} if quick else {"requests": 1_500, "warmup": 500}
    made = []
    for work, (trace, rate) in WORKS.items():
        if work == "agent" and (quick or not available(trace)):
            continue
        for policy in POLICIES[:1] if quick else POLICIES:
            for gbit in GBIT_PER_S[1:2] if quick or work == "agent" else GBIT_PER_S:
                base = {
                    "trace": or_excerpt(trace),
                    "rate_per_s": rate,
                    "policy": policy,
                    "gbit_per_s": gbit,
                    **size,
                }
                made += [
                    Variant(_name(work, policy, gbit, lend), base | {"work": work, "lend": lend})
                    for lend in (False, True)
                ]
    return made


def _name(work: str, policy: str, gbit: float, lend: bool) -> str:
    return f"{work}, {policy}, {gbit:g} Gbit/s, {'on' if lend else 'off'}"


@lru_cache(maxsize=4)
def _rows(trace: str, seed: int) -> tuple[WorkloadRequest, ...]:
    return tuple(build(WorkloadSpec(name=trace), seed))


def work(config: Config, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of one stretch, at the configured mean rate; those of the warm-up come first."""
    rows, count = _rows(config["trace"], seed), config["requests"] + config["warmup"]
    start = (len(rows) - count) * (seed % PLACES) // PLACES
    part = transform.rebase(rows[start : start + count])
    return transform.at_rate(part, config["rate_per_s"])


def cluster(config: Config, seed: int, warmup_s: float) -> SimConfig:
    """Returns the ten engines under one switch."""
    topology = Topology.build(
        TopologyConfig(
            pods=1,
            racks_per_pod=1,
            nodes_per_rack=PREFILL + DECODE,
            nvlink_gbyte_per_s=450.0,
            nic_gbit_per_s=config["gbit_per_s"],
            rack_oversubscription=1.0,
            pod_oversubscription=1.0,
        )
    )
    nodes = tuple(topology.nodes)

    def engines(name: str, role: Role, where: tuple[str, ...]) -> EngineSpec:
        return EngineSpec(
            name,
            role,
            len(where),
            PROFILE,
            slots=SLOTS,
            kv_blocks=KV_TOKENS // BLOCK_TOKENS,
            block_size_tokens=BLOCK_TOKENS,
            nodes=where,
        )

    costs = {"prefill_base_s": PROFILE.prefill_base_s, "prefill_per_token_s": PROFILE.prefill_per_token_s}
    return SimConfig(
        (engines("p", Role.PREFILL, nodes[:PREFILL]), engines("d", Role.DECODE, nodes[PREFILL:])),
        prefill=(config["policy"], costs if config["policy"] == "predicted_ttft" else {}),
        decode=("join_shortest_queue", {}),
        dispatch=DispatchConfig(
            max_queue=1_000_000, queue_timeout_s=3_600.0, lend_prefixes=config["lend"], seed=seed
        ),
        # Reports and ticks at half a second instead of a tenth, which halves the simulator's work.
        control=ControlPlane(
            status_s=0.5,
            tick_s=0.5,
            progress_s=0.5,
            request_timeout_s=3_600.0,
            prefill_limit_s=math.inf,
            transfer_limit_s=math.inf,
        ),
        network=Fabric(topology),
        seed=seed,
        warmup_s=warmup_s,
    )


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one stretch. Tokens and loans are those of the whole run, times those behind the warm-up."""
    requests = work(config, seed)
    warmup_s = requests[config["warmup"]].at_s
    found = summarise(simulate(cluster(config, seed, warmup_s), requests))
    found["peak/prompt_tokens"] = float(sum(r.prompt_tokens for r in requests))
    return {name: found.get(name) for name in KEPT}


def _cases(results: Results) -> list[tuple[str, str, float]]:
    return [
        (work, policy, gbit)
        for work in WORKS
        for policy in POLICIES
        for gbit in GBIT_PER_S
        if _name(work, policy, gbit, True) in results.runs
    ]


def compare(results: Results) -> list[Row]:
    rows: list[Row] = []
    for case in _cases(results):
        off, on, name = _name(*case, False), _name(*case, True), _name(*case, True).removesuffix(", on")
        paying = case[2] >= 25.0
        for metric, what in (("ttft_mean_s", "mean TTFT"), ("ttft_p95_s", "P95 of TTFT")):
            less, half = results.reduction_percent(off, on, metric)
            row = Row(f"{name}: {what} less with lending", None, less, "%", half)
            least = 0.0 if paying else -2.0
            rows.append(aimed(row, f"above {least:g}", above=least) if metric == "ttft_mean_s" else row)
        fewer, half = results.reduction_percent(off, on, "peak/prefill_tokens")
        row = Row(f"{name}: tokens computed less", None, fewer, "%", half)
        rows.append(aimed(row, "above 0", above=0.0))
        for side, variant in (("off", off), ("on", on)):
            seen = results.spread(variant, "ttft_mean_s")
            rows.append(Row(f"{name}: mean TTFT, {side}", None, seen.mean, "s", seen.half_width))
            shares = [
                100.0 * tokens / prompts
                for tokens, prompts in zip(
                    results.values(variant, "peak/prefill_tokens"),
                    results.values(variant, "peak/prompt_tokens"),
                    strict=True,
                )
            ]
            share = sum(shares) / len(shares)
            rows.append(Row(f"{name}: prompt tokens computed, {side}", None, share, "%"))
        for metric, what, scale, unit in (
            ("peak/loans", "prefixes asked for", 1.0, ""),
            ("peak/prefixes_failed", "reads that failed", 1.0, ""),
            ("peak/prefix_bytes", "moved for them", 1e-9, "GB"),
        ):
            seen = results.spread(on, metric)
            width = None if seen.half_width is None else scale * seen.half_width
            rows.append(Row(f"{name}: {what}", None, scale * seen.mean, unit, width))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    cases = [case for case in _cases(results) if case[0] == "conversation"]
    made, [axis] = look.figure()
    series = {}
    for policy in POLICIES:
        for lend in (False, True):
            gbits = [gbit for _, p, gbit in cases if p == policy]
            seen = [
                results.spread(_name("conversation", policy, gbit, lend), "ttft_mean_s") for gbit in gbits
            ]
            if seen:
                label = f"{policy}, {'on' if lend else 'off'}"
                series[label] = look.Series(gbits, [s.mean for s in seen], [s.half_width for s in seen])
    look.lines(axis, series, "Gbit/s of a NIC", "mean TTFT, s", "conversation")
    return {"lend_prefixes": made}
