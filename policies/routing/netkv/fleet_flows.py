"""NetKV's network term with all senders' transfers in it, for `composition`.

    n[tau] = transfers of all P senders on tier tau or farther / P    -> Worker.transfers of the P prefill workers

NetKV counts the sender's own ones. What narrows a path, though, is shared by all senders: uplinks of racks and pods,
and farther transfers use the nearer tiers' links too. A fat tree has as many links a level as NICs below it and spreads
flows over them, so that a flow meets the mean number a NIC, not its own sender's. ASSUMPTION: senders are alike.
"""

from collections.abc import Sequence

from policies.routing.netkv.network_term import NetworkTerm
from policies.state.views import Role, Snapshot, Worker, WorkerId


class FleetFlows:
    """The transfers of all senders as of one snapshot. `lowest_priority`: only those of that class or a higher one."""

    def __init__(self, snapshot: Snapshot, lowest_priority: int | None = None) -> None:
        self._snapshot = snapshot
        senders = [worker for worker in snapshot.workers.values() if worker.role is Role.PREFILL]
        self.senders = max(1, len(senders))
        self.by_tier: dict[int, int] = {}  # transfers
        for sender in senders:
            for to, priority, flows in sender.transfers:
                receiver = snapshot.workers.get(to)
                if receiver is not None and (lowest_priority is None or priority <= lowest_priority):
                    self.add(sender.id, receiver, flows)

    def add(self, sender: WorkerId, receiver: Worker, flows: int) -> None:
        """More transfers on the way."""
        oracle, source = self._snapshot.oracle, self._snapshot.workers.get(sender)
        if oracle is not None and source is not None:
            tier = oracle.tier(sender, source.node, receiver.id, receiver.node)
            if tier is not None:
                self.by_tier[tier] = self.by_tier.get(tier, 0) + flows

    def flows(self, tier: int) -> float:
        """n[tau]."""
        return sum(flows for at, flows in self.by_tier.items() if at >= tier) / self.senders


class FleetNetworkTerm(NetworkTerm):
    """From `sender`. The fleet's transfers count up to `most`, and only if the oracle's congestion excludes them."""

    def __init__(
        self, snapshot: Snapshot, sender: WorkerId, workers: Sequence[Worker], most: int, fleet: FleetFlows
    ) -> None:
        self._fleet, self._cap = fleet, most
        super().__init__(snapshot, sender, workers, True, None)
        self._counted = snapshot.oracle is not None and snapshot.oracle.own_flows_excluded

    def flows(self, tier: int) -> float:
        return min(float(self._cap), self._fleet.flows(tier)) if self._counted else 0.0

    def moved(self) -> None:
        """The fleet's transfers are others now."""
        self._terms.clear()
        self._shown.clear()
