"""A replica's own listener for metrics, status and health, beside the port that all replicas of a node share.

A request to the shared port reaches any replica. Prometheus, probes and people who look at one replica use this one.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from app.ingress.asgi import IngressApp
from app.ingress.http.listener import Listener, ListenerConfig

log = logging.getLogger("ray.serve")

RETRY_S = 1.0
"""Seconds between attempts to listen while the replica that this one replaces still drains on its metrics port."""


def metrics_ports(first: int, replicas: int, local_rank: int) -> tuple[int, ...]:
    """Returns the metrics ports of a node in the order in which the replica with this rank on the node tries them."""
    return tuple(first + (local_rank + step) % replicas for step in range(replicas))


class MetricsPort:
    """Listens on the first free one of `ports`, and tries again in the background while none is free.

    A taken port is only logged: the public port is worth more than the metrics of one replica. `port` is the one that
    was free, or None.
    """

    def __init__(self, app: IngressApp, config: ListenerConfig, ports: Sequence[int]) -> None:
        self._app, self._config, self._ports = app, config, ports
        self.port: int | None = None
        self._listener: Listener | None = None
        self._retry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens, or begins to try again. `/sluice/status` of `app` shows the port."""
        if not await self._listen():
            log.warning("no metrics port is free among %s; trying again", ", ".join(map(str, self._ports)))
            self._retry = asyncio.create_task(self._try_again())

    async def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._listener is not None:
            await self._listener.stop()

    async def _listen(self) -> bool:
        for port in self._ports:
            config = replace(self._config, port=port, reuse_port=False)
            listener = Listener(self._app, config, self._app.dispatch_observation)
            try:
                await listener.start()
            except OSError:
                continue
            self._listener = listener
            self.port = self._app.metrics_port = listener.port
            log.info("metrics on %s:%d", config.host, listener.port)
            return True
        return False

    async def _try_again(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            if await self._listen():
                return
