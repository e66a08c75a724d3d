"""Loans in a run: victims are engines that lend or borrow at the moment, prompts share heads, and loans are counted."""

import random
from collections import Counter
from typing import Any, get_args

import pytest

from app.ingress.metrics import INGRESS
from benchmarks.chaos import asks
from benchmarks.chaos.asks import HEAD_WORDS, HEADS, PROMPTS_A_HEAD, Heads, sim_ask
from benchmarks.chaos.loans import COUNTER, PARTS, RESULTS, at_loans, ends_of
from benchmarks.chaos.processes import Member
from benchmarks.chaos.schedule import LENDING, Schedule
from benchmarks.chaos.setups import sim_setup
from benchmarks.chaos.watch import Watch
from policies.request.stage import LoanEnd

WELL = {
    "prefill": [Member("prefill", pid, 0.0, name, name) for pid, name in enumerate(("p0", "p1", "p2"), 10)],
    "decode": [Member("decode", pid, 0.0, name, name) for pid, name in enumerate(("d0", "d1"), 20)],
    "router": [Member("router", 30, 0.0, "router 30")],
}


def status(*pairs: tuple[str, str]) -> dict[str, Any]:
    loans = [{"lender": lender, "borrower": borrower, "prompts": 1} for lender, borrower in pairs]
    return {"replica": {"loans": loans}}


def found(statuses: list[dict[str, Any]], **well: list[Member]) -> tuple[list[str], list[str]]:
    parts = at_loans(statuses, WELL | well)
    assert set(parts) == set(PARTS)
    return [m.name for m in parts["lender"]], [m.name for m in parts["borrower"]]


@pytest.mark.parametrize(
    ("statuses", "lenders", "borrowers"),
    [
        ([], [], []),
        ([status(), status()], [], []),
        ([status(("p1", "p0"))], ["p1"], ["p0"]),
        # engines of both roles lend, one of them for prompts of two ingresses; one lends and borrows
        ([status(("d1", "p0"), ("p0", "p2")), status(("d1", "p2"))], ["p0", "d1"], ["p0", "p2"]),
        # one that is harmed, or gone, is not among the well ones
        ([status(("p9", "p1"))], [], ["p1"]),
    ],
)
def test_victims_are_those_that_lend_or_borrow_at_the_moment(
    statuses: list[dict[str, Any]], lenders: list[str], borrowers: list[str]
) -> None:
    assert found(statuses) == (lenders, borrowers)


def test_the_last_well_engine_of_a_role_is_spared() -> None:
    statuses = [status(("d0", "p0"), ("p1", "p0"))]
    assert found(statuses, decode=WELL["decode"][:1]) == (["p1"], ["p0"])
    assert found(statuses, prefill=WELL["prefill"][:1]) == (["d0"], [])
    assert found(statuses, prefill=[], decode=[]) == ([], [])


def test_faults_of_a_loan_wait_until_one_is_under_way() -> None:
    idle = {"prefill": 3, "decode": 4, "lender": 0, "borrower": 0}
    assert Schedule(LENDING, 1, idle).next(idle) is None
    schedule, length = Schedule(LENDING, 1, idle), sum(kind.times for kind in LENDING)
    lent = idle | {"lender": 1, "borrower": 1}
    drawn = Counter(fault.kind for _ in range(length) if (fault := schedule.next(lent)))
    assert drawn == {kind: kind.times for kind in LENDING}


def test_each_way_in_which_a_loan_ends_is_counted_once() -> None:
    assert set(RESULTS) == set(get_args(LoanEnd))
    assert COUNTER in {metric.name for metric in INGRESS if metric.labels == ("result",)}
    watch = Watch(1, list)
    watch.count(7, f'{COUNTER}{{result="used"}} 3.0\n{COUNTER}{{result="failed"}} 1.0\n')
    # the ingress that replaces it
    watch.count(8, f'{COUNTER}{{result="used"}} 1.0\n{COUNTER}{{result="recomputed"}} 2.0\n')
    assert ends_of(watch.totals) == {"begun": 7, "used": 4, "recomputed": 2, "failed": 1, "dropped": 0}
    assert ends_of({}) == dict.fromkeys(("begun", *RESULTS), 0)


def test_only_an_application_that_lends_has_a_network_file_and_faults_of_loans() -> None:
    plain, lends = sim_setup(bare=True, flow=True), sim_setup(bare=True, flow=True, lend=True)
    assert set(lends.kinds) - set(plain.kinds) == set(LENDING)
    assert [s.args["router"]["dispatch"]["lend_prefixes"] for s in (plain, lends)] == [False, True]
    links = [set(group["options"]["links"]) for group in lends.args["engines"]]
    assert links == [{"decode-*", "prefill-*"}, {"prefill-*"}]


# ---------------------------------------------------------------------------------------------------------- prompts


def tokens_of(ask: asks.Ask) -> list[int]:
    if "messages" in ask.body:
        text = asks._codec.render_chat(ask.body["messages"], None, True, False, {})
        return asks._codec.encode(text, False)
    prompt = ask.body["prompt"]
    return prompt if isinstance(prompt, list) else asks._codec.encode(prompt, True)


def test_prompts_share_long_heads_a_few_times_each() -> None:
    heads, rng = Heads(1), random.Random(2)
    drawn = [sim_ask(rng, 0.0, heads) for _ in range(300)]
    shared = [tuple(tokens_of(ask)[:HEAD_WORDS]) for ask in drawn if "head" in ask.form.split("+")]
    assert len(shared) > 150
    uses = Counter(shared)
    assert max(uses.values()) == PROMPTS_A_HEAD
    # those that are still in use have not been given to all their prompts
    assert sum(number < PROMPTS_A_HEAD for number in uses.values()) <= HEADS
    # what follows a head is a prompt's own
    assert len({tuple(tokens_of(ask)) for ask in drawn}) == len(drawn)


def test_a_seed_decides_the_heads() -> None:
    def texts(seed: int) -> list[str]:
        heads, rng = Heads(seed), random.Random(3)
        return [heads.draw(rng).text for _ in range(40)]

    assert texts(1) == texts(1) != texts(2)
