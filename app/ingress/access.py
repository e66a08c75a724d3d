"""The access line of a request for output: what was asked and how it went, never a text of prompt or answer."""

import logging
from typing import Any

from actors.telemetry.logs import about, access

log = logging.getLogger("ray.serve.access")


def write(
    path: str,
    status: int,
    seconds: float,
    request_id: str,
    *,
    attempt_id: str = "",
    trace_id: str = "",
    **more: Any,
) -> None:
    """Writes the line of a request that was answered with `status` after `seconds`, with `more` figures of it, unless
    access lines are off. In JSON each of them is a field.
    """
    if not access.on:
        return
    shown = "".join(f" {name}={value}" for name, value in more.items() if value is not None)
    fields = {name: value for name, value in more.items() if value is not None}
    log.info(
        "POST %s %d in %.3f s%s", path, status, seconds, shown,
        extra={"method": "POST", "path": path, "status": status, "seconds": round(seconds, 6)}
        | fields
        | about(attempt_id, request_id, trace_id),
    )  # fmt: skip
