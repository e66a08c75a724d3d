"""The dispatcher's limits (`policies.dispatch.dispatcher` says what each does)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Limits of the dispatcher. Times in s. Raises ValueError for a value out of range."""

    max_queue: int = 1024
    """Requests that may wait for a prefill worker; one more and the least urgent is rejected with 429."""
    queue_timeout_s: float = 60.0
    """Wait before prefill after which a request is rejected with 503."""
    # ASSUMPTION: BalanceRoute D.1 has "a configurable threshold" and gives no value
    kv_high_water: float = 0.9
    """Share of a prefill worker's KV above which no prompt is sent to it."""
    status_stale_s: float = 3.0
    """Age of an engine's last report from which its KV counts as full."""
    # ASSUMPTION: the slowest pull we want to survive, of vLLM's 30 s lease
    lease_margin_s: float = 8.0
    """Time before the end of its lease at which a pool entry is rescued."""
    starvation_s: float = 2.0  # ASSUMPTION
    """Age of a pool entry from which nothing behind it may be sent before it."""
    reserve_tokens: int = 16
    """Free KV that a decode worker must have for each sequence besides the prompt."""
    overcommit_slots: int = 0
    """Sequences that a decode worker may get above its slots (BalanceRoute D.6)."""
    max_prefills: int = 2
    """Times that one request may be prefilled."""
    tick_entries: int = 512
    """Pool entries that one event may scan."""
    tick_admissions: int = 128
    """Pool entries that one event may send to decode workers or rescue."""
    seed: int = 0
    """Seed of the draws among equal costs."""

    def __post_init__(self) -> None:
        checks = [
            (self.max_queue >= 1, "max_queue must be >= 1"),
            (self.queue_timeout_s > 0, "queue_timeout_s must be > 0"),
            (0 < self.kv_high_water <= 1, "kv_high_water must be in (0, 1]"),
            (self.status_stale_s > 0, "status_stale_s must be > 0"),
            (self.lease_margin_s >= 0, "lease_margin_s must be >= 0"),
            (self.starvation_s >= 0, "starvation_s must be >= 0"),
            (self.reserve_tokens >= 0, "reserve_tokens must be >= 0"),
            (self.overcommit_slots >= 0, "overcommit_slots must be >= 0"),
            (self.max_prefills >= 1, "max_prefills must be >= 1"),
            (self.tick_entries >= 1, "tick_entries must be >= 1"),
            (self.tick_admissions >= 1, "tick_admissions must be >= 1"),
        ]
        for ok, message in checks:
            if not ok:
                raise ValueError(f"dispatch: {message}")

    def changed(self, fields: Mapping[str, Any]) -> "DispatchConfig":
        """A copy with these fields changed. Raises ValueError naming what is unknown, mistyped or out of range."""
        now = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "seed"}
        for name, value in fields.items():
            if name not in now:
                raise ValueError(f"dispatch: {name!r} cannot be changed at run time; {', '.join(now)} can")
            kinds = (int,) if type(now[name]) is int else (int, float)
            if type(value) not in kinds:
                wanted = "a whole number" if kinds == (int,) else "a number"
                raise ValueError(f"dispatch: {name} is {value!r}: it must be {wanted}")
        return dataclasses.replace(self, **fields)
