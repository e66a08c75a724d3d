"""A prefix that one engine lends another, in vLLM's scheduler with Sluice's half of the connector."""

import time
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from actors.engine.vllm.blocks import SegmentedManager, SegmentQueue  # noqa: E402
from actors.engine.vllm.config import VllmEngineConfig, kv_transfer_args  # noqa: E402
from actors.engine.vllm.connector import DUE, LEASE  # noqa: E402
from actors.engine.vllm.params import prefill_params  # noqa: E402
from actors.engine.vllm.scheduler import AsyncCoreScheduler, CoreScheduler  # noqa: E402
from tests.actors.engine.vllm.small import BLOCK, SmallModel  # noqa: E402

PREFIX = 8 * BLOCK
PROMPT = list(range(1000, 1000 + PREFIX + 24))


@pytest.fixture(scope="module")
def model() -> SmallModel:
    config = VllmEngineConfig(engine_id="p0", model="small", role="prefill")
    return SmallModel(KVTransferConfig(**kv_transfer_args(config, "cpu")))


@pytest.fixture(params=[CoreScheduler, AsyncCoreScheduler])
def kind(request: pytest.FixtureRequest) -> type[Any]:
    scheduler: type[Any] = request.param
    return scheduler


def step(
    scheduler: Any, came: set[str] | None = None, failed: set[str] | None = None
) -> tuple[Any, list[Any]]:
    """Schedules once and samples token 50 for everyone; the reads of `came` have ended, those of `failed` badly."""
    plan = scheduler.schedule()
    ids = list(plan.num_scheduled_tokens)
    reads = KVConnectorOutput(finished_recving=came or None, failed_recving=failed or set())
    sampled = ModelRunnerOutput(
        ids, {r: n for n, r in enumerate(ids)}, [[50]] * len(ids), kv_connector_output=reads
    )
    outputs = scheduler.update_from_output(plan, sampled)
    return plan, [one for group in outputs.values() for one in group.outputs]


def lent(model: SmallModel, kind: type[Any]) -> tuple[Any, dict[str, Any]]:
    """A lender and the handle of the prefix that it lends: a prefill of the prefix and one token."""
    lender = model.scheduler(kind)
    model.add(lender, model.request("lend", PROMPT[: PREFIX + 1], prefill_params()))
    _, outputs = step(lender)
    handle: dict[str, Any] = outputs[0].kv_transfer_params
    return lender, handle


def borrower(model: SmallModel, kind: type[Any]) -> tuple[Any, Any]:
    """An engine without the prefix, and a prefill there to which it is lent."""
    _, handle = lent(model, kind)
    scheduler = model.scheduler(kind)
    return scheduler, model.add(scheduler, model.request("r", PROMPT, prefill_params(lent=handle)))


def test_a_cached_prefix_is_lent_for_one_token_s_computation(model: SmallModel, kind: type[Any]) -> None:
    lender, handle = lent(model, kind)
    assert handle["remote_num_tokens"] == PREFIX + 1
    assert [len(group) for group in handle["remote_block_ids"]] == [9]
    again = model.add(lender, model.request("again", PROMPT[: PREFIX + 1], prefill_params()))
    plan, outputs = step(lender)
    assert plan.num_scheduled_tokens == {again.request_id: 1}
    assert outputs[0].kv_transfer_params["remote_block_ids"][0][:8] == handle["remote_block_ids"][0][:8]


def test_a_prefill_reads_the_prefix_and_computes_the_rest(model: SmallModel, kind: type[Any]) -> None:
    scheduler, record = borrower(model, kind)
    plan, outputs = step(scheduler)
    assert (plan.num_scheduled_tokens, outputs) == ({}, [])
    read = plan.kv_connector_metadata.reqs_to_recv[record.request_id]
    assert (len(read.local_block_ids[0]), len(read.remote.block_ids[0])) == (9, 9)
    assert plan.kv_connector_metadata.leases[record.request_id] == record.kv_transfer_params[LEASE]
    plan, _ = step(scheduler, came={record.request_id})
    assert plan.num_scheduled_tokens == {}
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {record.request_id: len(PROMPT) - PREFIX - 1}
    own = outputs[0].kv_transfer_params
    assert own["remote_num_tokens"] == len(PROMPT)
    assert own[LEASE]["generation"] != record.kv_transfer_params[LEASE]["generation"]
    assert plan.kv_connector_metadata.reqs_to_recv == {}


def test_a_prefix_is_needed_sooner_when_requests_before_its_own_leave_the_queue(
    model: SmallModel, kind: type[Any]
) -> None:
    """Each read is ordered in a step of its own, while those before it are still open."""
    _, handle = lent(model, kind)
    scheduler = model.scheduler(kind)
    ids, places = [], []
    for name in "abc":
        record = model.add(scheduler, model.request(name, PROMPT, prefill_params(lent=dict(handle))))
        ids.append(record.request_id)
        plan, _ = step(scheduler)
        places.append(plan.kv_connector_metadata.flows[record.request_id]["rli"])
        assert plan.kv_connector_metadata.advanced == {}
    assert places == [0, 1, 2]
    first, second, third = ids
    plan, _ = step(scheduler, came={first})
    assert plan.kv_connector_metadata.advanced == {}
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == [first]
    assert plan.kv_connector_metadata.advanced == {second: 0, third: 1}
    scheduler.finish_requests({second}, RequestStatus.FINISHED_ABORTED)
    plan, _ = step(scheduler)
    assert plan.kv_connector_metadata.advanced == {third: 0}
    plan, _ = step(scheduler)
    assert plan.kv_connector_metadata.advanced == {}


def test_a_decode_that_waits_for_its_kv_is_before_a_later_prefill(model: SmallModel, kind: type[Any]) -> None:
    _, handle = lent(model, kind)
    scheduler = model.scheduler(kind)
    sampling = prefill_params()
    sampling.extra_args = {"kv_transfer_params": dict(handle)}
    model.add(scheduler, model.request("d", PROMPT[: PREFIX + 1], sampling))
    step(scheduler)
    record = model.add(scheduler, model.request("r", PROMPT, prefill_params(lent=dict(handle))))
    plan, _ = step(scheduler)
    assert plan.kv_connector_metadata.flows[record.request_id]["rli"] == 1


def test_what_is_cached_here_is_not_read(model: SmallModel, kind: type[Any]) -> None:
    _, handle = lent(model, kind)
    scheduler = model.scheduler(kind)
    model.add(scheduler, model.request("warm", PROMPT[: 3 * BLOCK + 1], prefill_params()))
    step(scheduler)
    record = model.add(scheduler, model.request("r", PROMPT, prefill_params(lent=handle)))
    plan, _ = step(scheduler)
    assert len(plan.kv_connector_metadata.reqs_to_recv[record.request_id].local_block_ids[0]) == 6


def test_a_prefix_that_cannot_be_read_is_computed(model: SmallModel, kind: type[Any]) -> None:
    scheduler, record = borrower(model, kind)
    step(scheduler)
    _, outputs = step(scheduler, came={record.request_id}, failed={record.request_id})
    assert outputs == [], "the request does not fail"
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {record.request_id: len(PROMPT)}
    assert plan.kv_connector_metadata.reqs_to_recv == {}, "it is not read again"
    assert outputs[0].kv_transfer_params["remote_num_tokens"] == len(PROMPT)


def test_a_decode_whose_kv_cannot_be_read_still_fails(model: SmallModel, kind: type[Any]) -> None:
    _, handle = lent(model, kind)
    scheduler = model.scheduler(kind)
    sampling = prefill_params()
    sampling.extra_args = {"kv_transfer_params": handle}
    record = model.add(scheduler, model.request("d", PROMPT[: PREFIX + 1], sampling))
    step(scheduler)
    _, outputs = step(scheduler, came={record.request_id}, failed={record.request_id})
    assert [str(one.finish_reason) for one in outputs] == ["error"]


def test_a_finished_decode_is_not_pinned(model: SmallModel, kind: type[Any]) -> None:
    _, handle = lent(model, kind)
    scheduler = model.scheduler(kind)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    sampling = prefill_params()
    sampling.extra_args = {"kv_transfer_params": handle}
    record = model.add(scheduler, model.request("d", PROMPT[: PREFIX + 1], sampling))
    plan, _ = step(scheduler)
    assert plan.kv_connector_metadata.reqs_in_batch == set()
    step(scheduler, came={record.request_id})
    _, outputs = step(scheduler)
    assert [one.kv_transfer_params for one in outputs] == [None]
    step(scheduler)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_a_waiting_prefill_renews_the_lease_of_its_prefix(model: SmallModel, kind: type[Any]) -> None:
    scheduler, record = borrower(model, kind)
    params = record.kv_transfer_params
    plan = scheduler.schedule()
    beat = plan.kv_connector_metadata.heartbeat_by_engine[params["remote_engine_id"]]
    assert (beat.req_ids, beat.port) == ({params["remote_request_id"]}, params["remote_port"])
    scheduler.connector.connector_scheduler.update_connector_output(
        KVConnectorOutput(finished_recving={record.request_id})
    )
    assert scheduler.connector.connector_scheduler._heartbeat_by_engine == {}


def test_a_prefill_that_ends_in_the_queue_gives_its_prefix_back(model: SmallModel, kind: type[Any]) -> None:
    scheduler, record = borrower(model, kind)
    scheduler.finish_requests({record.request_id}, RequestStatus.FINISHED_ABORTED)
    plan, _ = step(scheduler)
    read = plan.kv_connector_metadata.reqs_to_recv[record.request_id]
    assert not any(read.local_block_ids)
    assert read.remote.request_id == record.kv_transfer_params["remote_request_id"]
    assert scheduler.connector.connector_scheduler.gives_back()


def test_a_prefill_that_is_preempted_after_its_read_computes_what_is_lost(model: SmallModel) -> None:
    scheduler, record = borrower(model, CoreScheduler)
    step(scheduler)
    step(scheduler, came={record.request_id})
    scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {record.request_id: len(PROMPT)}


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": ["p0"]},
        {"remote_request_id": None},
        {"remote_host": None},
        {"remote_port": None},
        {"tp_size": None},
        {LEASE: "mine"},
        {"remote_block_ids": [7]},
    ],
    ids=str,
)
def test_a_handle_that_cannot_be_read_leaves_a_prefill_that_computes(
    model: SmallModel, change: dict[str, Any]
) -> None:
    """The handle comes from another process, and the core must not end for it."""
    _, handle = lent(model, CoreScheduler)
    scheduler = model.scheduler(CoreScheduler)
    bad = {name: value for name, value in {**handle, **change}.items() if value is not None}
    record = model.add(scheduler, model.request("r", PROMPT, prefill_params(lent=bad)))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {record.request_id: len(PROMPT)}
    assert plan.kv_connector_metadata.reqs_to_recv == {}
    assert outputs[0].kv_transfer_params["remote_num_tokens"] == len(PROMPT)


def test_an_engine_with_a_host_buffer_computes_and_gives_the_prefix_back(
    model: SmallModel, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM saves such a prefill's KV to host memory, and would not read for it: the request would wait without end."""
    _, handle = lent(model, kind)
    scheduler = model.scheduler(kind)
    monkeypatch.setattr(scheduler.connector.connector_scheduler, "use_host_buffer", True)
    record = model.add(scheduler, model.request("r", PROMPT, prefill_params(lent=handle)))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {record.request_id: len(PROMPT)}
    read = plan.kv_connector_metadata.reqs_to_recv[record.request_id]
    assert not any(read.local_block_ids)
    assert (read.awaiting_kvs, read.remote.request_id) == (False, handle["remote_request_id"])
    assert plan.kv_connector_metadata.leases == {}
    assert scheduler.connector.connector_scheduler._heartbeat_by_engine == {}


def test_a_jump_of_the_wall_clock_does_not_change_a_deadline(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = lent(model, CoreScheduler)
    scheduler = model.scheduler(CoreScheduler)
    sampling = prefill_params()
    sampling.extra_args = {"kv_transfer_params": {**handle, DUE: time.monotonic() + 50.0}}
    record = model.add(scheduler, model.request("d", PROMPT[: PREFIX + 1], sampling))
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600.0)
    plan, _ = step(scheduler)
    assert 0.0 < plan.kv_connector_metadata.flows[record.request_id]["due_s"] <= 50.0


def test_every_role_allocates_in_segments_and_frees_late_where_batches_overlap(
    model: SmallModel, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = model.scheduler(kind)
    assert isinstance(scheduler.kv_cache_manager, SegmentedManager)
    assert isinstance(scheduler.kv_cache_manager.block_pool.free_block_queue, SegmentQueue)
    assert not scheduler.defer_block_free
    monkeypatch.setattr(type(model.config), "max_concurrent_batches", property(lambda _: 2))
    assert model.scheduler(kind).defer_block_free
