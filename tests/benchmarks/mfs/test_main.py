"""The command where it cannot measure, and its checks of what it has measured."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.live.kept import Parts
from benchmarks.mfs import __main__ as command
from benchmarks.mfs import link
from benchmarks.mfs.engines import UNSCHEDULED, OneMachine, Sizes
from benchmarks.mfs.workload import Workload

PLAN = command.Plan("link", (UNSCHEDULED, "mfs"), (0.8,), 1, 10**8, Workload(), Sizes())


def test_a_machine_that_cannot_make_the_link_is_told_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "why_not", lambda: "network namespaces need root")
    assert command.main([]) == 2
    assert "network namespaces need root: nothing is measured here" in capsys.readouterr().err


def case(policy: str) -> command.Case:
    return command.Case(policy, 0, 0.8, True)


def cell(held_ms: float, **changed: Any) -> dict[str, Any]:
    kinds = {
        kind: {"least_cached_tokens": cached, "read_mb": 10.0, "held_ms": [0.0, held_ms]}
        for kind, cached in (("tight", 256), ("loose", 1_984))
    }
    return {**kinds, "wire_mb": 21.0, **changed}


@pytest.mark.parametrize(("policy", "held_ms"), [("mfs", 30.0), (UNSCHEDULED, 1.0)])
def test_a_run_in_order_is_taken(policy: str, held_ms: float) -> None:
    command._check_read(PLAN, case(policy), cell(held_ms))


@pytest.mark.parametrize(
    ("policy", "found", "why"),
    [
        ("mfs", cell(1.0), "mfs, run 0, load 0.8: 0 reads were held back"),
        (UNSCHEDULED, cell(30.0), "unscheduled, run 0, load 0.8: 2 reads were held back"),
        # 20 MB of KV cannot have come through a link that carried 5
        (UNSCHEDULED, cell(0.0, wire_mb=5.0), "over the link: see UCX_TLS"),
        (
            UNSCHEDULED,
            cell(0.0, loose={"least_cached_tokens": 0, "read_mb": 1.0, "held_ms": []}),
            "loose prompts were not cached",
        ),
        # with blocks of 128 an engine computes half of a short prompt again
        (
            UNSCHEDULED,
            cell(0.0, tight={"least_cached_tokens": 128, "read_mb": 1.0, "held_ms": []}),
            "tight prompts were not cached",
        ),
    ],
)
def test_a_run_that_measured_something_else_is_refused(policy: str, found: dict[str, Any], why: str) -> None:
    with pytest.raises(command.BadRunError, match=why):
        command._check_read(PLAN, case(policy), found)


def test_what_was_measured_is_not_measured_again_unless_it_is_invalid(tmp_path: Path) -> None:
    parts = Parts("mfs", {"code": "", "code_of": []}, {}, tmp_path)
    bench = command.Bench(PLAN, OneMachine(Sizes()), None, tmp_path, parts, print)
    due, invalid, valid, unscheduled = (command.Case("mfs", run, 0.8, True) for run in range(4))
    parts.put(invalid.name, {"flows": 100, "unscheduled": {"silent": 2}})
    parts.put(valid.name, {"flows": 100, "unscheduled": {"silent": 1}})
    parts.put(unscheduled.name, {})
    assert [bench._is_due(case) for case in (due, invalid, valid, unscheduled)] == [True, True, False, False]
    # both forms of stage 1 are parts of their own
    assert bench._is_due(command.Case("mfs", 2, 0.8, False))


def test_promises_are_multiples_of_what_a_class_takes_alone() -> None:
    times: dict[str, dict[str, float]] = {
        "ttft_s": {"tight": 0.5, "loose": 2.0},
        "after_kv_s": {"tight": 0.1, "loose": 0.2},
        "cold_ttft_s": {},
    }
    promise = command._promise(times, "loose", Workload(slo_factor=3.0))
    assert (promise.ttft_s, promise.after_kv_s) == (6.0, 0.2)
    # the slower way of a class decides
    times["cold_ttft_s"] = {"tight": 0.4, "loose": 2.5}
    assert command._promise(times, "tight", Workload(slo_factor=3.0)).ttft_s == 1.5
    assert command._promise(times, "loose", Workload(slo_factor=3.0)).ttft_s == 7.5
