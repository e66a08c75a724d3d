"""From wanted counts to the moves of single engines.

Roles that have too many engines give them to roles that have too few (switch); then warm engines are activated. Where
these are not enough for all that is missing, prefill is filled first, since decode has nothing to do without it. A warm
engine of the role goes before others, because engines of other roles may have other options; so a switch goes first to
a role that no warm engine has. With `missing` serving engines after that, `idle` warm ones left, `starting` ones and
`leaving` ones:

    lack = missing + warm - idle - starting - leaving
    lack > 0   that many are started; they become warm, and are activated when they are ready
    lack < 0   that many stop, first of the leaving ones, then of the idle ones; the other leaving ones become warm

The moves are those that are missing now, so the same plan without any change in the fleet has the same moves.
"""

from collections.abc import Sequence

from policies.scaling.base import Counts, Move, Way, serving_now
from policies.scaling.observation import Duty, EngineView, Observation
from policies.scaling.warm_pool import first_to_activate, first_to_leave
from policies.state.views import Role

ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


def moves(seen: Observation, serving: Counts, warm: int) -> tuple[Move, ...]:
    """Returns the moves from what `seen` has to `serving` engines by role and `warm` warm ones."""
    now = serving_now(seen)
    leaving = _too_many(seen, now, serving)
    missing = [role for role in ROLES for _ in range(serving.of(role) - now.of(role))]
    idle = first_to_activate(seen.with_duty(Duty.WARM))
    starting = len(seen.with_duty(Duty.STARTING))
    # which roles get engines now does not depend on who is there to take them
    most = len(leaving) + len(idle)
    missing, lacking = missing[:most], missing[most:]
    in_own_role, others = _in_own_role(idle, missing)
    missing = [*others, *(e.role for e in in_own_role)]
    found = [Move(Way.SWITCH, e.engine, role) for e, role in zip(leaving, missing, strict=False)]
    missing, leaving = missing[len(found) :], leaving[len(found) :]
    in_own_role, missing = _in_own_role(idle, missing)
    idle = [e for e in idle if e not in in_own_role]
    in_another = list(zip(idle, missing, strict=False))
    found += [Move(Way.ACTIVATE, e.engine, e.role) for e in in_own_role]
    found += [Move(Way.ACTIVATE, e.engine, role) for e, role in in_another]
    idle = idle[len(in_another) :]
    lack = len(lacking) + warm - len(idle) - starting - len(leaving)
    if lack > 0:
        roles = (lacking + [Role.DECODE if serving.decode else Role.COLOCATED] * lack)[:lack]
        found += [Move(Way.START, "", role) for role in roles]
    stopped = leaving[: max(0, -lack)]
    found += [Move(Way.STOP, e.engine, e.role) for e in stopped]
    found += [Move(Way.DEACTIVATE, e.engine, e.role) for e in leaving[len(stopped) :]]
    # The warm ones that would be activated last stop first.
    found += [Move(Way.STOP, e.engine, e.role) for e in idle[::-1][: max(0, -lack - len(stopped))]]
    return tuple(found)


def _in_own_role(idle: Sequence[EngineView], missing: Sequence[Role]) -> tuple[list[EngineView], list[Role]]:
    """Returns the first of the `idle` engines whose own roles are missing, and the roles that are missing without them,
    both in their order.
    """
    found, left = [], list(missing)
    for engine in idle:
        if engine.role in left:
            left.remove(engine.role)
            found.append(engine)
    return found, left


def _too_many(seen: Observation, now: Counts, serving: Counts) -> list[EngineView]:
    """Returns the engines that leave their role, each role's in the order of `first_to_leave`."""
    found: list[EngineView] = []
    for role in ROLES:
        surplus = now.of(role) - serving.of(role)
        if surplus > 0:
            own = [e for e in seen.engines if e.duty is Duty.ACTIVE and e.role is role]
            found += first_to_leave(own)[:surplus]
    return found
