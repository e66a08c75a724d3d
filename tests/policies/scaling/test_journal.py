"""A policy's journal: replay decides every step again, from the beginning or from the middle, and finds what
differs.
"""

import dataclasses

import pytest

from policies.scaling.journal import ScalingJournalError, fault_line, header_line, replay, step_line
from policies.scaling.observation import Room
from policies.scaling.registry import SCALING, make
from tests.policies.scaling.fixtures import engines, seen

ALONE = {"prefill_min": 0, "prefill_max": 0, "decode_min": 0, "decode_max": 0, "colocated_max": 9}


def written(name: str, first: int) -> list[str]:
    """Returns a journal of thirty steps of which the first `first` went to an earlier file."""
    policy = make(name, {"limits": {"prefill_max": 9, "decode_max": 9, "warm_max": 2, "budget": 14}})
    state, lines = policy.initial(), []
    for i in range(30):
        if i == first:
            lines.append(header_line(policy, state, "1.0"))
        observation = seen(3.0 + 7.0 * (i % 9), engines(3, 4, warm=1), i, queued=5 * i, missed=i)
        step = policy.step(observation, state)
        state = step.state
        if i >= first:
            lines.append(step_line(observation, step))
    return lines


@pytest.mark.parametrize("first", [0, 13])
@pytest.mark.parametrize("name", SCALING)
def test_a_journal_replays_to_the_same_plans(name: str, first: int) -> None:
    replayed = list(replay(written(name, first)))
    assert len(replayed) == 30 - first
    assert all(one.same for one in replayed)


def test_a_journal_without_the_slots_of_colocated_engines_replays() -> None:
    """Journals of earlier versions have no such field."""
    lines = written("joint", 0)
    old = [line.replace(',"colocated":null', "") for line in lines]
    assert old[1] != lines[1]
    assert all(one.same for one in replay(old))


def test_the_slots_of_colocated_engines_are_written() -> None:
    policy = make("joint", {"limits": ALONE})
    state, found = policy.initial(), seen(20.0, engines(0, 0, 2))
    found = dataclasses.replace(
        found, capability=dataclasses.replace(found.capability, colocated=Room(2, 500_000))
    )
    step = policy.step(found, state)
    (one,) = replay([header_line(policy, state, "1.0"), step_line(found, step)])
    assert one.same
    assert one.seen == found


def test_another_plan_is_found() -> None:
    lines = written("joint", 0)
    lines[7] = lines[7].replace('"serving":{"prefill":', '"serving":{"prefill":1', 1)
    assert [i for i, one in enumerate(replay(lines)) if not one.same] == [6]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: no JSON"),
        ('{"seen":{}}', "line 2"),
        ('{"scaling":9,"version":"0.9"}', "replay it with the version that wrote it, 0.9"),
        ('{"scaling":1,"policy":"magic","params":{},"state":{}}', "line 2: no scaling policy"),
    ],
)
def test_lines_that_cannot_be_read_are_named(line: str, said: str) -> None:
    with pytest.raises(ScalingJournalError, match=said):
        list(replay([written("fixed", 0)[0], line]))
    with pytest.raises(ScalingJournalError, match="begins with its header"):
        list(replay(written("fixed", 0)[1:]))


def test_an_error_of_the_policy_is_replayed_as_an_error_and_changes_no_state() -> None:
    lines = written("joint", 0)
    policy = make("joint", {"limits": {"prefill_max": 9, "decode_max": 9, "warm_max": 2, "budget": 14}})
    right = seen(5.0, engines(3, 4, warm=1), 3)
    assert right.windows is not None
    # requests in no time at all are no rate
    windows = tuple(dataclasses.replace(window, length_s=0.0) for window in right.windows)
    wrong = dataclasses.replace(right, windows=windows)
    with pytest.raises(ZeroDivisionError) as raised:
        policy.step(wrong, policy.initial())
    said = repr(raised.value)
    with_fault = [*lines[:6], fault_line(wrong, said, by_step=True), *lines[6:]]
    replayed = list(replay(with_fault))
    assert len(replayed) == 31 and all(one.same for one in replayed)
    assert replayed[5].written == said
    other = [*lines[:6], fault_line(wrong, "KeyError(1)", by_step=True), *lines[6:]]
    assert [one.same for one in replay(other)].count(False) == 1
    # a plan that no orders could carry out: the step itself is decided again
    uncarried = [
        *lines[:6],
        fault_line(seen(3.0, engines(3, 4), 3), "KeyError('e9')", by_step=False),
        *lines[6:],
    ]
    assert all(one.same for one in replay(uncarried))
