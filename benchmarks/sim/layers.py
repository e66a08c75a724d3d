"""A prefill engine whose step is a chain of layer groups (MFS; `LayerPlan`).

Group j computes for step_s / groups seconds. Then its collective, of prompt tokens x bytes per token, crosses the
network. Then group j + 1 begins.

After each group, its share of the KV of the prompts that end with this step may leave (`Owner.layer_done`), so
transfers overlap with the rest of the prefill. A chain that has begun always runs to its end.
"""

from benchmarks.sim.config import LayerPlan
from benchmarks.sim.engine import Meter, StepGroup, Worker
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.links import KvNetwork
from policies.engine_model.scheduler import Sequence


class LayeredGroup(StepGroup):
    """The step group of one prefill worker that has a `LayerPlan`."""

    def __init__(
        self, kernel: Kernel, worker: Worker, meter: Meter, plan: LayerPlan, network: KvNetwork
    ) -> None:
        super().__init__(kernel, [worker], meter)
        self._layers, self._network = plan, network
        self._done = 0
        self._ending: list[Sequence] = []

    def done_now(self) -> int:
        return 0

    def _cut(self) -> None:
        """Does nothing: sequences that arrive wait for the end of the chain."""

    def _wait(self) -> None:
        self._done = 0
        self._ending = self.workers[0].model.ending_prefills()
        self._compute()

    def _compute(self) -> None:
        plan = self._plans[0]
        assert plan is not None
        self.kernel.after(plan.first_s / self._layers.groups, self._computed)

    def _computed(self) -> None:
        plan, layers, worker = self._plans[0], self._layers, self.workers[0]
        assert plan is not None
        n_bytes = round(layers.collective_bytes_per_token * plan.prefill_tokens)
        if n_bytes == 0:
            self._group_done(None)
            return
        peer = layers.peer_node or worker.node
        self._network.start(
            worker.node, peer, n_bytes, layers.priority, self._group_done, source_nic=worker.nic
        )

    def _group_done(self, flow: object) -> None:
        self._done += 1
        worker, groups = self.workers[0], self._layers.groups
        ending = self._ending
        if self._done == groups:
            self._end()
        else:
            self._compute()
        worker.owner.layer_done(worker, ending, self._done, groups)
