"""RED by hand, and Algorithm 1 against a literal one that recomputes everything from sets at each step."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.flow.base import BadEvent, Port, Side
from policies.flow.events import Ordered
from policies.flow.inter_request import Batch, RequestLoad, load_of, schedule, urgency
from tests.policies.flow.link import flow

PORTS = (Port("a", Side.EGRESS), Port("b", Side.INGRESS), Port("c", Side.INGRESS))
EQUAL = dict.fromkeys(PORTS, 100.0)


def batch(name: str, *dues: float, compute_s: float = 0.0, size: int = 0) -> Batch:
    requests = tuple(RequestLoad(f"{name}{i}", due, {PORTS[0]: size}) for i, due in enumerate(dues))
    return Batch(name, requests, compute_s)


@pytest.mark.parametrize(
    ("deadlines", "red", "tight", "loose"),
    [
        ((5.0,), 5.0, 5.0, 5.0),
        ((5.0, 5.0), 5.0, 5.0, 5.0),
        ((10.0, 1.0), 5.5, 1.0, 10.0),  # 1/2 * 1 + 1/2 * 10
        ((1.0, 10.0, 11.0, 12.0), 7.75, 1.0, 10.0),  # one tight of four: 1/4 * 1 + 3/4 * 10
        ((1.0, 2.0, 3.0, 13.0), 4.0, 1.0, 13.0),  # three tight: 3/4 * 1 + 1/4 * 13
        ((1.0, 3.0, 5.0), 1 / 3 + 2.0, 1.0, 3.0),  # equal gaps: the first
    ],
)
def test_robust_effective_deadline(
    deadlines: tuple[float, ...], red: float, tight: float, loose: float
) -> None:
    found = urgency(deadlines)
    assert (found.red, found.tight, found.loose) == (pytest.approx(red), tight, loose)


def test_one_tight_request_does_not_carry_its_batch_to_the_front() -> None:
    order = schedule([batch("x", 1.0, 20.0, 21.0, 22.0), batch("y", 10.0, 11.0)], EQUAL, 0, 0.0)
    assert [each.batch for each in order.batches] == ["y", "x"]  # RED 10.5 before 15.25
    assert order.event() == Ordered(("y", "x"), ())


def test_the_finish_is_computation_and_the_fullest_ports_load() -> None:
    order = schedule([batch("x", 9.0, compute_s=2.0, size=300)], EQUAL, 0, 1.0)
    assert order.batches[0].finish_at == 6.0  # 1 + 2 + 300 / 100


def test_the_heaviest_request_of_an_earlier_batch_may_be_pruned() -> None:
    first = Batch("x", (RequestLoad("big", 8.0, {PORTS[0]: 700}), RequestLoad("small", 8.0, {PORTS[0]: 100})))
    second = Batch("y", (RequestLoad("late", 9.0, {PORTS[0]: 200}),))
    order = schedule([second, first], EQUAL, 5, 0.0)
    # x ends at 8 as it must; y would end at 10 > 9, and big weighs most
    assert order.pruned == ("big",)
    assert [each.finish_at for each in order.batches] == [8.0, 3.0]


def test_the_drop_budget_bounds_pruning() -> None:
    doomed = batch("x", 1.0, 1.0, 1.0, 1.0, size=1000)
    assert len(schedule([doomed], EQUAL, 2, 0.0).pruned) == 2


def test_a_batch_that_computes_for_too_long_costs_no_budget() -> None:
    assert schedule([batch("x", 1.0, compute_s=5.0)], EQUAL, 10, 0.0).pruned == ()


def test_a_flow_loads_both_of_its_ports() -> None:
    assert load_of(flow("x", 10)) == {Port("a", Side.EGRESS): 10, Port("b", Side.INGRESS): 10}


def literal(
    batches: list[Batch], bandwidth: dict[Port, float], budget: int, now_s: float
) -> tuple[list[str], list[str], list[float]]:
    """Runs Algorithm 1 with sets: every load is summed again from the requests that are not pruned."""

    def red(each: Batch) -> tuple[float, float]:
        due = sorted(request.due_at for request in each.requests)
        splits = [(due[k] - due[k - 1], -k, k) for k in range(1, len(due))]
        if not splits:
            return due[0], due[0]
        k = max(splits)[2]
        return k / len(due) * due[0] + (1 - k / len(due)) * due[k], due[k]

    sigma = sorted(batches, key=lambda each: (red(each)[0], each.batch))
    dropped: list[str] = []
    finishes: list[float] = []
    for index, current in enumerate(sigma):

        def kept(upto: int = index) -> list[RequestLoad]:
            taken = itertools.chain.from_iterable(each.requests for each in sigma[: upto + 1])
            return [request for request in taken if request.request_id not in dropped]

        def seconds(port: Port) -> float:
            return sum(request.load.get(port, 0) for request in kept()) / bandwidth[port]

        while True:
            finish = now_s + current.compute_s + max(map(seconds, bandwidth))
            worst = max(seconds(port) for port in bandwidth)
            fullest = [port for port in bandwidth if seconds(port) == worst]
            if finish <= red(current)[1] or len(dropped) >= budget or worst == 0:
                break
            [port] = fullest[:1]
            dropped.append(max(kept(), key=lambda r: (r.load.get(port, 0), r.request_id)).request_id)
        finishes.append(finish)
    return [each.batch for each in sigma], dropped, finishes


@st.composite
def problems(draw: st.DrawFn) -> list[Batch]:
    made = []
    sizes = st.integers(0, 500)
    for number in range(draw(st.integers(1, 4))):
        requests = tuple(
            RequestLoad(
                f"r{number}.{i}",
                draw(st.integers(0, 20)) / 2,
                {port: size for port in PORTS if (size := draw(sizes))},
            )
            for i in range(draw(st.integers(1, 4)))
        )
        made.append(Batch(f"b{number}", requests, draw(st.integers(0, 8)) / 2))
    return made


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 8))
def test_algorithm_1_against_a_literal_one(batches: list[Batch], budget: int) -> None:
    # bandwidths whose loads never tie, so that the bottleneck is unique
    bandwidth = {port: 100.0 + math.pi * rank for rank, port in enumerate(PORTS)}
    order = schedule(batches, bandwidth, budget, 1.0)
    sigma, dropped, finishes = literal(batches, bandwidth, budget, 1.0)
    assert [each.batch for each in order.batches] == sigma
    assert list(order.pruned) == dropped
    assert [each.finish_at for each in order.batches] == pytest.approx(finishes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(0, 12))
def test_on_one_port_the_fewest_requests_are_pruned(sizes: list[int], due: int) -> None:
    requests = tuple(RequestLoad(f"r{i}", float(due), {PORTS[0]: size}) for i, size in enumerate(sizes))
    order = schedule([Batch("b", requests)], EQUAL, len(sizes), 0.0)
    fewest = next(
        count
        for count in range(len(sizes) + 1)
        if any(sum(sizes) - sum(out) <= due * 100 for out in itertools.combinations(sizes, count))
    )
    assert len(order.pruned) == fewest


@pytest.mark.parametrize(
    "run",
    [
        lambda: urgency([]),
        lambda: Batch("x", ()),
        lambda: batch("x", math.nan),
        lambda: batch("x", 1.0, compute_s=-1.0),
        lambda: schedule([batch("x", 1.0), batch("x", 1.0)], EQUAL, 0, 0.0),
        lambda: schedule([batch("x", 1.0, size=-5)], EQUAL, 0, 0.0),
        lambda: schedule([batch("x", 1.0, size=5)], {}, 0, 0.0),
        lambda: schedule([batch("x", 1.0)], EQUAL, -1, 0.0),
    ],
)
def test_what_is_not_valid_is_refused(run) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadEvent):
        run()
