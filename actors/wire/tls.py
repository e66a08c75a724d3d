"""TLS of the wire's TCP connections: version 1.3, mutual, with certificates that are read again when they change.

A folder holds `tls.crt` (this process's certificate, and what leads from it to the authority), `tls.key` and `ca.crt`
(the authorities), which are the names in a Kubernetes secret of cert-manager. Both sides of a connection show a
certificate that one of the authorities has signed. Names in it are not compared with addresses, because addresses of
nodes and pods change: whoever holds such a certificate is a member of this fleet. So the authority signs for nothing
else.

Contexts are made anew for the first connection after a file has changed, so a renewed certificate, and an authority
that was added or removed, count from then on. Connections that stand stay. A session is never resumed, since that would
skip the check. Files that cannot be used change nothing: the last good ones go on, and the log says so.
"""

import logging
import os
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "SLUICE_WIRE_TLS"
"""Environment variable that names the folder, where the configuration does not (`wire.tls`)."""
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
FILES = (CERTIFICATE, KEY, AUTHORITY)

_State = tuple[tuple[int, int, int], ...]


class WireTls:
    """The certificates in `folder`. Raises OSError (as which ssl.SSLError counts too) if they cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = self._state()
        self._server, self._client = self._contexts()
        self._listening = _context(ssl.PROTOCOL_TLS_SERVER, folder)
        # The one documented way to choose a context for each connection of a listener; the name itself is not used.
        self._listening.sni_callback = self._choose

    @classmethod
    def of_environment(cls) -> "WireTls | None":
        """Returns the certificates in the folder that `SLUICE_WIRE_TLS` names, or None without it."""
        folder = os.environ.get(VARIABLE, "")
        return cls(Path(folder)) if folder else None

    @property
    def server(self) -> ssl.SSLContext:
        """The context of a listener, whose every new connection gets the present certificates."""
        return self._listening

    @property
    def client(self) -> ssl.SSLContext:
        """The context of a new connection to a listener."""
        self._look()
        return self._client

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        self._look()
        connection.context = self._server

    def _look(self) -> None:
        """Reads the files again if one of them has changed since they were read last."""
        try:
            found = self._state()
            if found == self._seen:
                return
            self._seen = found
            self._server, self._client = self._contexts()
            log.info("the certificates of the wire in %s were read again", self.folder)
        except OSError as error:
            log.error(
                "the certificates of the wire in %s cannot be used, so the last ones go on: %s",
                self.folder,
                error,
            )

    def _state(self) -> _State:
        """Returns what changes with the files: of each, its number, size in bytes and time of change in ns."""
        found = [(self.folder / name).stat() for name in FILES]
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return _context(ssl.PROTOCOL_TLS_SERVER, self.folder), _context(ssl.PROTOCOL_TLS_CLIENT, self.folder)


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        context.load_verify_locations(folder / AUTHORITY)
    except OSError as error:
        raise OSError(f"{CERTIFICATE}, {KEY} or {AUTHORITY} in {folder} cannot be used: {error}") from error
    return context
