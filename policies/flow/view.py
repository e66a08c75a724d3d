"""A flow as `explain` shows it."""

from dataclasses import dataclass

from policies.flow.base import Stage, mlu
from policies.flow.ports import Held, PortTable


@dataclass(frozen=True, slots=True)
class FlowView:
    """Where a flow stands: its level and why, how far it has come, and how long it was held."""

    flow_id: str
    request_id: str
    stage: Stage
    level: int
    mlu: float | None
    """Minimal link utilisation; None without an explicit deadline."""
    rli: int
    pruned: bool
    left: int
    """Bytes that have not arrived."""
    posted: int
    """Bytes that were permitted and have not arrived."""
    permits: tuple[int, ...]
    """Bytes of each open permit, the oldest first."""
    held_s: float
    """Seconds for which none of the flow's chunks was on its way."""
    bytes_per_s: float
    """B(1-rho) between its ports."""
    unscheduled: bool
    """Whether its worker posted the rest without a permit."""


def view_of(state: Held, ports: PortTable, now_s: float) -> FlowView:
    """Returns the view of a flow that has been placed."""
    assert state.level is not None
    flow = state.flow
    return FlowView(
        flow_id=flow.flow_id,
        request_id=flow.request_id,
        stage=flow.stage,
        level=state.level,
        mlu=mlu(state, ports, now_s),
        rli=state.rli,
        pruned=state.pruned,
        left=state.left,
        posted=state.posted,
        permits=tuple(permit.size for permit in state.permits),
        held_s=state.held_s + (0.0 if state.stalled_at is None else max(now_s - state.stalled_at, 0.0)),
        bytes_per_s=ports.rate(flow.source, flow.target),
        unscheduled=state.unscheduled,
    )
