"""The prefix index at work in the whole application: requests go to the engine that holds their prefix, and the hits
that the router predicts are those that the engines have. The decode engine has four data-parallel ranks behind a step
barrier: each is a worker, with a feed of its own. Each test has prompts of its own and needs no other to run first.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.live.serving import PATIENCE_S, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.nightly]

BLOCK = 16
PREFIXES = 6
RANKS = 4
FEED = "sluice_router_kv_event_batches_total"
HITS = tuple(f"sluice_router_prefill_hit_tokens_{what}_total" for what in ("predicted", "reported"))


def three_prefill_engines(args: dict[str, Any]) -> None:
    args["engines"][0]["replicas"] = 3
    args["engines"][1] |= {"replicas": 1, "options": {"dp_ranks": RANKS, "barrier": True}}
    args["router"] = {"prefill": {"name": "cache_aware"}, "decode": {"name": "cache_load_aware"}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("kv"), "sim.yaml", three_prefill_engines)) as running:
        running.wait(lambda status: len(status["engines"]) == 4, "three prefill engines and a decode engine")
        yield running


def ask(app: App, prompt: list[int]) -> int:
    """Tokens of the prompt that the prefill engine had cached."""
    answer = httpx.post(
        f"{app.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def prefix(n: int, tokens: int = 25 * BLOCK) -> list[int]:
    return [10 + n] * tokens


def hit_tokens(app: App) -> tuple[float, float]:
    app.settle(FEED, *HITS)
    predicted, reported = (app.metric(name) for name in HITS)
    return predicted, reported


def test_requests_go_where_their_prefix_is_and_hit_what_was_predicted(app: App) -> None:
    assert [ask(app, prefix(n)) for n in range(PREFIXES)] == [0] * PREFIXES
    before = hit_tokens(app)
    # 25 blocks are shared; by chance all would go to the right one of three engines once in 3^18
    cached = [ask(app, prefix(n) + [3, n, turn] * 9) for turn in range(3) for n in range(PREFIXES)]
    assert cached == [25 * BLOCK] * (3 * PREFIXES)
    assert ask(app, prefix(0)) == 24 * BLOCK  # its last token is always computed
    after = hit_tokens(app)
    assert after[0] - before[0] == after[1] - before[1] == (3 * PREFIXES * 25 + 24) * BLOCK


def test_the_index_is_reported(app: App) -> None:
    for n in range(PREFIXES):
        ask(app, prefix(20 + n))
    app.settle(FEED)
    assert app.metric("sluice_router_prefix_index_blocks") >= PREFIXES * 25
    assert app.metric("sluice_router_prefix_index_bytes") > 0
    assert app.metric("sluice_router_prefix_index_feeds") == 3 + RANKS
    assert app.metric("sluice_router_kv_event_gaps_total") == 0


def test_a_mass_disconnect_leaves_nothing_on_any_rank(app: App) -> None:
    def leave_early(n: int) -> None:
        body = {"prompt": prefix(100 + n, 40), "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            next(answer.iter_lines())

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(leave_early, range(64)))
    app.wait_idle()


def test_a_router_that_was_killed_knows_every_prefix_again(app: App) -> None:
    known = [prefix(30 + n) for n in range(PREFIXES)]
    for prompt in known:
        ask(app, prompt)
    app.settle(FEED)
    blocks = app.metric("sluice_router_prefix_index_blocks")
    killed = app.replica_pid("Router")
    os.kill(killed, signal.SIGKILL)
    app.wait(lambda status: not status["router"]["connected"], "the router's death is noticed")
    app.wait(lambda status: status["router"]["connected"] and len(status["engines"]) == 4, "a new router")
    snapshots = "sluice_router_kv_event_snapshots_total"
    app.wait(lambda _: app.metric(snapshots) >= 3 + RANKS, "every engine's and rank's snapshot")
    app.settle(FEED)
    assert app.metric("sluice_router_prefix_index_blocks") == blocks
    assert [ask(app, prompt + [5] * 20) for prompt in known] == [25 * BLOCK] * PREFIXES
