"""The facts from which the fleet can be simulated (`benchmarks.whatif.live`), as plain data."""

from typing import Any

from actors.router.clock import clock_s
from actors.router.engines import Engines
from actors.router.network.feed import RouterNetwork

_ANNOUNCED = (
    "id", "role", "kind", "group", "node", "state", "duty", "slots", "kv_blocks", "block_size_tokens",
    "max_model_len", "lease_s", "max_lease_s", "dp_ranks", "barrier",
)  # fmt: skip
"""The announced facts that are told."""


class FleetFacts:
    """The facts of one router's engines and network."""

    def __init__(self, engines: Engines, network: RouterNetwork) -> None:
        self._engines, self._network = engines, network

    def told(self) -> dict[str, Any]:
        """Returns every engine with the totals of its steps, and the network as configured and learnt."""
        now_s = clock_s()
        totals = {status.engine_id: status.totals for status in self._engines.statuses()}
        return {
            "at_s": now_s,
            "engines": [
                {**{name: getattr(info, name) for name in _ANNOUNCED}, "totals": totals.get(info.id, {})}
                for info in self._engines.infos()
            ],
            "network": self._network.told(now_s),
        }
