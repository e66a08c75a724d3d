"""`logs`, `set_logs` and the command `sluice logs`: what is sent, what is shown, and what is refused unsent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.cli import main
from tests.sluice.drivers import Driver
from tests.sluice.server import ContractServer, answers

Captured = pytest.CaptureFixture[str]
PATH = "/sluice/admin/logs"
LEVELS: dict[str, Any] = {"levels": {"actors": "INFO", "actors.router": "DEBUG"}}


@pytest.fixture(autouse=True)
def at_the_server(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_BASE_URL", server.url)
    server.on(f"GET {PATH}", answers(200, LEVELS))
    server.on(f"PUT {PATH}", answers(200, {**LEVELS, "told": 4}))


def test_levels_are_typed_and_a_change_is_one_request(server: ContractServer, driver: Driver) -> None:
    told = driver.call(server.url, "logs", settings={"admin_key": "root"})
    assert (told.levels["actors.router"], told.told) == ("DEBUG", None)
    assert server.requests[0].headers["authorization"] == "Bearer root"
    assert driver.call(server.url, "set_logs", "DEBUG", logger="actors.router").told == 4
    driver.call(server.url, "set_logs", access=False)
    assert [request.json for request in server.requests[1:]] == [
        {"level": "DEBUG", "logger": "actors.router"},
        {"access": False},
    ]


def test_a_change_that_says_nothing_or_half_is_not_sent(server: ContractServer, driver: Driver) -> None:
    with pytest.raises(ValueError, match="nothing to change"):
        driver.call(server.url, "set_logs")
    with pytest.raises(ValueError, match="logger needs level"):
        driver.call(server.url, "set_logs", logger="actors", access=True)
    assert server.requests == []


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ([], None),
        (["debug"], {"level": "DEBUG"}),
        (["INFO", "--logger", "actors.router"], {"level": "INFO", "logger": "actors.router"}),
        (["--access", "on"], {"access": True}),
    ],
)
def test_the_command_shows_levels(
    server: ContractServer, capsys: Captured, arguments: list[str], sent: dict[str, Any] | None
) -> None:
    assert main(["logs", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "actors.router  DEBUG" in shown
    assert ("sent to 4 other processes" in shown) == (sent is not None)
    (request,) = server.requests
    assert (request.json if sent is not None else None) == sent


def test_the_command_prints_json(capsys: Captured) -> None:
    assert main(["logs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == LEVELS


def test_a_logger_without_a_level_is_wrong_usage(server: ContractServer, capsys: Captured) -> None:
    assert main(["logs", "--logger", "actors"]) == 2
    assert "needs a level" in capsys.readouterr().err
    assert server.requests == []
