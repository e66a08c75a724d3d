"""The interface of a simulated network, and the network without contention that is used where none is configured."""

from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.sim.kernel import Kernel, Timer
from policies.engine_model.timing import TimingProfile

Done = Callable[[Any], None]
"""A callback that is called with a flow when its last byte has arrived."""


class KvNetwork(Protocol):
    """The interface of a network that moves bytes between nodes in virtual time.

    Each network has its own type of flow. `benchmarks.sim.network` is the fat tree.
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
        """Starts a flow of `n_bytes` and returns it. Priority 0 is the most urgent.

        NICs that are not given are drawn. Flows with the same `path_key` take the same path.
        """
        ...

    def cancel(self, flow: Any) -> None:
        """Ends a flow early; its `on_done` is never called."""
        ...

    def tier(self, source: str, target: str) -> int:
        """Returns the tier of two nodes: 0 for the same node, 1 the same rack, 2 the same pod, 3 different pods."""
        ...

    def mark(self) -> None:
        """Begins the period over which `link_use` measures."""
        ...

    def link_use(self) -> dict[str, float]:
        """Returns the mean busy share of each class of links since the last `mark`."""
        ...


class FixedLinks:
    """A network in which every flow has the latency and bandwidth of a profile to itself.

    The tier is 0 within a node, else 3, and makes no difference to a flow.
    """

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
        """Does nothing: these links are never shared, so their use is not measured."""

    def link_use(self) -> dict[str, float]:
        return {}
