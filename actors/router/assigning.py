"""Role and duty of a single engine, as an administrator orders them.

The orders are those that an autoscaler gives (`SetRole`), so they are for administrators only where none is connected:
of two that decide, each would undo what the other ordered.
"""

import logging
from typing import Any, get_args

from actors.router.engines import Engines
from actors.wire.messages import Duty, Role, SetRole

log = logging.getLogger(__name__)


class NotAssigned(ValueError):
    """An order is not given. The message says why; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def assign(engines: Engines, scaled: bool, engine_id: object, role: object, duty: object) -> dict[str, Any]:
    """Orders an engine to serve a role with a duty; None leaves what it has. Returns what it had and what it is to
    have.

    Raises NotAssigned where an autoscaler decides (`scaled`), for an engine that cannot get the order, and where no
    engine that decodes would be left.
    """
    infos = {info.id: info for info in engines.infos()}
    info = infos.get(str(engine_id))
    if info is None:
        raise NotAssigned(
            404, f"no engine {str(engine_id)[:80]!r} is known; there are {', '.join(infos) or 'none'}"
        )
    new_role, new_duty = _known(role, get_args(Role), "role"), _known(duty, get_args(Duty), "duty")
    if new_role is None and new_duty is None:
        raise NotAssigned(400, "give a role, a duty, or both")
    if scaled:
        raise NotAssigned(
            409,
            "the autoscaler decides the role and duty of each engine, and would undo this: set numbers of engines"
            " instead (scale), or turn scaling.enabled off",
        )
    channel = engines.channel(info.id)
    if channel is None or not channel.open or info.state in ("draining", "down"):
        raise NotAssigned(409, f"engine {info.id} is {info.state} and takes no orders: choose another")
    before = {"role": info.role, "duty": info.duty}
    after = {"role": new_role or info.role, "duty": new_duty or info.duty}
    if not _decodes(after["role"], after["duty"]) and not any(
        _decodes(other.role, other.duty) and other.state == "ready"
        for other in infos.values()
        if other.id != info.id and other.group == info.group
    ):
        raise NotAssigned(
            409,
            f"engine {info.id} is the last active one of its group that decodes: activate another one first",
        )
    log.info("an administrator orders engine %s to serve %s, %s", info.id, after["role"], after["duty"])
    channel.send(SetRole(after["role"], after["duty"]))  # type: ignore[arg-type]  # checked above
    return {"engine": info.id, "before": before, "after": after}


def _decodes(role: str, duty: str) -> bool:
    return role != "prefill" and duty == "active"


def _known(given: object, names: tuple[str, ...], what: str) -> str | None:
    if given is not None and given not in names:
        raise NotAssigned(400, f"{what} is {str(given)[:40]!r}: it must be one of {', '.join(names)}")
    return None if given is None else str(given)
