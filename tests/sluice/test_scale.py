"""`scaling`, `scale` and the command `sluice scale`: what is sent, what is shown, and what is refused unsent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice import NotFoundError
from sluice.cli import main
from tests.sluice.drivers import Driver
from tests.sluice.server import ContractServer, answers, api_error

Captured = pytest.CaptureFixture[str]
PATH = "/sluice/admin/scale"
ANSWER: dict[str, Any] = {
    "mode": "manual",
    "by": "an administrator",
    "policy": {"name": "joint", "params": {"band": 0.15}},
    "observed_for_s": 0.4,
    "groups": [
        {
            "name": "decode",
            "role": "decode",
            "min": 1,
            "max": 4,
            "keeps_warm": 1,
            "warm_max": 1,
            "configured": {"min": 1, "max": 3, "warm": 0, "warm_max": 1},
            "wanted": 3,
            "replicas": 4,
            "starting": 1,
            "warm": 0,
            "active": 2,
            "draining": 0,
            "overdue": 2,
        }
    ],
    "held": None,
    "plan": {
        "serving": {"prefill": 1, "decode": 3, "colocated": 0},
        "warm": 1,
        "moves": [
            {"way": "activate", "engine": "decode-a", "role": "decode"},
            {"way": "start", "engine": "", "role": "decode"},
        ],
        "engines": [{"engine": "decode-a", "role": "decode", "duty": "active"}],
        "replicas": {"decode": 4},
    },
    "reasons": ["an administrator set decode=3"],
    "notes": ["decode: 1 that did not start yet is no longer needed"],
}


@pytest.fixture(autouse=True)
def at_the_server(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_BASE_URL", server.url)
    server.on(f"GET {PATH}", answers(200, ANSWER))
    server.on(f"PUT {PATH}", answers(200, ANSWER))


def test_the_state_is_typed(server: ContractServer, driver: Driver) -> None:
    scaling = driver.call(server.url, "scaling", settings={"admin_key": "root"})
    assert (scaling.mode, scaling.groups[0].active, scaling.plan.serving.decode) == ("manual", 2, 3)
    assert scaling.plan.moves[1].way == "start"
    assert server.requests[0].headers["authorization"] == "Bearer root"


def test_an_order_is_one_request(server: ContractServer, driver: Driver) -> None:
    driver.call(server.url, "scale", {"decode": 3})
    driver.call(server.url, "scale", {"decode": 3}, plan=True)
    driver.call(server.url, "scale", auto=True)
    driver.call(server.url, "scale", plan=True)
    driver.call(server.url, "scale", bounds={"decode": {"max": 6, "warm": 1}})
    assert [request.json for request in server.requests] == [
        {"counts": {"decode": 3}},
        {"counts": {"decode": 3}, "plan": True},
        {"mode": "auto"},
        {"plan": True},
        {"bounds": {"decode": {"max": 6, "warm": 1}}},
    ]


def test_an_order_that_says_nothing_or_too_much_is_not_sent(server: ContractServer, driver: Driver) -> None:
    with pytest.raises(ValueError, match="nothing to change"):
        driver.call(server.url, "scale")
    with pytest.raises(ValueError, match="exclude each other"):
        driver.call(server.url, "scale", {"decode": 1}, auto=True)
    with pytest.raises(ValueError, match="exclude each other"):
        driver.call(server.url, "scale", {"decode": 1}, bounds={"decode": {"max": 2}})
    assert server.requests == []


def test_a_server_without_an_autoscaler_says_what_to_set(server: ContractServer, driver: Driver) -> None:
    server.on(f"GET {PATH}", answers(404, api_error("no autoscaler is connected", code="no_autoscaler")))
    with pytest.raises(NotFoundError) as caught:
        driver.call(server.url, "scaling")
    assert "scaling.enabled" in (caught.value.hint or "")


def test_the_command_shows_groups_plan_reasons_and_orders(capsys: Captured) -> None:
    assert main(["scale"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mode      manual (by an administrator)"
    assert "observed  0.4 s ago" in lines
    table = [" ".join(line.split()) for line in lines if line.startswith(("GROUP", "decode "))]
    assert table == [
        "GROUP ROLE BOUNDS KEEPS WANTED REPLICAS ACTIVE WARM STARTING OVERDUE DRAINING",
        "decode decode 1..4 1 warm 3 4 2 0 1 2 0",
    ]
    assert lines[-8:] == [
        "plan      1 prefill, 3 decode, 0 colocated serve, 1 warm",
        "move      activate decode-a (decode)",
        "move      start one more (decode)",
        "order     decode-a: decode, active",
        "order     decode: 4 replicas",
        "bounds    decode: max 4 (configured: 3), warm 1 (configured: 0), set by an administrator",
        "reason    an administrator set decode=3",
        "note      decode: 1 that did not start yet is no longer needed",
    ]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (["prefill=2", "decode=3"], {"counts": {"prefill": 2, "decode": 3}}),
        (["auto"], {"mode": "auto"}),
        (["--plan"], {"plan": True}),
        (["decode=3", "--plan"], {"counts": {"decode": 3}, "plan": True}),
        (
            ["decode.min=0", "decode.max=6", "d.warm_max=2"],
            {"bounds": {"decode": {"min": 0, "max": 6}, "d": {"warm_max": 2}}},
        ),
        (["decode.warm=1", "--plan"], {"bounds": {"decode": {"warm": 1}}, "plan": True}),
    ],
)
def test_the_command_sends_its_orders(
    server: ContractServer, arguments: list[str], sent: dict[str, Any]
) -> None:
    assert main(["scale", *arguments]) == 0
    assert server.requests[-1].json == sent


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["decode"], "GROUP=N"),
        (["decode=-1"], "GROUP=N"),
        (["=1"], "GROUP=N"),
        (["decode=1", "decode=2"], "two numbers"),
        (["auto", "decode=1"], "stands alone"),
        (["decode.most=1"], "there are min, max, warm, warm_max"),
        ([".max=1"], "GROUP=N"),
        (["decode.max=1", "decode.max=2"], "two numbers"),
        (["decode.max=1", "decode=2"], "not both"),
    ],
)
def test_wrong_orders_ask_nobody(
    server: ContractServer, capsys: Captured, arguments: list[str], says: str
) -> None:
    assert main(["scale", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert server.requests == []


def test_json_is_the_server_s_answer(capsys: Captured) -> None:
    assert main(["scale", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["replicas"] == {"decode": 4}
    assert told["groups"][0]["name"] == "decode"
