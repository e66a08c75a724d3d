"""The bound on sequences and bytes of prompts under way, by hand and in an ingress."""

import asyncio
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api.errors import ApiError
from app.ingress import exchange as exchange_module
from app.ingress.config import IngressConfig
from app.ingress.work_bound import SMALL_PART, TOKEN_BYTES, Held, WorkBound, held_of
from tests.app.ingress.rig import MODEL, Rig, pair, rig, until

CONFIG = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02)


def test_what_a_request_holds() -> None:
    text = "a text"
    assert held_of([text], [[1, 2, 3]], 2) == Held(2, sys.getsizeof(text) + 3 * 48)
    # ids are counted once, and known before they are "tokenised"
    ids: list[str | list[int]] = [[1, 2], [3]]
    assert held_of(ids, (), 1) == held_of(ids, [[1, 2], [3]], 1) == Held(2, 3 * TOKEN_BYTES)
    # a conversation that is not rendered yet
    assert held_of([], (), 4) == Held(4, 0)


def test_a_number_of_a_prompt_takes_no_more_than_it_counts_for() -> None:
    ids = [int(text) for text in map(str, range(300, 10_300))]
    taken = sys.getsizeof(ids) + sum(map(sys.getsizeof, ids))
    assert taken <= 10_000 * TOKEN_BYTES < 2 * taken


@pytest.mark.parametrize(
    ("asked", "before", "status"),
    [
        (Held(4, 40), Held(), None),
        (Held(5, 0), Held(), 429),
        (Held(0, 41), Held(), 503),
        (Held(11, 0), Held(), 400),
        (Held(0, 101), Held(), 400),
        # it holds some already, and takes more
        (Held(7, 70), Held(3, 30), None),
        (Held(8, 0), Held(3, 30), 429),
        (Held(3, 71), Held(3, 30), 503),
        # what it gives back is never refused
        (Held(2, 20), Held(3, 30), None),
    ],
)  # fmt: skip
def test_what_fits(asked: Held, before: Held, status: int | None) -> None:
    bound = WorkBound(10, 100)
    bound.change(Held(), before)
    bound.change(Held(), Held(6 - before.sequences, 60 - before.n_bytes), "another")
    if status is None:
        bound.check(asked, before)
        bound.change(before, asked)
        assert (bound.sequences, bound.n_bytes) == (6 + asked[0] - before[0], 60 + asked[1] - before[1])
        return
    with pytest.raises(ApiError) as refused:
        bound.check(asked, before)
    assert refused.value.status == status
    assert (refused.value.retry_after_s is None) == (status == 400)
    assert (bound.sequences, bound.n_bytes) == (6, 60)


def test_small_requests_are_taken_whatever_the_large_ones_hold() -> None:
    most = 2**20
    bound = WorkBound(10_000, most)
    bound.change(Held(), Held(4, most))
    small = most // SMALL_PART
    bound.check(Held(1, small))
    # it begins as a text, and its tokens are known later
    bound.change(Held(), Held(1, small // 2))
    bound.check(Held(1, small), Held(1, small // 2))
    for asked, before in ((Held(1, small + 1), Held()), (Held(1, small + 1), Held(1, small // 2))):
        with pytest.raises(ApiError) as refused:
            bound.check(asked, before)
        assert (refused.value.status, refused.value.code) == (503, "prompt_memory")


def fits(bound: WorkBound, n_bytes: int, tenant: str) -> bool:
    """Whether a request of `n_bytes` is taken; if it is, it is counted."""
    try:
        bound.check(Held(1, n_bytes), tenant=tenant)
    except ApiError as refused:
        if refused.code != "prompt_memory":
            raise
        return False
    bound.change(Held(), Held(1, n_bytes), tenant)
    return True


def test_one_tenant_leaves_room_for_the_first_prompts_of_others() -> None:
    bound = WorkBound(10_000, 1_000)
    assert [fits(bound, 150, "greedy") for _ in range(6)] == [True] * 5 + [False]
    # each may have one at least, and more up to its share: 1,000 / 4 with these two and one to come
    assert fits(bound, 100, "first")
    assert fits(bound, 10, "second")
    assert fits(bound, 90, "second")
    assert not fits(bound, 51, "second")
    assert not fits(bound, 1, "greedy")
    # what a prompt gives back is there again, for whoever holds little
    bound.change(Held(1, 150), Held(), "greedy")
    assert not fits(bound, 1, "greedy")
    assert fits(bound, 150, "first")
    assert fits(bound, 50, "second")


def test_a_single_prompt_may_take_everything() -> None:
    bound = WorkBound(10, 1_000)
    assert fits(bound, 1_000, "one")
    bound.change(Held(1, 1_000), Held(), "one")
    assert (bound.sequences, bound.n_bytes) == (0, 0)
    # it begins as a text, and its tokens are known later
    bound.change(Held(), Held(1, 100), "one")
    bound.check(Held(1, 1_000), Held(1, 100), "one")
    bound.change(Held(1, 100), Held(), "one")
    assert not bound._by_tenant


async def test_long_prompts_of_one_user_leave_room_for_those_of_another(tmp_path: Path) -> None:
    config = replace(CONFIG, max_prompt_bytes=100 * TOKEN_BYTES)
    async with rig(tmp_path, pair(tmp_path, auto=False), config) as made:
        tasks = [asyncio.create_task(complete(made, [1] * 30, user="greedy")) for _ in range(2)]
        await until(lambda: held(made) == (2, 60 * TOKEN_BYTES), "two prompts under way")
        status, error = await complete(made, [1] * 20, user="greedy")
        assert (status, error["code"]) == (503, "prompt_memory")
        tasks.append(asyncio.create_task(complete(made, [1] * 30, user="another")))
        await until(lambda: held(made) == (3, 90 * TOKEN_BYTES), "another one's")
        for task in tasks:
            task.cancel()
        await until(lambda: held(made) == (0, 0), "nothing held")
        assert not made.app.requests.work._by_tenant


async def test_long_prompts_that_wait_keep_no_short_one_out(tmp_path: Path) -> None:
    """One client's prompts fill the bound while they wait for an engine; another client's prompt is short."""
    # a small request takes up to 2 * 2^20 / 2^14 = 128 bytes
    config = replace(CONFIG, max_prompt_bytes=2 * 2**20)
    async with rig(tmp_path, pair(tmp_path, auto=False, max_model_len=50_000), config) as made:
        # 43,000 ids take 2,064,000 of 2,097,152 bytes
        first = asyncio.create_task(complete(made, [1] * 43_000))
        await until(lambda: held(made) == (1, 43_000 * TOKEN_BYTES), "a long prompt under way")
        assert (await complete(made, [1] * 1_000))[0] == 503
        second = asyncio.create_task(complete(made, [1, 2]))
        await until(lambda: held(made)[0] == 2, "a short prompt beside it")
        # and it is, too, where the bound is full
        made.app.requests.work._most_bytes = held(made)[1]
        third = asyncio.create_task(complete(made, [1, 2]))
        await until(lambda: held(made)[0] == 3, "another short prompt")
        for task in (first, second, third):
            task.cancel()
        await until(lambda: held(made) == (0, 0), "nothing held")


async def complete(made: Rig, prompt: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **more}
    answer = await made.client.post("/v1/completions", json=body)
    return answer.status_code, answer.json().get("error", {})


def held(made: Rig) -> tuple[int, int]:
    work = made.app.requests.work
    return work.sequences, work.n_bytes


# offload_prompt_chars: whether the loop or a thread tokenises
@pytest.mark.parametrize("offload_prompt_chars", [0, 10**6])
async def test_sequences_beyond_the_bound_are_refused_until_others_end(
    tmp_path: Path, offload_prompt_chars: int
) -> None:
    config = replace(CONFIG, max_sequences=8, offload_prompt_chars=offload_prompt_chars)
    async with rig(tmp_path, pair(tmp_path, auto=False), config) as made:
        status, error = await complete(made, ["a b"] * 9)
        assert (status, error["code"]) == (400, "request_too_costly")
        assert "ingress.options.max_sequences" in error["message"]
        first = asyncio.create_task(complete(made, ["a b"] * 3, n=2))
        await until(lambda: held(made)[0] == 6 and held(made)[1] > 0, "a request under way")
        status, error = await complete(made, ["a b"] * 3)
        assert (status, error["code"]) == (429, "too_many_sequences")
        first.cancel()
        await until(lambda: held(made) == (0, 0), "the end of the request whose client left")
    async with rig(tmp_path, pair(tmp_path), config) as made:
        assert (await complete(made, ["a b"] * 8))[0] == 200
        assert (await complete(made, "a b", max_tokens=10**6))[0] == 400
        assert held(made) == (0, 0)


@pytest.mark.parametrize("offload_prompt_chars", [0, 10**6])
async def test_prompts_beyond_the_bytes_are_refused_until_others_end(
    tmp_path: Path, offload_prompt_chars: int
) -> None:
    config = replace(CONFIG, max_prompt_bytes=2048, offload_prompt_chars=offload_prompt_chars)
    async with rig(tmp_path, pair(tmp_path, auto=False), config) as made:
        # 25 ids take 1,200 bytes, 43 take 2,064
        status, error = await complete(made, [1] * 43)
        assert (status, error["code"]) == (400, "request_too_costly")
        assert "ingress.options.max_prompt_bytes" in error["message"]
        first = asyncio.create_task(complete(made, [1] * 25))
        await until(lambda: held(made) == (1, 25 * TOKEN_BYTES), "a prompt under way")
        status, error = await complete(made, [1] * 20)
        assert (status, error["code"]) == (503, "prompt_memory")
        # a text of which only the tokens are too many; they are known when it is tokenised
        status, error = await complete(made, "a " * 20)
        assert (status, error["code"]) == (503, "prompt_memory")
        first.cancel()
        await until(lambda: held(made) == (0, 0), "the end of the request whose client left")


TOOL = {"type": "function", "function": {"name": "f"}}
FILLER = {"x": "y" * 3000}
OPTIONS = [
    # engines get the conversation and the tools of a request with tools
    {"tools": [TOOL | FILLER]},
    {"response_format": {"type": "json_object", "x": [{}] * 20}},
    {"response_format": {"type": "json_object"} | FILLER},
    {"logit_bias": {str(token): 1.0 for token in range(20)}},
    {"stop": ["y" * 1000]},
    {"stop_token_ids": [1] * 20},
]


@pytest.mark.parametrize("offload_prompt_chars", [0, 10**6])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
async def test_what_is_kept_beside_the_prompts_counts_as_they_do(
    tmp_path: Path, options: dict[str, Any], offload_prompt_chars: int
) -> None:
    engines = pair(tmp_path, auto=False, features=("tools",))
    config = replace(CONFIG, offload_prompt_chars=offload_prompt_chars)
    async with rig(tmp_path, engines, config) as made:
        work, path, body = made.app.requests.work, "/v1/chat/completions", made.chat(**options)
        first = asyncio.create_task(made.client.post(path, json=body))
        await until(lambda: work.sequences == 1 and bool(made.connections.live), "a request under way")
        assert work.n_bytes > 2048
        for most_bytes, status, code in (
            (work.n_bytes * 3 // 2, 503, "prompt_memory"),
            (2048, 400, "request_too_costly"),
        ):
            work._most_bytes = most_bytes
            answer = await made.client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        first.cancel()
        await until(lambda: held(made) == (0, 0), "the end of the request whose client left")


async def test_many_prompts_of_one_request_start_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time for more than one prompt a turn, others have 199 turns before the last of 200 starts. When the
    client leaves, the rest does not start.
    """
    monkeypatch.setattr(exchange_module, "TURN_S", 0.0)
    async with rig(tmp_path, pair(tmp_path, auto=False, slots=1000), CONFIG) as made:
        live, loop = made.connections.live, asyncio.get_running_loop()
        started: list[int] = [0]

        def look() -> None:
            started.append(len(live))
            if started[-1] < 200:
                loop.call_soon(look)

        look()
        answer = asyncio.create_task(complete(made, ["a b"] * 200))
        await until(lambda: len(live) == 200, "all of them")
        assert max(after - before for before, after in itertools.pairwise(started)) == 1
        answer.cancel()
        await until(lambda: held(made) == (0, 0) and not live, "its end")
        answer = asyncio.create_task(complete(made, ["a b"] * 400))
        await until(lambda: len(live) > 0, "the first of them")
        made.app.requests.draining = True
        assert not await made.app.drain(0.0)
        assert len(live) == 0
        assert (await answer)[0] == 503
        await until(lambda: held(made) == (0, 0), "nothing held")
        # no other prompt has started meanwhile
        assert len(live) == 0
