"""Sluice's additions to a request: priority, SLO, session, timeout and mode, from the body or else from headers.

body                                header
priority (class name or integer)    x-sluice-priority
slo.ttft_ms, slo.tpot_ms            x-sluice-slo-ttft-ms, x-sluice-slo-tpot-ms
session                             x-sluice-session
user (OpenAI's own field)           x-sluice-user; predictors learn output lengths for each user
-                                   x-sluice-timeout-s (the total time that the request may take, at most what its API
                                    key allows, or the operator's `request_timeout_s`)
-                                   x-sluice-migrate (on or off: whether another engine may go on with an answer)
-                                   x-sluice-mode (colocated or disaggregated: only engines of that kind serve
                                    it; for measurements, by administrators: `app.ingress.admin`)
"""

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from app.api.errors import ApiError, bad_request
from app.api.schema import ChatRequest, CompletionRequest, Slo
from policies.record import record
from policies.request.terms import Mode, Terms

CLASSES = ("interactive", "standard", "batch")
PRIORITY_OF_CLASS = {"interactive": -1, "standard": 0, "batch": 1}
"""The priority of each class; lower is served earlier, as in vLLM. A number maps to a class by its sign."""

MAX_PRIORITY = 1000
MAX_NAME_CHARS = 512

Class = Literal["interactive", "standard", "batch"]
Ceiling = Class | Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""The most urgent class or priority that a request may ask for."""


@record
class ClassSlo:
    """Latency targets in seconds for requests of a class that name none; None means no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@record
class Defaults:
    """The operator's settings for what a request leaves open.

    `completion_tokens` is the max_tokens of a completion (16 at OpenAI), `timeout_s` the total time that a request may
    take (None: no limit), and `class_slo` the latency targets of each class. `least_priority` (None: any) is the most
    urgent priority that the request may ask for, and has at most if it asks for none. It comes of the request's API
    key, as `tenant`, `weight` and, where the key has one, `timeout_s` do; where keys are off, `tenant` is "" here.
    """

    completion_tokens: int = 16
    timeout_s: float | None = None
    class_slo: Mapping[str, ClassSlo] = field(default_factory=dict)
    least_priority: int | None = None
    tenant: str = ""
    weight: float = 1.0


def terms_of(
    request: ChatRequest | CompletionRequest,
    headers: dict[bytes, bytes],
    defaults: Defaults,
    local: bool = False,
) -> Terms:
    """Makes the `Terms` of a request, once for its whole life.

    With `local` the prompt must be computed where the answer is generated. Raises `ApiError` 400 for a header that
    cannot be read, and 403 for a priority above the ceiling of the API key, or of the service where keys are off.
    """
    priority, request_class = priority_of(request.priority, headers)
    least = defaults.least_priority
    if least is not None and priority < least:
        if request.priority is not None or b"x-sluice-priority" in headers:
            raise above_ceiling(least, keyed=bool(defaults.tenant))
        priority, request_class = least, class_of(least)
    ttft_slo_s, tpot_slo_s = slo_of(request.slo, headers)
    of_class = defaults.class_slo.get(request_class, ClassSlo())
    # a client could overtake everybody with an objective of a millisecond
    presses = ttft_slo_s is None or (of_class.ttft_s is not None and ttft_slo_s >= of_class.ttft_s)
    return Terms(
        priority=priority,
        request_class=request_class,
        ttft_slo_s=of_class.ttft_s if ttft_slo_s is None else ttft_slo_s,
        tpot_slo_s=of_class.tpot_s if tpot_slo_s is None else tpot_slo_s,
        session=name_of(request.session, headers, "x-sluice-session"),
        local=local,
        mode=mode_of(headers),
        timeout_s=timeout_of(headers, defaults.timeout_s),
        migrate=migrate_of(headers),
        tenant=defaults.tenant,
        weight=defaults.weight,
        slo_presses=presses,
    )


def priority_of(value: int | str | None, headers: dict[bytes, bytes]) -> tuple[int, str]:
    """Returns the priority and the class of a request.

    Raises `ApiError` 400 for a header that is neither a class nor an integer of at most `MAX_PRIORITY`.
    """
    if value is None:
        raw = headers.get(b"x-sluice-priority")
        value = 0 if raw is None else _priority_in(_text(raw, "x-sluice-priority").strip())
    if isinstance(value, str):
        return PRIORITY_OF_CLASS[value], value
    return value, class_of(value)


def class_of(priority: int) -> str:
    """Returns the class of a priority, by its sign."""
    return CLASSES[1 + (priority > 0) - (priority < 0)]


def least_priority_of(ceiling: Ceiling) -> int:
    """Returns the smallest, which is the most urgent, priority below a ceiling."""
    return PRIORITY_OF_CLASS[ceiling] if isinstance(ceiling, str) else ceiling


def above_ceiling(least: int, keyed: bool) -> ApiError:
    """Returns the 403 of a request that asks for more than its API key allows, or the service where keys are off."""
    who = "This API key" if keyed else "A request without an API key"
    message = f"{who} may ask for priorities of {least} and more (class {class_of(least)}), not for less."
    if not keyed:
        message += " More is for admin keys, or where the server's ingress.options.ceiling allows it."
    return ApiError(403, message, param="priority", code="priority_not_allowed")


def slo_of(slo: Slo | None, headers: dict[bytes, bytes]) -> tuple[float | None, float | None]:
    """Returns the targets for TTFT and TPOT in seconds, or None for each that is missing. Raises `ApiError` 400."""
    ttft_ms = slo.ttft_ms if slo else None
    tpot_ms = slo.tpot_ms if slo else None
    if ttft_ms is None:
        ttft_ms = _positive(headers, b"x-sluice-slo-ttft-ms", "milliseconds")
    if tpot_ms is None:
        tpot_ms = _positive(headers, b"x-sluice-slo-tpot-ms", "milliseconds")
    return (None if ttft_ms is None else ttft_ms / 1e3), (None if tpot_ms is None else tpot_ms / 1e3)


def timeout_of(headers: dict[bytes, bytes], most_s: float | None) -> float | None:
    """Returns the seconds that the request may take: what its header asks for, but at most `most_s` (None: any). Raises
    `ApiError` 400 for a header that is no positive number.
    """
    asked_s = _positive(headers, b"x-sluice-timeout-s", "seconds")
    if asked_s is None or most_s is None:
        return most_s if asked_s is None else asked_s
    return min(asked_s, most_s)


def name_of(value: str | None, headers: dict[bytes, bytes], header: str) -> str:
    """Returns the name in the body, else in the header, else "".

    Raises `ApiError` 400 for a header that is too long or not UTF-8.
    """
    if value is not None:
        return value
    raw = headers.get(header.encode())
    return "" if raw is None else _text(raw, header)


def mode_of(headers: dict[bytes, bytes]) -> Mode | None:
    """Returns the mode in the header, or None without the header. Raises `ApiError` 400 for an unknown mode."""
    raw = headers.get(b"x-sluice-mode")
    if raw is None:
        return None
    mode = _text(raw, "x-sluice-mode").strip()
    try:
        return Mode(mode)
    except ValueError:
        message = f"'x-sluice-mode' must be {' or '.join(Mode)}."
        raise bad_request(message, "x-sluice-mode", "invalid_value") from None


def migrate_of(headers: dict[bytes, bytes]) -> bool:
    """Returns whether another engine may go on with the answer when one fails. Raises `ApiError` 400 for a header that
    says neither `on` nor `off`.
    """
    raw = headers.get(b"x-sluice-migrate")
    if raw is None:
        return True
    value = _text(raw, "x-sluice-migrate").strip()
    if value not in ("on", "off"):
        raise bad_request("'x-sluice-migrate' must be on or off.", "x-sluice-migrate", "invalid_value")
    return value == "on"


def _priority_in(text: str) -> int | str:
    if text in PRIORITY_OF_CLASS:
        return text
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or abs(value) > MAX_PRIORITY:
        raise bad_request(
            f"'x-sluice-priority' must be {', '.join(CLASSES)} or an integer of at most {MAX_PRIORITY}.",
            "x-sluice-priority",
            "invalid_value",
        )
    return value


def _positive(headers: dict[bytes, bytes], name: bytes, unit: str) -> float | None:
    raw = headers.get(name)
    if raw is None:
        return None
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        message = f"'{name.decode()}' must be a positive number of {unit}."
        raise bad_request(message, name.decode(), "invalid_value")
    return value


def _text(raw: bytes, name: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise bad_request(f"'{name}' is not valid UTF-8.", name, "invalid_value") from None
    if len(text) > MAX_NAME_CHARS:
        raise bad_request(f"'{name}' is longer than {MAX_NAME_CHARS} characters.", name, "invalid_value")
    return text
