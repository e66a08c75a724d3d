"""Durations of an engine's work: a step, a prefill, a KV transfer.

    t_step = [prefill_base_s + prefill_per_token_s * p   if p > 0]
           + [decode_base_s + decode_per_seq_s * n + decode_per_kv_token_s * K   if n > 0]
    t_transfer = transfer_latency_s + bytes / transfer_bandwidth_bytes_per_s

p: prompt tokens computed in the step; n: sequences that decode in it; K: their KV tokens (docs/design.md 3.3's t_iter
with the KV term of BalanceRoute's load). Only a colocated engine has steps with both parts; each part delays the other.
Not claimed: the quadratic part of attention in a prefill, jumps of kernel time at certain batch sizes, transfers that
slow computation.
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class TimingProfile:
    """Timing coefficients of one kind of engine; `source` says where they come from.

    Raises ValueError for an impossible coefficient.
    """

    source: str
    prefill_base_s: float
    prefill_per_token_s: float
    decode_base_s: float
    decode_per_seq_s: float
    decode_per_kv_token_s: float
    kv_bytes_per_token: int
    transfer_bandwidth_bytes_per_s: float
    transfer_latency_s: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "source" and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"TimingProfile.{item.name} is {value}: it must be a finite number >= 0")
        if self.decode_base_s + self.decode_per_seq_s <= 0:
            raise ValueError("TimingProfile: a decode step must take time; set decode_base_s above 0")
        if self.prefill_base_s + self.prefill_per_token_s <= 0:
            raise ValueError("TimingProfile: a prefill must take time; set prefill_base_s above 0")
        if self.transfer_bandwidth_bytes_per_s <= 0:
            raise ValueError("TimingProfile.transfer_bandwidth_bytes_per_s must be above 0")

    def step_s(self, prefill_tokens: int, decode_seqs: int, kv_tokens: int) -> float:
        """Returns the seconds of one step that computes `prefill_tokens` prompt tokens and decodes `decode_seqs`
        sequences, which hold `kv_tokens` KV tokens together.
        """
        seconds = 0.0
        if prefill_tokens:
            seconds += self.prefill_base_s + self.prefill_per_token_s * prefill_tokens
        if decode_seqs:
            seconds += (
                self.decode_base_s
                + self.decode_per_seq_s * decode_seqs
                + self.decode_per_kv_token_s * kv_tokens
            )
        return seconds

    def kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of the KV of `tokens` tokens."""
        return tokens * self.kv_bytes_per_token

    def transfer_s(self, n_bytes: int) -> float:
        """Returns the seconds to move `n_bytes` of KV between two engines; 0 bytes need no transfer."""
        if n_bytes == 0:
            return 0.0
        return self.transfer_latency_s + n_bytes / self.transfer_bandwidth_bytes_per_s


# SmolLM2-135M: 30 layers x (K and V) x 3 KV heads x 64 x 2 bytes (its config.json).
SMOLLM2_KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2

TICK_1MS = TimingProfile(
    source="artificial: one millisecond a step whatever the batch, for overhead benchmarks and tests",
    prefill_base_s=1e-3,
    prefill_per_token_s=0.0,
    decode_base_s=1e-3,
    decode_per_seq_s=0.0,
    decode_per_kv_token_s=0.0,
    kv_bytes_per_token=SMOLLM2_KV_BYTES_PER_TOKEN,
    transfer_bandwidth_bytes_per_s=10e9,
    transfer_latency_s=1e-4,
)

CPU_SMOLLM2 = TimingProfile(
    source="docs/design.md 8, SmolLM2-135M on one core: a lone sequence 55 ms a step, a batch of 32 90 ms (so 1.1 ms a "
    "sequence), prefill 210 tokens/s, 679 tokens moved in 3.5 ms; ASSUMPTION: a KV token is 23 kB read at 10 GB/s",
    prefill_base_s=0.02,  # ASSUMPTION
    prefill_per_token_s=1 / 210,
    decode_base_s=0.054,
    decode_per_seq_s=0.0011,
    decode_per_kv_token_s=2.3e-6,
    kv_bytes_per_token=SMOLLM2_KV_BYTES_PER_TOKEN,
    transfer_bandwidth_bytes_per_s=16.9 * 2**20 / 3.4e-3,
    transfer_latency_s=1e-4,
)

PROFILES: dict[str, TimingProfile] = {"tick_1ms": TICK_1MS, "cpu_smollm2": CPU_SMOLLM2}
