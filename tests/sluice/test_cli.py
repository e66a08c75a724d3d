"""The `sluice` command against a real server: output, exit codes, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.cli import main
from tests.sluice.server import (
    WAIT_S,
    ContractServer,
    Request,
    Wire,
    answers,
    api_error,
    chat_answer,
    chat_chunk,
    streams,
)
from tests.sluice.test_streams import cut_between_events, endless

CHAT = "POST /v1/chat/completions"
ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def at_the_server(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_BASE_URL", server.url)


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, for what needs signals and pipes."""
    run = subprocess.Popen(
        [sys.executable, "-m", "sluice.cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with run:
        try:
            yield run
        finally:
            run.kill()


def test_chat_streams_the_answer(server: ContractServer, capsys: Captured) -> None:
    server.on(CHAT, streams("Hel", "lo"))
    options = (
        "--system be-brief --max-tokens 9 --temperature 0 --top-p 0.5 --top-k 3 --seed 1 --stop x --stop y"
    )
    more = "--priority interactive --slo-ttft-ms 200 --session s --model m"
    assert main(["chat", "hi", *options.split(), *more.split()]) == 0
    assert capsys.readouterr() == ("Hello\n", "")
    assert server.requests[0].json == {
        "messages": [{"role": "system", "content": "be-brief"}, {"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 1,
        "stop": ["x", "y"],
        "priority": "interactive",
        "slo": {"ttft_ms": 200.0},
        "session": "s",
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_chat_without_streaming(server: ContractServer, capsys: Captured) -> None:
    server.on(CHAT, answers(200, chat_answer("Hello")))
    assert main(["chat", "hi", "--no-stream", "--priority", "-3"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert server.requests[0].json == {"messages": [{"role": "user", "content": "hi"}], "priority": -3}


def test_chat_json_is_the_whole_answer(server: ContractServer, capsys: Captured) -> None:
    server.on(CHAT, answers(200, chat_answer("Hello", extra=1), x_request_id="r1"))
    assert main(["chat", "hi", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["choices"][0]["message"]["content"], answer["extra"], answer["request_id"]) == (
        "Hello",
        1,
        "r1",
    )


@pytest.mark.parametrize("flags", [[], ["--no-stream"]])
def test_stats_go_to_stderr(server: ContractServer, capsys: Captured, flags: list[str]) -> None:
    whole = answers(200, chat_answer("abc"), x_request_id="req-stream")
    server.on(CHAT, whole if flags else streams("a", "b", "c", usage=(5, 2)))
    assert main(["chat", "hi", "--stats", *flags]) == 0
    out, err = capsys.readouterr()
    assert out == "abc\n"
    assert ("TTFT" in err) == (not flags)
    assert "2 tokens in" in err
    assert "tok/s" in err
    assert "request req-stream" in err


def test_stats_without_usage_do_not_invent_tokens(server: ContractServer, capsys: Captured) -> None:
    server.on(CHAT, streams("a", "b"))
    assert main(["chat", "hi", "--stats"]) == 0
    err = capsys.readouterr().err
    assert "? tokens" in err
    assert "tok/s" not in err


@pytest.mark.parametrize("arguments", [["chat"], ["chat", "-"]])
def test_the_message_may_be_piped_in(
    server: ContractServer, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    server.on(CHAT, streams("ok"))
    assert main(arguments) == 0
    assert server.requests[0].json["messages"] == [{"role": "user", "content": "two\nlines\n"}]


def test_complete(server: ContractServer, capsys: Captured) -> None:
    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream()
        await wire.event({"id": "c", "choices": [{"index": 0, "text": " time\n"}]})
        await wire.end_stream()

    server.on("POST /v1/completions", handle)
    assert main(["complete", "Once upon a"]) == 0
    assert capsys.readouterr().out == " time\n"
    assert server.requests[0].json["prompt"] == "Once upon a"


def test_a_conversation_keeps_its_turns_and_its_session(
    server: ContractServer, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("second\n\nthird\n/reset\nfourth\n/exit\nnever\n"))
    server.on(CHAT, streams("one"), cut_between_events, streams("three"), streams("four"))
    assert main(["chat", "-i", "first", "--system", "s"]) == 0
    out, err = capsys.readouterr()
    assert out == "one\na\nthree\nfour\n"
    assert "cut it" in err or "broke" in err
    system = {"role": "system", "content": "s"}
    first = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "one"}]
    assert [request.json["messages"] for request in server.requests] == [
        [system, first[0]],
        [system, *first, {"role": "user", "content": "second"}],
        [system, *first, {"role": "user", "content": "third"}],  # the turn that failed is not part of it
        [system, {"role": "user", "content": "fourth"}],
    ]
    assert len({request.json["session"] for request in server.requests}) == 1


def test_ctrl_c_stops_an_answer_but_not_the_conversation(server: ContractServer) -> None:
    server.on(CHAT, endless, streams("next"))
    with process("chat", "-i", "first") as run:
        assert run.stdout is not None
        assert run.stdin is not None
        assert run.stdout.read(1) == "a"
        run.send_signal(signal.SIGINT)
        assert server.client_left.wait(WAIT_S), "the server must learn that nobody reads"
        out, err = run.communicate("second\n", timeout=WAIT_S)
    assert run.returncode == 0
    assert out.endswith("\nnext\n")
    assert "not part of the conversation" in err
    assert server.requests[1].json["messages"] == [{"role": "user", "content": "second"}]


def test_ctrl_c_cancels_a_single_answer(server: ContractServer) -> None:
    server.on(CHAT, endless)
    with process("chat", "hi") as run:
        assert run.stdout is not None
        assert run.stdout.read(1) == "a"
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130
    assert "Traceback" not in err
    assert server.client_left.wait(WAIT_S)


def test_a_reader_that_leaves_ends_the_command_quietly(server: ContractServer) -> None:
    server.on(CHAT, endless)
    with process("chat", "hi") as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.read(1) == "a"
        run.stdout.close()
        assert run.wait(WAIT_S) == 141
        assert run.stderr.read() == ""
    assert server.client_left.wait(WAIT_S)


P0 = {"id": "p0", "role": "prefill", "kind": "vllm", "state": "ready", "slots": 8, "running": 1, "waiting": 2}
STATUS = {
    "ready": True,
    "model": "smol",
    "router": {"connected": True, "policy": {"prefill": "round_robin", "decode": "jsq"}},
    "engines": [
        {**P0, "kv_blocks_total": 200, "kv_blocks_used": 50},
        {"id": "d0", "kv_usage": 0.5},
    ],
    "requests": {"in_flight": 3, "queued": 2},
    "load": {"regime": "imbalanced", "prefill": 0.621, "decode": 0.1, "idle": ["d0"]},
}


def test_status_is_a_table(server: ContractServer, capsys: Captured) -> None:
    server.on("GET /sluice/status", answers(200, STATUS))
    assert main(["status"]) == 0
    assert capsys.readouterr().out == (
        "ready     yes\n"
        "model     smol\n"
        "router    connected; prefill: round_robin, decode: jsq\n"
        "requests  3 in flight, 2 queued, - in the pool\n"
        "load      imbalanced (prefill 0.62, decode 0.10)\n"
        "leases    -\n"
        "\n"
        "ENGINE  ROLE     KIND  STATE  RUNNING  WAITING  SLOTS  KV BLOCKS  KV USE\n"
        "p0      prefill  vllm  ready  1        2        8      50/200     25%\n"
        "d0      -        -     -      -        -        -      -          50%\n"
    )


def test_status_tells_a_warm_engine_from_one_that_serves(server: ContractServer, capsys: Captured) -> None:
    engines = [
        {"id": "d0", "state": "ready", "duty": "warm"},
        {"id": "d1", "state": "ready", "duty": "active"},
    ]
    server.on("GET /sluice/status", answers(200, {"ready": True, "engines": engines}))
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert ["ready, warm" in line for line in lines] == [True, False]


def test_status_says_why_an_engine_is_quarantined_and_when_it_is_tried_next(
    server: ContractServer, capsys: Captured
) -> None:
    held = {"rank": None, "reason": "slow_decode", "for_s": 12.4, "probe_in_s": 3.6, "probing": False}
    tried = {"rank": 1, "reason": "failing", "for_s": 2.0, "probe_in_s": 0.0, "probing": True}
    engines = [
        {"id": "d0", "state": "quarantined", "quarantine": [{**held, "failure_rate": 0.0}]},
        {"id": "d1", "state": "ready", "quarantine": [{**tried, "failure_rate": 0.51}]},
        {"id": "d2", "state": "ready", "quarantine": []},
    ]
    server.on("GET /sluice/status", answers(200, {"ready": True, "engines": engines}))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "",
        "quarantined: d0, slow decode (failure rate 0.00), for 12 s; next probe in 4 s",
        "quarantined: d1 rank 1, failing (failure rate 0.51), for 2 s; a probe runs now",
    ]


def test_status_shows_the_flow_agents_where_there_are_some(server: ContractServer, capsys: Captured) -> None:
    agent = {"node": "n1", "policy": "mfs", "open": 4, "held": 1, "granted": 70, "unscheduled_share": 0.0125}
    ports = {"ingress n1": 45.8e6, "egress n1": 50e6}
    flow = {
        "policy": "mfs",
        "held": 1,
        "granted": 70,
        "agents": [{**agent, "bytes_per_s": ports}, {"node": "n2"}],
    }
    server.on("GET /sluice/status", answers(200, {"ready": True, "flow": flow}))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "",
        "KV transfers by mfs: 1 reads held, 70 permits granted",
        "",
        "AGENT OF  OPEN  HELD  GRANTED  UNSCHEDULED  PORTS MB/S",
        "n1        4     1     70       1.2%         ingress n1 45.8, egress n1 50.0",
        "n2        -     -     -        -            -",
    ]


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (
            {"limits": "share", "ingresses": 4},
            "12 of 3 tenants; each of 4 ingresses enforces its share of the limits",
        ),
        (
            {"limits": "shared", "ingresses": 4, "detail": "it is late"},
            "12 of 3 tenants; limits are counted for all ingresses together (it is late)",
        ),
    ],
)
def test_status_says_who_enforces_the_limits_of_keys(
    server: ContractServer, capsys: Captured, told: dict[str, object], shown: str
) -> None:
    status = {"ready": True, "api_keys": {"keys": 12, "tenants": 3, **told}}
    server.on("GET /sluice/status", answers(200, status))
    assert main(["status"]) == 0
    assert f"api keys  {shown}\n" in capsys.readouterr().out


def test_a_server_that_is_not_ready_has_its_own_exit_code(server: ContractServer, capsys: Captured) -> None:
    server.on("GET /sluice/status", answers(200, {"ready": False}))
    assert main(["status"]) == 6
    out = capsys.readouterr().out
    assert "ready     NO" in out
    assert "no engines" in out


def test_status_json(server: ContractServer, capsys: Captured) -> None:
    server.on("GET /sluice/status", answers(200, STATUS))
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_watching_goes_on_through_an_outage_until_ctrl_c(server: ContractServer) -> None:
    ready = answers(200, {"ready": True})
    server.on("GET /sluice/status", ready, answers(503, api_error("restarting")), ready)
    with process("status", "--json", "--watch", "0.01") as run:
        assert run.stdout is not None
        assert [json.loads(run.stdout.readline()) for _ in range(3)] == [{"ready": True, "engines": []}] * 3
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=WAIT_S)
    assert run.returncode == 0
    assert "restarting" in err
    assert "Traceback" not in err


MODELS = {
    "object": "list",
    "data": [{"id": "smol", "max_model_len": 2048, "owned_by": "sluice"}, {"id": "x"}],
}


def test_models(server: ContractServer, capsys: Captured) -> None:
    server.on("GET /v1/models", answers(200, MODELS))
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "MODEL  CONTEXT TOKENS  OWNED BY",
        "smol   2048            sluice",
        "x      -               -",
    ]
    assert main(["models", "--json"]) == 0
    assert [model["id"] for model in json.loads(capsys.readouterr().out)] == ["smol", "x"]


def test_version(server: ContractServer, capsys: Captured) -> None:
    server.on("GET /version", answers(200, {"version": "9.9", "transport": "sockets"}))
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"sluice 0.1.0\nserver 9.9 at {server.url} (transport sockets)\n"
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["server"] == {"version": "9.9", "transport": "sockets"}


@contextmanager
def refusing_address() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_version_without_a_server_is_still_a_version(capsys: Captured) -> None:
    with refusing_address() as url:
        assert main(["version", "--base-url", url]) == 0
    assert "server not reached" in capsys.readouterr().out


def test_no_server_says_how_to_start_one(capsys: Captured) -> None:
    with refusing_address() as url:
        assert main(["chat", "hi", "--base-url", url, "--retries", "0"]) == 3
    err = capsys.readouterr().err
    for part in (url, "sluice serve", "SLUICE_BASE_URL"):
        assert part in err


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (400, 2, "max_tokens"),
        (401, 2, "SLUICE_API_KEY"),
        (404, 2, "sluice models"),
        (429, 4, "wait 7 s"),
        (500, 1, "server's log"),
        (503, 4, "wait 7 s"),
    ],
)
def test_errors_have_exit_codes_and_say_what_to_do(
    server: ContractServer, capsys: Captured, status: int, code: int, says: str
) -> None:
    server.on(CHAT, answers(status, api_error("why", param="max_tokens"), retry_after="7"))
    assert main(["chat", "hi", "--retries", "0"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"sluice: {status}: why")
    assert says in err


@pytest.mark.parametrize(
    ("code", "says", "says_not"),
    [
        ("model_not_found", "sluice models", "SLUICE_BASE_URL"),
        ("not_found", "SLUICE_BASE_URL", "sluice models"),
    ],
)
def test_what_was_not_found_decides_what_to_do(
    server: ContractServer, capsys: Captured, code: str, says: str, says_not: str
) -> None:
    server.on(CHAT, answers(404, api_error("why", code=code)))
    assert main(["chat", "hi", "--retries", "0"]) == 2
    err = capsys.readouterr().err
    assert says in err and says_not not in err


def test_an_engine_that_dies_leaves_the_text_and_a_clear_error(
    server: ContractServer, capsys: Captured
) -> None:
    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream()
        await wire.event(chat_chunk("half an"))
        await wire.event(api_error("engine d0 died", code="engine_died"))
        await wire.end_stream(done=False)

    server.on(CHAT, handle)
    assert main(["chat", "hi"]) == 1
    out, err = capsys.readouterr()
    assert out == "half an\n"
    assert err.startswith("sluice: stream error engine_died: engine d0 died\n")
    assert "incomplete" in err


def test_timeout(server: ContractServer, capsys: Captured) -> None:
    async def silence(request: Request, wire: Wire) -> None:
        await wire.until_client_leaves()

    server.on(CHAT, silence)
    assert main(["chat", "hi", "--timeout", "0.2"]) == 5
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat", "hi", "--temperature", "nan"], "--temperature"),
        (["chat", "hi", "--slo-ttft-ms", "0"], "above 0"),
        (["chat", "hi", "--priority", "urgent"], "interactive, standard, batch"),
        (["chat", "hi", "--retries", "-1"], "--retries"),
        (["chat", "hi", "--timeout", "0"], "--timeout"),
        (["dance"], "dance"),
    ],
)
def test_wrong_arguments_are_named(capsys: Captured, arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat", "\udcff"], "UTF-8"),
        (["chat", "hi", "--system", "\udcff"], "--system"),
        (["chat", "-i", "--json"], "--interactive"),
        (["chat", "hi", "--base-url", "localhost:8000"], "http://"),
        ([], "usage: sluice"),
    ],
)
def test_unusable_input_is_explained(capsys: Captured, arguments: list[str], says: str) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_text_that_the_terminal_cannot_show_does_not_end_the_command(server: ContractServer) -> None:
    server.on(CHAT, streams("für 🙂"))
    run = subprocess.run(
        [sys.executable, "-m", "sluice.cli", "chat", "hi"],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        check=True,
    )
    assert run.stdout == b"f\\xfcr \\U0001f642\n"
