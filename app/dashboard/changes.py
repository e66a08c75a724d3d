"""The changes of administrators, made by questions to the router: before and after, the audit log, and undoing.

One change is made at a time, so that before and after belong to it. A change can be undone while what it changed is as
it left it, and nothing later has changed the same.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from app.api.errors import ApiError
from app.dashboard.audit import Audit, Change, new_id
from app.dashboard.refusal import Refusal
from app.fleet.policy import policy_change

Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
Shown = dict[str, Any]

STAGES = ("prefill", "decode", "admission", "fairness", "flow")


class Changes:
    """The changes of one dashboard. `ask` asks the router, and `engine_now` returns the role and duty of an engine as
    the router told them last, or None; `changed` gets a sentence about each change that was made.
    """

    def __init__(
        self,
        ask: Ask,
        audit: Audit,
        engine_now: Callable[[str], Shown | None],
        changed: Callable[[str], None],
    ) -> None:
        self._ask, self._audit, self._engine_now, self._changed = ask, audit, engine_now, changed
        self._one_at_a_time = asyncio.Lock()

    # ------------------------------------------------------------------------------------------------------- reads

    async def read(self, what: str, asked: Shown | None = None) -> Shown:
        """Returns the router's answer to a question. Raises Refusal with its status and message."""
        status, body = await self._ask(what, b"" if asked is None else orjson.dumps(asked))
        found: Shown = orjson.loads(body)
        if status != 200:
            raise Refusal(status, str(found["message"]))
        return found

    def audit(self) -> list[Shown]:
        """Returns the last changes, the newest first, and which of them can be undone."""
        return [
            {
                "id": one.id,
                "at": one.at,
                "who": one.who,
                "what": one.what,
                "before": one.before,
                "after": one.after,
                "undone": one.undone,
                "can_undo": self._audit.latest(one.target) is one,
            }
            for one in self._audit.changes()
        ]

    # ----------------------------------------------------------------------------------------------------- changes

    async def policy(self, body: bytes, who: str) -> Shown:
        """Changes policies, as `PUT /sluice/admin/policy` does."""
        try:
            asked = orjson.loads(policy_change(body))
        except ApiError as error:
            raise Refusal(error.status, error.message) from None
        if not isinstance(asked, dict):
            raise Refusal(400, "a change of policies must be a JSON object")
        return await self._change("set_policy", "policy", asked, who, None)

    async def scale(self, asked: Shown, who: str) -> Shown:
        """Sets numbers of engines or bounds of groups, or has the policy rule again; with "plan": true nothing changes
        and the plan is returned.
        """
        if asked.get("plan"):
            return await self.read("scale", asked)
        if not asked:
            raise Refusal(
                400, 'nothing is asked for: give {"counts": {..}}, {"bounds": {..}} or {"mode": "auto"}'
            )
        return await self._change("scale", "bounds" if "bounds" in asked else "scale", asked, who, None)

    async def engine(self, engine: str, asked: Shown, who: str) -> Shown:
        """Changes role or duty of one engine."""
        unknown = sorted(set(asked) - {"role", "duty"})
        if unknown or not asked:
            what = f"{unknown[0]!r} is not known" if unknown else "nothing is asked for"
            raise Refusal(400, f"{what}: give role, duty or both")
        return await self._change("assign", f"engine {engine}", {"engine": engine, **asked}, who, None)

    async def undo(self, change_id: str, who: str) -> Shown:
        """Puts back what a change had found."""
        change = self._audit.find(change_id)
        if change is None or not change.done:
            raise Refusal(404, f"no change {change_id[:40]!r} is known; the log shows those that are")
        if change.undone:
            raise Refusal(409, "this change was undone already")
        if change.undoes is not None or self._audit.latest(change.target) is not change:
            raise Refusal(
                409, f"a later change of {change.target} is there: undo that one first, or set what you want"
            )
        asked = _back(change)
        return await self._change(change.kind, change.target, asked, who, change)

    async def _change(self, kind: str, target: str, asked: Shown, who: str, undoes: Change | None) -> Shown:
        async with self._one_at_a_time:
            before = await self._state(kind, asked)
            if undoes is not None and before != undoes.after:
                raise Refusal(
                    409,
                    f"{target} is not as this change left it: something else has changed it since, set what you want",
                )
            what = f"undo: {undoes.what}" if undoes is not None else _words(kind, target, asked)
            change = Change(
                new_id(), time.time(), who, what, kind, target, _short(asked),
                undoes=None if undoes is None else undoes.id,
            )  # fmt: skip
            await asyncio.to_thread(self._audit.begin, change)
            answer = await self.read(kind, asked)
            if kind == "assign":
                change.before, change.after = answer["before"], answer["after"]
            else:
                change.before, change.after = before, _part(kind, asked, answer)
            change.done = True
            await asyncio.to_thread(self._audit.end, change)
            if undoes is not None:
                undoes.undone = True
            self._changed(f"{who}: {what}")
            return {"id": change.id, "before": change.before, "after": change.after}

    async def _state(self, kind: str, asked: Shown) -> Any:
        """Returns what a change is about to replace."""
        if kind == "assign":
            return self._engine_now(asked["engine"])
        return _part(kind, asked, await self.read("scale" if kind == "scale" else "policy"))


def _part(kind: str, asked: Shown, answer: Shown) -> Any:
    """Returns the part of the router's or autoscaler's answer that a change is about."""
    if kind == "scale" and isinstance(asked.get("bounds"), dict):
        return {"bounds": {g["name"]: _bounds(g) for g in answer["groups"] if g["name"] in asked["bounds"]}}
    if kind == "scale":
        manual = answer["mode"] == "manual"
        counts = {group["name"]: group["wanted"] for group in answer["groups"]} if manual else None
        return {"mode": answer["mode"], "counts": counts}
    found = {stage: _choice(answer.get(stage)) for stage in STAGES if asked.get(stage) is not None}
    if isinstance(asked.get("dispatch"), dict):
        found["dispatch"] = {name: answer["dispatch"].get(name) for name in asked["dispatch"]}
    return found


def _bounds(group: Shown) -> Shown:
    """Returns the bounds of a group of the autoscaler's answer, by the keys of an order."""
    return {
        "min": group["min"],
        "max": group["max"],
        "warm": group["keeps_warm"],
        "warm_max": group["warm_max"],
    }


def _choice(described: Shown | None) -> Shown | None:
    return None if described is None else {"name": described["name"], "params": described["params"]}


def _back(change: Change) -> Shown:
    """Returns what to ask for so that things are as before a change. Raises Refusal where that is not possible."""
    if change.kind == "assign":
        return {"engine": change.target.removeprefix("engine "), **change.before}
    if change.target == "bounds":
        bounds: Shown = change.before
        return bounds
    if change.kind == "scale":
        counts = change.before["counts"]
        return {"mode": "auto"} if counts is None else {"counts": counts}
    asked = {stage: choice for stage, choice in change.before.items() if choice is not None}
    if not asked:
        raise Refusal(409, "there was no such policy before")
    return asked


def _words(kind: str, target: str, asked: Shown) -> str:
    """Returns a change in words."""
    if kind == "assign":
        return f"{target}: {', '.join(str(asked[name]) for name in ('role', 'duty') if asked.get(name))}"
    if kind == "scale" and isinstance(asked.get("bounds"), dict):
        named = [
            f"{name} " + " ".join(f"{key} {n}" for key, n in own.items())
            for name, own in asked["bounds"].items()
            if isinstance(own, dict)
        ]
        return "bounds: " + ", ".join(named)
    if kind == "scale":
        counts = asked.get("counts")
        if not isinstance(counts, dict):
            return "numbers of engines: the policy rules"
        return "numbers of engines: " + ", ".join(f"{name} {n}" for name, n in counts.items())
    named = []
    for stage, choice in asked.items():
        name = choice.get("name") if isinstance(choice, dict) and stage in STAGES else choice
        named.append(f"{stage} {name}" if isinstance(name, str) else stage)
    return "policy: " + ", ".join(named)


def _short(asked: Shown) -> Shown:
    """Returns what was asked for, without heatmaps, which are long and are in `after`."""
    text = orjson.dumps(asked)
    return asked if len(text) < 4096 else {"bytes": len(text), "keys": sorted(asked)}
