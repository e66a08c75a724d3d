"""The router's knowledge of the flow agents: their figures, and the policy that orders KV transfers.

Agents connect to the router as engines do, and report once a second. The router passes a change of the policy on to all
of them, also to those that connect later. It does not schedule flows itself: agents go on as they are without it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actors.wire.channel import Channel
from actors.wire.messages import MOST_NODES, FlowAgentStatus, FlowReport, SetFlowPolicy, Status
from policies.flow.ahead import MOST_BANDS
from policies.flow.base import WEIGHTS_LEVEL
from policies.flow.registry import FLOW, flow_policy, parameters
from policies.journal.codec import dumps, loads
from policies.state.events import FlowsReported, PolicyChoice
from policies.state.views import NodeLoad, PortLoad


class FlowAgents:
    """The agents that are connected now, and the policy that was set."""

    def __init__(self) -> None:
        self._reports: dict[Channel, FlowReport] = {}
        # figures of agents that have left, so that totals never fall
        self._past: Counter[str] = Counter()
        self._last: dict[str, dict[str, float]] = {}
        self._set: SetFlowPolicy | None = None

    def __len__(self) -> int:
        return len(self._reports)

    def reported(self, channel: Channel, report: FlowReport) -> None:
        """Takes an agent's report. A new agent gets the policy that was set here. Raises ValueError for a figure
        that is no finite number, a load of a port that cannot be, a policy that does not exist, or a parameter that it
        cannot have.
        """
        if report.policy not in FLOW:
            raise ValueError(f"agent {report.node} uses a flow policy that is not known: {report.policy!r}")
        flow_policy(report.policy, _params(report.params))
        if not all(map(math.isfinite, (*report.totals.values(), *report.gauges.values()))):
            raise ValueError(f"agent {report.node} reports a figure that is no finite number")
        _check(report.loads, report.node)
        if channel not in self._reports and self._set is not None:
            channel.send(self._set)
        if channel not in self._reports and channel.peer is not None:
            last = self._last.pop(channel.peer.id, None)
            if last and all(report.totals.get(name, 0.0) >= total for name, total in last.items()):
                # the same process has connected again, and its totals go on
                self._past.subtract(last)
        self._reports[channel] = report

    def lost(self, channel: Channel) -> None:
        """Forgets an agent; its totals still count."""
        report = self._reports.pop(channel, None)
        if report is not None:
            self._past.update(report.totals)
            if channel.peer is not None:
                self._last[channel.peer.id] = dict(report.totals)

    def check(self, choice: PolicyChoice) -> None:
        """Raises ValueError for a policy that does not exist, a wrong parameter, or if no agent is connected."""
        flow_policy(choice.name, choice.params)
        if not self._reports:
            raise ValueError("no flow agent is connected: set flow.enabled in the configuration")

    def set_policy(self, choice: PolicyChoice) -> None:
        """Has all agents use this policy. Raises ValueError as `check` does."""
        self.check(choice)
        self._set = SetFlowPolicy(choice.name, dumps(dict(choice.params)).encode("ascii"))
        for channel in self._reports:
            channel.send(self._set)

    def policy(self) -> dict[str, Any] | None:
        """Returns the policy that agents use, for people; None without agents."""
        if not self._reports:
            return None
        if self._set is not None:
            return described_flow(self._set.name, _params(self._set.params))
        report = next(iter(self._reports.values()))
        return described_flow(report.policy, _params(report.params))

    def status(self) -> tuple[FlowAgentStatus, ...]:
        """Returns the agents that are connected now, by their nodes' names."""
        return tuple(_status(report) for report in sorted(self._reports.values(), key=lambda one: one.node))

    def totals(self) -> dict[str, float]:
        """Returns the totals of all agents, by the names of the router's metrics."""
        total = Counter(self._past)
        for report in self._reports.values():
            total.update(report.totals)
        return {f"flow_{name}": float(count) for name, count in total.items()}

    def gauges(self, engines: Iterable[Status] = ()) -> dict[str, float]:
        """Returns the number of agents, what all of them hold, and the share of the engines' reads that went
        unscheduled, which no agent hears of while it is dead.
        """
        gauges = {"flow_agents": float(len(self._reports))}
        if self._reports:
            for name in ("open", "held", "workers"):
                gauges[f"flow_{name}"] = sum(
                    report.gauges.get(name, 0.0) for report in self._reports.values()
                )
        counting = [one.totals for one in engines if "transfers_unscheduled" in one.totals]
        if counting:
            reads = sum(
                totals.get("transfers", 0.0) + totals.get("transfer_failures", 0.0) for totals in counting
            )
            unscheduled = sum(totals["transfers_unscheduled"] for totals in counting)
            gauges["flow_unscheduled_share"] = unscheduled / max(1.0, reads)
        return gauges


def events_of(report: FlowReport, now_s: float) -> list[FlowsReported]:
    """Returns what the reducer has to know of an agent's report, which `FlowAgents` has taken: an event a node."""
    choice = PolicyChoice(report.policy, _params(report.params))
    return [FlowsReported(now_s, choice, load) for load in report.loads]


def _check(reported: Sequence[NodeLoad], agent: str) -> None:
    """Raises ValueError for a load of a port that no agent can have."""
    if len(reported) > MOST_NODES:
        raise ValueError(
            f"agent {agent} reports the ports of {len(reported)} nodes: at most {MOST_NODES} may be"
        )
    for load in reported:
        for port in (load.egress, load.ingress):
            wrong = _wrong(port)
            if wrong:
                raise ValueError(f"agent {agent} reports a load of node {load.node} that cannot be: {wrong}")


def _wrong(port: PortLoad) -> str:
    rate = port.bytes_per_s
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        return f"{rate!r} bytes/s: it must be finite and above 0"
    if len(port.bands) > _MOST_BANDS:
        return f"{len(port.bands)} bands: at most {_MOST_BANDS} may be"
    for band in port.bands:
        if not (1 <= band.level <= WEIGHTS_LEVEL and band.flows >= 1 and band.size >= 1):
            return f"{band}: level, flows and bytes must be at least 1, and the level at most {WEIGHTS_LEVEL}"
        if any(map(math.isnan, band.key)):
            return f"{band}: its key must be numbers"
    return ""


_MOST_BANDS = max(MOST_BANDS, WEIGHTS_LEVEL)
_HELD_AT = "held_level_"


def _status(report: FlowReport) -> FlowAgentStatus:
    gauges, totals, kind = report.gauges, report.totals, "_bytes_per_s "
    ports = {name.replace(kind, " "): value for name, value in gauges.items() if kind in name}
    return FlowAgentStatus(
        node=report.node,
        policy=report.policy,
        open=int(gauges.get("open", 0)),
        held=int(gauges.get("held", 0)),
        granted=int(totals.get("permits", 0)),
        unscheduled_share=_unscheduled_share(totals),
        bytes_per_s=ports,
        held_by_level={
            name.removeprefix(_HELD_AT): int(number)
            for name, number in sorted(gauges.items())
            if name.startswith(_HELD_AT)
        },
    )


def _unscheduled_share(totals: Mapping[str, float]) -> float:
    """Returns the share of all reads that an agent has heard of, of which a part was posted without a permit."""
    unscheduled = sum(count for name, count in totals.items() if name.startswith("unscheduled_reads_"))
    return unscheduled / max(1.0, totals.get("submitted", 0.0))


def _params(params: bytes) -> dict[str, Any]:
    """Returns the parameters that a message carries. Raises ValueError for what is no JSON object."""
    found = loads(params.decode("ascii"))
    if not isinstance(found, dict):
        raise ValueError(f"the parameters of a flow policy are a JSON object, not {found!r}")
    return found


def described_flow(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """Returns a description of a flow policy for people: its name, all its parameters, and its formula."""
    policy = flow_policy(name, params)
    return {"name": name, "params": parameters(policy), "formula": policy.formula}


def available() -> dict[str, Any]:
    """Returns all flow policies by name, with their default parameters."""
    return {name: described_flow(name, {}) for name in FLOW}
