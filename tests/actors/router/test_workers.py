"""Engines and workers: names, shares of slots and KV, reports by rank."""

import math
from typing import Any

import msgspec
import pytest

from actors.router.workers import (
    MAX_RANKS,
    check,
    check_fleet,
    place_of,
    reports,
    request_of,
    ups,
    worker_of,
    workers_of,
)
from actors.wire.messages import EngineInfo, Fleet, Standby, Status, Submit
from policies.request.terms import Terms
from policies.state.standby import Abilities
from policies.state.views import Health


def info(**more: object) -> EngineInfo:
    facts = ("e-1", "decode", "sim", "m", "g", ("unix:/x",), 8, 100, 16, 1024, "n", 1, 30.0)
    return EngineInfo(*facts, **more)  # type: ignore[arg-type]


def status(**more: object) -> Status:
    return Status("e-1", 3, 1, 40, 0, 0.4, **more)  # type: ignore[arg-type]


def test_an_engine_of_one_rank_is_a_worker_of_its_name() -> None:
    assert workers_of(info()) == ("e-1",)
    assert (worker_of("e-1", None), place_of("e-1")) == ("e-1", ("e-1", None))
    (up,) = ups(info(), Health.READY, 1.0)
    assert (up.worker, up.slots, up.kv_capacity_tokens, up.barrier) == ("e-1", 8, 1600, "")
    (report,) = reports(info(), status(token_budget=0.5), 1.0)
    assert (report.worker, report.running, report.kv_tokens, report.token_budget) == ("e-1", 3, 640, 0.5)


def test_ranks_divide_slots_and_kv_and_share_a_barrier() -> None:
    engine = info(dp_ranks=4, barrier=True)
    assert workers_of(engine) == ("e-1#0", "e-1#1", "e-1#2", "e-1#3")
    assert [worker_of(*place_of(worker)) for worker in workers_of(engine)] == list(workers_of(engine))
    found = ups(engine, Health.DRAINING, 1.0)
    assert [up.worker for up in found] == list(workers_of(engine))
    # 8 slots and 100 blocks of 16 tokens, by four
    assert {(up.slots, up.kv_capacity_tokens, up.barrier, up.health) for up in found} == {
        (2, 400, "e-1", Health.DRAINING)
    }
    assert {up.barrier for up in ups(info(dp_ranks=4), Health.READY, 1.0)} == {""}


def test_each_rank_is_reported_and_a_report_that_lacks_one_is_refused() -> None:
    engine = info(dp_ranks=2)
    ranks = [Status("e-1", n, 0, 10 * n, 0, 0.1) for n in range(2)]
    found = reports(engine, status(ranks=ranks, state="draining"), 1.0)
    assert [(r.worker, r.running, r.kv_tokens) for r in found] == [("e-1#0", 0, 0), ("e-1#1", 1, 160)]
    assert {r.health for r in found} == {Health.DRAINING}
    with pytest.raises(ValueError, match="engine e-1 has 2 ranks, but reports 0"):
        reports(engine, status(), 1.0)


def test_no_engine_is_no_worker() -> None:
    assert worker_of(None, None) is None
    assert worker_of(None, 1) is None


def test_an_engine_has_only_so_many_ranks() -> None:
    """Each would be a worker: 2**31 of them would take the router's memory, and minutes."""
    check(info(dp_ranks=8))
    with pytest.raises(ValueError, match=f"2147483648 ranks; at most {MAX_RANKS}"):
        check(
            EngineInfo(
                "e", "decode", "sim", "m", "g", ("unix:/x",), 2**31, 2**31, 16, 9, "n", 1, 3.0, dp_ranks=2**31
            )
        )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_model_len": 0}, "a context of 0 tokens"),
        ({"lease_s": float("-inf")}, "leases of -inf s"),
        ({"max_lease_s": float("nan")}, "at most nan s"),
        ({"block_size_tokens": 0}, "100 KV blocks of 0 tokens"),
    ],
)
def test_impossible_facts_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(msgspec.structs.replace(info(), **wrong))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"engines": [info(), info(dp_ranks=2**53)]}, "9007199254740992 ranks"),
        ({"block_tokens": 0}, "blocks of 0 tokens"),
        ({"block_tokens": -1}, "blocks of -1 tokens"),
        ({"standby": Standby("asleep", wake_limit_s=float("nan"))}, "a wake may take nan s"),
        ({"standby": Standby("asleep", abilities=Abilities(-1))}, "a context of -1 tokens"),
    ],
)
def test_an_impossible_fleet_is_refused(wrong: dict[str, Any], says: str) -> None:
    fleet = Fleet([info()], "a", "b", block_tokens=16, standby=Standby("asleep", abilities=Abilities(9)))
    check_fleet(fleet)
    with pytest.raises(ValueError, match=says):
        check_fleet(msgspec.structs.replace(fleet, **wrong))


@pytest.mark.parametrize("weight", [0.0, -1.0, 5e-324, 1e308, math.inf, math.nan])
def test_a_request_of_a_weight_that_no_tenant_has_is_refused(weight: float) -> None:
    """The weight divides what a tenant got: it would stop the dispatcher in the middle of a change."""
    submit = Submit("r", 10, 10, terms=Terms(weight=weight))
    with pytest.raises(ValueError, match="a weight of"):
        request_of(submit, 1.0, ())
    assert request_of(Submit("r", 10, 10, terms=Terms(weight=2.0)), 1.0, ()).terms.weight == 2.0
