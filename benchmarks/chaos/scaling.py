"""An administrator who orders numbers of engines of the autoscaler during a run, and what serves when they are reached.

The policy is `fixed`, so the bounds of the groups alone decide what it wants, and each state of the fleet stands here
with its engines. From one state to another goes one order: other bounds, numbers by hand, or back to the policy.
Between the bounds `WIDE` and `NARROW` engines switch between prefill and decode; numbers by hand activate warm engines,
send engines home to their groups' role, start and stop.

An order that gets no answer, or one that is no acknowledgement (a router or autoscaler that is away), is given again
until it is acknowledged. One that is refused is a fault of the application: all of them are allowed.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.http import answered, connect, get, json_bytes
from benchmarks.live.servers import ADMIN_KEY

SCALE = "/sluice/admin/scale"
EVERY_S = (20.0, 40.0)
"""Bounds of the seconds between an acknowledgement and the next order."""
GREET_S = 1.0
"""Seconds in which an ingress must greet before it gets an order: one that is stopped would carry it out much later."""
ANSWER_S = 75.0
"""Seconds for an answer, longer than the longest stop: of an order that was given up nobody would know whether it is
still to come."""
AGAIN_S = 1.0

WIDE = {"prefill": {"min": 2, "max": 3}, "decode": {"min": 3, "max": 5}}
"""The bounds of the configuration."""
NARROW = {"prefill": {"min": 2, "max": 2}, "decode": {"min": 4, "max": 5}}

GROUPS: dict[str, dict[str, Any]] = {
    "prefill": {"replicas": 3, "scaling": WIDE["prefill"]},
    "decode": {"replicas": 3, "scaling": WIDE["decode"] | {"warm": 1}},
}
"""The parts of the groups' configuration that the autoscaler reads."""

POLICY: dict[str, Any] = {"enabled": True, "policy": "fixed", "params": {"prefill": 3, "decode": 3}}
"""The configuration of the autoscaler. The policy wants these numbers as far as the bounds allow."""

DUTIES = ("warm", "starting", "draining")
"""The parts of engines that do not serve."""

LEAST = {"prefill": 2, "decode": 3}
"""The fewest engines that serve in any state."""


@dataclass(frozen=True, slots=True)
class State:
    """A state of the fleet: bounds of the groups, numbers of serving replicas by hand (None: the policy's), and the
    engines of each role and the warm ones that there are then.
    """

    bounds: str
    counts: tuple[int, int] | None
    prefill: int
    decode: int
    warm: int

    @property
    def engines(self) -> dict[str, int]:
        """The number of engines of each part."""
        return {
            "prefill": self.prefill, "decode": self.decode, "warm": self.warm, "starting": 0, "draining": 0
        }  # fmt: skip

    @property
    def replicas(self) -> int:
        """The number of replicas of all groups."""
        return self.prefill + self.decode + self.warm

    def leads_to(self, other: "State") -> bool:
        """Returns whether one order leads from this state to the other. Bounds change only while the policy decides,
        because those that exclude numbers set by hand are refused.
        """
        by_policy = self.counts is None and other.counts is None
        return self != other and (self.bounds == other.bounds or by_policy)

    def order_to(self, other: "State") -> dict[str, Any]:
        """Returns the body of the order that leads to the other state."""
        if other.counts is not None:
            return {"counts": dict(zip(GROUPS, other.counts, strict=True))}
        if self.counts is not None:
            return {"mode": "auto"}
        return {"bounds": BOUNDS[other.bounds]}

    def differs(self, told: Mapping[str, Any]) -> str | None:
        """Returns in what the autoscaler's answer to an administrator is not of this state, or None if it is."""
        wanted = dict.fromkeys(GROUPS) if self.counts is None else dict(zip(GROUPS, self.counts, strict=True))
        for group in told["groups"]:
            name, bounds = group["name"], BOUNDS[self.bounds][group["name"]]
            found = {key: group[key] for key in bounds}
            if found != bounds:
                return f"the bounds of {name} are {found}, ordered were {bounds}"
            if group["wanted"] != wanted[name]:
                return f"wanted of {name} by hand are {group['wanted']}, ordered were {wanted[name]}"
        return None


BOUNDS = {"wide": WIDE, "narrow": NARROW}

STATES = (
    State("wide", None, 3, 3, 1),
    State("wide", (2, 3), 2, 3, 1),
    State("wide", (2, 4), 2, 4, 1),
    State("wide", (3, 4), 3, 4, 1),
    State("narrow", None, 2, 4, 1),
    # the group's most replicas all serve
    State("narrow", (2, 5), 2, 5, 0),
)
"""The states that are ordered; the first is that of the configuration."""


def walk(rng: random.Random) -> Sequence[State]:
    """Returns the first states of a run, in the order in which they are reached."""
    states = [STATES[0]]
    for _ in range(1000):
        here = states[-1]
        states.append(rng.choice([state for state in STATES if here.leads_to(state)]))
    return states


@dataclass(slots=True)
class Ordered:
    """One order: its body, when it was given first, acknowledged, and when the fleet had come to what it wants, in
    seconds of the live clock. `tries` counts what became of the others that were given for it.
    """

    body: Mapping[str, Any]
    given_s: float
    acknowledged_s: float | None = None
    reached_s: float | None = None
    tries: Counter[str] = field(default_factory=Counter)


class Administrator:
    """Gives one order after the other. `state` is what was acknowledged last, and `changed` is called with it."""

    def __init__(
        self,
        port: int,
        seed: int,
        now_s: Callable[[], float],
        say: Callable[[str], None],
        changed: Callable[[State], None],
    ) -> None:
        self._port, self._now_s, self._say, self._changed = port, now_s, say, changed
        self._rng = random.Random(f"orders {seed}")
        self._walk = iter(walk(self._rng)[1:])
        self._stop = asyncio.Event()
        self.state = STATES[0]
        self.orders: list[Ordered] = []
        self.refused: str | None = None

    def stop(self) -> None:
        """Ends the orders, after the one that is being given."""
        self._stop.set()

    async def run(self) -> None:
        """Gives orders until `stop`, or until one is refused."""
        while self.refused is None:
            try:
                await asyncio.wait_for(self._stop.wait(), self._rng.uniform(*EVERY_S))
                return
            except TimeoutError:
                await self._give(next(self._walk))

    async def told(self) -> dict[str, Any] | None:
        """Returns the autoscaler's state, or None if it does not answer now."""
        status, body = await self._ask("GET", None)
        return json.loads(body) if status == 200 else None

    def note(self, reached: bool) -> None:
        """Notes whether the fleet has now what was acknowledged last."""
        last = self.orders[-1] if self.orders else None
        if reached and last is not None and last.acknowledged_s is not None and last.reached_s is None:
            last.reached_s = self._now_s()

    async def _give(self, state: State) -> None:
        order = Ordered(self.state.order_to(state), self._now_s())
        self.orders.append(order)
        self._say(f"order {len(self.orders)}: {json.dumps(order.body)}")
        while True:
            status, body = await self._ask("PUT", order.body)
            if status == 200:
                break
            order.tries[str(status or body.decode())] += 1
            if status == 400:
                self.refused = f"{json.dumps(order.body)}: {body.decode(errors='replace')}"
                return
            await asyncio.sleep(AGAIN_S)
        order.acknowledged_s = self._now_s()
        self.state = state
        self._changed(state)

    async def _ask(self, method: str, asked: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """Returns the status and the body of an answer; (0, the reason) without one."""
        request = json_bytes(method, SCALE, asked or {}, authorization=f"Bearer {ADMIN_KEY}")
        connection = None
        try:
            connection = await connect(self._port, GREET_S)
            await get(connection, "/health/live", GREET_S)
            return await answered(connection, request, ANSWER_S)
        except TimeoutError:
            return 0, b"no answer"
        except OSError:
            return 0, b"no connection"
        finally:
            if connection is not None:
                connection.drop()


def row(order: Ordered) -> list[Any]:
    """Returns an order's row of a result: body, given, acknowledged and reached in seconds, other tries."""
    times = (order.given_s, order.acknowledged_s, order.reached_s)
    return [
        json.dumps(order.body),
        *(None if at_s is None else round(at_s, 1) for at_s in times),
        dict(order.tries),
    ]
