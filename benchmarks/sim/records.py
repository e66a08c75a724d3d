"""The data of a run: one record a request, and the series that metrics are made of. Plain data."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """The life of one request, in seconds of virtual time; None = it never got there. Tokens and bytes are counts.

    TTFT = first_token_s - arrived_s (to the decode engine's first token, as NetKV and MFS count it);
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
    tier: int | None = None
    transfer_bytes: int = 0
    prefill_hit_tokens: int = 0
    decode_hit_tokens: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


@dataclass(slots=True)
class StepStats:
    """Decode steps of the measured window, all together. For a barrier group a step is the group's, else a worker's.

    `imbalance_sum` sums max_g L_g - min_g L_g in KV tokens over the steps: exact at a barrier; without one there is no
    common step, and the mean over time (looked at with each progress report) counts for every step.
    `idle_s` is what workers waited at barriers, `busy_s` what they computed. `full_steps` and `full_imbalance_sum` are
    of those steps at a barrier in which every slot of every member ran.
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
        """Mean imbalance over the steps in which every slot ran; None if there was none."""
        return self.full_imbalance_sum / self.full_steps if self.full_steps else None


@dataclass(slots=True)
class RunResult:
    """Everything measured in one simulated run. `link_use` is the mean share of each link class that was busy."""

    requests: list[RequestRecord]
    steps: StepStats
    duration_s: float
    kernel_events: int = 0
    link_use: dict[str, float] = field(default_factory=dict)
    tier_bytes: dict[int, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)  # "policy: reason" -> count
    peaks: dict[str, float] = field(default_factory=dict)
