"""A request that another engine began goes on at any token, and its whole answer is the undisturbed one."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.params import MAX_CHOICES
from actors.wire.messages import Admitted, Decode, Failed, Out, Prefill, PrefillDone, Resume
from tests.actors.engine.rig import Node, Rig, until

PROMPT = list(range(10, 60))
TOKENS = 24


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig


async def node(rig: Rig, name: str = "c", role: Any = "colocated", **options: Any) -> Node:
    return await rig.node(SimEngine(SimEngineConfig(name, role, **options)), name)


async def outs(node: Node, attempt_id: str, index: int = 0) -> list[Out]:
    await node.client.text(attempt_id, index)
    return node.client.outs(attempt_id, index)


def resume(
    node: Node,
    attempt_id: str,
    seen: list[Out],
    *,
    short_by: int = 0,
    handle: bytes | None = None,
    **params: Any,
) -> None:
    """Sends what an ingress sends that got `seen`, of which the last `short_by` characters were lost on the way."""
    ids = [token for out in seen for token in out.token_ids or ()]
    n_tokens = sum(out.n_tokens for out in seen)
    chars = len("".join(out.text for out in seen)) - short_by
    choice = seen[0].index if seen else 0
    params = {"max_tokens": TOKENS} | params
    message = Decode(attempt_id, PROMPT, params, handle, 60.0, resume=Resume(choice, n_tokens, ids, chars))
    node.client.channel.send(message)


PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seed": {"seed": 9},
    "greedy": {"temperature": 0},
    "logprobs": {"logprobs": 2},
    "minimum": {"min_tokens": 20, "stop": [" "]},
}


@pytest.mark.parametrize("name", list(PARAMS))
async def test_at_every_token_the_rest_follows(rig: Rig, name: str) -> None:
    c, params = await node(rig), PARAMS[name]
    c.client.decode("whole", PROMPT, **({"max_tokens": TOKENS} | params))
    whole = await outs(c, "whole")
    for at in range(len(whole)):
        resume(c, f"r{at}", whole[:at], **params)
        rest = await outs(c, f"r{at}")
        assert [out.text for out in rest] == [out.text for out in whole[at:]], at
        assert [out.finish for out in rest] == [out.finish for out in whole[at:]]
        assert [out.logprobs for out in rest] == [out.logprobs for out in whole[at:]]
    await c.rests()


async def test_a_stop_string_is_found_across_the_seam(rig: Rig) -> None:
    """The stop string begins in a token before the seam, whose text the first engine has held back."""
    c = await node(rig)
    c.client.decode("plain", PROMPT, max_tokens=TOKENS)
    words = [out.text for out in await outs(c, "plain")]
    stop = words[9] + words[10] + words[11][:2]
    c.client.decode("whole", PROMPT, max_tokens=TOKENS, stop=[stop])
    whole = await outs(c, "whole")
    assert "".join(out.text for out in whole) == "".join(words[:9])
    assert len(whole) == 12
    for at in (10, 11):
        resume(c, f"r{at}", whole[:at], stop=[stop])
        rest = await outs(c, f"r{at}")
        assert "".join(out.text for out in rest) == ""
        assert (rest[-1].finish, rest[-1].stop_reason) == ("stop", stop)


async def test_text_that_the_client_has_not_got_is_sent_with_the_first_piece(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode("whole", PROMPT, max_tokens=TOKENS)
    whole = await outs(c, "whole")
    text = "".join(out.text for out in whole)
    resume(c, "r", whole[:7], short_by=5)
    had = len("".join(out.text for out in whole[:7])) - 5
    assert text[:had] + "".join(out.text for out in await outs(c, "r")) == text


async def test_a_choice_keeps_its_index_and_its_text(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode("whole", PROMPT, n=3, max_tokens=TOKENS)
    whole = await outs(c, "whole", 2)
    resume(c, "r", whole[:8])
    assert "".join(out.text for out in await outs(c, "r", 2)) == "".join(out.text for out in whole[8:])
    assert not c.client.outs("r", 0)
    resume(c, "two", whole[:8], n=2)
    assert (await c.client.wait("two", Failed)).param == "n"


async def test_with_a_mean_length_the_end_stays_where_it_was(rig: Rig) -> None:
    c = await node(rig, mean_output_tokens=9.0)
    c.client.decode("whole", PROMPT, seed=3, max_tokens=TOKENS)
    whole = await outs(c, "whole")
    assert whole[-1].finish == "stop"
    assert len(whole) > 2
    resume(c, "r", whole[:2], seed=3)
    rest = await outs(c, "r")
    assert (len(rest), rest[-1].finish) == (len(whole) - 2, "stop")


async def test_kv_of_the_resumed_tokens_is_computed_and_held(rig: Rig) -> None:
    """The prompt's 50 tokens are pulled, 40 resumed ones computed here: 90 tokens, 6 blocks of 16. 40 more take 4 s."""
    p = await node(rig, "p", "prefill")
    d = await node(rig, "d", "decode", timing={"decode_base_s": 0.1})
    done = await p.prefilled("r", PROMPT)
    d.client.channel.send(
        Decode("r", PROMPT, {"max_tokens": 80}, done.handle, 60.0, resume=Resume(0, 40, [], 0))
    )
    admitted = await d.client.wait("r", Admitted)
    assert admitted.transfer_bytes == done.kv_bytes
    await until(lambda: d.client.outs("r"), "a token")
    assert d.used >= 6
    assert (d.engine.status().tokens_in_flight or 0) > 90
    assert d.engine.metrics().prefill_tokens == 40
    await outs(d, "r")
    assert len(d.client.outs("r")) == 40
    await d.rests()
    await p.rests()


async def test_kv_of_output_that_the_prefill_engine_has_computed_is_pulled(rig: Rig) -> None:
    """Of 50 tokens of prompt and 40 of output, of which the decode engine computes only the last."""
    p = await node(rig, "p", "prefill")
    d = await node(rig, "d", "decode", timing={"decode_base_s": 0.02})
    prompt = await p.prefilled("prompt", PROMPT)
    p.client.release("prompt")
    resume = Resume(0, 40, [], 0)
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, resume=resume))
    done = await p.client.wait("r", PrefillDone)
    assert done.prompt_tokens == len(PROMPT)
    assert done.kv_bytes * len(PROMPT) == prompt.kv_bytes * (len(PROMPT) + 40)
    d.client.channel.send(Decode("r", PROMPT, {"max_tokens": 80}, done.handle, 60.0, resume=resume))
    assert (await d.client.wait("r", Admitted)).transfer_bytes == done.kv_bytes
    text = "".join(out.text for out in await outs(d, "r"))
    other = await node(rig)
    other.client.decode("whole", PROMPT, max_tokens=80)
    assert "".join(out.text for out in await outs(other, "whole")).endswith(text)
    assert d.engine.metrics().prefill_tokens == 1
    await d.rests()
    await p.rests()


async def test_kv_of_more_output_than_there_is_is_that_of_another_prompt(rig: Rig) -> None:
    p, d = await node(rig, "p", "prefill"), await node(rig, "d", "decode")
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, resume=Resume(0, 3, [], 0)))
    done = await p.client.wait("r", PrefillDone)
    for attempt_id, resume in (("none", None), ("two", Resume(0, 2, [], 0))):
        d.client.channel.send(Decode(attempt_id, PROMPT, {"max_tokens": 9}, done.handle, 60.0, resume=resume))
        failed = await d.client.wait(attempt_id, Failed)
        assert (failed.code, failed.retryable) == ("unknown_handle", True)
    p.client.release("r")
    await d.rests()
    await p.rests()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Resume(0, TOKENS, [], 0), "cannot go on after"),
        (Resume(0, 3, [1, 2, 3], 0), "not those of this prompt"),
        (Resume(0, 2, [], 500), "characters"),
        (Resume(MAX_CHOICES, 2, [], 0), f"choice {MAX_CHOICES} is resumed"),
    ],
)
async def test_what_cannot_be_the_beginning_is_refused(rig: Rig, broken: Resume, message: str) -> None:
    c = await node(rig)
    c.client.channel.send(Decode("r", PROMPT, {"max_tokens": TOKENS}, None, 60.0, resume=broken))
    failed = await c.client.wait("r", Failed)
    assert (failed.code, failed.retryable) == ("bad_request", False)
    assert message in failed.message
    await c.rests()


@pytest.mark.parametrize("n_tokens", [SimEngineConfig("e").max_model_len, 2**53])
async def test_more_than_the_context_holds_is_not_resumed(rig: Rig, n_tokens: int) -> None:
    """A number like this would be a sequence without end, of which the engine died."""
    e = await node(rig)
    for attempt_id, message in (
        ("p", Prefill("p", PROMPT, {}, 60.0, resume=Resume(0, n_tokens, [], 0))),
        ("d", Decode("d", PROMPT, {}, None, 60.0, resume=Resume(0, n_tokens, [], 0))),
    ):
        e.client.channel.send(message)
        failed = await e.client.wait(attempt_id, Failed)
        assert (failed.code, failed.param) == ("bad_request", "resume")
    e.client.decode("after", PROMPT, max_tokens=2)
    await outs(e, "after")
