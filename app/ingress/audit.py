"""The audit log of an ingress: each request below `/sluice/admin/`, and each that was refused, as one JSON line.

    {"time": 1798761600.123, "key": "5d41402a", "address": "10.0.0.7", "forwarded": "", "replica": "ingress-0a1b2c3d",
     "request_id": "req-...", "method": "PUT", "path": "/sluice/admin/policy", "asked": "{...}", "status": 200}

`key` is a name of the key that was sent (`app.admin_key.name_of_key`), the same as in the dashboard's audit log, and
empty without one. `address` is whoever has opened the connection: behind a proxy the proxy, and what that says of its
client is in `forwarded`, which anybody can send. `asked` is the body of a change, cut to `ASKED_BYTES`.

A line is written when the request is answered, by the thread of `app.ingress.line_log`. Anybody can cause refusals, so
of these at most `REFUSALS` in `REFUSALS_S` are written; the next line says how many were not (`refused_more`).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.private_folder import make_own
from app.admin_key import name_of_key
from app.ingress.config import IngressConfig
from app.ingress.http.reply import Request
from app.ingress.line_log import LineLog
from app.ingress.metrics import IngressMetrics, counting

ASKED_BYTES = 4096
"""Bytes of a change that are kept; one of every policy with its parameters takes some hundred. ASSUMPTION."""
REFUSALS = 10
REFUSALS_S = 60.0
"""Refused requests that are written, and in which time. ASSUMPTION: enough to see that somebody tries. A line of a
refusal is below 1 kB, so a day of them is below 15 MB."""
_TEXT_BYTES = 256
"""Bytes of a header or a path that are kept."""
_REFUSED = (401, 403)


class Audit:
    """The log of one ingress replica in `folder`, which is made for this user alone. Raises OSError if others may write
    there, or if it cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        replica_id: str,
        max_bytes: int,
        most_files: int | None,
        count: Callable[[str, int], None] = lambda *_: None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        make_own(folder)
        self._log = LineLog("audit", folder, replica_id, max_bytes, count, most_files)
        self._replica_id, self._clock_s = replica_id, clock_s
        self._refused = self._refused_more = 0
        self._refused_from_s = 0.0

    def note(self, request: Request, request_id: str, token: bytes, status: int) -> None:
        """Has a request written that was answered with `status`, and returns at once."""
        now_s = self._clock_s()
        if status in _REFUSED and not self._room_for_refusal(now_s):
            self._refused_more += 1
            return
        line: dict[str, Any] = {
            "time": round(now_s, 3),
            "key": name_of_key(token.decode("latin-1")) if token else "",
            "address": request.address(),
            "forwarded": _text(request.headers.get(b"x-forwarded-for", b"")),
            "replica": self._replica_id,
            "request_id": request_id,
            "method": request.method,
            "path": request.path[:_TEXT_BYTES],
            "asked": _text(request.body, ASKED_BYTES)
            if request.method == "PUT" and status not in _REFUSED
            else "",
            "status": status,
        }
        if self._refused_more:
            line["refused_more"], self._refused_more = self._refused_more, 0
        self._log.add(line)

    async def stop(self) -> None:
        """Writes the remaining lines and closes the file."""
        await self._log.stop()

    def _room_for_refusal(self, now_s: float) -> bool:
        if not 0 <= now_s - self._refused_from_s < REFUSALS_S:
            self._refused, self._refused_from_s = 0, now_s
        self._refused += 1
        return self._refused <= REFUSALS


def audit_of(config: IngressConfig, metrics: IngressMetrics) -> Audit | None:
    """Returns the audit log of a replica, or None where it is turned off. Raises OSError if it has no folder."""
    if not config.audit_log:
        return None
    files, count = config.audit_log_files or None, counting(metrics.audit_lines)
    return Audit(Path(config.audit_log), config.replica_id, config.audit_log_bytes, files, count)


def _text(value: bytes, most: int = _TEXT_BYTES) -> str:
    return value[:most].decode("utf-8", "backslashreplace")
