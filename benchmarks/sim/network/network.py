"""The network of the simulator, which starts, cancels and finishes flows. The package's docstring has the formulas.

All changes of one instant are gathered, and rates are computed once, after all other callbacks of that instant. No time
passes in between, so this is exact. While no flow is sending there is no timer, so a kernel without other work stops.
"""

import heapq
import math
import random
from collections.abc import Callable, Sequence

from benchmarks.sim.kernel import Kernel, Timer
from benchmarks.sim.network.background import Background, Shares
from benchmarks.sim.network.fairshare import FairShare
from benchmarks.sim.network.flows import Flow, FlowBundle, FlowError, FlowState
from benchmarks.sim.network.paths import draw_path
from benchmarks.sim.network.topology import Topology
from benchmarks.sim.network.usage import Totals, Usage, class_use

# Among the kernel callbacks of one instant, the computation of rates comes last.
FLUSH_PRIORITY = 1_000_000


class Network:
    """All flows over `topology` in the virtual time of `kernel`.

    The same seed and the same calls give the same paths, times and bytes.
    """

    def __init__(
        self, topology: Topology, kernel: Kernel, seed: int, background: Sequence[Background] = ()
    ) -> None:
        self.topology, self._kernel, self._seed = topology, kernel, seed
        self.totals = Totals()
        self._rng = random.Random(seed)
        self._fair = FairShare([link.bytes_per_s for link in topology.links])
        self._bundles: dict[tuple[tuple[int, ...], int], FlowBundle] = {}
        self._touched: dict[int, FlowBundle] = {}
        # Bytes that bundles which no longer exist have sent, by link index.
        self._closed_bytes = [0.0] * len(topology.links)
        # Private links (`set_rate_cap`) that no flow uses now.
        self._free_caps: list[int] = []
        self._due: list[tuple[float, int, FlowBundle]] = []
        self._timer: Timer | None = None
        self._flush_waits = False
        self._sequence = 0
        self._shares = Shares(topology, background, seed)
        self._background_timer: Timer | None = None
        self._mark = self.usage()

    # --- flows

    def start(
        self,
        source: str,
        target: str,
        n_bytes: int,
        priority: int,
        on_done: Callable[[Flow], None] | None,
        *,
        weight: float = 1.0,
        source_nic: int | None = None,
        target_nic: int | None = None,
        path_key: str | None = None,
    ) -> Flow:
        """Starts a flow now and returns it; `on_done(flow)` is called once, when its last byte has arrived.

        `priority` is the level, and level 0 goes first. NICs that are not given are drawn. ECMP draws a path at random.
        With a `path_key`, a hash of the key and the seed chooses the path instead, so flows with the same key take the
        same path whatever other flows are started. Raises TopologyError for an unknown node or a pair without a path,
        and FlowError for impossible numbers.
        """
        if not (0 <= n_bytes < math.inf and 0 < weight < math.inf and priority >= 0):
            raise FlowError(
                f"flow {source} -> {target}: n_bytes {n_bytes} and priority {priority} must be finite and >= 0, "
                f"weight {weight} finite and > 0"
            )
        here, there = self.topology.node(source), self.topology.node(target)
        tier = self.topology.tier(source, target)
        rng = self._rng if path_key is None else random.Random(f"{self._seed}/{path_key}")
        links = draw_path(self.topology, here, there, source_nic, target_nic, rng)
        latency_s, now_s = self.topology.tier_latency_s[tier], self._kernel.now_s
        ideal_s = n_bytes / self.topology.tier_bytes_per_s[tier] + latency_s
        flow = Flow(
            self._next(),
            source,
            target,
            n_bytes,
            priority,
            weight,
            tier,
            links,
            ideal_s,
            latency_s,
            now_s,
            on_done,
        )
        self.totals.start(flow)
        if n_bytes == 0:
            self._land(flow)
        else:
            self._join(flow, n_bytes)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Ends a flow early; its `on_done` is never called. Raises FlowError if the flow has ended."""
        self._must_be_active(flow, "cancel")
        remaining = self._leave(flow) if flow.bundle is not None else 0.0
        if flow.landing is not None:
            flow.landing.cancel()
        self._free_cap(flow)
        flow.state = FlowState.CANCELLED
        self.totals.cancel(flow, remaining)

    def set_priority(self, flow: Flow, level: int) -> None:
        """Moves a flow to another level now; a landing flow does not change. Raises FlowError if the flow has ended."""
        self._must_be_active(flow, "give another priority to")
        if level < 0:
            raise FlowError(f"flow {flow.id}: priority {level} must be >= 0")
        if level != flow.level:
            remaining = self._leave(flow) if flow.bundle is not None else None
            flow.level = level
            if remaining is not None:
                self._join(flow, remaining)

    def set_rate_cap(self, flow: Flow, bytes_per_s: float | None) -> None:
        """Holds a flow to at most `bytes_per_s` from now on; None lifts the cap. A landing flow does not change.

        A cap is a private link of that capacity at the end of the flow's path. Raises FlowError for a cap that is not
        above 0, or if the flow has ended.
        """
        self._must_be_active(flow, "cap the rate of")
        if bytes_per_s is not None and not 0 < bytes_per_s < math.inf:
            raise FlowError(f"flow {flow.id}: rate cap {bytes_per_s} must be finite and > 0, or None")
        if flow.bundle is None or (bytes_per_s is None and flow.cap_link is None):
            return
        if bytes_per_s is not None and flow.cap_link is not None:
            self._fair.set_capacity(flow.cap_link, bytes_per_s)
            self._ask_flush()
            return
        remaining = self._leave(flow)
        if bytes_per_s is None:
            flow.links = flow.links[:-1]
            self._free_cap(flow)
        else:
            flow.cap_link = self._private_link(bytes_per_s)
            flow.links = (*flow.links, flow.cap_link)
        self._join(flow, remaining)

    def tier(self, source: str, target: str) -> int:
        return self.topology.tier(source, target)

    def remaining_bytes(self, flow: Flow) -> float:
        """Returns the bytes of the flow that have not left yet."""
        return 0.0 if flow.bundle is None else flow.bundle.remaining_bytes(flow, self._kernel.now_s)

    @property
    def sending(self) -> int:
        """The number of flows that have bytes left to send."""
        return sum(bundle.count for bundle in self._bundles.values())

    # --- what telemetry sees

    def background_share(self, link: str) -> float:
        """Returns the share of a link that background traffic uses now."""
        self._advance_background()
        return self._shares[self.topology.link(link).index]

    def background_shares(self) -> list[float]:
        """Returns `background_share` of every link, by link index."""
        self._advance_background()
        return self._shares.all()

    def own_shares(self) -> list[float]:
        """Returns the share of every link's nominal capacity that simulated flows use now, by link index."""
        self._settle_instant()
        return [self._fair.taken(link.index) / link.bytes_per_s for link in self.topology.links]

    def usage(self) -> Usage:
        """Returns the bytes that flows have sent over every link until now."""
        moved = list(self._closed_bytes)
        now_s = self._kernel.now_s
        for bundle in self._bundles.values():
            bundle.settle(now_s)
            for link in bundle.links:
                moved[link] += bundle.moved_bytes
        return Usage(now_s, tuple(moved[: len(self.topology.links)]))

    def mark(self) -> None:
        """Begins the period over which `link_use` measures."""
        self._mark = self.usage()

    def link_use(self) -> dict[str, float]:
        """Returns the mean share of each class of links that flows used since the last `mark`.

        Returns {} while no time has passed.
        """
        now = self.usage()
        return class_use(self.topology, self._mark, now) if now.at_s > self._mark.at_s else {}

    # --- inside

    def _must_be_active(self, flow: Flow, what: str) -> None:
        if not flow.active:
            raise FlowError(
                f"cannot {what} flow {flow.id} ({flow.source} -> {flow.target}): it is {flow.state}"
            )

    def _private_link(self, bytes_per_s: float) -> int:
        if not self._free_caps:
            self._free_caps.append(self._fair.add_link(bytes_per_s))
            self._closed_bytes.append(0.0)
        link = self._free_caps.pop()
        self._fair.set_capacity(link, bytes_per_s)
        return link

    def _free_cap(self, flow: Flow) -> None:
        if flow.cap_link is not None:
            self._free_caps.append(flow.cap_link)
            flow.cap_link = None

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _join(self, flow: Flow, remaining: float) -> None:
        now_s, key = self._kernel.now_s, (flow.links, flow.level)
        bundle = self._bundles.get(key)
        if bundle is None:
            bundle = FlowBundle(self._next(), flow.links, flow.level, flow.tier, now_s)
            bundle.join(flow, remaining, self._next(), now_s)
            self._bundles[key] = bundle
            self._fair.add(bundle)
        else:
            bundle.join(flow, remaining, self._next(), now_s)
            self._fair.reweigh(bundle)
        self._touch(bundle)

    def _leave(self, flow: Flow) -> float:
        bundle = flow.bundle
        assert bundle is not None
        remaining = bundle.leave(flow, self._kernel.now_s)
        self._drop_or_reweigh(bundle)
        return remaining

    def _drop_or_reweigh(self, bundle: FlowBundle) -> None:
        if bundle.count:
            self._fair.reweigh(bundle)
        else:
            self._fair.remove(bundle)
            del self._bundles[bundle.links, bundle.level]
            for link in bundle.links:
                self._closed_bytes[link] += bundle.moved_bytes
        self._touch(bundle)

    def _touch(self, bundle: FlowBundle) -> None:
        self._touched[bundle.id] = bundle
        self._ask_flush()

    def _ask_flush(self) -> None:
        if not self._flush_waits:
            self._flush_waits = True
            self._kernel.at(self._kernel.now_s, self._flush, FLUSH_PRIORITY)

    def _settle_instant(self) -> None:
        """Computes the present rates for a query within the instant; the pending flush will find nothing to change."""
        if self._touched:
            self._rebalance()

    def _flush(self) -> None:
        self._flush_waits = False
        self._rebalance()

    def _rebalance(self) -> None:
        self._advance_background()
        for bundle in self._fair.rebalance(self._kernel.now_s):
            assert isinstance(bundle, FlowBundle)
            self._touched[bundle.id] = bundle
        for touched in self._touched.values():
            self._schedule(touched)
        self._touched = {}
        self._arm()

    def _schedule(self, bundle: FlowBundle) -> None:
        bundle.generation = self._next()
        due_s = bundle.due_s()
        if due_s < math.inf:
            heapq.heappush(self._due, (due_s, bundle.generation, bundle))

    def _arm(self) -> None:
        """Sets the one timer to the earliest end of a flow. A timer that fires too early is set again."""
        due = self._due
        if len(due) > 64 + 4 * len(self._bundles):
            self._due = due = [item for item in due if item[1] == item[2].generation]
            heapq.heapify(due)
        while due and due[0][1] != due[0][2].generation:
            heapq.heappop(due)
        if due and (self._timer is None or self._timer.time_s > due[0][0]):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._kernel.at(max(due[0][0], self._kernel.now_s), self._on_due)
        if self._bundles and self._background_timer is None and self._shares.next_s < math.inf:
            self._background_timer = self._kernel.at(self._shares.next_s, self._on_background)
        elif not self._bundles and self._background_timer is not None:
            self._background_timer.cancel()
            self._background_timer = None

    def _on_background(self) -> None:
        self._background_timer = None
        self._ask_flush()

    def _advance_background(self) -> None:
        for link in self._shares.advance(self._kernel.now_s):
            left = 1.0 - self._shares[link]
            self._fair.set_capacity(link, self.topology.links[link].bytes_per_s * left)

    def _on_due(self) -> None:
        self._timer = None
        now_s, due = self._kernel.now_s, self._due
        while due and (due[0][1] != due[0][2].generation or due[0][0] <= now_s):
            _, generation, bundle = heapq.heappop(due)
            if generation != bundle.generation:
                continue
            ended = bundle.pop_due(now_s)
            for flow in ended:
                self._land(flow)
            if ended:
                self._drop_or_reweigh(bundle)
            # A change at this instant, or the rounding of an update in between, has postponed the end.
            elif bundle.count:
                self._touch(bundle)
        if not self._touched:
            self._arm()

    def _land(self, flow: Flow) -> None:
        self._free_cap(flow)
        flow.state = FlowState.LANDING
        flow.landing = self._kernel.after(flow.latency_s, lambda: self._finish(flow))

    def _finish(self, flow: Flow) -> None:
        flow.state, flow.done_s, flow.landing = FlowState.DONE, self._kernel.now_s, None
        self.totals.finish(flow)
        if flow.on_done is not None:
            flow.on_done(flow)
