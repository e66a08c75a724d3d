"""The cluster, workload and policies of `benchmarks.live.composition`, for a live app and for the simulator.

Prefill engines and half of the decode engines are in one rack, and the other half in another. Every prefill engine has
its own link into each rack; the link into the far rack has a quarter of the bandwidth. Decode steps grow with the batch
and its KV. Outputs are heavy-tailed, and clients differ in their lengths. Engines and router do not know the length of
an answer, only the cap (`max_tokens`), which is the same for all; a sim engine ends its answer after `min_tokens`.
`load` is the rate divided by what the decode slots carry when all slots run and each is also held for its transfer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.live.servers import Command
from benchmarks.live.targets import sluice_app
from benchmarks.sim import profiles
from benchmarks.sim.config import ControlPlane, EngineSpec, Forecasting, SimConfig
from benchmarks.sim.network.sender_links import SenderLinks
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.lengths import Lognormal
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Clients, Synthetic
from policies.admission.registry import DEFAULT as ADMIT
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import SMOLLM2_KV_BYTES_PER_TOKEN, TimingProfile
from policies.network.oracle import NodePlace
from policies.state.views import Role
from predictors.live import LivePredictor
from predictors.protocol import Arrival, Outcome, Predictor

MODEL = "sim"
# Network tiers: the same rack, and different pods.
NEAR, FAR = 1, 3
# The first seed of output lengths in the training part; rounds draw with lower seeds.
KEY_SPACE = 1 << 30
PREFILL_POLICY = "predicted_ttft"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The engines and links of the cluster, in seconds, tokens and bytes/s."""

    prefill: int = 4
    near: int = 4
    far: int = 4
    slots: int = 6
    near_bytes_per_s: float = 800e6
    far_bytes_per_s: float = 200e6
    latency_s: float = 1e-3
    prefill_base_s: float = 5e-3
    prefill_per_token_s: float = 5e-5
    step_base_s: float = 0.012
    step_per_seq_s: float = 0.0004
    step_per_kv_token_s: float = 4e-7

    @property
    def decode(self) -> int:
        return self.near + self.far

    def profile(self) -> TimingProfile:
        return TimingProfile(
            source="artificial, for benchmarks.live.composition: steps of 12 to 18 ms, prefills of 10 to 200 ms",
            prefill_base_s=self.prefill_base_s,
            prefill_per_token_s=self.prefill_per_token_s,
            decode_base_s=self.step_base_s,
            decode_per_seq_s=self.step_per_seq_s,
            decode_per_kv_token_s=self.step_per_kv_token_s,
            kv_bytes_per_token=SMOLLM2_KV_BYTES_PER_TOKEN,
            transfer_bandwidth_bytes_per_s=self.far_bytes_per_s,  # never used: every reader has a link
            transfer_latency_s=self.latency_s,
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """The workload. Outputs have a coefficient of variation of 1.8 before the cap, as `experiments.composition` has."""

    prompt_tokens: float = 1000.0
    prompt_cv: float = 0.6
    prompt_cap: int = 4000
    output_tokens: float = 60.0
    output_cv: float = 1.8
    output_cap: int = 300
    clients: int = 20
    client_spread: float = 0.25

    def outputs(self) -> Lognormal:
        return Lognormal.of_mean(self.output_tokens, self.output_cv, self.output_cap)

    def requests(self, rate_per_s: float, seconds: float, seed: int) -> list[WorkloadRequest]:
        """Returns the requests that come in `seconds`; lengths and clients depend on the seed but not on the rate."""
        drawn = Synthetic(
            "composition",
            Poisson(rate_per_s),
            prompt=Lognormal.of_mean(self.prompt_tokens, self.prompt_cv, self.prompt_cap),
            output=self.outputs(),
            clients=Clients(self.clients, 1.0, self.client_spread),
        ).stream(seed)
        return [self._plain(one) for one in takewhile(lambda one: one.at_s < seconds, drawn)]

    def _plain(self, one: WorkloadRequest) -> WorkloadRequest:
        """Returns the request without shared prefixes and with at least two output tokens.

        An answer with fewer tokens has no text.
        """
        tokens = max(2, one.output_tokens)
        return replace(one, output_tokens=tokens, max_tokens=self.output_cap, block_hashes=(), block_tokens=0)


@dataclass(frozen=True, slots=True)
class Contender:
    """A decode policy that is compared. With `users`, requests name their client, so lengths are forecast by client."""

    name: str
    policy: str
    params: Mapping[str, Any] = field(default_factory=dict)
    users: bool = True


def cases(cluster: Cluster) -> tuple[Contender, ...]:
    """Returns the policies to compare; the first is the base of the comparison.

    Of the engines, the policies know only the timing coefficients.
    """
    step = {"step_base_s": cluster.step_base_s, "step_per_seq_s": cluster.step_per_seq_s}
    own = {**step, "seconds_per_kv_token": cluster.step_per_kv_token_s}
    return (
        Contender("NetKV", "netkv", step),
        Contender("BR-H", "balance_route_h"),
        Contender("JSQ", "join_shortest_queue"),
        Contender("composition, users not told", "composition", own, users=False),
        Contender("composition", "composition", own),
    )


def capacity_per_s(cluster: Cluster, mix: Mix) -> float:
    """Returns the requests per second that the decode slots carry at the step time of full slots."""
    output = mix.outputs().mean_tokens
    kv_tokens = int(cluster.slots * (mix.prompt_tokens + output / 2))
    step_s = cluster.profile().step_s(0, cluster.slots, kv_tokens)
    n_bytes = mix.prompt_tokens * SMOLLM2_KV_BYTES_PER_TOKEN
    near, far = cluster.near / cluster.decode, cluster.far / cluster.decode
    move_s = cluster.latency_s + n_bytes * (near / cluster.near_bytes_per_s + far / cluster.far_bytes_per_s)
    return cluster.decode * cluster.slots / (output * step_s + move_s)


# ---------------------------------------------------------------------------------------------------------------- live


def command(cluster: Cluster, mix: Mix, folder: Path) -> Command:
    """Returns the command that starts the app under test.

    Its predictor starts without having learnt anything, and keeps no log, so no model is ever fitted.
    """
    file = folder / "network.yaml"
    file.write_text(yaml.safe_dump({"tiers": _tiers(cluster)}))
    args = {
        "model": {"path": MODEL, "name": MODEL},
        "engines": _groups(cluster, mix),
        "router": {
            "prefill": {"name": PREFILL_POLICY, "params": _prefill_params(cluster)},
            "network": {"file": str(file), "estimate": False},
            "predictor": {"enabled": True, "total_at_arrival": True},
        },
    }
    made = sluice_app("Sluice, composition on sim engines", folder / "composition.yaml", args, 300.0)
    return replace(made, env={"RAY_worker_niceness": "0"})


def _prefill_params(cluster: Cluster) -> dict[str, float]:
    return {"prefill_base_s": cluster.prefill_base_s, "prefill_per_token_s": cluster.prefill_per_token_s}


def _tiers(cluster: Cluster) -> dict[int, dict[str, float]]:
    return {
        NEAR: {"bandwidth_bytes_per_s": cluster.near_bytes_per_s, "latency_s": cluster.latency_s},
        FAR: {"bandwidth_bytes_per_s": cluster.far_bytes_per_s, "latency_s": cluster.latency_s},
    }


def _groups(cluster: Cluster, mix: Mix) -> list[dict[str, Any]]:
    profile, tiers = cluster.profile(), _tiers(cluster)
    timing = {name: getattr(profile, name) for name in profiles.FIELDS}
    options = {"profile": "tick_1ms", "timing": timing, "mean_output_tokens": 1.0}
    sending = options | {"links": {"near-*": tiers[NEAR], "far-*": tiers[FAR]}}
    decoding = options | {"slots": cluster.slots}
    return [
        _group("prefill", "prefill", cluster.prefill, sending, "r1"),
        _group("near", "decode", cluster.near, decoding, "r1"),
        _group("far", "decode", cluster.far, decoding, "r2"),
    ]


def _group(name: str, role: str, replicas: int, options: dict[str, Any], rack: str) -> dict[str, Any]:
    place = {"node": f"host-{name}", "rack": rack}
    return {
        "name": name, "role": role, "kind": "sim", "replicas": replicas, "options": options, "topology": place,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- simulated


def _cold(lengths: Mapping[str, int]) -> Predictor:
    """Returns the predictor that a router has before a model has been fitted."""
    return LivePredictor()


def history(trained_on: Sequence[WorkloadRequest]) -> tuple[Outcome, ...]:
    """Returns the outcomes of the training requests, one per millisecond, all before time 0."""
    seen = []
    for i, one in enumerate(trained_on):
        at_s = (i - len(trained_on)) * 1e-3
        arrival = Arrival(
            f"before-{i}", at_s - 1.0, one.prompt_tokens, max_tokens=one.max_tokens, client=one.client or None
        )
        seen.append(Outcome(arrival, one.output_tokens, at_s))
    return tuple(seen)


def simulated(
    cluster: Cluster, case: Contender, control: ControlPlane, trained_on: Sequence[WorkloadRequest], seed: int
) -> SimConfig:
    """Returns the simulator's configuration of the live cluster under the policy of `case`.

    Its predictor has learnt from `trained_on`.
    """
    profile = cluster.profile()
    groups = (
        ("prefill", Role.PREFILL, cluster.prefill, 256, "r1"),
        ("near", Role.DECODE, cluster.near, cluster.slots, "r1"),
        ("far", Role.DECODE, cluster.far, cluster.slots, "r2"),
    )
    specs = tuple(
        EngineSpec(name, role, count, profile, slots=slots) for name, role, count, slots, _ in groups
    )
    places = {f"{name}-{i}": NodePlace(rack) for name, _, count, _, rack in groups for i in range(count)}
    tiers = _tiers(cluster)
    network = SenderLinks(
        {tier: link["bandwidth_bytes_per_s"] for tier, link in tiers.items()},
        {tier: link["latency_s"] for tier, link in tiers.items()},
        places,
    )
    return SimConfig(
        specs,
        prefill=(PREFILL_POLICY, _prefill_params(cluster)),
        decode=(case.policy, case.params),
        admission=(ADMIT, {}),
        dispatch=DispatchConfig(seed=seed),
        control=control,
        network=network,
        forecasts=Forecasting(_cold, total_at_arrival=True, history=history(trained_on)),
        seed=seed,
    )


def asked(case: Contender, work: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Returns `work` as it is sent under `case`: without clients where the case does not name them."""
    return list(work) if case.users else [replace(one, client="") for one in work]


def training(mix: Mix, rate_per_s: float, seed: int, count: int) -> list[WorkloadRequest]:
    """Returns requests of the same clients that are sent before anything is measured; no block has the same ones."""
    return list(islice(mix.requests(rate_per_s, 4.0 * count / rate_per_s, KEY_SPACE + seed), count))
