"""Loans in a run: victims are engines that lend or borrow at the moment, prompts continue others, loans are counted."""

import random
from collections import Counter
from typing import Any, get_args

import pytest

from app.ingress.metrics import INGRESS
from benchmarks.chaos import asks
from benchmarks.chaos.asks import TALKS, TURN_WORDS, TURNS, Talks, sim_ask
from benchmarks.chaos.loans import COUNTER, PARTS, RESULTS, at_loans, ends_of
from benchmarks.chaos.processes import Member
from benchmarks.chaos.schedule import LENDING, Kind, Schedule
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


def test_the_turn_of_a_fault_of_a_loan_is_kept_while_it_is_awaited() -> None:
    kinds = [*LENDING, Kind("kill", "router", 30)]
    well = {"router": 1, "lender": 0, "borrower": 0}
    for seed in range(20):
        schedule = Schedule(kinds, seed, well)
        drawn = []
        while (fault := schedule.next(well, PARTS)) is not None:
            drawn.append(fault.kind.part)
        assert set(drawn) <= {"router"}
        # it is the turn of one of these until a loan is under way, or until nobody waits any more
        first = schedule.next(well | {"lender": 1, "borrower": 1}, PARTS)
        assert first is not None and first.kind.part in PARTS
        while schedule.next(well, PARTS) is not None:
            pass
        passed = schedule.next(well)
        assert passed is not None and passed.kind.part == "router"


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


def test_each_turn_of_a_conversation_begins_with_the_one_before() -> None:
    talks, rng = Talks(1), random.Random(2)
    open_talks: list[asks.Turn] = []
    for _ in range(100):
        turn = talks.turn(rng)
        if turn.number > 1:
            (before,) = [one for one in open_talks if turn.head.startswith(f"{one.head} ")]
            assert (turn.number, turn.chat) == (before.number + 1, before.chat)
            open_talks.remove(before)
        assert len(turn.head.split()) >= turn.number * TURN_WORDS
        if turn.number < TURNS:
            open_talks.append(turn)
        assert len(open_talks) <= TALKS


def test_most_prompts_are_turns_and_all_are_different() -> None:
    talks, rng = Talks(1), random.Random(2)
    drawn = [sim_ask(rng, 0.0, talks) for _ in range(60)]
    turns = [ask for ask in drawn if "turn" in ask.form.split("+")]
    assert 30 < len(turns) < 60
    assert all(len(tokens_of(ask)) > TURN_WORDS for ask in turns)
    assert len({tuple(tokens_of(ask)) for ask in drawn}) == len(drawn)


def test_a_seed_decides_the_conversations() -> None:
    def heads(seed: int) -> list[str]:
        talks, rng = Talks(seed), random.Random(3)
        return [talks.turn(rng).head for _ in range(40)]

    assert heads(1) == heads(1) != heads(2)
