"""The endpoints in the configuration: where the public API, the dashboard and the internal sockets listen.

A replica gets its own part of them when it starts. They stand apart from `app.config`, which loads every policy and
predictor: a process that needs none of these, as the dashboard's, is smaller without.
"""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from actors.wire.channel import Identity
from actors.wire.environment import secret_of_environment
from actors.wire.frames import PeerKind
from actors.wire.tls import VARIABLE, WireTls
from app.strict import Strict

CORES_FOR_TWO_INGRESSES = 4
"""Cores of a machine from which on two ingress replicas are the default.

ASSUMPTION: on fewer cores a second process takes more from the engines than its readiness to take over is worth.
"""

METRICS_PORT_OFFSET = 1000
"""Default distance of the first metrics port above the public port: 9000 for 8000."""


def url_here(host: str, port: int, secure: bool) -> str:
    """Returns the URL by which a process of the same machine reaches a listener on `host`, with TLS if `secure`."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class IngressGroupConfig(Strict):
    """The ingress replicas, which serve the public API.

    All replicas of a node listen on the one `port`, and each of them on a metrics port of its own: `metrics_port` plus
    its number on the node. With `port` 0 the ingress has no listener of its own, and only Serve's port answers.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    replicas: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="default: 2 on machines with 4 cores or more, else 1"
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="first metrics port; default: 1000 above `port`; 0 leaves them out"
    )
    tls_cert: str | None = None
    tls_key: str | None = None
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources, to pin it to nodes"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="fields of app.ingress' IngressConfig")

    @property
    def url(self) -> str:
        """The URL of the ingress for a process of the same machine."""
        return url_here(self.host, self.port, self.tls_cert is not None)

    def resolved(self, cores: int) -> "IngressGroupConfig":
        """Returns the same settings with a number wherever they leave it to the machine, which has `cores` cores."""
        replicas = self.replicas or (2 if cores >= CORES_FOR_TWO_INGRESSES else 1)
        first = self.metrics_port
        if first is None:
            above = self.port + METRICS_PORT_OFFSET
            below = self.port - METRICS_PORT_OFFSET
            first = 0 if not self.port else above if above + replicas <= 65536 else below
        return self.model_copy(update={"replicas": replicas, "metrics_port": first})


DASHBOARD_PORT_OFFSET = 2
"""Default distance of the dashboard's port above the public port: 8002 for 8000, beside Serve's own port 8001."""


class DashboardConfig(Strict):
    """The dashboard (`app.dashboard`): a page to watch and to change things from, on a port of its own; 0 turns it off.

    A key is always needed. `viewer_keys` may look (SLUICE_VIEWER_KEYS in its environment adds to them), and
    `admin_keys`, or else SLUICE_ADMIN_KEYS, may change things, too; so may the keys of the ingress. Where none are
    configured, it makes one at its start, as the ingress does (`app.admin_key`). A browser reaches it by an address,
    as localhost, or by one of the names in `hosts`. A login lasts for `session_s`. Audit log and runs lie in `folder`.
    `experiments` are fields of `app.dashboard.store.RunsConfig`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="default: 2 above the ingress's `port`; 0: no dashboard"
    )
    tls_cert: str | None = Field(None, description="default: that of the ingress")
    tls_key: str | None = Field(None, description="default: that of the ingress")
    viewer_keys: tuple[Annotated[str, Field(min_length=8)], ...] = Field((), repr=False)
    admin_keys: tuple[Annotated[str, Field(min_length=8)], ...] = Field((), repr=False)
    hosts: tuple[str, ...] = ()
    session_s: Annotated[float, Field(gt=0)] = 43_200.0
    folder: str | None = Field(
        None, description="default: a folder of this user and port, with other temporary files"
    )
    experiments: dict[str, Any] = Field(default_factory=dict)
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources, to pin it to nodes"
    )

    @property
    def url(self) -> str:
        """The URL of the dashboard for a process of the same machine, once its settings are `resolved`."""
        return url_here(self.host, self.port or 0, self.tls_cert is not None)

    def check(self, ingress: IngressGroupConfig) -> None:
        """Raises ValueError for settings that do not go together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("dashboard: tls_cert and tls_key belong together")
        if self.port and self.port == ingress.port:
            raise ValueError(f"dashboard: port {self.port} is that of the ingress: choose another, or 0")

    def resolved(self, ingress: IngressGroupConfig) -> "DashboardConfig":
        """Returns the same settings with those of the ingress wherever they follow it."""
        port = self.port
        if port is None:
            above = ingress.port + DASHBOARD_PORT_OFFSET
            port = 0 if not ingress.port else above if above < 65536 else ingress.port - DASHBOARD_PORT_OFFSET
        found: dict[str, Any] = {"port": port}
        if self.tls_cert is None and self.tls_key is None:
            found |= {"tls_cert": ingress.tls_cert, "tls_key": ingress.tls_key}
        return self.model_copy(update=found)


class WireConfig(Strict):
    """The internal sockets.

    They are unix sockets inside a node and, with `interface`, TCP on that address. TCP needs a secret, and is encrypted
    where there are certificates.
    """

    interface: str | None = Field(
        None,
        description="network (10.1.0.0/16) in which each node has one address, or 'auto' for Ray's address",
    )
    ports: Annotated[str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$")] = Field(
        "0",
        description="TCP ports to listen on, `first-last`; 0: any port that the kernel gives",
        coerce_numbers_to_str=True,
    )
    secret_env: str = Field(
        "SLUICE_WIRE_SECRET", description="environment variable that holds the shared secret"
    )
    tls: str | None = Field(
        None,
        description="folder with tls.crt, tls.key and ca.crt, by which connections over TCP are encrypted and both ends"
        " proved; default: that of the environment variable SLUICE_WIRE_TLS, and without it no TLS",
    )
    socket_dir: str | None = Field(
        None, description="where unix sockets live; default: a private temporary directory"
    )

    @field_validator("interface")
    @classmethod
    def _is_network(cls, interface: str | None) -> str | None:
        if interface not in (None, "auto"):
            try:
                ipaddress.ip_network(str(interface))
            except ValueError as error:
                raise ValueError(f"{error}; give a network, such as 10.1.0.0/16, or auto") from None
        return interface

    def secret(self) -> bytes | None:
        """Returns the shared secret from this process's environment, or None."""
        return secret_of_environment(self.secret_env)

    def tls_folder(self) -> str | None:
        """Returns the folder of the certificates, or None without TLS."""
        return self.tls or os.environ.get(VARIABLE) or None

    def identity(self, kind: PeerKind, name: str, generation: int = 0) -> Identity:
        """Returns the identity of this process on the wire. Raises OSError for certificates that cannot be used."""
        folder = self.tls_folder()
        tls = None if folder is None else WireTls(Path(folder))
        return Identity(kind, name, self.secret(), generation, tls=tls)
