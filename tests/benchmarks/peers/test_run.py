"""A run of the comparison: the order of its sides, its samples, and what the sides are."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from benchmarks.live.measure import CHAT, Measurement
from benchmarks.peers.__main__ import Setup, failures, sample_of
from benchmarks.peers.rows import CASES, FAST_STEP_S, STEP_S, Case
from benchmarks.peers.sides import HOT, LEAN, MODEL, ROUTER, SIDES, SLUICE, Ticks, command_of
from benchmarks.peers.turns import order


def test_every_side_is_measured_in_every_round_and_begins_as_often_as_the_others() -> None:
    orders = [order(list(SIDES), number) for number in range(8)]
    assert all(sorted(one) == sorted(SIDES) for one in orders)
    assert Counter(one[0] for one in orders) == dict.fromkeys(SIDES, 2)
    assert orders[0] == list(SIDES)
    # an odd round goes backwards
    assert orders[1] == [ROUTER, SLUICE, "bare", LEAN]


def test_sluice_and_the_router_come_one_before_the_other_equally_often() -> None:
    orders = [order(list(SIDES), number) for number in range(8)]
    assert sum(one.index(SLUICE) < one.index(ROUTER) for one in orders) == 4


def measurement(**changes: object) -> Measurement:
    found = Measurement(
        target="Sluice",
        client="python",
        path=CHAT,
        concurrency=8,
        tokens=16,
        requests=100,
        wall_s=2.0,
        requests_per_s=50.0,
        tokens_per_s=800.0,
        e2e_ms={"p50": 20.0, "p99": 30.0},
        ttft_ms={"p50": 4.0, "p99": 9.0},
        tpot_ms={"p50": 1.0, "p99": 1.5},
        cpu_ms_per_request={"ingress": 0.25, "router": 0.125, "decode": 0.5},
        cpu_ms_per_token={},
        client_cpu_ms_per_request=0.1,
        failures={},
        other_cores=0.0,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_a_sample_has_the_cpu_time_of_the_processes_between_clients_and_engines() -> None:
    case = CASES["python, c = 8, 16 tokens"]
    sample = sample_of(measurement(), case, 3, SLUICE)
    assert (sample["round"], sample["row"], sample["side"]) == (3, case.name, SLUICE)
    assert (sample["hot_cpu_ms"], sample["hot_cpu_ms_per_token"]) == (0.375, 0.375 / 16)
    assert (sample["ttft_p50_ms"], sample["ttft_p99_ms"], sample["e2e_p99_ms"]) == (4.0, 9.0, 30.0)
    beside = sample_of(
        measurement(ttft_ms=None, cpu_ms_per_request={"vllm-router": 0.5, "decode source": 1.0}),
        CASES["wrk, c = 8, 16 tokens"],
        0,
        ROUTER,
    )
    assert beside["hot_cpu_ms"] == 0.5
    assert "ttft_p50_ms" not in beside


def test_failures_are_counted_by_side_row_and_reason() -> None:
    case = CASES["wrk, c = 8, 16 tokens"]
    samples = [sample_of(measurement(failures={"status": 2}), case, number, ROUTER) for number in range(2)]
    assert failures({"rounds": [{"samples": samples}]}) == {
        "vllm-router, uvicorn sources, wrk, c = 8, 16 tokens: status": 4
    }
    assert failures({"rounds": [{"samples": [sample_of(measurement(), case, 0, ROUTER)]}]}) == {}


def test_a_setup_has_each_step_once() -> None:
    cases = (Case("wrk", 8), Case("wrk", 8, step_s=FAST_STEP_S), Case("wrk", 32))
    assert Setup(1, tuple(SIDES), cases).steps() == [STEP_S, FAST_STEP_S]


def test_all_sides_tick_alike_and_take_every_request_at_once(tmp_path: Path) -> None:
    program = Path("/somewhere/vllm-router")
    made = {side: command_of(side, tmp_path, Ticks(FAST_STEP_S), program) for side in SIDES}
    [file] = tmp_path.glob("*.yaml")
    engines = yaml.safe_load(file.read_text())["applications"][0]["args"]["engines"]
    for engine in engines:
        assert engine["options"]["timing"]["decode_base_s"] == FAST_STEP_S
        assert engine["options"]["slots"] >= max(case.clients for case in CASES.values())
        tokens = max(case.clients * (case.words + case.tokens) for case in CASES.values())
        assert engine["options"]["kv_blocks"] * 16 >= tokens
    assert ["--step-s", str(FAST_STEP_S)] == made[ROUTER].argv[-4:-2]
    assert (made[ROUTER].argv[-1], made[LEAN].argv[-1]) == ("uvicorn", "bare")
    assert ["--step-s", str(FAST_STEP_S)] == made["bare"].argv[-4:-2]
    assert set(HOT) == set(MODEL) == set(SIDES)
    with pytest.raises(ValueError, match="needs the program"):
        command_of(ROUTER, tmp_path, Ticks(STEP_S), None)
