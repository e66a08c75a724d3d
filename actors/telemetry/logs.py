"""Log lines of one process: who wrote them and about which request, as text or as JSON, from a level on.

Ray Serve gives each replica a log file and writes its own lines there. `start` sends the lines of Sluice's packages the
same way, and marks every line with its component and engine. Lines about a request carry `about`: its id, the attempt's
and the trace's. No line contains the text of a prompt or of an answer.

With SLUICE_LOG_FORMAT=json, or where Serve's own encoding is JSON, each line is a JSON object. SLUICE_LOG_LEVEL is the
least level (INFO). With SLUICE_ACCESS_LOG=1 an ingress writes a line for each request for output when it has ended.
`change` changes level and access lines while the process runs.
"""

import logging
import os
from collections.abc import Mapping
from logging.handlers import MemoryHandler
from typing import Final

LEVEL, FORMAT, ACCESS = "SLUICE_LOG_LEVEL", "SLUICE_LOG_FORMAT", "SLUICE_ACCESS_LOG"
"""Environment variables that set the level, the format and the access lines."""
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
SERVE = "ray.serve"
"""The logger to whose handlers Ray Serve gives a replica's log file. It does not pass lines on to other loggers."""
PACKAGES: Final = ("actors", "app", "policies", "predictors")
"""The packages whose lines go to a replica's log file, beside those that are written to Serve's logger itself."""

_FIELDS = ("levelname", "name", "message", "component", "engine")


class Access:
    """Whether an ingress writes access lines; `on` is read once a request."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


access = Access()
"""The switch of this process."""


class BadLogs(ValueError):
    """Logs cannot be changed as asked; the message says what is allowed."""


def about(
    attempt_id: str | None = None, request_id: str | None = None, trace_id: str | None = None
) -> dict[str, str]:
    """Returns what a line about a request says of it, for the argument `extra` of a logger's methods."""
    told = {"attempt_id": attempt_id, "request_id": request_id, "trace_id": trace_id}
    return {name: value for name, value in told.items() if value}


class _Marks(logging.Filter):
    """Adds component and engine to each line."""

    def __init__(self, component: str, engine: str | None) -> None:
        super().__init__()
        self._component, self._engine = component, engine

    def filter(self, record: logging.LogRecord) -> bool:
        record.component = self._component
        if self._engine is not None:
            record.engine = self._engine
        return True


class _ToServe(logging.Handler):
    """Hands lines to the handlers of Serve's logger, whatever they are at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(SERVE).handle(record)


def start(component: str, engine: str | None = None, environment: Mapping[str, str] = os.environ) -> None:
    """Sets up the lines of this process, which is a `component` and perhaps one `engine`. Raises BadLogs for a level or
    a format that does not exist.
    """
    wanted = environment.get(FORMAT, "").lower() or "text"
    if wanted not in ("text", "json"):
        raise BadLogs(f"{FORMAT} is {wanted!r}: it must be text or json")
    serve = logging.getLogger(SERVE)
    for handler in serve.handlers:
        handler.filters = [one for one in handler.filters if not isinstance(one, _Marks)]
        handler.addFilter(_Marks(component, engine))
        if wanted == "json":
            _last(handler).setFormatter(json_formatter())
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = [one for one in logger.handlers if not isinstance(one, _ToServe)]
        logger.addHandler(_ToServe())
        logger.propagate = False
    change(environment.get(LEVEL) or "INFO")
    access.on = environment.get(ACCESS, "0").lower() in ("1", "true", "on", "yes")


def _last(handler: logging.Handler) -> logging.Handler:
    """Returns the handler that writes: Serve buffers lines in one that has another as its target."""
    return handler.target if isinstance(handler, MemoryHandler) and handler.target else handler


def json_formatter() -> logging.Formatter:
    """Returns a formatter that makes a JSON object of a line, with all that the line was given beside its text."""
    from pythonjsonlogger.json import JsonFormatter

    renamed = {"levelname": "level", "name": "logger"}
    return JsonFormatter(_FIELDS, rename_fields=renamed, timestamp="time")


def change(level: str | None = None, logger: str = "", on: bool | None = None) -> None:
    """Sets the least level of the lines of `logger` and of those below it (by default of all of Sluice), and whether
    there are access lines; None leaves it as it is. Raises BadLogs, and then changes nothing.
    """
    check(level, logger)
    if level is not None:
        for name in (logger,) if logger else (*PACKAGES, SERVE):
            logging.getLogger(name).setLevel(level)
    if on is not None:
        access.on = on


def check(level: str | None, logger: str) -> None:
    """Raises BadLogs for a level that does not exist, or for a logger that is none of Sluice's."""
    if level is not None and level not in LEVELS:
        raise BadLogs(f"the level is {level!r}: it must be one of {', '.join(LEVELS)}")
    if logger and not any(logger == name or logger.startswith(f"{name}.") for name in (*PACKAGES, SERVE)):
        raise BadLogs(
            f"the logger is {logger!r}: it must be {', '.join((*PACKAGES, SERVE))} or one below these"
        )


def levels() -> dict[str, str]:
    """Returns the level of each logger of Sluice that has one of its own, by name."""
    known = [*PACKAGES, SERVE, *logging.root.manager.loggerDict]
    own = [
        name for name in known if any(name == one or name.startswith(f"{one}.") for one in (*PACKAGES, SERVE))
    ]
    found = {name: logging.getLogger(name).level for name in sorted(set(own))}
    return {name: logging.getLevelName(level) for name, level in found.items() if level}
