"""Requests that begin with output, in vLLM's schedulers and in the record of its model runner V1."""

import time
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState  # noqa: E402

from actors.engine.vllm.config import SCHEDULERS  # noqa: E402
from actors.engine.vllm.resume import carry, output_before, resumed_seed, start_with_output  # noqa: E402
from actors.engine.vllm.scheduler import AsyncCoreScheduler, CoreScheduler  # noqa: E402
from tests.actors.engine.vllm.small import BLOCK, SmallModel  # noqa: E402

KINDS = [CoreScheduler, AsyncCoreScheduler]
PROMPT = list(range(1000, 1040))
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


@pytest.fixture(params=KINDS)
def scheduler(request: pytest.FixtureRequest, model: SmallModel) -> Any:
    return model.scheduler(request.param)


def step(scheduler: Any, *tokens: int) -> tuple[Any, list[Any]]:
    """Schedules once, with `tokens` as what the model samples for the scheduled requests; the outputs of the step."""
    plan = scheduler.schedule()
    ids = list(plan.num_scheduled_tokens)
    sampled = [[token] for token in tokens[: len(ids)]]
    outputs = scheduler.update_from_output(
        plan, ModelRunnerOutput(ids, {r: n for n, r in enumerate(ids)}, sampled)
    )
    return plan, [one for group in outputs.values() for one in group.outputs]


def params(output: list[int], **more: Any) -> SamplingParams:
    made = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **more})
    carry(made, output)
    return made


def test_prompt_and_output_are_computed_in_one_step_and_counted_apart(
    model: SmallModel, scheduler: Any
) -> None:
    record = model.add(scheduler, model.request("r", PROMPT, params([7, 8, 9])))
    plan, outputs = step(scheduler, 50)
    assert plan.num_scheduled_tokens == {record.request_id: 43}
    assert plan.scheduled_new_reqs[0].prompt_token_ids == PROMPT
    assert (record.num_prompt_tokens, list(record.output_token_ids)) == (40, [7, 8, 9, 50])
    assert outputs[0].new_token_ids == [50], "nothing of the first engine's output comes again"
    # The model runner computes the answer from 40 prompt tokens and 4 of output.
    plan, _ = step(scheduler, 51)
    assert plan.scheduled_cached_reqs.num_output_tokens == [4]


def test_limits_count_from_the_first_engine_s_first_token(model: SmallModel, scheduler: Any) -> None:
    model.add(scheduler, model.request("r", PROMPT, params([7, 8, 9], max_tokens=5)))
    _, outputs = step(scheduler, 50)
    assert outputs[0].finish_reason is None
    _, outputs = step(scheduler, 51)
    assert outputs[0].finish_reason == FinishReason.LENGTH


def test_a_prefix_that_holds_part_of_the_output_is_used(model: SmallModel, scheduler: Any) -> None:
    """A first run leaves 40 prompt tokens and 30 of output: 4 full blocks of 16, which end in the output."""
    output = list(range(2000, 2030))
    model.add(scheduler, model.request("first", PROMPT, params(output, max_tokens=31)))
    step(scheduler, 50)
    again = model.add(scheduler, model.request("again", PROMPT, params(output, max_tokens=60)))
    plan, outputs = step(scheduler, 50)
    assert plan.num_scheduled_tokens == {again.request_id: 70 - 4 * BLOCK}
    assert outputs[0].new_token_ids == [50]


def test_a_preempted_one_keeps_its_output(model: SmallModel, scheduler: Any) -> None:
    record = model.add(scheduler, model.request("r", PROMPT, params([7, 8, 9])))
    step(scheduler, 50)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    plan, _ = step(scheduler, 51)
    assert plan.num_scheduled_tokens == {record.request_id: 44}
    assert list(record.output_token_ids) == [7, 8, 9, 50, 51]


def test_a_request_without_output_is_vllm_s_own(model: SmallModel, scheduler: Any) -> None:
    record = model.add(scheduler, model.request("r", PROMPT, params([])))
    plan, _ = step(scheduler, 50)
    assert plan.num_scheduled_tokens == {record.request_id: 40}
    assert list(record.output_token_ids) == [50]


# ------------------------------------------------------------------------------------------------------- grammars


def compiled(scheduler: Any, record: Any) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not record.structured_output_request.is_grammar_ready and time.monotonic() < until_s:
        time.sleep(0.01)
    assert record.structured_output_request.is_grammar_ready


def allowed(model: SmallModel, scheduler: Any, plan: Any) -> set[str]:
    """The texts of the tokens that the grammar lets come next, of those that are one of a few characters."""
    bitmask = scheduler.get_grammar_bitmask(plan).grammar_bitmask[0]
    wanted = {mark: model.tokens(mark)[0] for mark in "0123456789-x"}
    return {mark for mark, token in wanted.items() if bitmask[token // 32] >> (token % 32) & 1}


def test_a_grammar_goes_on_behind_the_output(model: SmallModel, scheduler: Any) -> None:
    form = StructuredOutputsParams(regex="[0-3]{2}-[4-6]{2}x")
    request = model.request("r", PROMPT, params(model.tokens("12-4"), structured_outputs=form))
    record = model.add(scheduler, request)
    compiled(scheduler, record)
    plan = scheduler.schedule()
    assert allowed(model, scheduler, plan) == {"4", "5", "6"}


def test_output_that_the_grammar_does_not_accept_fails_the_request_alone(
    model: SmallModel, scheduler: Any
) -> None:
    form = StructuredOutputsParams(regex="[0-3]{2}-[4-6]{2}x")
    request = model.request("r", PROMPT, params(model.tokens("1x"), structured_outputs=form))
    record = model.add(scheduler, request)
    compiled(scheduler, record)
    for _ in range(2):
        # Asynchronous scheduling plans a second step before the first one's output is processed.
        assert scheduler.schedule().num_scheduled_tokens == {}
    other = model.add(scheduler, model.request("other", PROMPT, params([])))
    _, outputs = step(scheduler, 50)
    assert {one.request_id: one.finish_reason for one in outputs} == {
        other.request_id: None, record.request_id: FinishReason.ERROR,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- model runner


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedRequestState, "__post_init__", CachedRequestState.__post_init__)  # put back
    start_with_output()
    start_with_output()


def state(made: SamplingParams, output: list[int]) -> CachedRequestState:
    return CachedRequestState("r", PROMPT, [], made, None, ([1, 2, 3],), 0, output)


@pytest.mark.usefixtures("patched")
def test_model_runner_v1_knows_the_output_of_a_new_request() -> None:
    made = params([7, 8, 9])
    one, other = state(made, []), state(made, [])
    assert (one.output_token_ids, one.num_tokens, one.get_token_id(41)) == ([7, 8, 9], 43, 8)
    one.output_token_ids.append(10)
    assert (other.output_token_ids, output_before(made)) == ([7, 8, 9], [7, 8, 9])
    assert state(made, [5]).output_token_ids == [5]
    assert state(params([]), []).output_token_ids == []


# ------------------------------------------------------------------------------------------------------ parameters


def test_parameters_carry_the_output_beside_what_is_there() -> None:
    made = SamplingParams(extra_args={"kv_transfer_params": {"a": 1}})
    carry(made, [1, 2])
    assert output_before(made) == [1, 2]
    assert made.extra_args is not None
    assert made.extra_args["kv_transfer_params"] == {"a": 1}
    assert output_before(None) == output_before(SamplingParams()) == []


def test_a_seed_goes_on_as_a_function_of_seed_and_length() -> None:
    def seed_after(seed: int | None, tokens: int) -> int | None:
        made = SamplingParams(seed=seed)
        carry(made, [5] * tokens)
        return made.seed

    assert seed_after(41, 3) == resumed_seed(41, 3) == 0x5C7584E1FE5DEB8A
    assert len({seed_after(seed, k) for seed in (41, 42) for k in (0, 1, 2)}) == 6
    assert seed_after(41, 0) == 41
    assert seed_after(None, 3) is None
    assert all(0 <= resumed_seed(seed, 1) < 1 << 63 for seed in range(-3, 3))


def test_both_schedulers_are_found_by_their_names() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert [resolve_obj_by_qualname(SCHEDULERS[kind]) for kind in (False, True)] == KINDS
