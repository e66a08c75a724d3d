"""The sim engine's own features: its text, parameters, timing, preemption, KV events, and its refusals."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.links import SimLink
from actors.engine.sim.peers import SimHandle
from actors.options import from_options
from actors.wire.messages import Admitted, Failed, Out, PrefillDone, Reading
from policies.engine_model import text
from policies.engine_model.blocks import Stored, block_hashes
from tests.actors.engine.rig import Node, Rig, until

PROMPT = list(range(10, 60))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig


async def node(rig: Rig, name: str = "c", role: Any = "colocated", **options: Any) -> Node:
    return await rig.node(SimEngine(SimEngineConfig(name, role, **options)), name)


def words(n: int, prompt: list[int] = PROMPT, seed: int = 0, choice: int = 0) -> list[str]:
    base = text.text_base(text.prompt_hash(prompt), seed, choice)
    return [text.WORDS[text.token_id(base, i)] for i in range(n)]


# ---------------------------------------------------------------------------------------------------- links


async def pulled(p: Node, d: Node, attempt_id: str, prompt: list[int]) -> Admitted:
    done = await p.prefilled(attempt_id, prompt)
    d.client.decode(attempt_id, prompt, done.handle)
    return await d.client.wait(attempt_id, Admitted)


async def test_links_give_each_reader_its_bandwidth_and_latency(rig: Rig) -> None:
    """50 tokens at 100 bytes: 5,000 B at 100 kB/s + 10 ms, at a quarter of it, and by the timing profile."""
    timing = {"kv_bytes_per_token": 100, "transfer_bandwidth_bytes_per_s": 1e9, "transfer_latency_s": 0.0}
    links = {"near-*": SimLink(100e3, 0.01), "far-*": SimLink(25e3)}
    p = await node(rig, "p", "prefill", timing=timing, links=links)
    took = {}
    for name in ("near-1", "far-1", "other"):
        d = await node(rig, name, "decode", timing=timing)
        took[name] = (await pulled(p, d, f"r-{name}", PROMPT)).transfer_s
        await d.rests()
    assert took["near-1"] == pytest.approx(0.06, abs=1e-9)
    assert took["far-1"] == pytest.approx(0.2, abs=1e-9)
    assert took["other"] == pytest.approx(5e-6)
    await p.rests()


async def test_transfers_of_one_sender_share_its_link(rig: Rig) -> None:
    """Two engines read 5,000 B each over 5 kB/s: alone 1 s, together up to 2 s; the sum of bytes/time is fixed."""
    timing = {"kv_bytes_per_token": 100}
    p = await node(rig, "p", "prefill", timing=timing, links={"d*": SimLink(5e3)})
    nodes = [await node(rig, f"d{i}", "decode", timing=timing) for i in range(2)]
    prompts = [[i, *PROMPT[1:]] for i in range(2)]
    done = [await p.prefilled(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    for i, d in enumerate(nodes):
        d.client.decode(f"r{i}", prompts[i], done[i].handle)
    took = [(await d.client.wait(f"r{i}", Admitted)).transfer_s for i, d in enumerate(nodes)]
    # They overlapped, and each slowed the other down.
    assert max(took) > 1.1
    assert all(1.0 <= seconds <= 2.0 + 1e-9 for seconds in took)
    for each in [p, *nodes]:
        await each.rests()


async def test_a_cancelled_read_over_a_link_is_let_end_and_leaves_nothing(rig: Rig) -> None:
    p = await node(rig, "p", "prefill", timing={"kv_bytes_per_token": 100}, links={"d": SimLink(50e3)})
    d = await node(rig, "d", "decode", timing={"kv_bytes_per_token": 100})
    done = await p.prefilled("r", PROMPT)
    d.client.decode("r", PROMPT, done.handle)
    await until(lambda: d.used > 0, "the read")
    d.client.cancel("r")
    await d.rests()
    await p.rests()
    assert d.client.of("r") == [Reading("r")]


async def test_a_sender_that_goes_in_the_middle_fails_the_read(rig: Rig) -> None:
    p = await node(rig, "p", "prefill", timing={"kv_bytes_per_token": 100}, links={"d": SimLink(100.0)})
    d = await node(rig, "d", "decode", timing={"kv_bytes_per_token": 100})
    done = await p.prefilled("r", PROMPT)
    d.client.decode("r", PROMPT, done.handle)
    await until(lambda: d.used > 0, "the read")
    await p.server.stop()
    assert (await d.client.wait("r", Failed)).code == "kv_load"
    await d.rests()


@pytest.mark.parametrize(
    "bad", [{"bandwidth_bytes_per_s": 0.0}, {"bandwidth_bytes_per_s": 1.0, "latency_s": -1.0}]
)
def test_an_impossible_link_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a link's"):
        SimLink(**bad)


# ---------------------------------------------------------------------------------------------------- text


async def test_text_is_the_pure_function_of_prompt_seed_and_choice(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode("r", PROMPT, n=2, seed=5, max_tokens=12)
    c.client.decode("greedy", PROMPT, n=2, temperature=0, max_tokens=12)
    assert await c.client.text("r", 0) == "".join(words(12, seed=5))
    assert await c.client.text("r", 1) == "".join(words(12, seed=5, choice=1))
    assert await c.client.text("greedy", 0) == await c.client.text("greedy", 1) == "".join(words(12))


async def test_preempted_requests_say_the_same(rig: Rig) -> None:
    """8 blocks of 16 hold two prompts of 3 blocks, but not their 100 tokens of output."""
    c = await node(rig, kv_blocks=10, max_model_len=160)
    prompts = {f"r{i}": [i, *PROMPT[1:]] for i in range(4)}
    for attempt_id, prompt in prompts.items():
        c.client.decode(attempt_id, prompt, max_tokens=100)
    for attempt_id, prompt in prompts.items():
        assert await c.client.text(attempt_id) == "".join(words(100, prompt))
        assert sum(isinstance(m, Admitted) for m in c.client.of(attempt_id)) == 1
    assert (c.engine.metrics().preemptions or 0) > 0
    await c.rests()


async def test_stop_string_across_tokens(rig: Rig) -> None:
    c = await node(rig)
    said = words(10)
    whole = "".join(said)
    # The end of one token and the beginning of the next.
    stop = said[3][-2:] + said[4][:2]
    c.client.decode("r", PROMPT, stop=["never said", stop], max_tokens=50)
    assert await c.client.text("r") == whole[: whole.index(stop)]
    last = c.client.outs("r")[-1]
    assert (last.finish, last.stop_reason) == ("stop", stop)
    await c.rests()


async def test_min_tokens_comes_before_stop(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode("r", PROMPT, stop=[" "], min_tokens=5, max_tokens=50)
    # The fifth token begins with the stop string.
    assert await c.client.text("r") == "".join(words(4))
    assert sum(out.n_tokens for out in c.client.outs("r")) == 5


async def test_held_back_text_comes_with_the_last_token(rig: Rig) -> None:
    c = await node(rig)
    said = words(4)
    c.client.decode("r", PROMPT, stop=[said[3] + "!"], max_tokens=4)
    assert await c.client.text("r") == "".join(said)
    assert c.client.outs("r")[-1].finish == "length"


async def test_stop_token_has_no_text(rig: Rig) -> None:
    c = await node(rig)
    base = text.text_base(text.prompt_hash(PROMPT), 0, 0)
    ids = [text.token_id(base, i) for i in range(20)]
    first = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    c.client.decode("r", PROMPT, stop_token_ids=[ids[first]], max_tokens=50)
    assert await c.client.text("r") == "".join(words(first))
    last = c.client.outs("r")[-1]
    assert (last.finish, last.stop_reason) == ("stop", ids[first])


async def test_texts_may_end_by_themselves(rig: Rig) -> None:
    c = await node(rig, mean_output_tokens=10)
    for i in range(20):
        c.client.decode(f"r{i}", [i, 1, 2], max_tokens=40)
    c.client.decode("all", [3, 1, 2], max_tokens=40, ignore_eos=True)
    lengths = {}
    for i in range(20):
        await c.client.text(f"r{i}")
        outs = c.client.outs(f"r{i}")
        lengths[i] = len(outs)
        assert (outs[-1].finish, outs[-1].text == "") in [("stop", True), ("length", False)]
        if outs[-1].finish == "length":
            assert lengths[i] == 40
    assert len(set(lengths.values())) > 5
    await c.client.text("all")
    assert len(c.client.outs("all")) == 40


async def test_without_max_tokens_it_runs_to_the_end_of_the_context(rig: Rig) -> None:
    c = await node(rig, max_model_len=64)
    c.client.decode("r", PROMPT, max_tokens=None)
    await c.client.text("r")
    assert len(c.client.outs("r")) == 14


async def test_logprobs_have_the_shape_of_the_wire(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode("r", PROMPT, logprobs=3, prompt_logprobs=2, max_tokens=4)
    await c.client.text("r")
    outs = c.client.outs("r")
    for i, out in enumerate(outs):
        assert out.logprobs is not None
        [(word, token, logprob, best)] = out.logprobs
        assert out.token_ids == [token]
        assert (word, text.WORDS[token]) == (out.text, out.text)
        assert logprob < 0
        assert len(best) == 3
        assert list(best[0]) == [word, token, logprob]
        assert (out.prompt_logprobs is None) == (i > 0)
    prompt = outs[0].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert [entry[1] for entry in prompt[1:]] == PROMPT[1:]
    assert all(len(entry[3]) == 2 for entry in prompt[1:])


async def test_logprobs_zero_names_the_chosen_token_only(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode("r", PROMPT, logprobs=0, max_tokens=1)
    await c.client.text("r")
    [(_, _, _, best)] = c.client.outs("r")[0].logprobs or []
    assert list(best) == []


# ---------------------------------------------------------------------------------------------------- refusals

BAD = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x"}, "stop"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ({"logprobs": 99}, "logprobs"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": 1.5}, "seed"),
]


@pytest.mark.parametrize(("params", "param"), BAD)
async def test_bad_parameters_are_named(rig: Rig, params: dict[str, Any], param: str) -> None:
    c = await node(rig)
    c.client.decode("d", PROMPT, **params)
    c.client.prefill("p", PROMPT, **params)  # so that no KV is computed in vain
    for attempt_id, stage in (("d", "decode"), ("p", "prefill")):
        failed = await c.client.wait(attempt_id, Failed)
        assert (failed.task, failed.code, failed.param, failed.retryable) == (
            stage,
            "bad_request",
            param,
            False,
        )
    await c.rests()


@pytest.mark.parametrize("tokens", [[], [-1], [2**32], [1000], list(range(100))])
async def test_bad_prompts_are_refused(rig: Rig, tokens: list[int]) -> None:
    c = await node(rig, max_model_len=100, vocab_size=500)
    c.client.decode("d", tokens, max_tokens=1)
    failed = await c.client.wait("d", Failed)
    assert (failed.code, failed.param) == ("bad_request", "prompt")
    await c.rests()


async def test_tools_are_refused(rig: Rig) -> None:
    from actors.wire.messages import Decode

    c = await node(rig)
    c.client.channel.send(Decode("r", PROMPT, {}, None, 5.0, 0, b"{}"))
    assert (await c.client.wait("r", Failed)).param == "tools"


async def test_parameters_without_effect_are_taken(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode(
        "r",
        PROMPT,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias={"5": 1},
        skip_special_tokens=False,
        response_format={"type": "text"},
        max_tokens=3,
    )
    assert await c.client.text("r") == "".join(words(3))


async def test_strange_handles_are_refused(rig: Rig) -> None:
    p = await node(rig, "p", "prefill")
    d = await node(rig, "d", "decode")
    done = await p.prefilled("r", PROMPT)
    d.client.decode("garbage", PROMPT, b"\x93\x01")
    # an array whose first text is no UTF-8
    d.client.decode("no-text", PROMPT, b"\x97\xa1\xd5" + b"\x00" * 6)
    d.client.decode("other", [1, *PROMPT], done.handle)
    d.client.decode("same-length", [1, *PROMPT[1:]], done.handle)
    for attempt_id in ("garbage", "no-text", "other", "same-length"):
        failed = await d.client.wait(attempt_id, Failed)
        assert (failed.code, failed.retryable) == ("unknown_handle", True)
    p.client.release("r")
    await p.rests()
    await d.rests()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"slots": 0}, "slots"),
        ({"kv_blocks": 10}, "kv_blocks"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"hold_transfers_s": -1.0}, "hold_transfers_s"),
        ({"mean_output_tokens": 0.5}, "mean_output_tokens"),
        ({"profile": "h200"}, "cpu_smollm2"),
        ({"timing": {"decode_bse_s": 1.0}}, "decode_base_s"),
        ({"timing": {"decode_base_s": -1.0}}, "decode_base_s"),
    ],
)
def test_impossible_configurations_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SimEngineConfig("e", **options)


# ---------------------------------------------------------------------------------------------------- model


async def test_a_cached_prefix_is_not_computed_again(rig: Rig) -> None:
    c = await node(rig)
    c.client.decode("a", PROMPT)
    await c.client.text("a")
    c.client.decode("b", PROMPT)
    # 3 blocks of 16 are cached; the last 2 tokens are computed.
    assert (await c.client.wait("b", Admitted)).cached_tokens == 48
    await c.client.text("b")
    assert c.engine.metrics().prefill_tokens == 50 + 2


async def test_only_what_is_not_cached_moves(rig: Rig) -> None:
    p = await node(rig, "p", "prefill")
    d = await node(rig, "d", "decode")
    moved = []
    for attempt_id in ("a", "b"):
        done = await p.prefilled(attempt_id, PROMPT)
        d.client.decode(attempt_id, PROMPT, done.handle)
        await d.client.text(attempt_id)
        moved.append((await d.client.wait(attempt_id, Admitted)).transfer_bytes)
    assert moved == [done.kv_bytes, done.kv_bytes * 2 // 50]
    metrics = d.engine.metrics()
    assert metrics.transfer_bytes == sum(moved)
    assert metrics.transfers == 2


async def test_an_engine_can_decode_what_it_prefilled_itself(rig: Rig) -> None:
    c = await node(rig)
    done = await c.prefilled("r", PROMPT)
    c.client.decode("r", PROMPT, done.handle)
    assert await c.client.text("r") == "".join(words(8))
    assert (await c.client.wait("r", Admitted)).transfer_bytes == 0
    await c.rests()


async def test_urgent_work_is_computed_first(rig: Rig) -> None:
    p = await node(rig, "p", "prefill", slots=1, timing={"prefill_base_s": 0.5})
    p.client.prefill("running", PROMPT)
    await until(lambda: p.engine.status().running == 1, "computing")
    p.client.prefill("low", PROMPT, priority=1)
    p.client.prefill("high", PROMPT, priority=-1)
    await until(lambda: len(p.client.inbox) == 3, "three prefills")
    assert [m.attempt_id for m in p.client.inbox] == ["running", "high", "low"]  # type: ignore[union-attr]


async def test_the_loop_rests_without_work_and_one_step_is_one_message(rig: Rig) -> None:
    c = await node(rig)
    engine = c.engine
    assert isinstance(engine, SimEngine)
    for i in range(6):
        c.client.decode(f"r{i}", [i, 1, 2], max_tokens=10)
    for i in range(6):
        await c.client.text(f"r{i}")
    batches = [message.items for message in c.client.inbox if hasattr(message, "items")]
    assert [len(items) for items in batches] == [6] * 10
    await c.rests()
    await until(lambda: not engine._clock.ticking, "rest")
    steps = engine._model.steps
    await asyncio.sleep(0.05)
    assert engine._model.steps == steps


@pytest.mark.parametrize("faulty", [False, True])
async def test_the_steps_of_an_engine_without_work_are_watched_only_if_a_fault_may_stop_them(
    rig: Rig, tmp_path: Path, faulty: bool
) -> None:
    options = {"timing": {"decode_base_s": 0.01}}
    if faulty:
        options |= {"faults": str(tmp_path / "faults.json")}  # type: ignore[dict-item]
    engine = SimEngine(from_options(SimEngineConfig, {"engine_id": "w", "role": "decode", **options}, "w"))
    node = await rig.node(engine, "w")
    watch = engine._watch
    begun = watch._timer
    for name in ("a", "b"):
        if faulty:
            await until(lambda: watch._timer is not begun, "a look")
            assert watch._timer is not None
        else:
            await until(lambda: watch._timer is None, "rest")
        node.client.decode(name, list(range(10, 60)), max_tokens=100)
        await until(lambda name=name: node.client.outs(name), "first token")  # type: ignore[misc]
        assert watch._timer is not None
        looked_s = watch._last_s
        await until(lambda: watch._last_s > looked_s, "a look at the steps")  # noqa: B023
        await node.client.text(name)
    assert (watch.state, watch.silent_s, watch.stalls) == ("ready", 0.0, 0)
    await node.rests()


async def test_kv_events_mirror_the_cache(rig: Rig) -> None:
    c = await node(rig, kv_events=True)
    engine = c.engine
    assert isinstance(engine, SimEngine)
    c.client.decode("r", PROMPT)
    await c.client.text("r")
    assert engine.kv_events() == [Stored(block_hashes(PROMPT, 16))]
    assert engine.kv_events() == []


async def test_a_bug_in_the_step_loop_fails_all_requests(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    c = await node(rig)
    engine = c.engine
    assert isinstance(engine, SimEngine)
    c.client.decode("r", PROMPT, max_tokens=5000)
    await c.client.wait("r", Out)

    def broken() -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(engine._model, "end_step", broken)
    failed = await _failed(c)
    assert (failed.code, failed.retryable) == ("engine_dead", True)
    with pytest.raises(RuntimeError, match="died"):
        await c.server.check_health()
    c.client.decode("later", PROMPT)
    assert (await c.client.wait("later", Failed)).code == "engine_dead"


async def _failed(c: Node) -> Failed:
    await until(lambda: any(isinstance(m, Failed) for m in c.client.of("r")), "Failed")
    return next(m for m in c.client.of("r") if isinstance(m, Failed))


async def test_a_prefill_engine_that_is_silent_does_not_hold_a_decode(rig: Rig, tmp_path: Path) -> None:
    """Something accepts the connection but never answers: the pull ends by its timeout."""
    p = await node(rig, "p", "prefill")
    d = await node(rig, "d", "decode", pull_timeout_s=0.2)
    done = await p.prefilled("r", PROMPT)
    p.engine.peer_message = lambda channel, message: None  # type: ignore[attr-defined]
    d.client.decode("r", PROMPT, done.handle)
    failed = await d.client.wait("r", Failed)
    assert (failed.code, failed.retryable) == ("kv_load", True)
    await d.rests()
    p.client.release("r")
    await p.rests()


def test_no_torch_vllm_or_ray_is_imported() -> None:
    code = (
        "import sys, actors.engine.sim.engine, actors.engine.server\n"
        "print([m for m in ('torch', 'vllm', 'ray', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_handles_of_one_step_name_the_same_batch(rig: Rig) -> None:
    p = await node(rig, "p", "prefill")
    p.client.prefill("a", PROMPT)
    p.client.prefill("b", [7, *PROMPT])
    one, other = [await p.client.wait(name, PrefillDone) for name in ("a", "b")]
    later = await p.prefilled("c", PROMPT)
    batches = [msgspec.msgpack.decode(done.handle, type=SimHandle).batch for done in (one, other, later)]
    assert batches[0] == batches[1] != batches[2]
    assert all(batches)
