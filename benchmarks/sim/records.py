"""The data that a run produces, from which metrics are made: a record for each request, step statistics and counts."""

from dataclasses import dataclass, field

from benchmarks.sim.flow_driver import FlowStats
from policies.scaling.observation import Duty


@dataclass(slots=True)
class RequestRecord:
    """The record of one request. Its moments are seconds of virtual time, or None where the request never reached them.

    TTFT = first_token_s - arrived_s (to the decode engine's first token, as NetKV and MFS count it);
    `prefill_hit_tokens` were cached when the prompt was computed; of these `lent_tokens` were read from another engine.
    TPOT = (finished_s - first_token_s) / (output_tokens - 1); JCT = finished_s - arrived_s.
    """

    request_id: str
    request_class: str
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    prefill_worker: str | None = None
    decode_worker: str | None = None
    colocated: bool = False
    prefill_routed_s: float | None = None
    prefill_started_s: float | None = None
    prefill_done_s: float | None = None
    decode_routed_s: float | None = None
    transfer_started_s: float | None = None
    transfer_done_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    rejected: str | None = None
    rejected_s: float | None = None
    tier: int | None = None
    transfer_bytes: int = 0
    prefill_hit_tokens: int = 0
    lent_tokens: int = 0
    decode_hit_tokens: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    tenant: str = ""


@dataclass(slots=True)
class StepStats:
    """Sums over the decode steps of the measured window. A step is a barrier group's, or that of a worker without one.

    `imbalance_sum` is the sum over the steps of max_g L_g - min_g L_g in KV tokens. At a barrier it is exact. Workers
    without a barrier have no common step; there the mean over all progress reports counts for every step.
    `idle_s` is the time that workers waited at barriers, and `busy_s` the time that they computed. `full_steps` and
    `full_imbalance_sum` cover only the steps at a barrier in which every slot of every member ran.
    """

    steps: int = 0
    imbalance_sum: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0
    full_steps: int = 0
    full_imbalance_sum: float = 0.0

    @property
    def mean_imbalance_tokens(self) -> float:
        return self.imbalance_sum / self.steps if self.steps else 0.0

    @property
    def full_imbalance_tokens(self) -> float | None:
        """The mean imbalance in KV tokens over the steps in which every slot ran, or None if there was no such step."""
        return self.full_imbalance_sum / self.full_steps if self.full_steps else None


@dataclass(slots=True)
class FleetStats:
    """The record of a fleet that changes: engine-seconds of the measured window by duty, and counts of the whole run.

    `moved` counts the streams that an engine still had when its time to drain was over. `timeline` has a row for each
    change: the time, the active engines (prefill, decode, colocated), then the warm, starting and draining ones.
    """

    engine_s: dict[Duty, float] = field(default_factory=dict)
    starts: int = 0
    activations: int = 0
    switches: int = 0
    deactivations: int = 0
    stops: int = 0
    moved: int = 0
    timeline: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        """The engine-seconds of the measured window, whatever the engines' duty."""
        return sum(self.engine_s.values())


@dataclass(slots=True)
class RunResult:
    """Everything measured in one simulated run.

    `link_use` is the mean share of each link class that was busy. `decisions` counts by "policy: reason". `flows` is
    what was measured of scheduled flows, or None where no flow policy is configured. `fleet` is None where the fleet is
    fixed.
    """

    requests: list[RequestRecord]
    steps: StepStats
    duration_s: float
    kernel_events: int = 0
    link_use: dict[str, float] = field(default_factory=dict)
    tier_bytes: dict[int, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    flows: FlowStats | None = None
    fleet: FleetStats | None = None
