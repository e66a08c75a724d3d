"""NetKV's evaluation (arXiv 2606.03910, VI): cluster, workloads and schedulers that the netkv_* experiments share.

What the paper does not say, and its own figures do; each is fitted once, for all experiments:

- Prefill has no queue. TTFT less transfer is 976 to 978 ms at 100, 200 and 250 % and under every scheduler (Table
  II), at rates (6.1 to 15.2 requests/s) that would fill four serial engines of 0.95 s a prompt 1.5 to 3.6 times over.
  So all prompts are computed at once (`EngineSpec.prefill_queue` False).
- 100 % is 6.09 requests/s for RAG: goodput / SLO attainment = 12.19/s at 200 % for all three schedulers (VI-C). The
  others have no such figures. ASSUMPTION: chatbot the same requests/s (its NetKV TTFT grows by 6 ms from 100 to 200 %,
  which rules out as many bytes/s), long context as many prompt tokens/s as RAG has on the whole stand-in trace.
- A transfer has one path, on which its tier's B is all that it gets, and few others are on it: one flow (its four
  shards keep together) over one of its server's 8 NICs, one a GPU; 16 uplinks a rack, 32 a pod. Tried instead: four
  paths a transfer, of which four at 25 Gbit/s fill a NIC, so that tiers hardly differ; 2 NICs a server, with which the
  prefill rack's uplinks are overloaded; one fixed NIC an instance, as "sharing the source NIC" may mean, which is full
  at 250 %, where the paper's round robin takes 1,246 ms.
- RAG prompts have about 10,000 tokens in the mean: uniform placement without contention takes 87 us a token (1/3 at
  50, 2/3 at 25 Gbit/s), and round robin's 993 ms grow by 20 % when the rate doubles, so some 860 ms are no contention.
  Mooncake conversation has 14,988 between 4K and 64K; transfers, and the reductions that they allow, are longer for
  it. "rag" therefore keeps one in five of its prompts above 10,240 tokens (mean 9.8K, the tail stays);
  "rag-conversation" is the trace as it is. The other two are as they are: 3.3K (chatbot), 33K (long context).
- T_prefill = c len + d: 76 us and 177 ms (the profile's file says from what).
- Requests come in bursts. Mooncake's times are ticks of 3 s, "preserving the burstiness" (VI-A) keeps them, and the
  paper's 23K rows in an hour are 20 a tick, the stand-in's half as many. A workload keeps of a tick the share that it
  keeps of the stand-in's rows (`Workload.burst`), and one factor compresses bursts and pauses alike: RAG at 100 % has
  12.6 requests every 2.1 s, three for each prefill instance, whose transfers meet. With the ticks spread (`spread`)
  few meet: NetKV then sends more within the pod than Table VI has (69 %), and gains more at short prompts than the
  paper's does (`netkv_load` has rows of both).
- A window has the same requests at every load: TTFT less transfer is the same within 2 ms at 100, 200 and 250 %, where
  other requests would move the mean prefill by some 50 ms, and what CLA* saves of RR's transfers (158, 176, 155 ms)
  does not grow as it does when more requests fit into 15 s and hit more. So warm-up and
  window are stretches of the trace ("trace seconds", VI-A): 5 and 15 s at 100 %, less above, more below.

A run: 5 s of warm-up, 15 s measured, at 100 %; ten windows of the trace (five where there are fewer seeds), one a seed,
each compressed so that its mean rate is the target's; the requests behind it keep the load up. CLA*'s tuning slice is
the trace's first 30 s. Seeds also draw where in the trace's clock a request comes, what is shared and the paths; the
paper's five seeds (9 ms apart) cannot have changed the requests, so its intervals are no measure of ours.
"""

from __future__ import annotations

import dataclasses
import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.sim import profiles
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.sim.network.background import Background, Load, OnOff, Static
from benchmarks.sim.network.clusters import (
    NIC_GBIT,
    Instance,
    netkv_cluster,
    netkv_instances,
    nic_of,
    prefill_and_decode,
)
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.records import RequestRecord
from benchmarks.workloads import transform
from benchmarks.workloads.catalog import WorkloadSpec, build, or_excerpt
from benchmarks.workloads.prefixes import Sharing, share_prefixes
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.network.contention import FORMS
from policies.state.views import Role

# The stand-in for the paper's trace; its shipped excerpt where the file is not at hand (`or_excerpt`).
TRACE = "mooncake-conversation"
PROFILE = profiles.load("netkv_llama3_70b_tp4_h100")
WARMUP_S, MEASURE_S, TUNING_S = 5.0, 15.0, 30.0  # NetKV VI-A
# NetKV has 16. Coarser blocks are faster, and at most 127 tokens of a hit are lost.
BLOCK_TOKENS = 128
KV_TOKENS = 4 * 45 * 10**9 // PROFILE.kv_bytes_per_token  # 45 GB of free HBM a GPU, TP = 4 (VI-A)
# Windows of the trace, for experiments of ten seeds.
WINDOWS = 10
SLOTS = 64  # beta_max (VI-A)
# Prefill's slots and blocks and the queue before it have no limit: prefill is a latency only.
UNBOUNDED = 1_000_000
# Rows of one time: the paper's 23,608 in an hour. ASSUMPTION: their clock ticks every 3 s, as the stand-in's does.
TICK_ROWS = 19.7
SWITCH_S = 5.0  # ASSUMPTION: mean time on and off of background that comes and goes


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload profile of VI-A.

    `p_share` None keeps the prefixes that the trace itself shares. Of the prompts longer than `thin_above` tokens only
    the share `kept` stays. `burst` is the number of requests that arrive at the same time on 64 GPUs.
    """

    lengths: transform.LengthFilter | None
    p_share: float | None
    ttft_slo_s: float
    rate_per_s: float  # at 100 %
    burst: float  # ASSUMPTION: TICK_ROWS times the share of the stand-in's rows that `lengths` keeps
    thin_above: int | None = None
    kept: float = 1.0


_RAG = Workload(transform.LengthFilter(4_096, 65_536), 0.7, 5.0, 6.09, 0.638 * TICK_ROWS)
WORKLOADS: Mapping[str, Workload] = {
    "chatbot": Workload(transform.LengthFilter(max_prompt_tokens=8_192), 0.3, 2.0, 6.09, 0.550 * TICK_ROWS),
    "rag": dataclasses.replace(_RAG, thin_above=10_240, kept=0.2),
    "rag-conversation": _RAG,
    "long": Workload(transform.LengthFilter(min_prompt_tokens=16_385), 0.1, 10.0, 2.75, 0.227 * TICK_ROWS),
    # The whole trace with its own hash_ids, 1.8 times as fast as it was recorded.
    "conversation": Workload(None, None, 5.0, 6.09, TICK_ROWS),
}

_STEP = {"step_base_s": PROFILE.decode_base_s, "step_per_seq_s": PROFILE.decode_per_seq_s}
_QUEUE = {"queue": "iterations"}  # the paper's
SCHEDULERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "RR": ("round_robin", {}),
    "LA": (
        "netkv",
        {"variant": "cla", "cache_weight": 0.0, **_QUEUE},
    ),  # least beta: least T_queue + T_decode
    "CA": ("cache_aware", {}),
    "CLA*": ("netkv", {"variant": "cla", **_QUEUE}),
    "NetKV-Topo-Only": ("netkv", {"variant": "topo_only", **_STEP, **_QUEUE}),
    "NetKV-Static": ("netkv", {"variant": "static", **_STEP, **_QUEUE}),
    "NetKV-Full": ("netkv", {"variant": "full", **_STEP, **_QUEUE}),
    # Ours: the oracle also tells the tiers' uplinks.
    "NetKV-Uplinks": ("netkv", {"variant": "full", **_STEP, **_QUEUE}),
    # Topo-Only with the oracle's congestion and without a count, to tell apart what the two rungs above it do.
    "NetKV-Congestion": ("netkv", {"variant": "full", "max_inflight": 0, **_STEP, **_QUEUE}),
    # Ours: the slowdown by own transfers is learnt (`netkv_contention`).
    **{
        f"NetKV-Learnt-{form.capitalize()}": (
            "netkv",
            {"variant": "full", "contention": form, **_STEP, **_QUEUE},
        )
        for form in FORMS
    },
}
LADDER = ("CLA*", "NetKV-Topo-Only", "NetKV-Static", "NetKV-Full")
# workload -> CLA*'s (cache_weight, load_weight); see `netkv_tuning`
TUNED: Mapping[str, tuple[float, float]] = {
    "chatbot": (1.0, 1.0),
    "rag": (1.0, 1.0),
    "rag-conversation": (1.0, 1.0),
    "long": (1.5, 0.7),
    "conversation": (1.0, 1.0),
}


def config(workload: str, scheduler: str, **more: Any) -> dict[str, Any]:
    """Returns a variant's config for `run_one`. `more` are further keys:

    - `load` (1 = 100 %), `prompt_tokens`, `p_share`, `gpus`, `oversubscription`, `oracle_s`, `tuning`, `prefill_queue`
    - `background`: share of every link, all the time; `switching`: share, on and off
    - `weights` of CLA*, else the tuned ones
    - `whole`: the whole trace, measured from the warm-up to its end
    - `fixed_nic`: an instance sends by one of its server's NICs
    - `shared_tokens`: the length of every shared prefix
    - `nics` of a server, else 8; uplinks in proportion
    - `windows`: the number of places at which seeds begin, else 5
    - `spread`: the trace's ticks are spread with the seed, instead of bursts
    - `covered`: least and greatest share of a prompt that a shared prefix covers, else those of `Sharing`
    - `transfer_flows`: parallel flows of a transfer, else 1
    - `nic_gbit`: Gbit/s of a NIC, else 100; the links above in proportion
    - `kv_share`: part of a decode instance's KV memory that it has, else all
    - `prefill`: (base, per token) of T_prefill in seconds, else the profile's
    """
    made = {"trace": or_excerpt(TRACE), "workload": workload, "scheduler": scheduler, **more}
    if scheduler == "CLA*":
        made.setdefault("weights", list(TUNED[workload]))
    return made


# ----------------------------------------------------------------------------------------------------------- one run


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one window under one scheduler and returns its metrics.

    `tbt_mean_s` is NetKV's TBT, which is t_iter(beta) at the moment when a request enters the batch.
    """
    result = simulate(sim_config(config, seed), requests(config, seed))
    found = summarise(result)
    found["tbt_mean_s"] = entry_tbt_s(result.requests)
    prompts = [r.prompt_tokens for r in result.requests]
    found["prompt_tokens_mean"] = sum(prompts) / len(prompts)
    return found


def requests(config: Config, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of a run in order of time; those of the warm-up come first."""
    kind = WORKLOADS[config["workload"]]
    load, at_100 = config.get("load", 1.0), kind.rate_per_s * config.get("gpus", 64) / 64
    rows = _rows(config["trace"], config["workload"], seed)
    if config.get("whole"):
        start, count, most = 0, len(rows), len(rows)
    elif config.get("tuning"):
        start, count = 0, round(kind.rate_per_s * TUNING_S) + 1
        most = 2 * count
    else:
        start, count = (
            window_start(len(rows), seed, config.get("windows", 5)),
            round(at_100 * (WARMUP_S + MEASURE_S)) + 1,
        )
        # Three times as many again as are measured keep the load up behind the window.
        most = 4 * count
    ahead = _turned(rows, start)[:most]
    made = list(transform.compress(ahead, transform.compression_for(ahead[:count], at_100 * load)))
    if not config.get("spread"):
        made = in_bursts(made, kind.burst / (kind.rate_per_s * load))
    if "prompt_tokens" in config:
        made = list(transform.with_prompt_tokens(made, config["prompt_tokens"]))
    p_share = config.get("p_share", kind.p_share)
    if p_share is not None:
        fixed = config.get("shared_tokens")
        sharing = Sharing(p_share, block_tokens=BLOCK_TOKENS, covered_tokens=fixed)
        if "covered" in config:
            low, high = config["covered"]
            sharing = dataclasses.replace(sharing, covered=(low, high))
        made = list(share_prefixes(made, sharing, seed))
    return list(transform.with_class(made, config["workload"], kind.ttft_slo_s))


def window_start(rows: int, seed: int, windows: int = 5) -> int:
    """Returns the row with which a seed's warm-up begins; starts are spread over the trace after the tuning slice."""
    return rows * (windows + 15 * (seed % windows)) // (16 * windows)


def in_bursts(made: Sequence[WorkloadRequest], period_s: float) -> list[WorkloadRequest]:
    """Returns the requests on a clock that ticks every `period_s`; each comes at the last tick before its time."""
    return [dataclasses.replace(r, at_s=math.floor(r.at_s / period_s) * period_s) for r in made]


@lru_cache(maxsize=16)
def _rows(trace: str, workload: str, seed: int) -> tuple[WorkloadRequest, ...]:
    kind = WORKLOADS[workload]
    made = build(WorkloadSpec(name=trace, lengths=kind.lengths), seed)
    if kind.thin_above is None:
        return tuple(made)
    drawn = random.Random(0)  # the same rows for every seed
    return tuple(r for r in made if drawn.random() < kind.kept or r.prompt_tokens <= kind.thin_above)


def _turned(rows: Sequence[WorkloadRequest], start: int) -> list[WorkloadRequest]:
    """Returns the rows from `start` on, then the rows before it, which large clusters need; times count from 0."""
    turn_s = rows[-1].at_s - rows[0].at_s
    before = [dataclasses.replace(r, at_s=r.at_s + turn_s) for r in rows[:start]]
    return transform.rebase([*rows[start:], *before])


def sim_config(config: Config, seed: int) -> SimConfig:
    """Returns the simulator's configuration of the cluster under one scheduler."""
    topology = netkv_cluster(
        config.get("gpus", 64),
        config.get("oversubscription", 4.0),
        config.get("nics", 8),
        config.get("nic_gbit", NIC_GBIT),
    )
    profile = PROFILE
    if "prefill" in config:
        base_s, per_token_s = config["prefill"]
        profile = dataclasses.replace(PROFILE, prefill_base_s=base_s, prefill_per_token_s=per_token_s)
    kv_tokens = round(KV_TOKENS * config.get("kv_share", 1.0))
    prefill, decode = prefill_and_decode(netkv_instances(topology))

    def engines(name: str, role: Role, where: list[Instance], **more: Any) -> EngineSpec:
        return EngineSpec(
            name,
            role,
            len(where),
            profile,
            block_size_tokens=BLOCK_TOKENS,
            nodes=tuple(instance.node for instance in where),
            nics=tuple(nic_of(topology, instance) for instance in where) if config.get("fixed_nic") else (),
            lease_s=600.0,
            **more,
        )

    load, queue = config.get("load", 1.0), config.get("prefill_queue", False)
    policy, params = SCHEDULERS[config["scheduler"]]
    if "weights" in config:
        params = {**params, "cache_weight": config["weights"][0], "load_weight": config["weights"][1]}
    return SimConfig(
        (
            engines(
                "p",
                Role.PREFILL,
                prefill,
                slots=UNBOUNDED,
                kv_blocks=UNBOUNDED,
                prefix_cache=False,
                prefill_queue=queue,
            ),
            engines(
                "d",
                Role.DECODE,
                decode,
                slots=SLOTS,
                kv_blocks=kv_tokens // BLOCK_TOKENS,
                transfer_flows=config.get("transfer_flows", 1),
            ),
        ),
        prefill=("round_robin", {}),
        decode=(policy, params),
        # Algorithm 1 chooses among all workers with memory, whatever their queues, and so do its rivals. The paper lets
        # nothing starve and nothing go first, and gives up no stage.
        dispatch=DispatchConfig(
            max_queue=UNBOUNDED,
            queue_timeout_s=600.0,
            overcommit_slots=UNBOUNDED,
            overcommit="always",
            starvation_s=math.inf,
            overdue_by_slo=False,
            seed=seed,
        ),
        control=ControlPlane(
            hop_s=0.0,
            ingress_s=0.0,
            progress_s=0.1,
            request_timeout_s=600.0,
            prefill_limit_s=math.inf,
            transfer_limit_s=math.inf,
        ),
        network=Fabric(
            topology,
            _background(config),
            config.get("oracle_s", 1.0),
            uplinks=topology.tier_uplinks(1 if config.get("fixed_nic") else None)
            if config["scheduler"] == "NetKV-Uplinks"
            else None,
        ),
        learn_contention="contention" in params,
        seed=seed,
        warmup_s=WARMUP_S / load,
        measure_s=None
        if config.get("whole")
        else (TUNING_S - WARMUP_S if config.get("tuning") else MEASURE_S) / load,
    )


def _background(config: Config) -> tuple[Background, ...]:
    """Returns the background traffic of all links except NVLink: a steady load, and one that switches on and off.

    The second one switches independently on each link.
    """
    loads: list[Load] = []
    if config.get("background"):
        loads.append(Static(config["background"]))
    if config.get("switching"):
        loads.append(OnOff(config["switching"], SWITCH_S, SWITCH_S))
    return tuple(Background("all", load) for load in loads)


def entry_tbt_s(records: Sequence[RequestRecord]) -> float | None:
    """Returns the mean of a + b beta over the requests when they enter the batch, or None if none has entered.

    beta counts the measured requests on that worker, including the new one.
    """
    by_worker: dict[str, list[RequestRecord]] = defaultdict(list)
    for r in records:
        if r.decode_worker is not None and r.first_token_s is not None:
            by_worker[r.decode_worker].append(r)
    batches: list[int] = []
    for on_it in by_worker.values():
        begins = sorted(r.first_token_s for r in on_it if r.first_token_s is not None)
        ends = sorted(r.finished_s for r in on_it if r.finished_s is not None)
        batches += [bisect_right(begins, t) - bisect_right(ends, t) for t in begins]
    if not batches:
        return None
    return PROFILE.decode_base_s + PROFILE.decode_per_seq_s * sum(batches) / len(batches)


# ----------------------------------------------------------------------------------------------------------- figures

WITHIN = 3.0  # points: the aim for every reduction


def named(workload: str, scheduler: str, *more: str, **options: Any) -> Variant:
    """Returns a variant that is named after its parts."""
    return Variant(" ".join([workload, *more, scheduler]), config(workload, scheduler, **options))


def reduction(results: Results, what: str, base: str, ours: str, paper: float | None, note: str = "") -> Row:
    """Returns a row with the change of the mean TTFT from `base` to `ours` in per cent (negative: shorter)."""
    row = _reduction(results, what, base, ours, paper, note)
    if paper is None:
        return row
    return aimed(row, f"within {WITHIN:g} points", least=paper - WITHIN, most=paper + WITHIN)


def measured(results: Results, what: str, base: str, ours: str, paper: float | None) -> Row:
    """Returns the row of `reduction` without an aim, for a figure that shows a cause."""
    return _reduction(results, what, base, ours, paper, "")


def _reduction(results: Results, what: str, base: str, ours: str, paper: float | None, note: str) -> Row:
    percent, half = results.reduction_percent(base, ours, "ttft_mean_s")
    return Row(f"{what}: mean TTFT", paper, -percent, "%", half, note=note)


def milliseconds(
    results: Results, what: str, variant: str, metric: str, paper: float | None, note: str = ""
) -> Row:
    """Returns a row with a mean time in ms."""
    ours = results.spread(variant, metric)
    half = None if ours.half_width is None else ours.half_width * 1e3
    return Row(what, paper, ours.mean * 1e3, "ms", half, note=note)


def share(results: Results, what: str, variant: str, metric: str, paper: float | None) -> Row:
    """Returns a row with a share in per cent, which counts as 0 where a run did not measure it."""
    found = results.values(variant, metric, missing=0.0)
    return Row(what, paper, 100.0 * sum(found) / len(found), "%")


def lower(
    results: Results, what: str, base: str, ours: str, metric: str, paper: float, within: float | None = None
) -> Row:
    """Returns a row with the change of a time from `base` to `ours` in per cent (negative: shorter), which is aimed at
    within some points of the paper's, or not at all.
    """
    percent, half = results.reduction_percent(base, ours, metric)
    return _near(Row(what, paper, -percent, "%", half), within, "points")


def added(
    results: Results,
    what: str,
    base: str,
    ours: str,
    metric: str,
    paper: float | None,
    unit: str,
    within: float | None = None,
) -> Row:
    """Returns a row with what `ours` has more than `base`: of a share in points ("points"), of a time in ms ("ms")."""
    found, scale = results.paired(base, ours, metric).difference, {"points": 100.0, "ms": 1e3}[unit]
    half = None if found.half_width is None else scale * found.half_width
    return _near(Row(what, paper, scale * found.mean, unit, half), within, unit)


def _near(row: Row, within: float | None, unit: str) -> Row:
    """Returns the row with the aim that it is within some `unit`s of the paper's figure, if there are both."""
    if within is None or row.paper is None:
        return row
    word = "point" if (within, unit) == (1.0, "points") else unit
    return aimed(row, f"within {within:g} {word}", least=row.paper - within, most=row.paper + within)
