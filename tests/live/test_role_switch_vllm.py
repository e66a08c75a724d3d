"""Real vLLM engines change their roles and duties in the whole application while streams run: the two engines of a pair
change places and back, directly and over colocated, and a warm one is activated. Each text is the one that an
undisturbed stream has.

The application has no autoscaler, so the orders are an administrator's; an autoscaler's are the same to an engine.
"""

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.live.serving import PATIENCE_S, App
from tests.live.vllm_app import APP_BLOCK, KV_TOKEN_BYTES, NEAR_TIE

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = "Once upon a time there was a lighthouse keeper"
"""A text shorter than a KV block on either device: nothing of it is cached, and each transfer moves one block."""

STREAM_S = 10.0
"""Time that a stream takes about, and with which it outlasts two orders and a report of the router, which comes once a
second. ASSUMPTION: they take a third of it at most, also on a busy machine.
"""

LENGTHS = (64, 2000)
"""The least and the greatest length of a stream in tokens; the greatest one fits into the context."""

Tokens = list[tuple[str, dict[str, float]]]
"""The tokens of an answer, each with the likeliest ones at its place and their log probabilities in nats."""


@dataclass
class Answer:
    """A streamed answer that may be on its way: the request's id, and the tokens that have come."""

    request_id: str = ""
    tokens: Tokens = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    """Set at the first token, which the decode engine computes once it has the KV, and when the stream has failed."""
    ended: threading.Event = field(default_factory=threading.Event)


def stream(app: App, answer: Answer, tokens: int) -> None:
    """Reads one stream of `tokens` tokens into `answer` until it ends."""
    body = {
        "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2,
        "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S) as events:
        assert events.status_code == 200, events.read()
        answer.request_id = events.headers["x-request-id"]
        for line in events.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                assert "error" not in piece, piece
                # the last piece may have the reason of the end only
                for choice in (choice for choice in piece["choices"] if choice["logprobs"]):
                    shown = choice["logprobs"]
                    answer.tokens += zip(shown["tokens"], shown["top_logprobs"], strict=True)
                    answer.began.set()


def length_here(app: App) -> int:
    """Returns how many tokens take about `STREAM_S` on this machine."""
    probe = Answer()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream, app, probe, 17)
        assert probe.began.wait(PATIENCE_S), "no token has come"
        began_s = time.monotonic()
        reading.result(PATIENCE_S)
    token_s = (time.monotonic() - began_s) / 16
    least, most = LENGTHS
    return max(least, min(most, round(STREAM_S / token_s)))


@contextmanager
def under_way(app: App, undisturbed: Tokens) -> Iterator[Answer]:
    """A stream that is being decoded when the block begins, and still when it ends; then it must end like the
    undisturbed one.
    """
    answer = Answer()

    def read() -> None:
        try:
            stream(app, answer, len(undisturbed))
        finally:
            answer.ended.set()
            answer.began.set()

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert answer.began.wait(PATIENCE_S), "no token has come"
        yield answer
        had_ended = answer.ended.is_set()
        reading.result(PATIENCE_S)
    assert_same(answer.tokens, undisturbed)
    assert not had_ended, (
        "the stream had ended before all orders were carried out: STREAM_S is too short here"
    )


def assert_same(tokens: Tokens, undisturbed: Tokens) -> None:
    """Fails if an answer is not the undisturbed one. They may part at a near tie: sums differ by batch shape."""
    assert len(tokens) == len(undisturbed)
    for n, ((one, mine), (other, theirs)) in enumerate(zip(tokens, undisturbed, strict=True)):
        if one != other:
            # in each answer the other's token must be nearly as likely
            gaps = [abs(top.get(one, -math.inf) - top.get(other, -math.inf)) for top in (mine, theirs)]
            print(f"the texts part at token {n}: {one!r} and {other!r}, gaps of {gaps} nats")
            assert max(gaps) <= NEAR_TIE, f"token {n}: {one!r} and {other!r} are no near tie"
            return


def short(app: App) -> str:
    """Has a short request answered, and returns its id."""
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    request_id: str = answer.headers["x-request-id"]
    return request_id


def way(app: App, request_id: str) -> list[str]:
    """Returns the engines on a request's way: those of prefill and decode, or the one that did both."""
    answer = app.http.get(f"{app.url}/sluice/admin/explain/{request_id}")
    assert answer.status_code == 200, answer.text
    return [decision["decision"]["worker"] for decision in answer.json()["decisions"]]


def order(app: App, engine: str, **change: str) -> None:
    """Orders an engine to have a role, a duty or both, and waits until the status shows it."""
    answer = app.http.put(f"{app.url}/sluice/admin/engines/{engine}", json=change)
    assert answer.status_code == 200, answer.text
    assert change.items() <= answer.json()["after"].items()

    def obeyed(status: dict[str, Any]) -> bool:
        return any(e["id"] == engine and change.items() <= e.items() for e in status["engines"])

    app.wait(obeyed, f"engine {engine} has {change}")


def seen(status: dict[str, Any]) -> dict[str, tuple[str, str, int | None]]:
    """Role, duty and running requests of each engine, as a status has them."""
    return {e["id"]: (e["role"], e["duty"], e["running"]) for e in status["engines"]}


def wait_seen(app: App, engines: dict[str, tuple[str, str, int]], answer: Answer) -> None:
    """Waits until the status shows these roles, duties and running requests. Once the stream has ended, nothing is
    waited for: `under_way` fails then.
    """
    app.wait(lambda status: answer.ended.is_set() or seen(status) == engines, f"the status shows {engines}")


@pytest.fixture
def pair(vllm_app: App) -> Iterator[tuple[str, str]]:
    """The ids of the prefill and of the decode engine, idle before and after the test, when each has its role again."""

    def whole(status: dict[str, Any]) -> bool:
        ready = [(e["role"], e["duty"]) for e in status["engines"] if e["state"] == "ready"]
        return sorted(ready) == [("decode", "active"), ("prefill", "active")] and len(status["engines"]) == 2

    vllm_app.wait(whole, "one engine of each role is ready, and no other is known")
    by_role = {engine["role"]: engine["id"] for engine in vllm_app.wait_idle()["engines"]}
    prefill, decode = by_role["prefill"], by_role["decode"]
    yield prefill, decode
    # the decode engine first: one that decodes must always be left
    order(vllm_app, decode, role="decode", duty="active")
    order(vllm_app, prefill, role="prefill", duty="active")
    vllm_app.wait_idle()


def test_streams_go_on_while_engines_change_places_and_a_warm_one_is_activated(
    vllm_app: App, pair: tuple[str, str]
) -> None:
    app, (p, d) = vllm_app, pair
    length = length_here(app)
    app.wait_idle()

    def pulled(what: str) -> list[float]:
        """Returns how much `p` and `d` have pulled since they started."""
        return [app.metric(f"sluice_engine_{what}_total", engine=engine) for engine in pair]

    counted = ("sluice_engine_transfers_total", "sluice_engine_transfer_bytes_total")
    app.settle(*counted)
    transfers, moved = pulled("transfers"), pulled("transfer_bytes")
    failures = app.metric("sluice_kv_transfer_failures_total")

    first = Answer()
    stream(app, first, length)
    undisturbed = first.tokens
    assert way(app, first.request_id) == [p, d]

    # the engines change places while one of them decodes
    with under_way(app, undisturbed) as one:
        # the other way round, no engine would decode in between, which is refused
        order(app, p, role="decode")
        order(app, d, role="prefill")
        wait_seen(app, {p: ("decode", "active", 0), d: ("prefill", "active", 1)}, one)
    assert way(app, one.request_id) == [p, d]

    # the engine that lent the stream's KV gets nothing while it is warm, and is activated
    with under_way(app, undisturbed) as one:
        order(app, d, duty="warm")
        alone = short(app)
        wait_seen(app, {p: ("decode", "active", 1), d: ("prefill", "warm", 0)}, one)
        order(app, d, duty="active")
    assert way(app, one.request_id) == [d, p]
    assert way(app, alone) == [p]

    # the activated engine computes the prompt; both get their roles back while the other one decodes
    with under_way(app, undisturbed) as one:
        order(app, d, role="decode")
        order(app, p, role="prefill")
    assert way(app, one.request_id) == [d, p]
    assert way(app, short(app)) == [p, d]

    # the decode engine becomes colocated while it decodes, and serves alone while the other one is warm
    with under_way(app, undisturbed) as one:
        order(app, d, role="colocated")
        order(app, p, role="colocated", duty="warm")
        alone = short(app)
    assert way(app, one.request_id) == [p, d]
    assert way(app, alone) == [d]
    whole = Answer()
    stream(app, whole, 32)
    assert way(app, whole.request_id) == [d]
    assert_same(whole.tokens, undisturbed[:32])

    # both go on to the other role, and come back while one of them decodes, `d` over colocated
    order(app, p, role="decode", duty="active")
    order(app, d, role="prefill")
    with under_way(app, undisturbed) as one:
        order(app, d, role="colocated")
        order(app, d, role="decode")
        order(app, p, role="prefill")
    assert way(app, one.request_id) == [d, p]
    assert way(app, short(app)) == [p, d]

    home = {p: ("prefill", "active", 0), d: ("decode", "active", 0)}
    app.wait_idle()
    app.wait(lambda status: seen(status) == home, "both engines are idle and have their roles again")
    # `p` decoded the three streams of [d, p]; `d` decoded the first two streams, the one before it served alone, and
    # the two short requests of [p, d]
    expected = [transfers[0] + 3, transfers[1] + 5]
    app.wait(
        lambda _: pulled("transfers") == expected,
        "each request but those of one engine moved KV to the engine that decoded it",
    )
    block = APP_BLOCK * KV_TOKEN_BYTES
    assert pulled("transfer_bytes") == [moved[0] + 3 * block, moved[1] + 5 * block]
    assert app.metric("sluice_kv_transfer_failures_total") == failures
