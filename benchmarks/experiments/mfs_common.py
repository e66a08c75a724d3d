"""MFS's evaluation (MFS 6): clusters, models, workloads and flow policies that the mfs_* experiments share.

What the paper does not say, and how it is set here, once for all experiments:

- A port is the NICs of one data-parallel rank (the GPUs of one tensor-parallel group). All ports hang on one switch
  that does not block, as the testbed's; the paper's 1:1 fat tree does not block either. Prefill instances have
  `ranks` ports, decode engines one each, as many as there are prefill ports.
- A request's KV lies on one rank of its instance. Collectives (dispatch and combine of each layer, as one exchange for
  a group of layers) load all ports of the instance alike: tokens x k x hidden x 2 bytes, both ways, of which the share
  that leaves the rank (Mixtral on 3090s, without NVLink) or the server crosses the ports.
- Layers are taken in groups (`groups`), which compute, exchange and release KV together.
- Compute time is 2 x active parameters x tokens at half of the GPUs' peak. Then the bandwidth that collectives and KV
  reach is set so that collectives take the share `exchange` of a prefill alone. On the testbed that is 62.5 %: Fig. 5's
  1.8x CCT and +50 % TTFT are equal there (0.5 / 0.8). In simulation it is 50 %, the middle of the 40 to 60 % of 2.2.
- The testbed's GPUs cannot compute 1 request/s each at half of their peak. So its compute time is set by load instead:
  at 1 request/s/GPU on conversations an instance without KV traffic is busy for the share `BUSY` of the time.
- An SLO is 3x the request's own TTFT at low load: alone, with the same prefix reused. Requests of less than the median
  prompt are of class "short", the others "long".
- The workloads are stand-ins (`benchmarks.workloads.standins`), with prefixes shared so that reuse is the paper's 50
  and 65 %. Blocks are of 64 tokens. Requests before the run fill the store of KV, on ranks drawn at random.
- Requests go to the instance with the fewest requests; the paper's router also looks for cached prefixes.
- The decode engine makes one token in 1 ms.

The rivals have no parameters. MFS runs in three forms, which stand beside each other:

- "mfs": the paper's thresholds (U = 0.5, E = 4; K = 8); Algorithm 1 orders batches and prunes nothing.
- "mfs-swept": U = 4, K = 2, so Q_1 = 1: a P2D transfer goes before collectives only when it needs the whole port. The
  paper calls its thresholds empirical; these are `mfs_thresholds`' and shipped (`policies.flow.mfs.SWEPT`).
- "mfs-pruned": "mfs" with Algorithm 1's pruning. At each arrival and departure of a batch, at most `DROP_SHARE` of the
  requests in progress are pruned, as by live agents. The paper names no drop budget, and prunes softly: a pruned
  request's reused KV and P2D transfers go to the scavenger level until an order no longer prunes it, so it is late and
  not refused. Its collectives are its batch's and stay, and the batch waits for its reused KV; the paper does not say
  whether it would.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, FlowSetup, LayerPlan, Permits, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.network.topology import Topology, TopologyConfig
from benchmarks.workloads import standins, transform
from benchmarks.workloads.catalog import WorkloadSpec, build
from benchmarks.workloads.prefixes import Sharing
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.flow.mfs import SWEPT
from policies.state.views import Role

BLOCK_TOKENS = 64
BUDGET_TOKENS = 8_192  # MFS 6.2: batched tokens
SLO = 3.0  # MFS 6.1
DECODE_S = 0.001
# Requests before the run, whose prefixes are known when it begins.
HISTORY = 3_000
# Seeds below it were looked at while the experiments were set up; reports are of others.
SEEDS_FROM = 10
RIVALS = ("fair", "sjf", "edf", "karuna")
SWEPT_FORM, PRUNED = "mfs-swept", "mfs-pruned"
OURS = {"mfs": "MFS", SWEPT_FORM: "MFS with Q_1 = 1, K = 2", PRUNED: "MFS with pruning"}
POLICIES = (*RIVALS, *OURS)
# ASSUMPTION: MFS names no drop budget. This is the default of live agents (`actors.flow.config`).
DROP_SHARE = 0.1
# MFS 6.3: prompts of the dense model. The paper's agent trace is not published; Mooncake's synthetic one shares as
# much.
MOONCAKE = {"mooncake-conversation": "mooncake-conversation", "mooncake-agent": "mooncake-synthetic"}
UNBOUNDED = 1_000_000
# Mean earliness of the requests in time, in units of their SLOs (MFS 6.1).
EARLY = "earliness_slo_mean"
ENOUGH = 0.05
"""The least share of requests in time of which a mean earliness is taken (ASSUMPTION)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on one instance of `ranks` data-parallel ranks with `gpus` GPUs each.

    `exchanged_bytes` is what each prompt token sends through the ports over all layers, `kv_bytes` its KV.
    `compute_s` is the computation of one token by the whole instance, and `exchange` the share of collectives in a
    prefill alone, without other traffic.
    """

    ranks: int
    gpus: int
    layers: int
    kv_bytes: int
    exchanged_bytes: float
    compute_s: float
    exchange: float

    @property
    def port_bytes_per_s(self) -> float:
        """The bandwidth of one port, with which collectives take the share `exchange` of a prefill."""
        exchange_s = self.compute_s * self.exchange / (1.0 - self.exchange)
        return self.exchanged_bytes / self.ranks / exchange_s


def _experts(layers: int, hidden: int, chosen: int, crossing: float) -> float:
    """Returns the bytes of dispatch and combine of one token over all layers that cross the ports, in 16 bits."""
    return 2 * layers * chosen * hidden * 2 * crossing


def _kv(layers: int, heads: int, width: int = 128) -> int:
    return layers * heads * width * 2 * 2


def _a100_s(active: float, gpus: int) -> float:
    """Returns the seconds of a token on A100s (312 TFLOPS in bf16) at half of their peak."""
    return 2 * active / (gpus * 156e12)


# Share of the time that a testbed instance is busy at 1 request/s/GPU on conversations, without KV traffic.
# Between 0.35 and 0.5 contention prolongs collectives of agents by 1.6 to 1.7x (Figure 5: 1.8x); above, fair sharing
# no longer keeps up with conversations.
BUSY = 0.35
# Prompt tokens computed per second and instance then: 8 requests/s of 2k tokens, half of them reused.
_TESTBED_TOKENS_PER_S = 8 * 2_000 * 0.5
_FIG_5 = 0.5 / 0.8

MODELS: Mapping[str, Model] = {
    # MFS 6.2: TP 1, EP 8 on 8 GPUs of 4 in a server; PCIe only, so 7 of 8 exchanged bytes leave the GPU.
    "mixtral-8x7b": Model(
        8,
        1,
        32,
        _kv(32, 8),
        _experts(32, 4_096, 2, 7 / 8),
        BUSY * (1.0 - _FIG_5) / _TESTBED_TOKENS_PER_S,
        _FIG_5,
    ),
    # MFS 6.3: 32 GPUs in 4 servers with NVSwitch, so 3 of 4 exchanged bytes leave the server.
    "mixtral-8x22b": Model(8, 4, 56, _kv(56, 8), _experts(56, 6_144, 2, 3 / 4), _a100_s(39e9, 32), 0.5),
    "dbrx": Model(16, 2, 40, _kv(40, 8), _experts(40, 6_144, 4, 3 / 4), _a100_s(36e9, 32), 0.5),
    "qwen3-coder": Model(32, 1, 62, _kv(62, 8), _experts(62, 6_144, 8, 3 / 4), _a100_s(35e9, 32), 0.5),
    "grok-2": Model(8, 4, 64, _kv(64, 8), _experts(64, 8_192, 2, 3 / 4), _a100_s(115e9, 32), 0.5),
    # TP 4, SP 4 on 16 GPUs in 2 servers. Ring attention: each rank passes K and V of its tokens to 3 others.
    "llama3-8b": Model(4, 4, 32, _kv(32, 8), 3 * _kv(32, 8), _a100_s(8e9, 16), 0.5),
}


def workload(name: str, rate_per_s: float) -> Synthetic:
    """Returns the generator of "conversation" (Qwen A) or "agent" (Qwen B), with the paper's reuse of prompts.

    The shares of texts in common are raised until an unlimited cache holds 50 and 65 % of the prompt tokens.
    """
    if name == "conversation":
        return dataclasses.replace(
            standins.qwen_a(rate_per_s), sharing=_sharing(0.83, 32, (0.5, 0.9)), block_tokens=BLOCK_TOKENS
        )
    if name == "agent":
        return dataclasses.replace(
            standins.qwen_b(rate_per_s), sharing=_sharing(1.0, 256, (0.6, 0.98)), block_tokens=BLOCK_TOKENS
        )
    raise ValueError(f"workload {name!r}: choose conversation or agent")


def _sharing(p_share: float, groups: int, covered: tuple[float, float]) -> Sharing:
    return Sharing(p_share=p_share, groups=groups, covered=covered, block_tokens=BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Form:
    """A flow policy with parameters, and the share of requests that Algorithm 1 may prune with it."""

    policy: str
    params: Mapping[str, Any] = field(default_factory=dict)
    drop_share: float = 0.0


FORMS: Mapping[str, Form] = {
    SWEPT_FORM: Form("mfs", SWEPT),
    PRUNED: Form("mfs", drop_share=DROP_SHARE),
}
"""The variants of "policy" that are forms of another policy."""


def config(model: str, work: str, policy: str, rate: float, **more: Any) -> dict[str, Any]:
    """Returns a variant's config for `run_one`. `rate` is in requests/s for each prefill GPU. `more` are further keys:

    - `instances`: prefill instances, else 2; `groups`: layer groups, else 8
    - `requests`: measured requests, else 1,024; `warmup`: requests before them, else 512; `history`: requests before
      the run, whose prefixes are known, else `HISTORY`
    - `isolated`: collectives have ports of their own ("w/o contention")
    - `params` of the policy; `permits`: the fields of `Permits` in order, instead of ideal switches
    - `trace`: the published trace of a workload named mooncake-...
    - `pattern` of collectives, else "ring"; `drop_share` of Algorithm 1, else the form's
    """
    return {"model": model, "workload": work, "policy": policy, "rate": rate, **more}


# ----------------------------------------------------------------------------------------------------------- one run


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates the measured requests under one flow policy and returns the metrics of the run."""
    setup, requests = sim_config(config, seed), workload_of(config, seed)
    found = summarise(simulate(setup, requests[0]))
    found["reuse_share"] = requests[2]
    return found


@lru_cache(maxsize=8)
def _drawn(
    work: str, trace: str | None, rate_per_s: float, count: int, seed: int
) -> tuple[WorkloadRequest, ...]:
    """Returns `count` requests at the rate; of a trace, those from a row on that depends on the seed. Raises ValueError
    for a trace that has fewer.
    """
    if trace is None:
        return tuple(islice(workload(work, rate_per_s).stream(seed), count))
    rows = build(WorkloadSpec(name=trace), seed)
    if count > len(rows):
        raise ValueError(f"{trace} has {len(rows)} requests, the run needs {count}: ask for fewer of them")
    begin = (len(rows) - count) * (seed % 4) // 4
    return tuple(transform.at_rate(transform.rebase(rows[begin : begin + count]), rate_per_s))


def workload_of(config: Config, seed: int) -> tuple[list[WorkloadRequest], dict[int, str], float]:
    """Returns (requests in order of time from 0, blocks that are known before, share of prompt tokens reused)."""
    model = MODELS[config["model"]]
    warmup, measured = config.get("warmup", 512), config.get("requests", 1_024)
    ranks = config.get("instances", 2) * model.ranks
    rate_per_s = config["rate"] * ranks * model.gpus
    # Requests behind the measured ones keep the load up until these have ended.
    history = config.get("history", HISTORY)
    count = history + warmup + measured + warmup
    rows = _drawn(config["workload"], config.get("trace"), rate_per_s, count, seed)
    known: dict[int, str] = {}
    rng = random.Random(seed)
    for row in rows[:history]:
        node = f"node{rng.randrange(ranks)}"
        for block in row.block_hashes:
            known.setdefault(block, node)
    seen = set(known)
    begin_s = rows[history].at_s
    median = statistics.median(row.prompt_tokens for row in rows)
    made, reused = [], 0
    for row in rows[history:]:
        hits = 0
        for block in row.block_hashes[: (row.prompt_tokens - 1) // row.block_tokens]:
            if block not in seen:
                break
            hits += 1
        seen.update(row.block_hashes)
        hits *= row.block_tokens
        reused += hits
        made.append(
            dataclasses.replace(
                row,
                at_s=row.at_s - begin_s,
                output_tokens=1,
                session="",
                request_class="short" if row.prompt_tokens < median else "long",
                ttft_slo_s=SLO * alone_s(model, config, row.prompt_tokens, hits),
            )
        )
    return made, known, reused / sum(row.prompt_tokens for row in rows[history:])


def alone_s(model: Model, config: Config, prompt: int, reused: int) -> float:
    """Returns a request's TTFT in seconds at low load, alone under fair sharing: all groups' reused KV first, as they
    share the port, then the groups' computation and collectives, then the last group's KV.
    """
    groups, port = config.get("groups", 8), model.port_bytes_per_s
    group_s = (prompt - reused) * model.compute_s / (1.0 - model.exchange) / groups
    send_s = prompt * model.kv_bytes / groups / port
    # The slower of computing and sending a group sets the pace.
    fetch_s = reused * model.kv_bytes / port
    return fetch_s + group_s + (groups - 1) * max(group_s, send_s) + send_s + DECODE_S


def sim_config(config: Config, seed: int) -> SimConfig:
    """Returns the simulator's configuration of a cluster under one flow policy."""
    model, instances = MODELS[config["model"]], config.get("instances", 2)
    groups, ranks = config.get("groups", 8), model.ranks
    ports = instances * ranks
    requests, known, _ = workload_of(config, seed)
    topology = Topology.build(
        TopologyConfig(
            pods=1,
            racks_per_pod=1,
            nodes_per_rack=2 * ports,
            nvlink_gbyte_per_s=max(900.0, model.port_bytes_per_s / 1e9),
            nic_gbit_per_s=model.port_bytes_per_s * 8 / 1e9,
            rack_oversubscription=1.0,
            pod_oversubscription=1.0,
        )
    )
    profile = TimingProfile(
        source=f"{config['model']}: see benchmarks/experiments/mfs_common.py",
        prefill_base_s=0.0,
        prefill_per_token_s=model.compute_s,
        decode_base_s=DECODE_S,
        decode_per_seq_s=0.0,
        decode_per_kv_token_s=0.0,
        kv_bytes_per_token=model.kv_bytes,
        transfer_bandwidth_bytes_per_s=model.port_bytes_per_s,
        transfer_latency_s=0.0,
    )
    spans = tuple(tuple(f"node{i * ranks + rank}" for rank in range(ranks)) for i in range(instances))
    common: dict[str, Any] = {
        "slots": UNBOUNDED,
        "kv_blocks": UNBOUNDED,
        "block_size_tokens": requests[0].block_tokens,
        "prefix_cache": False,
        "lease_s": 600.0,
    }
    prefill = EngineSpec(
        "p",
        Role.PREFILL,
        instances,
        profile,
        prefill_budget_tokens=BUDGET_TOKENS,
        nodes=tuple(span[0] for span in spans),
        spans=spans,
        layers=LayerPlan(
            groups,
            model.exchanged_bytes / groups,
            pattern=config.get("pattern", "ring"),
            isolated=config.get("isolated", False),
        ),
        **common,
    )
    decode = EngineSpec(
        "d", Role.DECODE, ports, profile, nodes=tuple(f"node{ports + i}" for i in range(ports)), **common
    )
    permits = config.get("permits")
    form = FORMS.get(config["policy"], Form(config["policy"]))
    warmup = config.get("warmup", 512)
    return SimConfig(
        (prefill, decode),
        prefill=("join_shortest_queue", {}),
        decode=("round_robin", {}),
        dispatch=DispatchConfig(
            max_queue=UNBOUNDED,
            queue_timeout_s=600.0,
            overcommit_slots=UNBOUNDED,
            overcommit="always",
            seed=seed,
        ),
        control=dataclasses.replace(
            IDEAL, kv_events=False, request_timeout_s=600.0, prefill_limit_s=600.0, transfer_limit_s=600.0
        ),
        network=Fabric(topology, oracle_s=None),
        flows=FlowSetup(
            (form.policy, {**form.params, **config.get("params", {})}),
            permits=None if permits is None else Permits(*permits),
            known=known,
            drop_share=config.get("drop_share", form.drop_share),
        ),
        seed=seed,
        warmup_s=requests[warmup].at_s,
        measure_s=requests[warmup + config.get("requests", 1_024)].at_s - requests[warmup].at_s,
    )


# ----------------------------------------------------------------------------------------------------------- figures


def named(model: str, work: str, policy: str, rate: float, *more: str, **options: Any) -> Variant:
    """Returns a variant that is named after its parts."""
    return Variant(
        " ".join([model, work, *more, f"{rate:g}/s", policy]), config(model, work, policy, rate, **options)
    )


def change(
    results: Results,
    what: str,
    base: str,
    ours: str,
    metric: str,
    paper: float | None,
    at_least: float | None = None,
) -> Row:
    """Returns a row with the change of a mean from `base` to `ours` in per cent (negative: less).

    The aim is a change of at least `at_least` per cent downwards (the paper's figure where it is None).
    """
    percent, half = results.reduction_percent(base, ours, metric)
    goal = paper if at_least is None else at_least
    row = Row(what, paper, -percent, "%", half)
    return row if goal is None else aimed(row, f"at most {goal:g} %", most=goal)


def earliness(results: Results, what: str, rival: str, ours: str, paper: float | None) -> Row:
    """Returns a row with the change of the mean earliness against a rival's, in per cent.

    It is None where either has fewer than `ENOUGH` of its requests in time, or none in a seed. Karuna paces a transfer
    to end when it is due, so its earliness is nearly 0 and no base; the row then has our own, in per cent of the SLO.
    """
    few = [name for name in (rival, ours) if results.mean(name, "ttft_slo_share") < ENOUGH]
    if not few and rival.endswith(" karuna"):
        own = 100 * results.mean(ours, EARLY) if results.measured(ours, EARLY) else None
        return Row(f"{what}, of the SLO; Karuna's is nearly 0", None, own, "%")
    if not few and all(results.measured(name, EARLY) for name in (rival, ours)):
        return change(results, what, rival, ours, EARLY, paper)
    note = "a seed without a request in time"
    if few:
        note = f"fewer than {100 * ENOUGH:g} % in time: {', '.join(name.split()[-1] for name in few)}"
    return Row(what, paper, None, "%", None, "" if paper is None else f"at most {paper:g} %", None, note)


def ratio(results: Results, what: str, base: str, ours: str, metric: str, paper: float | None) -> Row:
    """Returns a row with the ratio of the means of `ours` and `base`; the aim is at least the paper's."""
    found = results.ratio(ours, base, metric) if results.mean(base, metric) else (None, None)
    row = Row(what, paper, found[0], "x", found[1])
    return row if paper is None else aimed(row, f"at least {paper:g}", least=paper)


def reuse_of(names: Sequence[str], results: Results) -> float:
    """Returns the mean share of reused prompt tokens over some variants, in per cent."""
    return 100.0 * statistics.fmean(results.mean(name, "reuse_share") for name in names)
