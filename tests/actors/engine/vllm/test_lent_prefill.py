"""A prefill to which a prefix is lent, in the engine's own process: it never fails for its prefix."""

import time
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from actors.engine.vllm.connector import ENDS, RELEASE  # noqa: E402
from actors.engine.vllm.stats import Transfer  # noqa: E402
from actors.wire.messages import Failed, Prefill, Resume  # noqa: E402
from tests.actors.engine.vllm.small import SmallModel  # noqa: E402
from tests.actors.engine.vllm.test_resume import PROMPT, Rig, settle  # noqa: E402

LENT = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "a", "remote_request_id": "lend",
    "remote_block_ids": [[4, 5]], "remote_host": "127.0.0.1", "remote_port": 7, "tp_size": 1, "remote_num_tokens": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


async def begun(model: SmallModel, prefix: bytes, **params: Any) -> Rig:
    """An engine that has been given a prefill with a prefix."""
    rig = Rig(model)
    rig.runner.prefill(Prefill("r", PROMPT, params, 60.0, prefix=prefix))
    await settle()
    return rig


def transfer(rig: Rig, number: int = -1) -> dict[str, Any]:
    """Returns the transfer parameters by which the core learns of the KV of one of its requests."""
    found: dict[str, Any] = rig.core.requests[number].sampling_params.extra_args["kv_transfer_params"]
    return found


async def test_the_core_reads_the_prefix_and_keeps_the_whole_for_a_decode_engine(model: SmallModel) -> None:
    rig = await begun(model, msgspec.msgpack.encode(LENT))
    read = transfer(rig)
    ends_at_s = read.pop(ENDS)
    assert read == {**LENT, "do_remote_prefill": False, "do_remote_decode": True}
    assert 0.0 < ends_at_s - time.monotonic() <= 60.0
    assert rig.sink.sent == []


async def test_with_a_handle_that_is_none_the_prompt_is_computed(model: SmallModel) -> None:
    for strange in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"remote_engine_id": "a"}),
        msgspec.msgpack.encode({name: value for name, value in LENT.items() if name != "tp_size"}),
    ):
        rig = await begun(model, strange)
        assert transfer(rig) == {"do_remote_prefill": False, "do_remote_decode": True}
        assert rig.sink.sent == []


async def test_a_read_that_takes_too_long_is_left_and_the_prompt_computed(model: SmallModel) -> None:
    rig = await begun(model, msgspec.msgpack.encode(LENT))
    (first,) = rig.core.requests
    rig.runner.on_overdue(first.request_id)
    await settle()
    second = rig.core.requests[1]
    assert rig.core.aborted == [first.request_id]
    assert second.request_id != first.request_id
    assert transfer(rig) == {"do_remote_prefill": False, "do_remote_decode": True}
    assert list(rig.runner.streams) == [second.request_id]
    assert rig.sink.sent == [], "the prefill goes on"
    # the core may have just finished the first request, ignores the abort then, and has its lease released
    assert rig.core.rejected == [{RELEASE: [first.request_id]}]
    # a late report of the first read changes nothing, and the second request ends with the task
    rig.runner.on_overdue(first.request_id)
    rig.runner.cancel("r")
    await settle()
    assert rig.core.aborted == [first.request_id, second.request_id]
    assert not rig.runner.busy


async def test_a_prefill_that_is_computed_anew_computes_the_output_of_another_engine_too(
    model: SmallModel,
) -> None:
    rig = Rig(model)
    resume = Resume(0, 2, [1000, 1001], 0)
    rig.runner.prefill(Prefill("r", PROMPT, {}, 60.0, prefix=msgspec.msgpack.encode(LENT), resume=resume))
    await settle()
    rig.runner.on_overdue(rig.core.requests[0].request_id)
    await settle()
    assert [request.prompt_token_ids for request in rig.core.requests] == [[*PROMPT, 1000, 1001]] * 2


async def test_the_reports_of_its_read_say_nothing_of_a_decode(model: SmallModel) -> None:
    rig = await begun(model, msgspec.msgpack.encode(LENT))
    request_id = rig.core.requests[0].request_id
    rig.runner.on_reading(request_id)
    rig.runner.on_transfer(Transfer(request_id, True, 100, 0.1, 2, 0.0))
    rig.runner.on_transfer(Transfer(request_id, False, 100, 0.1, 2, 0.0))
    assert rig.sink.sent == []


async def test_a_prefill_that_is_refused_gives_its_prefix_back(model: SmallModel) -> None:
    rig = await begun(model, msgspec.msgpack.encode(LENT), top_p=7.0)
    (given_back,) = rig.core.rejected
    assert {name: value for name, value in given_back.items() if name != ENDS} == LENT
    assert isinstance(rig.sink.sent[0], Failed)
    assert rig.sink.failed_with()[0] == "bad_request"


async def test_a_prefill_that_cannot_begin_anew_fails_as_one_that_may_be_tried_again(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await begun(model, msgspec.msgpack.encode(LENT))
    monkeypatch.setattr(rig.runner, "_defaults", None)
    rig.runner.on_overdue(rig.core.requests[0].request_id)
    await settle()
    assert rig.sink.failed_with() == ("kv_load", None, True)
    assert rig.core.rejected == [{RELEASE: [rig.core.requests[0].request_id]}]
    assert not rig.runner.busy
