"""The renewals of leases between a vLLM engine and its cores: each is asked for once and answered once."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.leases import AttemptLeases
from actors.engine.vllm.renewals import Renewals


class Desk:
    """Renewals with a clock and a loop of its own; `posted` are the wishes sent to cores, `answers` the answers."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.soon: list[Callable[[], None]] = []
        self.posted: list[tuple[dict[str, float], int]] = []
        self.answers: list[tuple[str, float]] = []
        self.leases = AttemptLeases()
        self.renewals = Renewals(
            self.leases,
            lambda wishes, rank: self.posted.append((wishes, rank)),
            lambda attempt_id, left_s: self.answers.append((attempt_id, left_s)),
            lambda: self.now_s,
            self.soon.append,
        )

    def turn(self) -> None:
        """One turn of the event loop."""
        calls, self.soon[:] = list(self.soon), []
        for call in calls:
            call()

    def ended(self, request_id: str) -> None:
        self.leases.ended(request_id)
        self.renewals.ended(request_id)


def test_the_renewals_of_one_turn_reach_a_core_together_and_are_answered_by_what_is_left() -> None:
    desk = Desk()
    for attempt_id, rank in (("a", 0), ("b", 0), ("c", 1)):
        desk.leases.granted(attempt_id, f"v-{attempt_id}", rank)
        desk.renewals.ask(attempt_id, 30.0)
    assert desk.posted == []
    desk.turn()
    assert desk.posted == [({"v-a": 30.0, "v-b": 30.0}, 0), ({"v-c": 30.0}, 1)]
    desk.now_s += 2.0
    desk.renewals.renewed("v-b")
    # the report of another worker of the same core
    desk.renewals.renewed("v-b")
    assert desk.answers == [("b", 28.0)]


def test_a_lease_that_ended_is_not_renewed_whichever_is_heard_of_first() -> None:
    desk = Desk()
    desk.renewals.ask("never", 30.0)
    desk.leases.granted("a", "v-a", 0)
    desk.ended("v-a")
    desk.renewals.ask("a", 30.0)
    desk.leases.granted("b", "v-b", 0)
    desk.renewals.ask("b", 30.0)
    desk.turn()
    desk.ended("v-b")
    desk.renewals.renewed("v-b")
    assert desk.answers == [("never", 0.0), ("a", 0.0), ("b", 0.0)]


def test_the_report_of_an_earlier_question_promises_no_more_than_that() -> None:
    desk = Desk()
    desk.leases.granted("a", "v-a", 0)
    desk.renewals.ask("a", 30.0)
    desk.turn()
    desk.now_s += 10.0
    desk.renewals.ask("a", 200.0)
    desk.turn()
    desk.now_s += 1.0
    desk.renewals.renewed("v-a")
    assert desk.answers == [("a", 0.0), ("a", 19.0)]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "renewed", "ended", "turn", "wait"]), st.integers(0, 2)),
        max_size=40,
    )
)
def test_every_question_has_at_most_one_answer_and_none_promises_too_much(
    steps: list[tuple[str, int]],
) -> None:
    desk = Desk()
    for i in range(3):
        desk.leases.granted(f"r{i}", f"v{i}", 0)
    asked: dict[str, list[float]] = {f"r{i}": [] for i in range(3)}
    for what, i in steps:
        before = len(desk.answers)
        if what == "ask":
            asked[f"r{i}"].append(desk.now_s)
            desk.renewals.ask(f"r{i}", 30.0)
        elif what == "renewed":
            desk.renewals.renewed(f"v{i}")
        elif what == "ended":
            desk.ended(f"v{i}")
        elif what == "turn":
            desk.turn()
        else:
            desk.now_s += 7.0
        for attempt_id, left_s in desk.answers[before:]:
            assert left_s == 0.0 or desk.now_s + left_s <= asked[attempt_id][-1] + 30.0
    for attempt_id, times in asked.items():
        assert sum(answered == attempt_id for answered, _ in desk.answers) <= len(times)
