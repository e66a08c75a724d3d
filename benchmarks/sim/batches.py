"""The batches whose prompts are being computed, for the order between requests (Algorithm 1)."""

from collections.abc import Sequence

from benchmarks.sim.flow_driver import FlowDriver
from benchmarks.sim.kernel import Kernel
from policies.engine_model import scheduler


class Batches:
    """Tells the driver a new order whenever a batch arrives or departs."""

    def __init__(self, driver: FlowDriver, kernel: Kernel, port_bytes_per_s: float, budget: int) -> None:
        self._driver, self._kernel = driver, kernel
        self._port_bytes_per_s, self._budget = port_bytes_per_s, budget

    def began(
        self,
        batch: str,
        members: Sequence[scheduler.Sequence],
        compute_s: float,
        span: Sequence[str],
        collective_bytes: float,
    ) -> None:
        """Notes a batch that begins to compute."""

    def computed(self, batch: str) -> None:
        """Notes that a batch has been computed."""
