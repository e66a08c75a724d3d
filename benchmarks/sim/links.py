"""The network as the cluster needs it, and the one it has when none is given: a fixed bandwidth per transfer."""

from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.sim.kernel import Kernel, Timer
from policies.engine_model.timing import TimingProfile

Done = Callable[[Any], None]
"""Called with the flow, when its last byte is there."""


class KvNetwork(Protocol):
    """A network that moves bytes between nodes in virtual time; `benchmarks.sim.network` has the fat tree. Flows are
    of its own type.
    """

    def start(
        self,
        source: str,
        target: str,
        n_bytes: int,
        priority: int,
        on_done: Done,
        *,
        source_nic: int | None = None,
        target_nic: int | None = None,
        path_key: str | None = None,
    ) -> Any:
        """Begins a flow, level 0 first. NICs are drawn unless given; flows with one `path_key` take one path."""
        ...

    def cancel(self, flow: Any) -> None:
        """Ends a flow that is not over; its `on_done` never runs."""
        ...

    def tier(self, source: str, target: str) -> int:
        """Tier of two nodes: 0 same node, 1 same rack, 2 same pod, 3 beyond."""
        ...

    def mark(self) -> None:
        """Begins the stretch over which `link_use` measures."""
        ...

    def link_use(self) -> dict[str, float]:
        """Mean busy share of each class of links since the last `mark`."""
        ...


class FixedLinks:
    """Every flow has a profile's latency and bandwidth to itself, wherever it goes (tier 0 within a node, else 3)."""

    def __init__(self, kernel: Kernel, profile: TimingProfile) -> None:
        self._kernel = kernel
        self._profile = profile

    def start(
        self,
        source: str,
        target: str,
        n_bytes: int,
        priority: int,
        on_done: Done,
        **path: Any,
    ) -> Timer:
        timer = self._kernel.after(self._profile.transfer_s(n_bytes), lambda: on_done(timer))
        return timer

    def cancel(self, flow: Timer) -> None:
        flow.cancel()

    def tier(self, source: str, target: str) -> int:
        return 0 if source == target else 3

    def mark(self) -> None:
        """Does nothing: these links have no use."""

    def link_use(self) -> dict[str, float]:
        return {}
