"""A running answer goes on at another engine: the same text, the same counts, and nothing held afterwards."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.wire import messages as wire
from policies.request.stage import Stage
from tests.app.ingress.play import FLEET, IDS, PROMPT, Play, finish, story, undisturbed


def decoding(tokens: int, choices: list[int] | None = None, **body: Any) -> tuple[Play, str]:
    """Returns a play whose only attempt has `tokens` tokens of each of `choices` (by default all), with its id."""
    play = Play(FLEET, max_tokens=500, **body)
    (attempt_id,) = play.live
    for _ in range(4):
        play.advance(attempt_id, "p", "d")
    if tokens:
        play.generate(attempt_id, choices or list(range(body.get("n", 1))), tokens)
    return play, attempt_id


def chunks(play: Play) -> list[dict[str, Any]]:
    lines = [line for line in play.reply.body.decode().split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts(play: Play) -> dict[int, str]:
    """The text of each choice as the client has it, streamed or whole."""
    if play.exchange.plan.stream:
        made: dict[int, str] = {}
        for chunk in chunks(play):
            for choice in chunk["choices"]:
                made[choice["index"]] = made.get(choice["index"], "") + choice["text"]
        return made
    return {choice["index"]: choice["text"] for choice in json.loads(play.reply.body)["choices"]}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_fails_the_client_has_the_undisturbed_text(data: st.DataObject) -> None:
    asyncio.run(undisturbed_text(data))


async def undisturbed_text(data: st.DataObject) -> None:
    play, body = await story(data)
    finish(play)
    await play.written()
    n, stop = body["n"], body.get("stop", [])
    expected = [undisturbed(index, stop) for index in range(n)]
    assert texts(play) == {index: text for index, (text, _) in enumerate(expected)}
    assert sum(choice.tokens for choice in play.exchange._choices) == sum(tokens for _, tokens in expected)
    assert play.reply.status == 200
    # the router learns of the whole request once, however many attempts there were
    (ended,) = play.ended
    assert (ended.outcome, ended.output_tokens) == ("finished", sum(tokens for _, tokens in expected))
    first, *later = [m.again for m in play.told if isinstance(m, wire.Submit)]
    assert not first and all(later)
    play.nothing_held()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_went_on_says_where(stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    play, _ = decoding(7, stream=stream, **options)
    await play.written()
    play.lose("d")
    finish(play)
    await play.written()
    note = {"migrations": 1, "resumed": [{"index": 0, "after_tokens": 7}]}
    usage = {"prompt_tokens": 5, "completion_tokens": len(IDS[0]), "total_tokens": 5 + len(IDS[0])}
    if stream:
        *pieces, last, counts = chunks(play)
        assert not any("sluice" in piece for piece in pieces)
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["sluice"] == counts["sluice"] == note
    else:
        counts = json.loads(play.reply.body)
        assert counts["sluice"] == note
    assert counts["usage"] | usage == counts["usage"]
    assert play.metric("sluice_migrations_total", code="engine_lost") == 1
    assert play.metric("sluice_migration_stall_seconds_count") == 1
    assert play.metric("sluice_generation_tokens_total") == len(IDS[0])
    play.nothing_held()


async def test_an_undisturbed_answer_has_no_note() -> None:
    play, _ = decoding(7)
    finish(play)
    assert "sluice" not in json.loads(play.reply.body)


async def test_the_messages_of_a_resumed_request() -> None:
    play, first = decoding(7, seed=3, logprobs=1)
    play.lose("d")
    (second,) = play.live
    assert second != first
    closed, submit = play.told[-2:]
    assert closed == wire.Closed(first, "failed", 7, "d", "decode", "engine_lost")
    assert isinstance(submit, wire.Submit)
    assert (submit.attempt_id, submit.avoid, submit.slots) == (second, ("d",), 1)
    assert (submit.prompt_tokens, submit.max_tokens, submit.resumed_tokens) == (len(PROMPT) + 7, 493, 7)
    # two steps more urgent than the client asked for
    assert submit.terms.priority == -2
    for _ in range(4):
        play.advance(second, "q", "e")
    (prefill,) = [message for name, message in play.heard if name == "q"]
    assert isinstance(prefill, wire.Prefill)
    assert (prefill.tokens, prefill.priority) == (PROMPT, -2)
    (decode,) = [message for name, message in play.heard if name == "e"]
    assert isinstance(decode, wire.Decode)
    chars = len(play.exchange.delivered[0])
    assert prefill.resume == decode.resume == wire.Resume(0, 7, list(IDS[0][:7]), chars)
    assert (decode.tokens, decode.handle, decode.priority) == (PROMPT, b"h", -2)
    assert decode.params == {"seed": 3, "logprobs": 1, "max_tokens": 500}
    # the router counts what this attempt generates
    play.advance(second, "q", "e", tokens=2)
    play.connections._send_progress()
    assert play.told[-1] == wire.Progress([second], [wire.Grown(second, 2)])


async def test_the_prompts_own_logprobs_come_once() -> None:
    play, _ = decoding(1, echo=True, logprobs=1)
    play.lose("d")
    finish(play)
    before, after = (m for _, m in play.heard if isinstance(m, wire.Decode))
    assert "prompt_logprobs" in before.params
    assert "prompt_logprobs" not in after.params


async def test_choices_go_on_each_for_itself() -> None:
    play, _ = decoding(5, n=3, stream=True)
    (attempt_id,) = play.live
    # the third choice is short and ends here, the second one goes ahead of the first
    play.generate(attempt_id, [2], 1000)
    play.generate(attempt_id, [1], 10)
    await play.written()
    play.lose("d")
    submits = [m for m in play.told if isinstance(m, wire.Submit)][1:]
    assert [(m.slots, m.prompt_tokens, m.max_tokens) for m in submits] == [(1, 10, 495), (1, 20, 485)]
    for attempt_id in play.live:
        play.advance(attempt_id, "q", "e")
    finish(play)
    await play.written()
    resumes = [m.resume for _, m in play.heard if isinstance(m, wire.Decode)][1:]
    assert [(r.choice, r.n_tokens) for r in resumes if r is not None] == [(0, 5), (1, 15)]
    assert texts(play) == {index: undisturbed(index, [])[0] for index in range(3)}
    notes = {chunk["choices"][0]["index"]: chunk["sluice"] for chunk in chunks(play) if "sluice" in chunk}
    assert {index: note["resumed"][0]["after_tokens"] for index, note in notes.items()} == {0: 5, 1: 15}
    assert play.metric("sluice_migrations_total", code="engine_lost") == 2
    play.nothing_held()


async def test_a_choice_without_a_token_begins_at_its_own_index() -> None:
    play, _ = decoding(5, choices=[0], n=2)
    play.lose("d")
    finish(play)
    resumes = [m.resume for _, m in play.heard if isinstance(m, wire.Decode)][1:]
    assert sorted((r.choice, r.n_tokens, r.chars) for r in resumes if r is not None)[1] == (1, 0, 0)
    assert texts(play) == {index: undisturbed(index, [])[0] for index in range(2)}
    # a choice that begins anew was not interrupted
    assert json.loads(play.reply.body)["sluice"]["migrations"] == 1


async def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    play, _ = decoding(5, n=2)
    life = next(iter(play.live.values()))
    life.prefilled = life.prefilled._replace(cached_tokens=3)
    play.lose("d")
    finish(play)
    usage = json.loads(play.reply.body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


async def test_the_failure_of_one_part_ends_all() -> None:
    play, _ = decoding(5, n=3, stream=True)
    await play.written()
    play.lose("d")
    first = next(iter(play.live))
    play.advance(first, "q", "e")
    play.fail(first, "bad_request")
    await play.written()
    assert b'"error"' in play.reply.body and play.reply.ended
    play.nothing_held()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_may_forbid_it(stream: bool) -> None:
    play, _ = decoding(5, n=2, stream=stream, headers={b"x-sluice-migrate": b"off"})
    await play.written()
    play.lose("d")
    finish(play)
    await play.written()
    assert not [m for _, m in play.heard if isinstance(m, wire.Decode) and m.resume is not None]
    assert play.metric("sluice_migrations_total", code="engine_lost") == 0
    if stream:
        assert b'"engine_lost"' in play.reply.body
        assert b"[DONE]" not in play.reply.body
    else:
        # nothing had been sent, so it was generated again
        assert texts(play) == {index: undisturbed(index, [])[0] for index in range(2)}
        usage = json.loads(play.reply.body)["usage"]
        assert usage["completion_tokens"] == len(IDS[0]) + len(IDS[1])
    play.nothing_held()


async def test_retries_after_answers_of_engines_are_bounded_and_lost_engines_are_not_counted() -> None:
    play, attempt_id = decoding(0)
    play.connections.budgeted = 3
    play.lose("d")
    (attempt_id,) = play.live
    play.advance(attempt_id, "p", "d")
    play.fail(attempt_id, "internal")
    # it waits for room in the budget, which nobody gives back
    (life,) = play.live.values()
    assert (life.stage, life.router_knows, play.connections.budgeted) == (Stage.QUEUED, False, 3)
    while life.stage is Stage.QUEUED:
        play.now_s = life.wake_at_s
        life.wake(play.now_s)
    assert (play.reply.status, json.loads(play.reply.body)["error"]["code"]) == (503, "retry_budget")
    play.connections.budgeted -= 3
    play.nothing_held()


async def test_an_attempt_leaves_the_retry_budget_when_it_ends() -> None:
    play, attempt_id = decoding(0)
    play.fail(attempt_id, "internal")
    assert play.connections.budgeted == 1
    (attempt_id,) = play.live
    play.advance(attempt_id, "p", "d")
    play.fail(attempt_id, "overloaded")
    # the second retry waits for a moment
    assert play.connections.budgeted == 0
    (attempt_id,) = play.live
    play.now_s = play.live[attempt_id].wake_at_s
    play.live[attempt_id].wake(play.now_s)
    assert play.connections.budgeted == 1
    for _ in range(4):
        play.advance(attempt_id, "p", "d")
    play.generate(attempt_id, [0], 1)
    assert play.connections.budgeted == 0
    finish(play)
    play.nothing_held()


@pytest.mark.parametrize(
    ("state", "moves"), [("stalled", 1), ("quarantined", 1), ("down", 1), ("draining", 0)]
)
async def test_the_router_calls_an_engine_unfit(state: wire.EngineState, moves: int) -> None:
    play, attempt_id = decoding(5)
    play.unfit("d", state)
    cancels = [m for name, m in play.heard if name == "d" and isinstance(m, wire.Cancel)]
    assert len(cancels) == moves
    assert (attempt_id in play.live) == (not moves)
    finish(play)
    assert texts(play)[0] == undisturbed(0, [])[0]
    play.nothing_held()
