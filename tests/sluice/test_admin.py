"""`policies`, `set_policies`, `explain`, and the commands that show them: formula, numbers, ranking."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice import NotFoundError, Sluice
from sluice.cli import main
from tests.sluice.drivers import Driver
from tests.sluice.server import ContractServer, answers, api_error

Captured = pytest.CaptureFixture[str]
POLICY, EXPLAIN = "/sluice/admin/policy", "/sluice/admin/explain/chatcmpl-1"

NETKV = {
    "name": "netkv",
    "params": {"variant": "full", "load_weight": 2.0},
    "formula": "cost = transfer_s + queue_s + load_weight * missing",
}
LOAD = {
    "name": "load_aware",
    "params": {"running": 1.5, "waiting": 2.0},
    "formula": "cost = (w.running * running + w.waiting * waiting) / (sum of w)",
}
ANSWER: dict[str, Any] = {
    "prefill": LOAD,
    "decode": NETKV,
    "dispatch": {"max_queue": 1024},
    "available": {"prefill": {"load_aware": LOAD}, "decode": {"netkv": NETKV}},
}
EXPLANATION: dict[str, Any] = {
    "id": "chatcmpl-1",
    "decisions": [
        {
            "at_s": 1000.25,
            "action": "RoutePrefill",
            "attempt_id": "1-a",
            "colocated": False,
            "degraded": False,
            "waited_s": 0.0125,
            "policy": LOAD,
            "decision": {
                "worker": "p1",
                "reason": "least_cost",
                "ranking": [{"worker": "p1", "cost": 0.25, "terms": {"running": 0.5}}],
            },
        },
        {
            "at_s": 1000.5,
            "action": "RouteDecode",
            "attempt_id": "1-a",
            "waited_s": 2.0,
            "policy": NETKV,
            "intent": {"n_bytes": 9},
            "decision": {
                "worker": "d2",
                "reason": "tie_drawn",
                "ranking": [
                    {
                        "worker": "d1",
                        "cost": 0.75,
                        "terms": {"transfer_s": 0.5, "queue_s": 0.25, "tier": 3.0},
                    },
                    {"worker": "d2", "cost": 0.75, "terms": {"transfer_s": 0.5, "queue_s": 0.25}},
                    {"worker": "d3", "cost": 9.5, "terms": {"transfer_s": 9.5, "queue_s": 0.0}},
                ],
            },
        },
        {
            "at_s": 1001.0,
            "action": "Reject",
            "attempt_id": "1-b",
            "status": 503,
            "reason": "queue_timeout",
            "retry_after_s": 2.0,
        },
    ],
}


@pytest.fixture(autouse=True)
def at_the_server(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_BASE_URL", server.url)
    server.on(f"GET {POLICY}", answers(200, ANSWER))
    server.on(f"PUT {POLICY}", answers(200, ANSWER))
    server.on(f"GET {EXPLAIN}", answers(200, EXPLANATION))


# -------------------------------------------------------------------------------------------------------------- calls


def test_policies_are_typed(server: ContractServer, driver: Driver) -> None:
    policies = driver.call(server.url, "policies")
    assert (policies.decode.name, policies.decode.params["load_weight"]) == ("netkv", 2.0)
    assert policies.available.prefill["load_aware"].formula == LOAD["formula"]
    assert "authorization" not in server.requests[0].headers


def test_the_admin_key_is_sent_where_it_belongs_and_nowhere_else(
    server: ContractServer, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on("GET /v1/models", answers(200, {"data": []}))
    keys = {"api_key": "user", "admin_key": "root"}
    driver.call(server.url, "policies", settings=keys)
    driver.call(server.url, "models", settings=keys)
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "from-env")
    driver.call(server.url, "explain", "chatcmpl-1")
    sent = [request.headers["authorization"] for request in server.requests]
    assert sent == ["Bearer root", "Bearer user", "Bearer from-env"]


def test_status_and_metrics_are_asked_with_the_admin_key_where_no_other_is_given(
    server: ContractServer, driver: Driver
) -> None:
    for settings, expected in (
        ({}, None), ({"admin_key": "root"}, "Bearer root"), ({"api_key": "user", "admin_key": "root"}, "Bearer user"),
    ):  # fmt: skip
        for call in ("status", "metrics"):
            server.requests.clear()
            with contextlib.suppress(NotFoundError):
                driver.call(server.url, call, settings=settings)
            assert server.requests[0].headers.get("authorization") == expected


@pytest.fixture
def key_file(server: ContractServer, tmp_path: Path) -> Path:
    """The key file of the server, as `app.admin_key` writes it."""
    folder = tmp_path / f"sluice-{os.getuid()}"
    folder.mkdir(mode=0o700)
    file = folder / f"admin-key-{server.url.rpartition(':')[2]}"
    file.write_text("from-file\n")
    file.chmod(0o600)
    return file


def test_the_key_file_of_this_machine_is_read_at_each_call_where_no_key_is_given(
    server: ContractServer, driver: Driver, monkeypatch: pytest.MonkeyPatch, key_file: Path
) -> None:
    server.on("GET /v1/models", answers(200, {"data": []}))
    driver.call(server.url, "policies")
    driver.call(server.url, "explain", "chatcmpl-1", settings={"api_key": "user"})
    driver.call(server.url, "models")
    driver.call(server.url, "models", settings={"api_key": "user"})
    driver.call(server.url, "policies", settings={"admin_key": "root"})
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "from-env")
    driver.call(server.url, "policies")
    monkeypatch.delenv("SLUICE_ADMIN_KEY")
    key_file.write_text("another\n")
    driver.call(server.url, "policies")
    sent = [request.headers.get("authorization") for request in server.requests]
    assert sent == [
        "Bearer from-file",
        "Bearer from-file",
        None,
        "Bearer user",
        "Bearer root",
        "Bearer from-env",
        "Bearer another",
    ]


@pytest.mark.usefixtures("key_file")
def test_the_key_file_is_not_read_for_a_client_of_the_callers(server: ContractServer) -> None:
    with httpx.Client() as http, Sluice(server.url, http_client=http) as client:
        client.policies()
    assert "authorization" not in server.requests[0].headers


@pytest.mark.usefixtures("key_file")
def test_a_command_reads_the_key_file(server: ContractServer, capsys: Captured) -> None:
    assert main(["policy", "show"]) == 0
    assert server.requests[0].headers["authorization"] == "Bearer from-file"


def test_a_change_is_one_request(server: ContractServer, driver: Driver) -> None:
    driver.call(server.url, "set_policies", decode="netkv", decode_params={"variant": "static"})
    driver.call(server.url, "set_policies", prefill="random", dispatch={"max_queue": 3})
    driver.call(server.url, "set_policies", admission="by_wait", admission_params={"margin": 0.5})
    assert [request.json for request in server.requests] == [
        {"decode": {"name": "netkv", "params": {"variant": "static"}}},
        {"prefill": {"name": "random", "params": {}}, "dispatch": {"max_queue": 3}},
        {"admission": {"name": "by_wait", "params": {"margin": 0.5}}},
    ]


def test_a_change_that_says_nothing_or_too_little_is_not_sent(server: ContractServer, driver: Driver) -> None:
    with pytest.raises(ValueError, match="nothing to change"):
        driver.call(server.url, "set_policies")
    with pytest.raises(ValueError, match="decode_params need decode=NAME"):
        driver.call(server.url, "set_policies", prefill="random", decode_params={"a": 1})
    assert server.requests == []


def test_an_explanation_is_typed(server: ContractServer, driver: Driver) -> None:
    made = driver.call(server.url, "explain", "chatcmpl-1").decisions
    assert [d.action for d in made] == ["RoutePrefill", "RouteDecode", "Reject"]
    assert made[1].decision.ranking[2].terms["transfer_s"] == 9.5
    assert (made[2].status, made[2].reject_reason) == (503, "queue_timeout")


def test_an_id_is_quoted_in_the_path(server: ContractServer, driver: Driver) -> None:
    server.on("GET /sluice/admin/explain/a%2Fb%3F", answers(200, {"id": "a/b?", "decisions": []}))
    assert driver.call(server.url, "explain", "a/b?").id == "a/b?"


# ----------------------------------------------------------------------------------------------------------- commands


def test_explain_shows_formula_numbers_ranking_and_reason(capsys: Captured) -> None:
    assert main(["explain", "chatcmpl-1", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "request chatcmpl-1: 3 decisions"
    text = "\n".join(lines)
    assert "prefill -> p1  (attempt 1-a)" in text and "decode -> d2  (attempt 1-a)" in text
    assert "reason   least_cost, waited 12.5 ms" in text
    assert "formula  cost = (w.running * running + w.waiting * waiting) / (sum of w)" in text
    assert "p1: 0.25 = (1.5 * 0.5 + 2 * waiting) / (sum of w)" in text
    assert "d1: 0.75 = 0.5 + 0.25 + 2 * missing" in text
    assert "d2: 0.75 = 0.5 + 0.25 + 2 * missing" in text
    assert "d3: 9.5" not in text  # --top 2
    table = [line.split() for line in lines if line.strip().startswith(("WORKER", "> ", "d"))]
    assert ["WORKER", "COST", "transfer_s", "queue_s", "tier"] in table
    assert [">", "d2", "0.75", "0.5", "0.25", "-"] in table
    assert ["d3", "9.5", "9.5", "0", "-"] in table
    assert lines[-1].endswith("rejected with 503: queue_timeout, try again in 2 s  (attempt 1-b)")


def test_explain_names_the_workers_that_the_policy_could_not_choose(
    server: ContractServer, capsys: Captured
) -> None:
    made = EXPLANATION["decisions"][1] | {"quarantined": {"d7": "failing", "p2": "slow_prefill"}}
    server.on(f"GET {EXPLAIN}", answers(200, {"id": "chatcmpl-1", "decisions": [made]}))
    assert main(["explain", "chatcmpl-1"]) == 0
    assert "   without  d7 (failing), p2 (slow prefill): quarantined\n" in capsys.readouterr().out


def test_explain_shows_the_sum_of_the_admission_policy(server: ContractServer, capsys: Captured) -> None:
    terms = {"waited_s": 0.5, "queue_s": 4.25, "first_step_s": 0.031}
    judged = {"verdict": "refuse", "reason": "ttft_objective", "budget_s": 4.0, "terms": terms}
    slow = {"verdict": "refuse", "reason": "tpot_objective", "budget_s": 0.02, "terms": {"token_s": 0.03}}
    rejected = EXPLANATION["decisions"][2] | {"status": 429, "reason": "ttft_objective", "admission": judged}
    taken = EXPLANATION["decisions"][0] | {"admission": judged | {"verdict": "admit"}}
    made = [taken, rejected, rejected | {"admission": slow}]
    server.on(f"GET {EXPLAIN}", answers(200, {"id": "chatcmpl-1", "decisions": made}))
    assert main(["explain", "chatcmpl-1"]) == 0
    out = capsys.readouterr().out
    total = (
        "first token expected after 4.781 s = waited 0.500 + queue 4.250 + first_step 0.031; objective 4 s"
    )
    assert out.count(f"   admission {total}\n") == 2
    assert "   admission a token expected after 0.030 s = token 0.030; objective 0.02 s" in out
    assert "because" not in out


def test_explain_says_why_a_request_in_doubt_was_taken(server: ContractServer, capsys: Captured) -> None:
    said = "in doubt: the first token is expected after 5.3 s, and the request allows 5 s; at best it comes after 4.2 s"
    judged = {"verdict": "admit", "budget_s": 5.0, "terms": {"waited_s": 3.0, "pool_s": 2.3}, "detail": said}
    taken = EXPLANATION["decisions"][0] | {"admission": judged}
    server.on(f"GET {EXPLAIN}", answers(200, {"id": "chatcmpl-1", "decisions": [taken]}))
    assert main(["explain", "chatcmpl-1"]) == 0
    total = "first token expected after 5.300 s = waited 3.000 + pool 2.300; objective 5 s"
    assert f"   admission {total}\n   because  {said}\n" in capsys.readouterr().out


def test_explain_shows_whose_turn_it_was_and_who_was_ahead(server: ContractServer, capsys: Captured) -> None:
    first = {
        "tenant": "acme",
        "counter": 1200.4,
        "cost": 300.0,
        "tenants": 3,
        "others": {"beta": 1500.0, "": 1600.0},
    }
    late = {"tenant": "acme", "counter": 1500.0, "cost": 0.0, "tenants": 2, "others": {"beta": 1200.0}}
    routed = EXPLANATION["decisions"][0] | {"turn": first}
    refused = EXPLANATION["decisions"][2] | {"status": 429, "reason": "queue_full", "turn": late}
    server.on(f"GET {EXPLAIN}", answers(200, {"id": "chatcmpl-1", "decisions": [routed, refused]}))
    assert main(["explain", "chatcmpl-1"]) == 0
    out = capsys.readouterr().out
    said = "tenant acme at 1200 weighted tokens, charged 300; 3 tenants waited, none ahead: beta 1500, (no name) 1600"
    assert f"   turn     {said}\n" in out
    assert (
        "   turn     tenant acme at 1500 weighted tokens, charged 0; 2 tenants waited, 1 or more ahead: beta 1200\n"
        in out
    )


def test_explain_shows_the_counters_of_classes_and_a_raised_priority(
    server: ContractServer, capsys: Captured
) -> None:
    turn = {"tenant": "acme", "counter": 7.0, "cost": 300.0, "tenants": 1, "others": {}}
    shared = turn | {"classes": {"0": 1200.4, "1": 800.0, "-1": 2000.0}}
    both = shared | {"tenants": 2, "others": {"beta": 9.0}}
    aged = {"asked": 1, "served_as": 0}
    made = [EXPLANATION["decisions"][0] | more for more in ({"turn": shared, "aged": aged}, {"turn": both})]
    server.on(f"GET {EXPLAIN}", answers(200, {"id": "chatcmpl-1", "decisions": made}))
    assert main(["explain", "chatcmpl-1"]) == 0
    out = capsys.readouterr().out
    assert out.count("   class    priority 0 at 1200 weighted tokens; others: 1 800, -1 2000\n") == 2
    assert out.count("   aged     from priority 1 to 0: it waited long\n") == 1
    assert out.count("   turn     tenant acme at 7 weighted tokens, charged 300; 2 tenants waited") == 1
    assert out.count("   turn ") == 1


def test_a_worker_that_the_formula_was_not_applied_to_has_no_numbers(
    server: ContractServer, capsys: Captured
) -> None:
    tried = {"worker": "d1", "cost": 2.5, "terms": {"score": -2.5, "free": 3.0}}
    untried = {"worker": "d2", "cost": -4.0, "terms": {"free": 4.0}}
    made = EXPLANATION["decisions"][1] | {
        "policy": {"name": "br", "params": {}, "formula": "cost = -score"},
        "decision": {"worker": "d1", "reason": "fill", "ranking": [tried, untried]},
    }
    server.on(f"GET {EXPLAIN}", answers(200, {"id": "chatcmpl-1", "decisions": [made]}))
    assert main(["explain", "chatcmpl-1"]) == 0
    out = capsys.readouterr().out
    assert "d1: 2.5 = -(-2.5)" in out and "d2:" not in out
    assert "d2      -4" in out  # but it is ranked


def test_explain_json_is_the_server_s_answer(capsys: Captured) -> None:
    assert main(["explain", "chatcmpl-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == EXPLANATION


WAY = [
    {"name": "tokenise", "process": "in", "kind": "work", "since_s": 0.0, "until_s": 0.002},
    {"name": "queue", "process": "r", "kind": "wait", "since_s": 0.002, "until_s": 0.003},
    {"name": "to the prefill engine", "process": "p", "kind": "wire", "since_s": 0.003, "until_s": 0.008},
]


def test_explain_shows_the_way_of_a_request_as_a_waterfall(server: ContractServer, capsys: Captured) -> None:
    """The 48 characters of the bars are 8 ms, 6 each: 12 of work, then 6 of waiting, then 30 on the wire."""
    times = [{"attempt_id": "1-a", "at_s": 1000.0, "hops": WAY}]
    server.on(f"GET {EXPLAIN}", answers(200, {**EXPLANATION, "times": times}))
    assert main(["explain", "chatcmpl-1", "--times"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "attempt 1-a: 8.000 ms to the first token (work 2.000, wait 1.000, wire 5.000)"
    assert [row.split()[-4:] for row in rows] == [
        ["work", "0.000", "2.000", "=" * 12],
        ["wait", "2.000", "1.000", "." * 6],
        ["wire", "3.000", "5.000", "-" * 30],
    ]
    assert [row.index(row.split()[-1]) - rows[0].index("=") for row in rows] == [0, 12, 18]


def test_explain_says_how_times_come_to_be_known(capsys: Captured) -> None:
    assert main(["explain", "chatcmpl-1", "--times"]) == 0
    assert "x-sluice-times: on" in capsys.readouterr().out


def test_explain_of_an_unknown_request_says_so(server: ContractServer, capsys: Captured) -> None:
    message = "no decision is known for 'x'"
    server.on("GET /sluice/admin/explain/x", answers(404, api_error(message, code="decision_not_found")))
    assert main(["explain", "x"]) == 2
    err = capsys.readouterr().err
    assert message in err and "x-request-id" in err and "router.journal.folder" in err
    assert "sluice models" not in err


def test_explain_without_an_id_asks_nobody(capsys: Captured) -> None:
    assert main(["explain", " ", "--base-url", "http://127.0.0.1:1"]) == 2
    assert "chatcmpl-" in capsys.readouterr().err


def test_without_a_key_the_command_names_the_variable(server: ContractServer, capsys: Captured) -> None:
    server.on(f"GET {POLICY}", answers(401, api_error("Administration needs a key.", code="admin_key")))
    assert main(["policy", "show"]) == 2
    err = capsys.readouterr().err
    assert "SLUICE_ADMIN_KEY" in err and "SLUICE_API_KEY" not in err


def test_policy_show_lists_what_is_in_use_and_what_there_is(capsys: Captured) -> None:
    assert main(["policy", "show"]) == 0
    out = capsys.readouterr().out
    assert "decode   netkv\n         cost = transfer_s" in out
    assert "load_weight = 2.0" in out and "max_queue = 1024" in out
    assert "for prefill there are: load_aware" in out
    assert main(["policy", "show", "--all"]) == 0
    assert 'variant="full", load_weight=2.0' in capsys.readouterr().out


def test_policy_set_sends_names_and_typed_parameters(
    server: ContractServer, tmp_path: Path, capsys: Captured
) -> None:
    heatmap = tmp_path / "map.json"
    heatmap.write_text(json.dumps({"format": "sluice-heatmap/1", "heatmap": {"rates": 2}, "pairs": []}))
    set_decode = (
        "policy set --decode netkv --param variant=static --param load_weight=0.5 --dispatch max_queue=9"
    )
    set_both = f"policy set --prefill combined --decode netkv --param prefill.heatmap=@{heatmap} --param decode.a=true"
    assert main(set_decode.split()) == 0
    assert main(set_both.split()) == 0
    assert [request.json for request in server.requests] == [
        {
            "decode": {"name": "netkv", "params": {"variant": "static", "load_weight": 0.5}},
            "dispatch": {"max_queue": 9},
        },
        {
            "prefill": {"name": "combined", "params": {"heatmap": {"rates": 2}}},
            "decode": {"name": "netkv", "params": {"a": True}},
        },
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("policy set", "nothing to set: give --prefill NAME"),
        ("policy set --prefill a --decode b --param x=1", "as prefill.x=1 or decode.x=1"),
        ("policy set --prefill a --param decode.x=1", "add --decode NAME"),
        ("policy set --prefill a --param x", "'x' must look like NAME=VALUE"),
        ("policy set --prefill a --param x=@nowhere.json", "nowhere.json cannot be read"),
        ("policy show --decode netkv", "write `sluice policy set`"),
    ],
)
def test_a_command_that_cannot_be_meant_is_explained_and_not_sent(
    server: ContractServer, capsys: Captured, words: str, says: str
) -> None:
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err
    assert server.requests == []
