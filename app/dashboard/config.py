"""The settings of the dashboard's server, which its replica makes from the configuration file and the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.admin_key import LOOPBACK_HOSTS
from app.api.extensions import ClassSlo
from app.endpoints import url_here


@dataclass(frozen=True, slots=True)
class Settings:
    """The facts that the server needs. `version` and `model` are shown; `slo` are the objectives of the classes.

    `hosts` are further names under which browsers may reach it; `session_s` is how long a login lasts. Audit log and
    runs lie in `folder`. `secure` says whether browsers speak TLS with it.
    """

    host: str
    port: int
    model: str
    version: str
    folder: Path
    tls_cert: str | None = None
    tls_key: str | None = None
    hosts: tuple[str, ...] = ()
    session_s: float = 43_200.0
    slo: Mapping[str, ClassSlo] = field(default_factory=dict)

    @property
    def secure(self) -> bool:
        """Whether the server speaks TLS."""
        return self.tls_cert is not None

    @property
    def url(self) -> str:
        """The server's URL for a process of the same machine."""
        return url_here(self.host, self.port, self.secure)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK_HOSTS
