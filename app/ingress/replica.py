"""The ingress as a Serve replica: it starts connections, API and listener, and lends the API to Serve's port."""

import asyncio
import importlib.metadata
import logging
import os
import uuid
from typing import Any

from ray import serve

from actors.code_form import code_form
from actors.engine.registry import ENGINES
from actors.options import from_options
from actors.telemetry import logs
from actors.telemetry.environment import traces_of_environment
from actors.wire import channel
from app.addresses import finder
from app.admin_key import KeyFile, keys_of_environment, warn_of_shown_keys
from app.config import SIM_MODEL, ModelConfig
from app.drain import DrainPoint, socket_directory
from app.endpoints import IngressGroupConfig, WireConfig
from app.ingress.asgi import IngressApp
from app.ingress.audit import audit_of
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.digests import salt_of_application
from app.ingress.http.listener import Listener, ListenerConfig
from app.ingress.metrics import IngressMetrics, counting
from app.ingress.metrics_port import MetricsPort, metrics_ports
from app.ingress.tenants.gate import Gate
from app.ingress.tokenizer import HfCodec, TextCodec, WordCodec
from app.user_folder import user_folder

log = logging.getLogger("ray.serve")

READY_WAIT_S = 60.0
"""Seconds for which one of several replicas leaves the shared port to the others until it can serve.

ASSUMPTION: longer than a restart of the router, without which a new replica learns of no engine. When none can serve,
as in a cold start, clients are told so after this time.
"""


LISTEN_GRACE_S = 5.0
"""Seconds that a replica which shares its port waits until it can serve, before it takes connections anyway.

ASSUMPTION: connections to a router and engines that run take less than a second. While the engines still load a model,
every replica listens and answers 503 with the reason.
"""


class _Current:
    """Passes ASGI calls to this process's application, since Serve wants an application before the replica exists."""

    app: IngressApp | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if self.app is None:
            raise RuntimeError("the ingress replica has not started yet")
        await self.app(scope, receive, send)


_current = _Current()


def _asgi() -> _Current:
    return _current


@serve.ingress(_asgi)
class IngressReplica:
    """One ingress replica.

    If it cannot start it raises ConfigError or OSError (port taken, no place for an admin key) with advice, which
    `serve status` shows.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: ModelConfig,
        group: IngressGroupConfig,
        expects_prefill: bool,
        wire: WireConfig,
        admission: str,
        router: Any,
        *engines: Any,
    ) -> None:
        me = wire.identity("ingress", f"ingress-{uuid.uuid4().hex[:8]}")
        logs.start("ingress")
        options = {
            "served_names": (model.served_name,),
            "expects_prefill": expects_prefill,
            "admin_keys": keys_of_environment(),
            **(
                {"viewer_keys": keys_of_environment("SLUICE_VIEWER_KEYS")}
                if group.options.get("status_needs_key")
                else {}
            ),
            "key_file": os.environ.get("SLUICE_KEY_FILE", ""),
            "quota_redis": os.environ.get("SLUICE_QUOTA_REDIS", ""),
            "audit_log": str(user_folder() / f"audit-{group.port}"),
            "fallback_admission": admission,
            **group.options,
            "replica_id": me.id,
            "replicas": group.replicas or 1,
        }
        ingress = from_options(IngressConfig, options, "ingress.options")
        key_file = KeyFile(group.port, wire.secret())
        warn_of_shown_keys(group.options)
        if ingress.admin_keys:
            key_file.remove()
        else:
            key_file.take()
            log.info("ingress %s: the admin key is in %s", me.id, key_file.path)
        salt = salt_of_application(group.port, wire.secret())
        metrics = IngressMetrics(model.served_name)
        self._connections = IngressConnections(ingress, me, finder(router), metrics, salt)
        self._traces = traces_of_environment(
            counting(metrics.traces), "sluice-ingress", me.id, ingress.forced_traces_per_s
        )
        self._gate = Gate(ingress, metrics, self._connections.ingresses) if ingress.key_file else None
        self._audit = audit_of(ingress, metrics)
        self._app = IngressApp(
            ingress,
            self._connections,
            codec_of(model),
            metrics,
            versions(),
            key_file,
            self._traces,
            self._gate,
            self._audit,
        )
        if self._gate is not None:
            self._gate.start()
        await self._connections.start()
        _current.app = self._app
        self._metrics_port: MetricsPort | None = None
        self._listener: Listener | None = None
        listener = _listener_config(group)
        if group.metrics_port:
            local_rank = serve.get_replica_context().rank.local_rank
            ports = metrics_ports(group.metrics_port, group.replicas or 1, local_rank)
            self._metrics_port = MetricsPort(self._app, listener, ports)
            await self._metrics_port.start()
        if group.port and (group.replicas or 1) > 1:
            # The kernel gives a share of the connections to each replica that listens, whether it can serve or not.
            await self._connections.wait_ready(READY_WAIT_S)
        if group.port:
            if listener.reuse_port:
                await until_ready(self._connections, LISTEN_GRACE_S)
            self._listener = Listener(self._app, listener)
            await self._listener.start()
            log.info(
                "ingress %s (%s) listens on %s:%d",
                me.id,
                code_form(channel),
                group.host,
                self._listener.port,
            )
        self._drain_point = DrainPoint(socket_directory(wire.socket_dir), me.id, self._drain)
        await self._drain_point.start()

    async def _drain(self, seconds: float) -> None:
        if self._listener is None:
            await self._app.drain(seconds)
        else:
            await self._listener.stop(drain_s=seconds)

    async def __del__(self) -> None:
        try:
            if hasattr(self, "_drain_point"):
                await self._drain_point.stop()
            if getattr(self, "_listener", None) is not None:
                assert self._listener is not None
                await self._listener.stop(drain_s=self._app.config.drain_s)
            if getattr(self, "_metrics_port", None) is not None:
                assert self._metrics_port is not None
                await self._metrics_port.stop()
        finally:
            if hasattr(self, "_connections"):
                await self._connections.stop()  # router and engines learn what ends
            if getattr(self, "_gate", None) is not None:
                assert self._gate is not None
                await self._gate.stop()
            if getattr(self, "_audit", None) is not None:
                assert self._audit is not None
                await self._audit.stop()
            if getattr(self, "_traces", None) is not None:
                assert self._traces is not None
                await asyncio.to_thread(self._traces.stop)


async def until_ready(connections: IngressConnections, patience_s: float) -> None:
    """Waits until requests can be served, for at most `patience_s`.

    The other replicas of a shared port serve meanwhile. A listener that opened too early would answer 503 in their
    place.
    """
    deadline_s = connections.now_s() + patience_s
    while connections.ready() is not None and connections.now_s() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def _listener_config(group: IngressGroupConfig) -> ListenerConfig:
    return ListenerConfig(
        host=group.host,
        port=group.port,
        tls_cert=group.tls_cert,
        tls_key=group.tls_key,
        reuse_port=(group.replicas or 1) > 1,
    )


def codec_of(model: ModelConfig) -> TextCodec:
    """Returns the model's tokenizer, or a word codec for the sim model, which has no files."""
    if model.path == SIM_MODEL:
        return WordCodec()
    from app.models import resolve

    return HfCodec(resolve(model.path))


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that decide how the server behaves, by package name.

    The server's own version is under `version`, and under `code` whether the hot path is compiled.
    """
    found = {"version": importlib.metadata.version("sluice-server"), "code": code_form(channel)}
    for name in ("ray", *(package for kind in ENGINES.values() for package in kind.packages)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
