"""A prefill engine on several nodes, whose layer groups wait for reused KV and end with an all-to-all (MFS 2.2, 3.1).

A step computes its groups of layers one after another. Group j

    waits      until the KV that its requests reuse has arrived for group j            (stage 1)
    computes   for step_s / groups
    exchanges  activations among the instance's nodes, which blocks group j + 1        (stage 2)
    releases   its share of the KV of the prompts that end with this step              (stage 3, `pull`)

The flows of stage 1 are submitted when the step begins, for all groups at once, with the distance of their group as the
relative layer index; it falls as groups end. Beginning and end of a step are told to Algorithm 1 (`batches`).

The flows are those of `policies.flow.stages`, which sim engines have too. Deviation: KV leaves after the group's
exchange.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.sim.batches import Batches
from benchmarks.sim.config import LayerPlan
from benchmarks.sim.engine import Meter, Worker
from benchmarks.sim.flow_driver import FlowDriver, Sent
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.kv_store import LentModel, Staged
from benchmarks.sim.layers import LayeredGroup
from benchmarks.sim.links import KvNetwork
from policies.engine_model.scheduler import Sequence
from policies.flow.base import Port, Side
from policies.flow.stages import advanced_rli, collective, reuse_flow


class StagedGroup(LayeredGroup):
    """The step group of one prefill instance whose flows a policy schedules."""

    def __init__(
        self,
        kernel: Kernel,
        worker: Worker,
        meter: Meter,
        plan: LayerPlan,
        network: KvNetwork,
        driver: FlowDriver,
        batches: Batches,
        model: LentModel,
    ) -> None:
        super().__init__(kernel, worker, meter, plan, network)
        self._driver, self._batches, self._model, self._span = driver, batches, model, model.span
        self._number = 0
        self._batch = ""
        # By group of layers: the flows of reused KV that have not arrived.
        self._missing: list[dict[str, Sent]] = []
        self._waits_since_s: float | None = None
        self._exchanging = 0

    def left_s(self) -> float:
        """Returns the seconds of computation that the step still needs."""
        plan = self._plans[0]
        return 0.0 if plan is None else plan.first_s * (1.0 - self._done / self._layers.groups)

    # ------------------------------------------------------------------------------------------------------ one step

    def _wait(self) -> None:
        self._number += 1
        self._batch = f"{self.workers[0].name}/{self._number}"
        self._missing = [{} for _ in range(self._layers.groups)]
        plan = self._plans[0]
        assert plan is not None
        members = self._model.computing()
        for seq in members:
            staged: Staged = seq.owner.staged  # type: ignore[attr-defined]
            staged.batch = self._batch
        self._batches.began(self._batch, self._loads(members, plan.prefill_tokens), plan.first_s)
        for seq in members:
            self._fetch(seq)
        super()._wait()

    def _loads(self, members: list[Sequence], tokens: int) -> dict[str, tuple[float | None, dict[Port, int]]]:
        """Returns by request its deadline, and the bytes that its flows will move at each port."""
        collective = self._layers.collective_bytes_per_token * self._layers.groups * tokens
        each = round(collective / len(members) / len(self._span))
        found = {}
        for seq in members:
            owner: Any = seq.owner
            staged: Staged = owner.staged
            load: dict[Port, int] = {}
            if len(self._span) > 1:
                load = {Port(node, side): each for node in self._span for side in Side}
            kv_bytes = self.workers[0].spec.profile.kv_bytes
            parts = [(Port(staged.home, Side.EGRESS), kv_bytes(seq.prompt_tokens))]
            if staged.lent_tokens and staged.lender != staged.home and not staged.fetched:
                lent = kv_bytes(staged.lent_tokens)
                parts += [(Port(staged.lender, Side.EGRESS), lent), (Port(staged.home, Side.INGRESS), lent)]
            for port, n_bytes in parts:
                load[port] = load.get(port, 0) + n_bytes
            slo_s = owner.record.ttft_slo_s
            due_at = None if slo_s is None else owner.waits_since_s + slo_s
            found[owner.attempt_id] = (due_at, load)
        return found

    def _fetch(self, seq: Sequence) -> None:
        """Submits the flows of the KV that `seq` reuses, one for each group, once."""
        staged: Staged = seq.owner.staged  # type: ignore[attr-defined]
        if staged.fetched or not staged.lent_tokens or staged.lender == staged.home:
            return
        staged.fetched = True
        n_bytes = self.workers[0].spec.profile.kv_bytes(staged.lent_tokens)
        request_id: str = seq.owner.attempt_id  # type: ignore[attr-defined]
        lender, home, groups = staged.lender, staged.home, self._layers.groups
        for group in range(groups):
            flow = reuse_flow(request_id, self._batch, lender, home, n_bytes, group, groups, self.left_s())
            self._missing[group][flow.flow_id] = self._driver.send(flow, self._arrival(group, flow.flow_id))

    def _arrival(self, group: int, flow_id: str) -> Callable[[], None]:
        missing = self._missing

        def arrived() -> None:
            del missing[group][flow_id]
            if self._waits_since_s is not None and not missing[group]:
                if self.meter.measuring:
                    self._driver.stats.stalled_s += self.kernel.now_s - self._waits_since_s
                self._waits_since_s = None
                super(StagedGroup, self)._compute()

        return arrived

    def _compute(self) -> None:
        if self._missing[self._done]:
            self._waits_since_s = self.kernel.now_s
        else:
            super()._compute()

    def _computed(self) -> None:
        plan, layers, span = self._plans[0], self._layers, self._span
        assert plan is not None
        n_bytes = layers.collective_bytes_per_token * plan.prefill_tokens
        if n_bytes == 0 or len(span) == 1:
            self._group_done(None)
            return
        since_s = self.kernel.now_s
        self._exchanging = 1

        def exchanged() -> None:
            self._exchanging -= 1
            if not self._exchanging:
                if self.meter.measuring:
                    self._driver.stats.collectives += 1
                    self._driver.stats.collective_s += self.kernel.now_s - since_s
                self._group_done(None)

        if layers.isolated:
            port = self.workers[0].spec.profile.transfer_bandwidth_bytes_per_s
            self.kernel.after(n_bytes / len(span) / port, exchanged)
            return
        exchange = collective(self._batch, self._done, span, n_bytes, self.left_s(), layers.pattern)
        self._exchanging = len(exchange.flows)
        for flow in exchange.flows:
            self._driver.send(flow, exchanged, exchange.weight)

    def _group_done(self, flow: object) -> None:
        for group in range(self._done + 1, self._layers.groups):
            for sent in list(self._missing[group].values()):
                self._driver.advanced(sent, advanced_rli(group, self._done + 1))
        super()._group_done(flow)

    def _end(self) -> None:
        for seq in self._ending:
            self._model.computed(seq)
        super()._end()
