"""The roles of engines: the router orders an idle engine to serve the other role for a while, and back.

FlowKV's role switch decides (`policies.routing.flowkv.role_switch`); here its orders become messages. An engine obeys
by announcing itself in its new role. Its running work and its leases end where they are, because their charges belong
to the worker and not to its role.
"""

import logging

from actors.router.clock import clock_s
from actors.router.engines import Engines
from actors.router.workers import workers_of
from actors.wire.messages import SetRole
from policies.dispatch.dispatcher import Dispatcher
from policies.routing.flowkv.regimes import RegimeThresholds, RegimeWatch
from policies.routing.flowkv.role_switch import Engine, RoleSwitchConfig, RoleSwitcher
from policies.state.reducer import role_of

log = logging.getLogger(__name__)


class Roles:
    """Looks after the roles of a router's engines. `look` is called about once a second; with `switch_s` 0 it lends
    nothing, and only calls engines back that an earlier router has lent.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        engines: Engines,
        config: RoleSwitchConfig,
        thresholds: RegimeThresholds,
    ) -> None:
        self._dispatcher, self._engines = dispatcher, engines
        self._lends = config.switch_s > 0
        self._watch = RegimeWatch(thresholds)
        self._switcher = RoleSwitcher(config, thresholds)
        self.switches = 0
        """Number of orders that were sent."""

    def look(self) -> None:
        """Sends the orders that are due now. An engine that cannot be reached gets its order at a later look."""
        infos = self._engines.infos()
        # a snapshot costs the router time, and nothing could be ordered
        if not self._lends and all(info.home_role is None for info in infos):
            return
        engines = {info.id: Engine(role_of(info.home_role or info.role), workers_of(info)) for info in infos}
        snapshot = self._dispatcher.state.snapshot(clock_s(), ())
        for switch in self._switcher.look(snapshot, self._watch.look(snapshot), engines):
            channel = self._engines.channel(switch.engine_id)
            if channel is None or not channel.open:
                continue
            log.info("engine %s is to serve %s: %s", switch.engine_id, switch.role, switch.reason)
            home = engines[switch.engine_id].home
            channel.send(SetRole(switch.role.value, lent=switch.role is not home))
            self.switches += 1
