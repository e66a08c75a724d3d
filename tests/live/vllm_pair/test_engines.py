"""The engine contract, for real: one prefill and one decode engine of vLLM."""

import json
import socket
import time
from typing import Any

import msgspec
import pytest
import zmq

from actors.engine.vllm.connector.acquaintance import Peer, packed, unpacked
from actors.wire.messages import (
    Admitted,
    Cancel,
    Decode,
    Failed,
    KVRenewed,
    Out,
    Peers,
    Prefill,
    PrefillDone,
    Reading,
    ReleaseKV,
    RenewKV,
)
from policies.engine_model.blocks import block_hashes
from tests.live.serving import PATIENCE_S
from tests.live.vllm_app import (
    BLOCK,
    KV_TOKEN_BYTES,
    LEASE_S,
    on_a_slow_device,
)
from tests.live.vllm_pair.pair import GREEDY, Pair, fresh, shared_tokens, text

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [
    "The capital of France is",
    "Write one sentence about the sea.",
    "def fibonacci(n):",
    "List the planets of the solar system in their order from the sun: Mercury,",
    "Once upon a time there was a king who had three sons, and the youngest of them " * 20,
]


# --------------------------------------------------------------------------------------------------- the way through


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_disaggregated_text_equals_colocated(pair: Pair, number: int) -> None:
    tokens = pair.tokens(PROMPTS[number])
    params = {**GREEDY, "max_tokens": 16, "ignore_eos": True, "logprobs": 2}
    alone = pair.p.decode(f"alone-{number}", tokens, params, None)
    split = pair.both(f"split-{number}", tokens, params)
    if shared_tokens(split, alone) == 16:
        assert text(split) == text(alone)
    assert sum(piece.n_tokens for piece in split) == 16


def test_kv_moves_over_nixl_and_is_accounted_to_its_request(pair: Pair) -> None:
    before, tokens = pair.d.ask("metrics"), fresh(2 * BLOCK + 40)
    done = pair.p.prefill("moved", tokens)
    pair.d.decode("moved", tokens, {**GREEDY, "max_tokens": 2}, done.handle)
    admitted, after = pair.d.admitted("moved"), pair.d.ask("metrics")
    assert done.kv_bytes == admitted.transfer_bytes == 3 * BLOCK * KV_TOKEN_BYTES
    assert admitted.transfer_s > 0
    # One descriptor a layer where the blocks adjoin, else one a layer and block.
    assert 30 <= admitted.descriptors <= 3 * 30
    assert after["transfer_bytes"] - before["transfer_bytes"] == admitted.transfer_bytes
    assert after["transfers"] - before["transfers"] == 1
    assert after["prefill_tokens"] - before["prefill_tokens"] <= 1
    kinds = [type(message) for message in pair.d.seen("moved")]
    assert kinds[:2] == [Reading, Admitted]
    assert (kinds.count(Reading), kinds.count(Admitted)) == (1, 1)


def test_a_prompt_that_the_decode_engine_has_cached_is_not_moved_again(pair: Pair) -> None:
    tokens = fresh(2 * BLOCK + 10)
    params = {**GREEDY, "max_tokens": 4, "ignore_eos": True, "logprobs": 2}
    first, second = (pair.both(attempt_id, tokens, params) for attempt_id in ("first", "second"))
    if shared_tokens(first, second) == 4:
        assert text(first) == text(second)
    assert pair.d.admitted("second").transfer_bytes < pair.d.admitted("first").transfer_bytes
    assert pair.d.admitted("second").cached_tokens == 2 * BLOCK


def test_a_cached_prompt_is_found_with_its_own_salt_only(pair: Pair) -> None:
    """A tenant that hits others' prompts could tell by time, and by `cached_tokens`, what they have asked."""
    tokens = fresh(2 * BLOCK + 10)
    params = {**GREEDY, "max_tokens": 2, "ignore_eos": True}
    salts = {"salted": "ours", "other-salt": "theirs", "no-salt": None, "salted-again": "ours"}
    cached, moved = [], []
    for attempt_id, salt in salts.items():
        salted = {} if salt is None else {"cache_salt": salt}
        done = pair.p.prefill(attempt_id, tokens, params=salted)
        pair.d.decode(attempt_id, tokens, params | salted, done.handle)
        cached.append(done.cached_tokens)
        moved.append(pair.d.admitted(attempt_id).transfer_bytes)
    assert cached == [0, 0, 0, 2 * BLOCK]
    # the decode engine reads what it has not cached under this salt
    assert moved[0] == moved[1] == moved[2] == done.kv_bytes > moved[3]


def test_several_choices_share_one_pull(pair: Pair) -> None:
    before = pair.d.ask("metrics")["transfers"]
    # A text whose continuation is no near tie: the choices differ in how much of the prompt they compute themselves.
    tokens = pair.tokens("Counting up by one: " + ", ".join(map(str, range(101, 160))) + ",")
    assert len(tokens) > BLOCK
    pieces = pair.both("choices", tokens, {**GREEDY, "max_tokens": 5, "n": 3, "ignore_eos": True})
    assert [text(pieces, index) for index in range(3)] == [" 160,"] * 3
    assert sorted(piece.index for piece in pieces if piece.finish) == [0, 1, 2]
    assert pair.d.ask("metrics")["transfers"] == before + 1


def test_seeds_of_choices_follow_one_another(pair: Pair) -> None:
    tokens = pair.tokens("My favourite animal is the")
    params = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True}
    pieces = pair.d.decode("seeded", tokens, {**params, "seed": 41, "n": 4}, None)
    alone = [
        text(pair.d.decode(f"seed-{41 + n}", tokens, {**params, "seed": 41 + n}, None)) for n in range(4)
    ]
    assert len(set(alone)) == 4
    # One of four may part where two candidates are equally likely under the seed's noise.
    assert sum(text(pieces, n) == alone[n] for n in range(4)) >= 3


def test_requests_of_one_step_come_together(pair: Pair) -> None:
    pair.d.largest_batch = 0
    for attempt_id in ("left", "right"):
        pair.d.send(
            Decode(attempt_id, fresh(20), {**GREEDY, "max_tokens": 12, "ignore_eos": True}, None, PATIENCE_S)
        )
    pair.d.finish("left")
    pair.d.finish("right")
    assert pair.d.largest_batch == 2


# --------------------------------------------------------------------------------------------------------- leases


def test_release_frees_a_lease_at_once_and_is_idempotent(pair: Pair) -> None:
    pair.p.prefill("unwanted", fresh(3 * BLOCK))
    pair.p.until_status(lambda s: (s.leases, s.kv_blocks_used) == (1, 3))
    for _ in range(2):
        pair.p.send(ReleaseKV("unwanted"))
    pair.p.until_idle(0)
    pair.p.send(ReleaseKV("unwanted"))
    pair.p.send(ReleaseKV("never seen"))
    pair.p.until_idle(0)


def test_release_of_an_unfinished_prefill_ends_it(pair: Pair) -> None:
    pair.p.send(Prefill("early", fresh(1200), {}, PATIENCE_S))
    pair.p.send(ReleaseKV("early"))
    pair.p.until_idle(0)
    assert not [m for m in pair.p.seen("early") if isinstance(m, PrefillDone)]


def test_a_lease_that_nobody_wants_ends_by_itself(pair: Pair) -> None:
    pair.expiring = 1
    tokens = fresh(BLOCK + 5)
    done = pair.p.prefill("forgotten", tokens)
    assert pair.p.status().leases == 1
    pair.p.until_idle(0)
    assert_not_garbage(pair, "forgotten", tokens, done.handle)


def renewals(pair: Pair, attempt_id: str) -> list[float]:
    return [m.lease_s for m in pair.p.seen(attempt_id) if isinstance(m, KVRenewed)]


def test_a_lease_that_is_renewed_lasts_for_several_and_can_be_read_then(pair: Pair) -> None:
    tokens = fresh(BLOCK + 5)
    params = {**GREEDY, "max_tokens": 8, "logprobs": 2}
    done = pair.p.prefill("patient", tokens)
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 2.5 * LEASE_S:
        time.sleep(LEASE_S / 4)
        before = len(renewals(pair, "patient"))
        pair.p.send(RenewKV("patient"))
        until_s = time.monotonic() + PATIENCE_S
        while len(renewals(pair, "patient")) == before and time.monotonic() < until_s:
            time.sleep(0.05)
        assert 0.0 < renewals(pair, "patient")[-1] <= LEASE_S
    assert pair.p.status().leases == 1
    waited = pair.d.decode("patient", tokens, params, done.handle)
    pair.idle()
    at_once = pair.both("at once", tokens, params)
    assert shared_tokens(waited, at_once) > 0
    pair.p.send(RenewKV("patient"))
    assert_refused(pair, "patient")


def test_a_lease_that_is_renewed_no_more_ends_and_is_not_renewed_again(pair: Pair) -> None:
    pair.expiring = 1
    tokens = fresh(BLOCK + 5)
    done = pair.p.prefill("given-up", tokens)
    pair.p.send(RenewKV("given-up"))
    pair.p.until_idle(0)
    pair.p.send(RenewKV("given-up"))
    assert_refused(pair, "given-up")
    assert_not_garbage(pair, "given-up", tokens, done.handle)


def assert_refused(pair: Pair, attempt_id: str) -> None:
    """The last question about this lease, which has ended, is answered so."""
    until_s = time.monotonic() + PATIENCE_S
    while renewals(pair, attempt_id)[-1:] != [0.0] and time.monotonic() < until_s:
        time.sleep(0.05)
    assert renewals(pair, attempt_id)[-1] == 0.0


def test_kv_that_was_given_back_is_never_decoded(pair: Pair) -> None:
    tokens = fresh(BLOCK + 5)
    done = pair.p.prefill("given-back", tokens)
    pair.p.send(ReleaseKV("given-back"))
    pair.p.until_idle(0)
    pair.p.prefill("other", fresh(2 * BLOCK))  # its blocks are overwritten
    assert_not_garbage(pair, "given-back", tokens, done.handle)
    pair.p.send(ReleaseKV("other"))


def test_a_handle_serves_one_decode_only(pair: Pair) -> None:
    tokens = fresh(BLOCK + 5)
    done = pair.p.prefill("once", tokens)
    pair.d.decode("once", tokens, {**GREEDY, "max_tokens": 2}, done.handle)
    pair.p.until_idle(0)
    # One block of the prompt is cached by now; the rest would have to be read again, and is refused.
    assert_not_garbage(pair, "once more", tokens, done.handle)


def assert_not_garbage(pair: Pair, attempt_id: str, tokens: list[int], handle: bytes) -> None:
    failures = pair.d.ask("metrics")["transfer_failures"]
    pair.d.send(Decode(attempt_id, tokens, {**GREEDY, "max_tokens": 4}, handle, PATIENCE_S))
    failed = pair.d.wait_for(attempt_id, (Failed, Out))
    assert isinstance(failed, Failed), failed
    assert (failed.task, failed.code, failed.retryable) == ("decode", "kv_load", True)
    assert pair.d.ask("metrics")["transfer_failures"] == failures + 1


# --------------------------------------------------------------------------------------------------------- cancel


@on_a_slow_device
def test_cancel_while_computing_the_prefill(pair: Pair) -> None:
    pair.p.send(Prefill("computing", fresh(1200), {}, PATIENCE_S))
    # The core is busy with it and has not reported yet.
    assert pair.p.status().waiting == 1
    time.sleep(0.3)
    pair.p.send(Cancel("computing"))
    pair.p.until_idle(0)
    assert pair.p.seen("computing") == []


def test_cancel_of_a_leased_prefill_frees_it(pair: Pair) -> None:
    pair.p.prefill("leased", fresh(BLOCK))
    pair.p.send(Cancel("leased"))
    pair.p.until_idle(0)


@pytest.mark.parametrize("also_at_the_lender", [False, True])
def test_cancel_in_transfer_frees_both_engines(pair: Pair, also_at_the_lender: bool) -> None:
    attempt_id, tokens = f"moving-{also_at_the_lender}", fresh(2 * BLOCK + 3)
    done = pair.p.prefill(attempt_id, tokens)
    pair.d.send(Decode(attempt_id, tokens, {"max_tokens": 50}, done.handle, PATIENCE_S))
    pair.d.until_status(lambda s: s.kv_blocks_used == 3)
    pair.d.send(Cancel(attempt_id))
    if also_at_the_lender:
        pair.p.send(Cancel(attempt_id))
    pair.d.until_idle(0)
    pair.p.until_idle(0)
    assert {type(message) for message in pair.d.seen(attempt_id)} <= {Reading}


def test_cancel_while_the_read_runs(pair: Pair) -> None:
    """At some of these moments the read has been posted and not been seen to end."""
    for number, delay_s in enumerate((0.0, 0.28, 0.3, 0.31, 0.33)):
        attempt_id, tokens = f"at-{number}", fresh(3 * BLOCK)
        done = pair.p.prefill(attempt_id, tokens)
        pair.d.send(
            Decode(attempt_id, tokens, {"max_tokens": 50, "ignore_eos": True}, done.handle, PATIENCE_S)
        )
        time.sleep(delay_s)
        pair.d.send(Cancel(attempt_id))
        pair.p.send(Cancel(attempt_id))
    pair.idle()


def test_a_side_channel_that_accepts_and_is_silent_fails_its_request_alone(pair: Pair) -> None:
    """NIXL gives the handshake up; other requests run meanwhile."""
    tokens = fresh(BLOCK + 9)
    done = pair.p.prefill("silent", tokens)
    with socket.create_server(("127.0.0.1", 0)) as channel:
        handle = msgspec.msgpack.decode(done.handle)
        handle |= {"remote_engine_id": "stranger", "remote_port": channel.getsockname()[1]}
        stranger = msgspec.msgpack.encode(handle)
        pair.d.send(Decode("silent", tokens, {"max_tokens": 5}, stranger, PATIENCE_S))
        assert pair.d.decode("beside", fresh(20), {"max_tokens": 4, "ignore_eos": True}, None)
        failed = pair.d.wait_for("silent", (Failed, Out))
    assert isinstance(failed, Failed), failed
    assert (failed.code, failed.task, failed.retryable) == ("kv_load", "decode", True)
    pair.p.send(ReleaseKV("silent"))
    pair.idle()


def test_an_engine_meets_others_before_a_request_needs_them(pair: Pair) -> None:
    """Bytes that name no engine, or one that does not answer, harm nobody."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        pair.d.send(Peers((b"no engine",)))
        pair.d.send(Peers((packed(Peer("stranger", "127.0.0.1", port, 1, 1, 1)),)))
        assert stranger.poll(1000 * PATIENCE_S), "nobody asks for a handshake"
    assert pair.d.decode("beside", fresh(20), {"max_tokens": 4, "ignore_eos": True}, None)
    pair.idle()


def test_an_engine_starts_with_a_core_that_has_imported_meanwhile(pair: Pair) -> None:
    """With `overlap_imports` the core's process is as old as its owner's imports; without, it is younger."""
    for side, early in ((pair.p, False), (pair.d, True)):
        (core,) = side.processes("EngineCore")
        owner = core.parent()
        assert owner is not None
        age_s = core.create_time() - owner.create_time()
        assert (age_s < side.phases["imports"]) is early
        peer = unpacked(side.ask("info")["kv_peer"])
        assert (peer.host, peer.tp_size) == ("127.0.0.1", 1)


def test_cancel_while_waiting_for_a_slot_frees_the_lender(pair: Pair) -> None:
    for number in range(4):
        pair.d.send(
            Decode(f"full-{number}", fresh(10), {"max_tokens": 1400, "ignore_eos": True}, None, PATIENCE_S)
        )
    pair.d.until_status(lambda s: s.running == 4)
    tokens = fresh(BLOCK + 9)
    done = pair.p.prefill("behind", tokens)
    pair.d.send(Decode("behind", tokens, {"max_tokens": 5}, done.handle, PATIENCE_S))
    pair.d.until_status(lambda s: s.waiting == 1)
    pair.d.send(Cancel("behind"))
    pair.p.until_idle(0)
    for number in range(4):
        pair.d.send(Cancel(f"full-{number}"))
    pair.d.until_idle(0)
    assert pair.d.seen("behind") == []


def test_cancel_while_decoding_ends_the_stream(pair: Pair) -> None:
    tokens = fresh(BLOCK + 1)
    done = pair.p.prefill("streaming", tokens)
    pair.d.send(
        Decode("streaming", tokens, {"max_tokens": 1000, "ignore_eos": True, "n": 2}, done.handle, PATIENCE_S)
    )
    pair.d.wait_for("streaming", Out)
    pair.d.send(Cancel("streaming"))
    pair.d.until_idle(0)
    seen = len(pair.d.seen("streaming"))
    pair.d.decode("after", fresh(5), {"max_tokens": 3, "ignore_eos": True}, None)
    assert len(pair.d.seen("streaming")) == seen
    assert not [m for m in pair.d.seen("streaming") if isinstance(m, Out) and m.finish]


@on_a_slow_device
def test_deadlines_end_the_work_and_are_reported(pair: Pair) -> None:
    pair.p.send(Prefill("late-p", fresh(1200), {}, 0.2))
    pair.d.send(Decode("late-d", fresh(5), {"max_tokens": 1000, "ignore_eos": True}, None, 0.5))
    for side, attempt_id, stage in ((pair.p, "late-p", "prefill"), (pair.d, "late-d", "decode")):
        failed = side.wait_for(attempt_id, Failed)
        assert (failed.task, failed.code) == (stage, "deadline")


# ------------------------------------------------------------------------------------------------- requests' fields


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": 3.0}, "temperature"),
        ({"min_p": 2.0}, "min_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"zzz": 1}}, "logit_bias"),
        ({"best_guess": 1}, "best_guess"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
def test_wrong_fields_are_refused_by_name(pair: Pair, params: dict[str, Any], param: str) -> None:
    attempt_id = f"wrong-{param}"
    pair.d.send(Decode(attempt_id, fresh(5), params, None, PATIENCE_S))
    failed = pair.d.wait_for(attempt_id, Failed)
    assert (failed.code, failed.param, failed.retryable) == ("bad_request", param, False)


@pytest.mark.parametrize(
    ("attempt_id", "tokens"),
    [("too-long", [5] * 1600), ("empty", []), ("outside", [10_000_000])],
    ids=lambda v: str(v)[:9],
)
def test_prompts_that_cannot_be_served_are_refused(pair: Pair, attempt_id: str, tokens: list[int]) -> None:
    pair.p.send(Prefill(attempt_id, tokens, {}, PATIENCE_S))
    failed = pair.p.wait_for(attempt_id, Failed)
    assert (failed.task, failed.code) == ("prefill", "bad_request")


def test_a_handle_of_another_kind_is_refused(pair: Pair) -> None:
    for number, handle in enumerate(
        (b"\xc1", msgspec.msgpack.encode({"some": "thing"}), msgspec.msgpack.encode(7))
    ):
        pair.d.send(Decode(f"odd-{number}", fresh(5), {}, handle, PATIENCE_S))
        failed = pair.d.wait_for(f"odd-{number}", Failed)
        assert (failed.code, failed.retryable) == ("unknown_handle", True)


def test_a_handle_of_another_prompt_is_refused_and_its_kv_stays(pair: Pair) -> None:
    """Without the check the answer would be that of the other prompt."""
    mine, other = fresh(BLOCK + 5), fresh(BLOCK + 5)
    done = pair.p.prefill("theirs", other)
    pair.d.send(Decode("not-mine", mine, {"max_tokens": 4}, done.handle, PATIENCE_S))
    failed = pair.d.wait_for("not-mine", (Failed, Out))
    assert isinstance(failed, Failed), failed
    assert (failed.code, failed.retryable) == ("unknown_handle", True)
    pieces = pair.d.decode("theirs", other, {**GREEDY, "max_tokens": 4, "ignore_eos": True}, done.handle)
    assert sum(piece.n_tokens for piece in pieces) == 4


def test_logprobs_come_with_their_tokens(pair: Pair) -> None:
    pieces = pair.both("logprobs", pair.tokens("The sky is"), {**GREEDY, "max_tokens": 4, "logprobs": 2})
    for piece in pieces:
        assert len(piece.logprobs or []) == piece.n_tokens == len(piece.token_ids or [])
        for (_, token_id, logprob, top), emitted in zip(
            piece.logprobs or [], piece.token_ids or [], strict=True
        ):
            assert token_id == emitted == top[0][1], (
                "greedy: the likeliest, and the first of equally likely ones"
            )
            assert logprob == top[0][2] <= 0.0
            assert len(top) == 2
            assert top[0][2] >= top[1][2]


def test_prompt_logprobs_are_computed_here_and_the_prefill_is_given_back(pair: Pair) -> None:
    tokens = fresh(BLOCK + 7)
    done = pair.p.prefill("echo", tokens)
    pieces = pair.d.decode("echo", tokens, {**GREEDY, "max_tokens": 2, "prompt_logprobs": 1}, done.handle)
    of_prompt = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None]
    assert len(of_prompt) == 1
    assert of_prompt[0][0] is None
    assert [entry[1] for entry in of_prompt[0][1:]] == tokens[1:]
    pair.p.until_idle(0)


def test_a_schema_is_obeyed(pair: Pair) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    pieces = pair.both(
        "schema", pair.tokens("A colour as JSON:"), {**GREEDY, "max_tokens": 40, "response_format": form}
    )
    assert json.loads(text(pieces))["colour"] in ("red", "green")
    assert pieces[-1].finish == "stop"


def test_stop_strings_are_cut_off(pair: Pair) -> None:
    tokens = pair.tokens("Count: one, two, three, four, five, six, seven,")
    free = text(pair.d.decode("free", tokens, {**GREEDY, "max_tokens": 24}, None))
    stop = free[3:6]
    pieces = pair.d.decode("stopped", tokens, {**GREEDY, "max_tokens": 24, "stop": [stop]}, None)
    assert text(pieces) == free[: free.index(stop)]
    assert (pieces[-1].finish, pieces[-1].stop_reason) == ("stop", stop)


def test_tool_calls_come_as_openai_deltas(pair: Pair) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    chat = {
        "model": "small",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [tool],
        "tool_choice": "required",
    }
    pieces = pair.both(
        "tools",
        pair.tokens("Weather in Paris?"),
        {**GREEDY, "max_tokens": 80},
        chat=json.dumps(chat).encode(),
    )
    calls = [call for piece in pieces for call in json.loads(piece.delta or b"{}").get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather"
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert pieces[-1].finish == "tool_calls"
    assert text(pieces) == ""


def test_tools_without_a_parser_are_refused(pair: Pair) -> None:
    chat = json.dumps(
        {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "tools": []}
    ).encode()
    pair.p.send(Decode("unparsed", fresh(5), {}, None, PATIENCE_S, chat=chat))
    failed = pair.p.wait_for("unparsed", Failed)
    assert (failed.code, failed.param) == ("bad_request", "tools")


def test_kv_events_have_the_hashes_of_the_tokens(pair: Pair) -> None:
    """Hashes form the chain that the sim engine and the prefix index use, whatever vLLM calls its blocks."""
    tokens = fresh(3 * BLOCK + 5)
    pair.d.ask("kv_events")
    pair.both("events", tokens, {**GREEDY, "max_tokens": 2})
    wanted = block_hashes(tokens, BLOCK)
    seen: list[int] = []
    until_s = time.monotonic() + PATIENCE_S
    while not set(wanted) <= set(seen) and time.monotonic() < until_s:
        seen += [h for kind, event in pair.d.ask("kv_events") if kind == "Stored" for h in event["hashes"]]
        time.sleep(0.1)
    assert [h for h in seen if h in wanted] == list(wanted)


def test_engines_say_what_they_are(pair: Pair) -> None:
    prefill, decode = pair.p.ask("info"), pair.d.ask("info")
    assert prefill["group"] == decode["group"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert prefill["model"] == "small"
    assert prefill["block_size_tokens"] == BLOCK
    assert prefill["slots"] == 4
    assert prefill["lease_s"] == LEASE_S
    assert "tools" in decode["features"]
    assert "tools" not in prefill["features"]
    metrics = pair.p.ask("metrics")
    assert metrics["kv_blocks_total"] == prefill["kv_blocks"] == metrics["kv_blocks_free"]
