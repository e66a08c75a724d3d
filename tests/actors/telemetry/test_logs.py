"""Log lines say who wrote them about what; format, level and access lines are chosen by the environment and changed."""

import io
import json
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler

import pytest

from actors.telemetry import logs


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The content of a replica's log file: Serve's logger with a buffer before the file, as Serve makes it."""
    serve, stream = logging.getLogger(logs.SERVE), io.StringIO()
    before = {name: _state(name) for name in (logs.SERVE, *logs.PACKAGES, "actors.router")}
    file = logging.StreamHandler(stream)
    file.setFormatter(logging.Formatter("%(levelname)s -- %(message)s"))
    serve.handlers, serve.propagate = [MemoryHandler(1, target=file)], False
    # vLLM, which an earlier test may have imported, adds a field to every line of its process
    factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    yield stream
    logging.setLogRecordFactory(factory)
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    logs.access.on = False


def _state(name: str) -> tuple[list[logging.Handler], int, bool]:
    logger = logging.getLogger(name)
    return list(logger.handlers), logger.level, logger.propagate


def test_lines_of_all_packages_go_where_serve_s_go(written: io.StringIO) -> None:
    logs.start("router", environment={})
    logging.getLogger("actors.router.server").info("one")
    logging.getLogger("ray.serve").warning("two")
    logging.getLogger("app.ingress.asgi").debug("three")
    assert written.getvalue().splitlines() == ["INFO -- one", "WARNING -- two"]


def test_a_second_start_does_not_write_lines_twice(written: io.StringIO) -> None:
    for _ in range(2):
        logs.start("router", environment={})
    logging.getLogger("actors.router.server").info("one")
    assert written.getvalue().splitlines() == ["INFO -- one"]


def test_json_has_a_field_for_each_fact(written: io.StringIO) -> None:
    logs.start("engine", "d-1", {logs.FORMAT: "json"})
    told = logs.about("r-1", "req-r", "0af7")
    logging.getLogger("actors.engine").warning("slow %s", "step", extra=told)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("actors.engine").exception("failed")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING", "logger": "actors.engine", "message": "slow step", "component": "engine", "engine": "d-1",
        "attempt_id": "r-1", "request_id": "req-r", "trace_id": "0af7",
    }  # fmt: skip
    assert "ValueError: broken" in second["exc_info"]


def test_about_leaves_out_what_is_not_known() -> None:
    assert logs.about("r-1") == {"attempt_id": "r-1"}
    assert logs.about() == {}


def test_the_environment_sets_level_and_access_lines(written: io.StringIO) -> None:
    logs.start("ingress", environment={logs.LEVEL: "ERROR", logs.ACCESS: "1"})
    assert logs.access.on
    logging.getLogger("app.ingress").warning("not shown")
    assert written.getvalue() == ""


def test_one_logger_s_level_is_changed_while_it_runs(written: io.StringIO) -> None:
    logs.start("router", environment={})
    logs.change("DEBUG", "actors.router")
    logging.getLogger("actors.router.server").debug("shown")
    logging.getLogger("actors.wire.channel").debug("not shown")
    assert written.getvalue().splitlines() == ["DEBUG -- shown"]
    assert logs.levels()["actors.router"] == "DEBUG"
    logs.change(on=True)
    assert logs.access.on and logs.levels()["actors"] == "INFO"


@pytest.mark.parametrize(
    ("level", "logger", "word"),
    [
        ("LOUD", "", "one of DEBUG, INFO"),
        ("INFO", "ray", "actors, app"),
        ("INFO", "actors_of_others", "actors, app"),
    ],
)
def test_what_does_not_exist_is_refused_and_changes_nothing(
    written: io.StringIO, level: str, logger: str, word: str
) -> None:
    logs.start("router", environment={})
    before = logs.levels()
    with pytest.raises(logs.BadLogs, match=word):
        logs.change(level, logger, True)
    assert (logs.levels(), logs.access.on) == (before, False)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(logs.BadLogs, match="text or json"):
        logs.start("router", environment={logs.FORMAT: "xml"})
