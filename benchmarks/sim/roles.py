"""The simulated router's part of FlowKV's role switch: the live decision, and orders that arrive after a hop.

Regime and loans are those of `policies.routing.flowkv`, as in `actors.router.roles`. An engine obeys by announcing
itself in its new role; running work and leases end where they are.
"""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.sim.config import RoleSwitching
from benchmarks.sim.engine import Worker
from benchmarks.sim.kernel import Kernel
from policies.routing.flowkv.regimes import RegimeWatch
from policies.routing.flowkv.role_switch import Engine, RoleSwitcher
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import Role


class Roles:
    """Looks after the roles of a run's engines; `switches` counts the orders."""

    def __init__(
        self,
        config: RoleSwitching,
        kernel: Kernel,
        workers: Mapping[str, Worker],
        hop_s: float,
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._kernel, self._workers, self._hop_s, self._feed = kernel, workers, hop_s, feed
        self._watch = RegimeWatch(config.thresholds)
        self._switcher = RoleSwitcher(config.switch, config.thresholds)
        self._engines = {name: Engine(worker.spec.role, (name,)) for name, worker in workers.items()}
        self.switches = 0

    def look(self, state: ClusterState) -> None:
        """Sends the orders that are due at this moment."""
        snapshot = state.snapshot(self._kernel.now_s, ())
        for switch in self._switcher.look(snapshot, self._watch.look(snapshot), self._engines):
            self.switches += 1
            worker, role = self._workers[switch.engine_id], switch.role
            self._kernel.after(self._hop_s, partial(self._obey, worker, role))

    def _obey(self, worker: Worker, role: Role) -> None:
        worker.decodes = worker.decodes or role is not Role.PREFILL
        self._feed(announcement(worker, role, self._kernel.now_s))


def announcement(worker: Worker, role: Role, now_s: float) -> ev.EngineUp:
    """Returns the event with which a worker announces itself in a role."""
    spec = worker.spec
    capacity = spec.kv_blocks * spec.block_size_tokens
    return ev.EngineUp(
        now_s,
        worker.name,
        role,
        spec.group,
        worker.node,
        spec.slots,
        capacity,
        worker.health,
        spec.barrier,
    )
