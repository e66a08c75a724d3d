"""The cluster and the workloads of the experiments `composition` and `scale`.

The cluster is NetKV's fat tree of Llama-3-70B engines (TP = 4, one in four does prefill). Its decode steps also grow
with the KV that they read, so both BalanceRoute's balance and NetKV's transfers matter. The decode workers of two pods
end their steps together (`barrier`, as data-parallel ranks under expert parallelism do), or each steps on its own.

All outputs have the same mean. `tail` "heavy" has a coefficient of variation of 1.8 before the cap (ServeGen's
reasoning clients have 1.52), and "light" has 0.3. `load` is the rate divided by what the tightest resource carries:
prefill, the uplinks of the senders' rack, or decode slots at the step time of full slots. Arrivals end with the
measured window, and the run waits for every request that came in it. So where one request overtakes another, the waits
of both count.

Each request has one of 20 clients, whose output lengths differ (as ServeGen's do). A deployable predictor learns from
this; it has learnt from `HISTORY` outcomes of these clients before the run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from itertools import islice, takewhile
from typing import Any

from benchmarks.experiments.base import Config
from benchmarks.sim import profiles
from benchmarks.sim.config import ControlPlane, EngineSpec, Forecasting, SimConfig
from benchmarks.sim.network.clusters import Instance, netkv_cluster, netkv_instances, prefill_and_decode
from benchmarks.sim.network.fabric import Fabric, nodes_and_nics
from benchmarks.sim.network.topology import RACK, Topology
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.lengths import Lognormal
from benchmarks.workloads.prefixes import Sharing
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Clients, Synthetic
from policies.dispatch.dispatcher import DispatchConfig
from policies.state.views import Role
from predictors.memorise import CLIENT, Memorised
from predictors.oracle import Oracle
from predictors.protocol import Arrival, Outcome, Predictor

# 328 kB of KV a token read at 60 % of 4 x 3.35 TB/s (H100's data sheet). ASSUMPTION: the share
SECONDS_PER_KV_TOKEN = 327_680 / (0.6 * 4 * 3.35e12)
# ASSUMPTION: prefill at 15,500 tokens a second, whatever the prompts: 2 x 70e9 FLOP a token at 55 % of 4 x 990 TFLOPS.
# NetKV's own fit has a part per prompt, which is a latency there and would be a throughput here.
PREFILL_SECONDS_PER_TOKEN = 6.43e-5
PROFILE = dataclasses.replace(
    profiles.load("netkv_llama3_70b_tp4_h100"),
    prefill_base_s=0.0,
    prefill_per_token_s=PREFILL_SECONDS_PER_TOKEN,
    decode_per_kv_token_s=SECONDS_PER_KV_TOKEN,
)
BLOCK_TOKENS = 256
KV_TOKENS = 4 * 45 * 10**9 // PROFILE.kv_bytes_per_token  # 45 GB of free HBM a GPU (NetKV VI-A)
SLOTS = 8  # ASSUMPTION: BalanceRoute's Table 1 implies some nine long contexts a worker
# ServeGen's reasoning clients have a mean of 1,527; a shorter run takes less.
OUTPUT_TOKENS = 1_200.0
OUTPUT_CAP_TOKENS = 6_000
OUTPUT_CV = {"light": 0.3, "heavy": 1.8}
# BalanceRoute's Table 1 has a deviation of 25,000 and a mean of 42,500.
PROMPT_CV = 0.6
SHARING = Sharing(0.3, groups=64, covered=(0.3, 0.7), block_tokens=BLOCK_TOKENS)  # ASSUMPTION
CLIENTS = Clients(clients=20, zipf=1.0, spread=0.25)  # ASSUMPTION, as in `benchmarks.workloads.standins`
HISTORY, HISTORY_SEED = 1_000, 1_000_000
# The decode engines of two pods, which is all that 64 GPUs have.
BARRIER_WORKERS = 12
MANY = 1_000_000
STEP = {"step_base_s": PROFILE.decode_base_s, "step_per_seq_s": PROFILE.decode_per_seq_s}


def _placed(config: Config) -> tuple[Topology, list[Instance], list[Instance]]:
    topology = netkv_cluster(config["gpus"], config["oversubscription"])
    return topology, *prefill_and_decode(netkv_instances(topology))


def outputs(config: Config) -> Lognormal:
    """Returns the distribution of output lengths; apart from the cap, both tails have the same mean."""
    mean = config.get("output_tokens", OUTPUT_TOKENS)
    return Lognormal.of_mean(mean, OUTPUT_CV[config["tail"]], OUTPUT_CAP_TOKENS)


def capacity_per_s(config: Config) -> float:
    """Returns the requests per second that the tightest resource carries, without regard to prefix hits and queues."""
    mean = config.get("output_tokens", OUTPUT_TOKENS)
    return carried_per_s(config, config["context_tokens"], mean, outputs(config).mean_tokens)


def carried_per_s(config: Config, context: int, expected: float, mean: float) -> float:
    """Returns the requests per second that the tightest resource carries, for prompts of `context` tokens and outputs
    of `mean` tokens, where a full step has half of the `expected` output beside each context.
    """
    topology, prefill, decode = _placed(config)
    racks = {topology.node(i.node).rack for i in prefill}
    uplinks = len(racks) * topology.config.aggs_per_pod * topology.class_bytes_per_s[RACK]
    slots = config.get("slots", SLOTS)
    full_s = PROFILE.step_s(0, slots, int(slots * (context + expected / 2)))
    return min(
        len(prefill) / (context * PROFILE.prefill_per_token_s),
        uplinks / PROFILE.kv_bytes(context),
        len(decode) * slots / (mean * full_s),
    )


def _requests(config: Config) -> Synthetic:
    return Synthetic(
        "composition",
        Poisson(config["load"] * capacity_per_s(config)),
        prompt=Lognormal.of_mean(config["context_tokens"], PROMPT_CV, 65_536),
        output=outputs(config),
        clients=CLIENTS,
        sharing=SHARING,
        block_tokens=BLOCK_TOKENS,
    )


def workload(config: Config, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of warm-up and window; their lengths are the same at every load."""
    end_s = config["warmup_s"] + config["measure_s"]
    return list(takewhile(lambda r: r.at_s < end_s, _requests(config).stream(seed)))


@functools.lru_cache(maxsize=4)
def history(tail: str) -> tuple[Outcome, ...]:
    """Returns outcomes of the same clients that ended before the run, one per second.

    They are drawn with a seed that is never measured.
    """
    config = {"tail": tail, "context_tokens": 4_000, "load": 1.0, "gpus": 64, "oversubscription": 4.0}
    seen = islice(_requests(config).stream(HISTORY_SEED), HISTORY)
    return tuple(
        Outcome(
            Arrival(
                r.request_id, at_s - 1.0, r.prompt_tokens, client=r.client, traffic_class=r.request_class
            ),
            r.output_tokens,
            at_s,
        )
        for at_s, r in zip(range(-HISTORY, 0), seen, strict=True)
    )


def _oracle(lengths: Mapping[str, int]) -> Predictor:
    return Oracle(lengths)


def _client(lengths: Mapping[str, int]) -> Predictor:
    """Returns a predictor that has learnt the distribution of each client's output lengths."""
    return Memorised((CLIENT,))


def _forecasting(config: Config) -> Forecasting | None:
    name = config.get("forecasts")
    if name is None:
        return None
    known = history(config["tail"]) if name == "client" else ()
    return Forecasting(FORECASTS[name], total_at_arrival=True, history=known)


FORECASTS = {"oracle": _oracle, "client": _client}


def _limits(config: Config) -> dict[str, Any]:
    """Returns the limits of the dispatcher that `config` sets."""
    return {name: config[name] for name in ("overcommit_slots",) if name in config}


def sim_config(config: Config, seed: int) -> SimConfig:
    """Returns the simulator's configuration of one run of the policy in `config`."""
    topology, prefill, decode = _placed(config)

    def engines(name: str, role: Role, where: list[Instance], **more: Any) -> EngineSpec:
        nodes, nics = nodes_and_nics(topology, where)
        return EngineSpec(
            name, role, len(where), PROFILE, nodes=nodes, nics=nics, block_size_tokens=BLOCK_TOKENS, **more
        )

    return SimConfig(
        (
            engines("p", Role.PREFILL, prefill, slots=MANY, kv_blocks=MANY, lease_s=120.0),
            *(
                engines(
                    f"d{i}",
                    Role.DECODE,
                    decode[i * BARRIER_WORKERS : (i + 1) * BARRIER_WORKERS],
                    slots=config.get("slots", SLOTS),
                    kv_blocks=KV_TOKENS // BLOCK_TOKENS,
                    barrier=f"b{i}" if config["barrier"] else "",
                )
                for i in range(len(decode) // BARRIER_WORKERS)
            ),
        ),
        prefill=("predicted_ttft", {}),
        decode=(config["policy"], config["params"]),
        # the policies alone are compared: the papers' parts know neither of the dispatcher's two rules
        dispatch=DispatchConfig(
            queue_timeout_s=600.0,
            max_queue=MANY,
            starvation_s=math.inf,
            overdue_by_slo=False,
            seed=seed,
            **_limits(config),
        ),
        control=ControlPlane(status_s=0.25, progress_s=0.25, forecast_s=0.25),
        network=Fabric(topology),
        forecasts=_forecasting(config),
        seed=seed,
        warmup_s=config["warmup_s"],
        measure_s=config["measure_s"],
        drain=config.get("drain", True),
    )
