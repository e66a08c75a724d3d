"""From wanted counts to single engines: a literal table."""

import dataclasses

import pytest

from policies.scaling.base import Counts, Move, Way
from policies.scaling.moves import moves
from policies.scaling.observation import Duty, EngineView
from policies.state.views import Role
from tests.policies.scaling.fixtures import engines, seen

P, D = Role.PREFILL, Role.DECODE


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
