"""The arbiter's journal: replay gives the same permits; a broken journal is refused."""

import pytest
from hypothesis import given, settings

from policies.flow.arbiter import Arbiter
from policies.flow.base import BadEvent, Flow, FlowError, Port, Side
from policies.flow.config import ArbiterConfig
from policies.flow.events import Bandwidth, Done, FlowEvent, Lost, Ordered, Permit, PolicySet, Tick
from policies.flow.registry import flow_policy
from policies.journal.flows import FlowJournal, TornFlowJournal, replay
from policies.journal.lines import JournalError
from policies.state.events import PolicyChoice
from tests.policies.flow.link import Link, flow
from tests.policies.flow.scenarios import CONFIGS, NAMES, flows


class Journalled(Link):
    """A link whose arbiter keeps a journal."""

    def __init__(self, arbiter: Arbiter) -> None:
        super().__init__(arbiter)
        self.lines: list[str] = []
        self.journal = FlowJournal(self.lines.append, arbiter, "test")

    def tell(self, event: FlowEvent) -> list[Permit]:
        real, self.arbiter = self.arbiter, self.journal  # type: ignore[assignment]
        try:
            return super().tell(event)
        finally:
            self.arbiter = real


@settings(max_examples=40, deadline=None)
@given(NAMES, CONFIGS, flows())
def test_replay_gives_the_same_permits(
    name: str, config: ArbiterConfig, given_flows: list[tuple[float, Flow]]
) -> None:
    link = Journalled(Arbiter(flow_policy(name), config))
    for at_s, each in given_flows:
        link.submit(each, at_s)
    link.at(0.5, lambda: Ordered(("br1", "br0"), ("r2",)))
    link.at(1.0, lambda: Bandwidth(Port("n0", Side.EGRESS), 1500.0))
    link.at(1.5, lambda: PolicySet(PolicyChoice("mfs", {"levels": 4})))
    link.at(2.0, Tick)
    link.run()
    steps = list(replay(link.lines))
    assert len(steps) == len(link.lines) - 1
    assert [step for step in steps if not step.equal] == []
    assert sum(step.recorded.count("flow_id") for step in steps) == len(link.granted)


def recorded() -> list[str]:
    link = Journalled(Arbiter(flow_policy("mfs"), ArbiterConfig(window=1)))
    link.submit(flow("x", 300, due_s=2.0))
    link.submit(flow("y", 300))
    with pytest.raises(FlowError):
        link.tell(Done("unknown", 1, 0.1))
    link.tell(Lost(("x",)))
    return link.lines


def test_refusals_are_recorded_and_replayed() -> None:
    steps = list(replay(recorded()))
    assert [step.equal for step in steps] == [True] * 4
    assert "UnknownFlow" in steps[2].replayed


def test_a_changed_permit_is_seen() -> None:
    lines = recorded()
    lines[1] = lines[1].replace('"level":8', '"level":7')
    assert [step.equal for step in replay(lines)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: lines[1:], "header"),
        (lambda lines: [lines[0].replace('journal":4', 'journal":3'), *lines[1:]], "format is 3, .* reads 4"),
        (lambda lines: [lines[0], *lines[2:]], "missing"),
        (lambda lines: [lines[0], lines[1][:20] + "\n", lines[2]], "line 2"),
        (lambda lines: [lines[0], lines[1].replace("Submitted", "Submited")], "Submited"),
        (lambda lines: [lines[0], lines[1].replace('"stage":3', '"stage":3.0')], "Stage"),
    ],
)
def test_a_journal_that_cannot_be_read_is_refused(change, complaint: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(JournalError, match=complaint):
        list(replay(change(recorded())))


def test_a_torn_last_line_ends_the_replay_after_all_whole_ones() -> None:
    lines = recorded()
    steps = replay([*lines[:3], lines[3][:30]])
    assert [next(steps).n, next(steps).n] == [0, 1]
    with pytest.raises(TornFlowJournal, match="line 4"):
        next(steps)


def test_a_journal_begins_before_the_first_event() -> None:
    arbiter = Arbiter(flow_policy("mfs"))
    arbiter.apply(Tick(), 0.0)
    with pytest.raises(ValueError, match="first event"):
        FlowJournal(lambda line: None, arbiter, "test")


def test_time_does_not_run_back() -> None:
    arbiter = Arbiter(flow_policy("mfs"))
    arbiter.apply(Tick(), 1.0)
    with pytest.raises(BadEvent, match="monotonic"):
        arbiter.apply(Tick(), 0.5)
