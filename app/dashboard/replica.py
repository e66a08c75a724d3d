"""The dashboard, and its process as a Serve replica: observer and server. Nothing of serving waits for it."""

import importlib.metadata
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from starlette.routing import Route

from actors import garbage, no_memory
from actors.telemetry import logs
from app.addresses import finder, listen_addresses
from app.admin_key import KeyFile, KeyFileError, keys_of_environment
from app.api.extensions import ClassSlo
from app.dashboard.audit import Audit
from app.dashboard.auth import Keys, Sessions
from app.dashboard.changes import Changes
from app.dashboard.config import Settings
from app.dashboard.engines import Happened
from app.dashboard.feed import Feed
from app.dashboard.observer import Observer
from app.dashboard.run_marks import RunMarks
from app.dashboard.run_routes import routes
from app.dashboard.runs import Runs
from app.dashboard.server import DashboardApp, DashboardServer
from app.dashboard.store import RunsConfig, RunStore, default_folder
from app.dashboard.stream import Stream
from app.dashboard.whatif import WhatIf
from app.endpoints import DashboardConfig, WireConfig
from app.user_folder import user_folder

log = logging.getLogger("ray.serve.dashboard")


class Target(NamedTuple):
    """The ingress to which experiments send their load, as this machine reaches it; with port 0 there are none."""

    port: int
    url: str
    tls_cert: str | None = None


class Dashboard:
    """The parts of a dashboard. `find` returns the addresses of the router."""

    def __init__(
        self,
        config: DashboardConfig,
        runs: RunsConfig,
        model: str,
        slo: Mapping[str, Any],
        ingress: Target,
        ingress_keys: tuple[str, ...],
        wire: WireConfig,
        find: Callable[[], Awaitable[tuple[str, ...]]],
    ) -> None:
        assert config.port is not None
        me = wire.identity("observer", f"dashboard-{uuid.uuid4().hex[:8]}")
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
        keys = keys_of(config, ingress.port, ingress_keys, wire.secret())
        feed = Feed(settings.slo, me.id)
        self._stream = stream = Stream(feed.snapshot)
        self._wire = wire
        self._observer = observer = Observer(me, find, feed, stream.add)
        audit = Audit(settings.folder)
        audit.open()

        def changed(what: str) -> None:
            feed.event(observer.now_s(), Happened("admin", what))

        changes = Changes(observer.ask, audit, feed.engines.role_and_duty, changed)
        sessions = Sessions(keys, settings.session_s)
        self._runs: Runs | None = None
        self._whatif: WhatIf | None = None
        self._marks: RunMarks | None = None
        more: list[Route] = []
        runs = runs.within(settings.folder)
        url = runs.url or (ingress.url if ingress.port else None)
        if url is not None:
            key = key_for_runs(ingress.port, ingress_keys, wire.secret())
            certificates = certificates_of(settings, ingress)
            self._runs = Runs(runs, url, settings.url, key, certificates)
            self._whatif = WhatIf(runs, url, key, certificates)
            stores = self._runs.store, RunStore(default_folder())
            self._marks = RunMarks(stores, url, feed.event)
            more = routes(self._runs, self._whatif)
        app = DashboardApp(settings, feed, stream, changes, sessions, more)
        self._server = DashboardServer(app, settings, stream)

    async def start(self) -> None:
        """Listens for ingresses and browsers, and puts back what killed experiments have left."""
        if self._runs is not None:
            self._runs.start_up()
        if self._marks is not None:
            self._marks.start()
        await self._observer.start(listen_addresses(self._wire, "dashboard"))
        await self._server.start()
        garbage.settle()
        no_memory.watch()

    def check(self) -> None:
        """Raises an exception if this process should be replaced."""
        self._observer.check()

    async def stop(self) -> None:
        """Ends experiments in order, then everything else."""
        for commands in (self._runs, self._whatif):
            if commands is not None:
                await commands.close()
        if self._marks is not None:
            self._marks.stop()
        await self._server.stop()
        await self._observer.stop()


class DashboardReplica:
    """The dashboard's process as Serve starts it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: DashboardConfig,
        runs: RunsConfig,
        model: str,
        slo: Mapping[str, Any],
        ingress: Target,
        ingress_keys: tuple[str, ...],
        wire: WireConfig,
        router: Any,
    ) -> None:
        logs.start("dashboard")
        self._dashboard = Dashboard(config, runs, model, slo, ingress, ingress_keys, wire, finder(router))
        await self._dashboard.start()

    async def check_health(self) -> None:
        """Answers Serve's health probe; an exception makes Serve replace the replica."""
        self._dashboard.check()

    async def __del__(self) -> None:
        if hasattr(self, "_dashboard"):
            await self._dashboard.stop()


def folder_of(config: DashboardConfig) -> Path:
    """Returns where the audit log and runs lie: the configured folder, or one of this user and port.

    The path is absolute, because commands about runs work in another folder.
    """
    found = Path(config.folder) if config.folder is not None else user_folder() / f"dashboard-{config.port}"
    return found.absolute()


def keys_of(
    config: DashboardConfig, ingress_port: int, ingress_keys: tuple[str, ...], secret: bytes | None
) -> Keys:
    """Returns the keys that the dashboard takes.

    Those of the ingress administer here, too, also the one in its file. Where neither has any, the file of this port
    has one as well, which is made if it is missing. A file that cannot be kept is reported, and then opens nothing.
    """
    environment = keys_of_environment()
    viewer = (*config.viewer_keys, *keys_of_environment("SLUICE_VIEWER_KEYS"))
    admin = (*(config.admin_keys or environment), *(ingress_keys or environment))
    ports = [] if admin else [config.port]
    if not (ingress_keys or environment):
        ports.append(ingress_port)
    files = [KeyFile(port, secret) for port in ports if port]
    for file in files:
        try:
            file.take()
            log.info("the dashboard's admin key is in %s", file.path)
        except KeyFileError as error:
            log.error("no key opens the dashboard: %s", error)
    return Keys(viewer, dict.fromkeys(admin), files)


def certificates_of(settings: Settings, ingress: Target) -> dict[str, str]:
    """Returns the files of the certificates of this server and of the ingress, where they have one, by their URLs."""
    files = {settings.url: settings.tls_cert, ingress.url: ingress.tls_cert}
    # commands run in another folder
    return {url: os.path.abspath(file) for url, file in files.items() if file is not None}


def key_for_runs(port: int, ingress_keys: tuple[str, ...], secret: bytes | None) -> str | None:
    """Returns a key of the ingress at `port`, which opens the dashboard, too; None if there is none."""
    configured = ingress_keys or keys_of_environment()
    if configured:
        return configured[0]
    try:
        return KeyFile(port, secret).take()
    except KeyFileError:
        # `keys_of` has said so
        return None
