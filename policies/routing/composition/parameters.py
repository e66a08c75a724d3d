"""The parameters of the composition, which `round` reads and `composition` names in its formulas."""

from dataclasses import dataclass
from typing import Annotated

from policies.routing.balance.stages import MAX_WINDOW
from policies.routing.params import Number, OneOf, Whole

CREDITS = ("wait", "tokens")


@dataclass(frozen=True, slots=True)
class Parameters:
    """The weights, horizons and limits of a round of the composition."""

    # ASSUMPTION: this default, and those below that `netkv` and `balance_route_h` mark as assumptions.
    horizon: Annotated[int, Whole(0, 4096, "steps")] = 48
    """H, the number of decode steps that the lookahead covers."""
    gamma: Annotated[float, Number(above=0.0, high=1.0)] = 0.9
    """Discount factor of each further step."""
    # ASSUMPTION: a token has 100 kB of KV, which is read at 1 TB/s.
    seconds_per_kv_token: Annotated[float, Number(low=0.0, unit="s")] = 1e-7
    """Time by which a KV token makes a decode step longer."""
    # ASSUMPTION: the next three defaults, `near_scarcity` and `ageing_s` are the best of the few values that
    # docs/composition.md lists, on seeds 100 to 105 of `python -m benchmarks run composition`.
    hold_steps: Annotated[float, Number(low=0.0, unit="steps")] = 300.0
    """D, the number of decode steps for which an overflow lasts."""
    stream_weight: Annotated[float, Number(high=1.0, above=0.0)] = 0.01
    """Weight u of a second of streaming against a second of waiting."""
    scarcity: Annotated[float, Number(low=0.0)] = 8.0
    """Exponent k of the occupancy; the power is the estimated chance that a request has to wait."""
    step_base_s: Annotated[float, Number(above=0.0, unit="s")] = 0.02
    """Fixed time of a decode step; fit it to the engines deployed."""
    step_per_seq_s: Annotated[float, Number(low=0.0, unit="s")] = 0.0005
    """Time that each sequence adds to a decode step; fit it to the engines deployed."""
    max_inflight: Annotated[int, Whole(0, 1_000_000, "transfers")] = 16
    """Largest number of transfers in flight per sender that is counted."""
    strict_priorities: bool = False
    """Whether only transfers of the same or a higher class count."""
    wait_s: Annotated[float, Number(above=0.0, unit="s")] = 0.5  # ASSUMPTION
    """Time until an entry's next chance to be admitted."""
    max_weight: Annotated[float, Number(low=1.0)] = 8.0  # ASSUMPTION
    """Largest weight of a request whose slack runs out."""
    cost_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of transfer, queue and first step."""
    credit: Annotated[str, OneOf(CREDITS)] = "wait"
    """Kind of credit that an admission earns: the wait that it saves, or `credit_s_per_token` for each prompt token."""
    credit_s_per_token: Annotated[float, Number(above=0.0, unit="s")] = 1e-6
    """Credit for each prompt token with `credit: tokens`."""
    rent_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the wait that a held slot causes to the pool."""
    near_scarcity: Annotated[float, Number(low=0.0)] = 3.0
    """Exponent of the occupancy; the power is the estimated chance that no near slot is free."""
    # With null the mean wait is least, and its 95th percentile twice as long.
    ageing_s: Annotated[float, Number(above=0.0, unit="s")] | None = 1.0
    """Wait in the pool that is worth one request-second. With null waits do not count."""
    window: Annotated[int, Whole(1, MAX_WINDOW, "entries")] = 8
    """W, the number of pool entries from which stage 2 chooses."""
    abundance: Annotated[float, Number(low=0.0, unit="slots")] = 1.0
    """Free slots per pool entry at or above which each entry takes its best worker."""
    max_wait_s: Annotated[float, Number(low=0.0, unit="s")] | None = None
    """Wait in the pool after which an entry is overdue and is placed before all others of its class. With null only
    entries are overdue that must not wait by the dispatcher's rules (`PoolEntry.is_overdue`, `is_pressing`).
    """
    reserve_tokens: Annotated[int, Whole(0, 1_000_000, "tokens")] = 16
    """Free KV kept for each sequence besides its prompt, as `DispatchConfig.reserve_tokens`."""
