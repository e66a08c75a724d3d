"""The dispatcher's limits (`policies.dispatch.dispatcher` says what each does)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from policies.routing.params import Number, Whole, check


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Limits of the dispatcher. Times in s. Raises ValueError for a value out of range."""

    max_queue: Annotated[int, Whole(1, unit="requests")] = 1024
    """Requests that may wait for a prefill worker; one more and the least urgent is rejected with 429."""
    queue_timeout_s: Annotated[float, Number(above=0, unit="s")] = 60.0
    """Wait before prefill after which a request is rejected with 503."""
    # ASSUMPTION: BalanceRoute D.1 has "a configurable threshold" and gives no value
    kv_high_water: Annotated[float, Number(above=0, high=1)] = 0.9
    """Share of a prefill worker's KV above which no prompt is sent to it."""
    status_stale_s: Annotated[float, Number(above=0, unit="s")] = 3.0
    """Age of an engine's last report from which its KV counts as full."""
    # ASSUMPTION: the slowest pull we want to survive, of vLLM's 30 s lease
    lease_margin_s: Annotated[float, Number(low=0, unit="s")] = 8.0
    """Time before the end of its lease at which a pool entry is rescued."""
    starvation_s: Annotated[float, Number(low=0, unit="s")] = 2.0  # ASSUMPTION
    """Age of a pool entry from which nothing behind it may be sent before it."""
    reserve_tokens: Annotated[int, Whole(0, unit="tokens")] = 16
    """Free KV that a decode worker must have for each sequence besides the prompt."""
    overcommit_slots: Annotated[int, Whole(0, unit="slots")] = 0
    """Sequences that a decode worker may get above its slots (BalanceRoute D.6)."""
    max_prefills: Annotated[int, Whole(1)] = 2
    """Times that one request may be prefilled."""
    tick_entries: Annotated[int, Whole(1, unit="entries")] = 512
    """Pool entries that one event may scan."""
    tick_admissions: Annotated[int, Whole(1, unit="entries")] = 128
    """Pool entries that one event may send to decode workers or rescue."""
    seed: int = 0
    """Seed of the draws among equal costs."""

    def __post_init__(self) -> None:
        check(self, "dispatch")

    def changed(self, fields: Mapping[str, Any]) -> "DispatchConfig":
        """A copy with these fields changed. Raises ValueError naming what is unknown, mistyped or out of range."""
        now = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "seed"}
        for name in fields:
            if name not in now:
                raise ValueError(f"dispatch: {name!r} cannot be changed at run time; {', '.join(now)} can")
        return dataclasses.replace(self, **fields)
