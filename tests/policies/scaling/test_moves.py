"""From wanted counts to single engines: a literal table."""

import dataclasses

import pytest

from policies.scaling.base import Counts, Move, Way
from policies.scaling.moves import moves
from policies.scaling.observation import Duty, EngineView
from policies.state.views import Role
from tests.policies.scaling.fixtures import engines, seen

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


@pytest.mark.parametrize(
    ("now", "wanted", "warm", "expected"),
    [
        ((2, 2), (2, 2), 0, []),
        # one too many of prefill for one too few of decode
        ((2, 2), (1, 3), 0, [(Way.SWITCH, "p0", D)]),
        # warm engines first, then starts
        ((1, 1, 0, 2), (1, 4), 0, [(Way.ACTIVATE, "w0", D), (Way.ACTIVATE, "w1", D), (Way.START, "", D)]),
        # what starts already is not started again
        ((1, 1, 0, 0, 1), (2, 1), 0, []),
        # the pool is filled by starts
        ((1, 1), (1, 1), 2, [(Way.START, "", D)] * 2),
        # too many: one fills the pool, the others stop
        ((4, 1), (1, 1), 1, [(Way.STOP, "p0", P), (Way.STOP, "p1", P), (Way.DEACTIVATE, "p2", P)]),
        # a pool that is too large gives its last
        ((1, 1, 0, 3), (1, 1), 1, [(Way.STOP, "w2", D), (Way.STOP, "w1", D)]),
    ],
)
def test_moves(
    now: tuple[int, ...], wanted: tuple[int, int], warm: int, expected: list[tuple[Way, str, Role]]
) -> None:
    made = moves(seen(1.0, engines(*now)), Counts(*wanted), warm)
    assert made == tuple(Move(*one) for one in expected)


def test_the_nearest_is_activated_and_the_idlest_leaves() -> None:
    near, old, far = (
        EngineView("near", D, Duty.WARM, since_s=9.0),
        EngineView("old", D, Duty.WARM, since_s=1.0, distance=1.0),
        EngineView("far", D, Duty.WARM, since_s=0.0, distance=2.0),
    )
    fleet = (*engines(1, 1), far, old, near)
    made = moves(seen(1.0, fleet), Counts(1, 3), 1)
    assert [move.engine for move in made] == ["near", "old"]
    busy = [dataclasses.replace(e, running=3) for e in engines(2, 0)[:1]]
    made = moves(seen(1.0, (*busy, *engines(2, 1)[1:])), Counts(1, 1), 0)
    assert [(move.way, move.engine) for move in made] == [(Way.STOP, "p1")]


def warm(name: str, since_s: float, distance: float = 0.0) -> EngineView:
    """A warm engine whose role its name's first letter tells."""
    role = {"p": P, "d": D}[name[0]]
    return EngineView(name, role, Duty.WARM, since_s=since_s, distance=distance)


@pytest.mark.parametrize(
    ("now", "idle", "wanted", "expected"),
    [
        # the engine of the missing role, although another one is nearer and older
        ((1, 1), [warm("p-1", 1.0), warm("d-2", 5.0, 1.0)], (1, 2), [(Way.ACTIVATE, "d-2", D)]),
        ((1, 1), [warm("d-1", 1.0), warm("p-2", 5.0, 1.0)], (2, 1), [(Way.ACTIVATE, "p-2", P)]),
        # both roles are missing: none crosses, whichever is the older
        (
            (1, 1),
            [warm("d-1", 1.0), warm("p-2", 5.0)],
            (2, 2),
            [(Way.ACTIVATE, "d-1", D), (Way.ACTIVATE, "p-2", P)],
        ),
        # of those with the role the nearest, then the oldest
        (
            (1, 1),
            [warm("d-1", 1.0, 1.0), warm("p-2", 0.0), warm("d-3", 5.0), warm("d-4", 4.0)],
            (1, 3),
            [(Way.ACTIVATE, "d-4", D), (Way.ACTIVATE, "d-3", D)],
        ),
        # an engine of another role where none has it, after those that have theirs
        (
            (1, 1),
            [warm("p-1", 1.0), warm("d-2", 5.0)],
            (1, 3),
            [(Way.ACTIVATE, "d-2", D), (Way.ACTIVATE, "p-1", D)],
        ),
        # there are too few for both: prefill is filled first, whatever the warm one was
        ((1, 1), [warm("d-1", 1.0)], (2, 2), [(Way.ACTIVATE, "d-1", P), (Way.START, "", D)]),
        # an engine that switches leaves the role of the warm one to that one
        ((1, 1, 1), [warm("p-1", 1.0)], (2, 2), [(Way.SWITCH, "c0", D), (Way.ACTIVATE, "p-1", P)]),
        # as many switch as before: with two of them the warm one is not needed
        ((1, 1, 2), [warm("p-1", 1.0)], (2, 2), [(Way.SWITCH, "c0", D), (Way.SWITCH, "c1", P)]),
    ],
)
def test_a_warm_engine_is_activated_in_its_own_role_first(
    now: tuple[int, ...],
    idle: list[EngineView],
    wanted: tuple[int, int],
    expected: list[tuple[Way, str, Role]],
) -> None:
    kept = len(idle) - sum(way is Way.ACTIVATE for way, _, _ in expected)
    made = moves(seen(1.0, (*engines(*now), *idle)), Counts(*wanted), kept)
    assert made == tuple(Move(*one) for one in expected)
