"""OpenAI fields -> SamplingParams, and outputs -> wire pieces. Imports vLLM (seconds), starts nothing."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from vllm.logprobs import Logprob  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from actors.engine.vllm.connector import BATCH, LEASE, PROMPT  # noqa: E402
from actors.engine.vllm.connector.handle import fault, name_of  # noqa: E402
from actors.engine.vllm.params import (  # noqa: E402
    BadParameter,
    child_params,
    prefill_params,
    prompt_logprobs,
    sampling_params,
    sequences,
    structured_outputs,
    token_logprobs,
)
from actors.engine.vllm.task import BadHandle, EngineTask, Stream, decode_handle, out, prefill_done  # noqa: E402
from actors.wire.messages import Decode, Prefill, Resume  # noqa: E402
from app.api import budget  # noqa: E402


def test_given_fields_win_over_the_models_defaults_and_the_rest_is_openais() -> None:
    params = sampling_params(
        {"top_p": 0.5, "stop": ["x"], "max_tokens": 7}, {"temperature": 0.3, "top_p": 0.9, "eos": 2}
    )
    assert (params.temperature, params.top_p, params.stop, params.max_tokens, params.n) == (
        0.3,
        0.5,
        ["x"],
        7,
        1,
    )
    assert params.output_kind == RequestOutputKind.DELTA
    assert sampling_params({}, {}).temperature == 1.0
    assert sampling_params({}, {}).max_tokens is None  # to the end of the context


def test_logit_bias_takes_the_keys_of_json() -> None:
    assert sampling_params({"logit_bias": {"12": 200.0}}, {}).logit_bias == {12: 100.0}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": -7}, "logprobs"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_wrong_values_name_their_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(BadParameter) as caught:
        sampling_params(given, {})
    assert caught.value.param == param


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_n_must_be_a_count(n: Any) -> None:
    with pytest.raises(BadParameter) as caught:
        sequences({"n": n})
    assert caught.value.param == "n"


def test_choices_have_seeds_of_their_own() -> None:
    base = sampling_params({"seed": 5}, {})
    assert [child_params(base, index).seed for index in range(3)] == [5, 6, 7]
    assert base.seed == 5
    assert child_params(sampling_params({}, {}), 2).seed is None


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]),
        (-(2**63) + 1, [-(2**63) + 1, -(2**63) + 2, -(2**63) + 3]),
    ],
)
def test_seeds_stay_in_the_numbers_that_model_runner_v2_keeps(seed: int, seeds: list[int]) -> None:
    """One larger number ends its engine."""
    base = sampling_params({"seed": seed}, {})
    found = [child_params(base, index).seed for index in range(3)]
    assert found == seeds
    kept = np.zeros(3, dtype=np.int64)
    for index, each in enumerate(found):
        kept[index] = each
    with pytest.raises(OverflowError):
        kept[0] = 2**63


def test_the_front_door_takes_no_more_than_model_runner_v2_has_room_for() -> None:
    """The numbers are read in vLLM's source: importing it wants Triton."""
    source = Path(str(find_spec("vllm.v1.worker.gpu.sample").submodule_search_locations[0])) / "logit_bias.py"  # type: ignore[union-attr,index]
    found = dict(re.findall(r"^(MAX_NUM_\w+) = (\d+)$", source.read_text(), re.MULTILINE))
    assert int(found["MAX_NUM_LOGIT_BIAS_TOKENS"]) >= budget.MAX_BIASES
    # generation configs of models have up to some ten ends of sequence
    assert int(found["MAX_NUM_STOP_TOKEN_IDS"]) >= budget.MAX_HELD_BACK_IDS + 16


def test_response_formats() -> None:
    schema = {"type": "object"}
    assert structured_outputs(None) is None
    assert structured_outputs({"type": "text"}) is None
    assert structured_outputs({"type": "json_object"}).json_object is True  # type: ignore[union-attr]
    named = structured_outputs({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    assert named is not None
    assert named.json == schema
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    assert json.loads(structured_outputs(tag).structural_tag or "") == tag  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "bad", [{"type": "xml"}, {}, "json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
def test_wrong_response_formats_are_refused(bad: Any) -> None:
    with pytest.raises(BadParameter) as caught:
        structured_outputs(bad)
    assert caught.value.param == "response_format"


def test_a_prefill_keeps_its_kv() -> None:
    params = prefill_params()
    assert params.max_tokens == 1
    assert params.extra_args == {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def test_logprobs_are_ranked_and_hold_the_chosen_token() -> None:
    candidates = {7: Logprob(-2.0, 3, "c"), 5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.0, 2, "b")}
    assert token_logprobs([7], [candidates], 2) == [("c", 7, -2.0, [("a", 5, -0.5), ("b", 6, -1.0)])]
    assert token_logprobs([7], [candidates], 0) == [("c", 7, -2.0, [])]
    assert prompt_logprobs([1, 7], [None, candidates], 1) == [None, ("c", 7, -2.0, [("a", 5, -0.5)])]


def test_of_equal_logprobs_the_emitted_token_comes_first_and_no_more_are_shown_than_asked_for() -> None:
    tied = {
        3: Logprob(-1.0, 1, "c"),
        4: Logprob(-1.0, 1, "d"),
        5: Logprob(-1.0, 2, "e"),
        9: Logprob(-4.0, 3, "z"),
    }
    for emitted, text in ((3, "c"), (4, "d"), (5, "e")):
        ((_, _, _, top),) = token_logprobs([emitted], [tied], 2)
        assert top[0] == (text, emitted, -1.0)
        assert len(top) == 2
    assert len(token_logprobs([9], [tied], -1)[0][3]) == 4


def task_of(params: dict[str, Any]) -> tuple[EngineTask, Stream]:
    task = EngineTask("decode", Decode("r", [1, 2], params, None, 1.0))
    return task, Stream(lambda *_: None, task, 1, "r-0")


def output(**completion: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {
        "text": "hi",
        "token_ids": (3, 4),
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
    return SimpleNamespace(
        outputs=[SimpleNamespace(**(defaults | completion))], prompt_logprobs=None, prompt_token_ids=[1, 2]
    )


def test_a_piece_has_what_was_asked_for() -> None:
    task, stream = task_of({})
    piece = out(task, stream, output(finish_reason="stop", stop_reason="x", logprobs=[{}, {}]))
    assert (piece.attempt_id, piece.index, piece.text, piece.n_tokens, piece.finish, piece.stop_reason) == (
        "r",
        1,
        "hi",
        2,
        "stop",
        "x",
    )
    assert (piece.token_ids, piece.logprobs, piece.delta) == ([3, 4], None, None)


def test_a_parsed_piece_has_its_delta_and_no_text() -> None:
    task, stream = task_of({})
    calls: list[Any] = []

    class Parser:
        def delta(self, *args: Any) -> tuple[bytes, str | None]:
            calls.append(args)
            return b'{"tool_calls":[]}', "tool_calls"

    task.parsers = [None, Parser()]
    piece = out(task, stream, output(finish_reason="stop"))
    assert calls == [("hi", [3, 4], "stop")]
    assert (piece.text, piece.delta, piece.finish) == ("", b'{"tool_calls":[]}', "tool_calls")


def test_a_handle_survives_the_wire_and_nothing_else_passes_for_one() -> None:
    params = {
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "10.0.0.1", "remote_port": 9, "tp_size": 1,
        "remote_block_ids": [[1, 2], [3]], "another": "field",
    }  # fmt: skip
    stats = SimpleNamespace(queued_ts=1.0, scheduled_ts=1.5, first_token_ts=3.5)
    finished = SimpleNamespace(kv_transfer_params=params, num_cached_tokens=128, metrics=stats)
    tokens = [1] * 200
    done = prefill_done(EngineTask("prefill", Prefill("r", tokens, {}, 1.0)), finished, 30.0, 1000)
    assert (done.prompt_tokens, done.cached_tokens, done.queue_s, done.compute_s, done.kv_bytes) == (
        200,
        128,
        0.5,
        2.0,
        2000,
    )
    said = {"remote_prefill_cached_tokens": 128, PROMPT: name_of(tokens)}
    assert decode_handle(done.handle, tokens) == params | said
    for other in (tokens[1:], [*tokens[:-1], 2], [2, *tokens[1:]]):
        with pytest.raises(BadHandle, match="another prompt"):
            decode_handle(done.handle, other)
    # a longer prompt may borrow it, and no decode may take it for its own
    longer = [*tokens, 7]
    assert decode_handle(done.handle, longer) == params | said
    with pytest.raises(BadHandle, match="another prompt"):
        decode_handle(done.handle, longer, least=len(longer))
    with pytest.raises(BadHandle, match="no token"):
        decode_handle(done.handle, [-1, *tokens])
    # with output of another engine the handle tells that, too
    task = EngineTask("prefill", Prefill("r", tokens, {}, 1.0, resume=Resume(0, 2, [5, 6], 1)))
    resumed = prefill_done(task, finished, 30.0, 1000)
    assert decode_handle(resumed.handle, [*tokens, 5, 6], least=200)[PROMPT] == name_of([*tokens, 5, 6])
    with pytest.raises(BadHandle, match="another prompt"):
        decode_handle(resumed.handle, [*tokens, 5, 7], least=200)
    for bad in (b"", b"\xff", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"remote_engine_id": "e"})):
        with pytest.raises(ValueError, match="not a KV handle"):
            decode_handle(bad, tokens)


GOOD: dict[str, Any] = {
    "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "10.0.0.1", "remote_port": 9, "tp_size": 1,
    "remote_block_ids": [[1, 2]],
    LEASE: {"slot": 1, "generation": 7, "tables": [[0, 0, 4096]], "node": "n", "sums": [[0, 0, [8, 2, 64, 1]]]},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in GOOD if name != LEASE),
        {"remote_engine_id": ["e"]},
        {"remote_port": 0},
        {"remote_port": "9"},
        {"tp_size": 0},
        {"remote_block_ids": []},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [1, 2]},
        {"remote_num_tokens": "many"},
        {BATCH: 5},
        {PROMPT: [5]},
        {PROMPT: [-1, 5]},
        {PROMPT: "mine"},
        {LEASE: "mine"},
        {LEASE: {"slot": 1}},
        {LEASE: {**GOOD[LEASE], "tables": 7}},
        {LEASE: {**GOOD[LEASE], "sums": [[0, 0, [8, 2, 64, 0]]]}},
    ],
    ids=str,
)
def test_a_handle_with_a_field_that_would_end_the_core_is_refused(change: dict[str, Any]) -> None:
    assert decode_handle(msgspec.msgpack.encode(GOOD), [1]) == GOOD
    assert fault({**GOOD, LEASE: None}) == ""
    bad = {**GOOD, **change}
    assert fault(bad)
    with pytest.raises(ValueError, match="not a KV handle"):
        decode_handle(msgspec.msgpack.encode(bad), [1])
    (name,) = change
    lacking = {key: value for key, value in bad.items() if key != name}
    assert bool(fault(lacking)) == (name in GOOD and name != LEASE)
