"""The dashboard as a Serve replica: it starts observer and server. Nothing of serving waits for it."""

import importlib.metadata
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors import garbage, no_memory
from actors.options import from_options
from actors.wire.channel import Identity
from app.addresses import listen_addresses
from app.admin_key import KeyFile, KeyFileError, keys_of_environment
from app.api.extensions import ClassSlo
from app.config import DashboardConfig, WireConfig
from app.dashboard.audit import Audit
from app.dashboard.auth import Keys, Sessions
from app.dashboard.changes import Changes
from app.dashboard.config import Settings
from app.dashboard.engines import Happened
from app.dashboard.feed import Feed
from app.dashboard.observer import Observer
from app.dashboard.run_routes import routes
from app.dashboard.runs import Runs
from app.dashboard.server import DashboardApp, DashboardServer
from app.dashboard.store import RunsConfig
from app.dashboard.stream import Stream
from app.dashboard.whatif import WhatIf
from app.replicas import finder
from app.user_folder import user_folder

log = logging.getLogger("ray.serve.dashboard")


class DashboardReplica:
    """The dashboard's process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: DashboardConfig,
        model: str,
        slo: Mapping[str, Any],
        ingress_port: int,
        ingress_keys: tuple[str, ...],
        wire: WireConfig,
        router: Any,
    ) -> None:
        assert config.port is not None
        me = Identity("observer", f"dashboard-{uuid.uuid4().hex[:8]}", wire.secret())
        settings = Settings(
            host=config.host,
            port=config.port,
            model=model,
            version=importlib.metadata.version("sluice-server"),
            folder=folder_of(config),
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
            hosts=tuple(config.hosts),
            session_s=config.session_s,
            slo={name: ClassSlo(**one) for name, one in slo.items()},
        )
        keys = keys_of(config, ingress_port, ingress_keys, wire.secret())
        feed = Feed(settings.slo)
        self._stream = stream = Stream(feed.snapshot)
        self._observer = observer = Observer(me, finder(router), feed, stream.add)
        audit = Audit(settings.folder)
        audit.open()

        def changed(what: str) -> None:
            feed.event(observer.now_s(), Happened("admin", what))

        changes = Changes(observer.ask, audit, feed.engines.role_and_duty, changed)
        sessions = Sessions(keys, settings.session_s)
        self._runs, self._whatif = experiments_of(config, settings, ingress_port, ingress_keys)
        self._runs.start_up()
        more = routes(self._runs, self._whatif)
        app = DashboardApp(settings, feed, stream, changes, sessions, more)
        self._server = DashboardServer(app, settings, stream)
        await observer.start(listen_addresses(wire, "dashboard"))
        await self._server.start()
        garbage.settle()
        no_memory.watch()

    async def check_health(self) -> None:
        """Answers Serve's health probe; an exception makes Serve replace the replica."""
        self._observer.check()

    async def __del__(self) -> None:
        if hasattr(self, "_whatif"):
            await self._runs.close()
            await self._whatif.close()
        if hasattr(self, "_server"):
            await self._server.stop()
        if hasattr(self, "_observer"):
            await self._observer.stop()


def experiments_of(
    config: DashboardConfig, settings: Settings, ingress_port: int, ingress_keys: tuple[str, ...]
) -> tuple[Runs, WhatIf]:
    """Returns the experiments and what-if questions about the application. Raises ConfigError for impossible bounds.

    They administer with a key of the ingress, which the dashboard takes, too. Where none is configured, the commands
    read the file of the ingress on this machine.
    """
    folder = {} if config.folder is None else {"folder": f"{config.folder}/runs"}
    bounds: RunsConfig = from_options(RunsConfig, {**folder, **config.experiments}, "dashboard.experiments")
    scheme = "https" if settings.secure else "http"
    host = "127.0.0.1" if settings.host in ("", "0.0.0.0", "::") else settings.host
    own = f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
    url = bounds.url or f"{scheme}://127.0.0.1:{ingress_port}"
    key = next(iter((*ingress_keys, *keys_of_environment())), None)
    return Runs(bounds, url, own, key), WhatIf(bounds, url, key)


def folder_of(config: DashboardConfig) -> Path:
    """Returns where the audit log and runs lie: the configured folder, or one of this user and port."""
    return Path(config.folder) if config.folder is not None else user_folder() / f"dashboard-{config.port}"


def keys_of(
    config: DashboardConfig, ingress_port: int, ingress_keys: tuple[str, ...], secret: bytes | None
) -> Keys:
    """Returns the keys that the dashboard takes.

    Those of the ingress administer here, too. Where neither has any, the files of both ports have one, which is made if
    it is missing. A file that cannot be kept is reported, and then opens nothing.
    """
    environment = keys_of_environment()
    viewer = (*config.viewer_keys, *keys_of_environment("SLUICE_VIEWER_KEYS"))
    admin = (*(config.admin_keys or environment), *(ingress_keys or environment))
    files: list[KeyFile] = []
    if not admin:
        files = [KeyFile(port, secret) for port in (config.port, ingress_port) if port]
    for file in files:
        try:
            file.take()
            log.info("the dashboard's admin key is in %s", file.path)
        except KeyFileError as error:
            log.error("no key opens the dashboard: %s", error)
    return Keys(viewer, dict.fromkeys(admin), files)
