"""Observations for tests of scaling policies: one class, engines by count."""

from policies.scaling.observation import ClassWindow, Duty, EngineView, Leads, Observation
from policies.state.views import Role
from tests.policies.scaling.fleet import CAPABILITY

PROMPT_TOKENS, OUTPUT_TOKENS = 2_000, 100


def engines(
    prefill: int, decode: int, colocated: int = 0, warm: int = 0, starting: int = 0
) -> tuple[EngineView, ...]:
    """Returns that many idle engines."""
    groups = (
        (prefill, Role.PREFILL, Duty.ACTIVE, "p"),
        (decode, Role.DECODE, Duty.ACTIVE, "d"),
        (colocated, Role.COLOCATED, Duty.ACTIVE, "c"),
        (warm, Role.DECODE, Duty.WARM, "w"),
        (starting, Role.DECODE, Duty.STARTING, "s"),
    )
    return tuple(
        EngineView(f"{letter}{i}", role, duty) for number, role, duty, letter in groups for i in range(number)
    )


def seen(
    rate: float,
    fleet: tuple[EngineView, ...],
    window: int = 0,
    now_s: float | None = None,
    met: int = 100,
    missed: int = 0,
    queued: int = 0,
    pooled: int = 0,
    ttft_p90_s: float | None = 1.0,
) -> Observation:
    """Returns an observation of `rate` requests/s in a window of ten seconds."""
    arrived = round(10 * rate)
    one = ClassWindow(
        "chat",
        10.0,
        arrived,
        arrived * PROMPT_TOKENS,
        0,
        float(arrived * OUTPUT_TOKENS),
        met,
        missed,
        ended=met + missed,
        output_tokens=(met + missed) * OUTPUT_TOKENS,
        ttft_slo_s=2.0,
        tpot_slo_s=0.05,
        ttft_p90_s=ttft_p90_s,
        tpot_p90_s=0.02,
    )
    at_s = 10.0 * (window + 1) if now_s is None else now_s
    leads = Leads(1.0, 1.0, 60.0)
    return Observation(at_s, window, (one,), fleet, CAPABILITY, leads, queued, pooled)
