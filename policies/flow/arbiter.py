"""The arbiter turns the order of a flow policy into permits. The agent of a node and the simulator use this one object.

    permits = arbiter.apply(Submitted(flow), now_s)

A chunk needs a free slot at both of its ports, the source's egress and the target's ingress, and takes both at once or
none. At most `window` chunks are posted at a port. Each event frees slots or changes the order at a few ports only;
among the flows that wait there and have room at both ports, the first in the policy's order is served, until none is
left. While no other flow waits at a flow's ports and no chunk of another is posted there, one permit covers all that is
left of it, up to a bound in time.

Which flow is served next, and which slots are kept for whom, is `policies.flow.matching`'s; the arbiter conserves work.

A posted chunk that takes far longer than it should is *late*: its lender or its reader stands still. It is known still,
and answered by its `Done`, but it takes no slot, and it says nothing of a port's bandwidth. Until it has arrived no
further chunk is permitted between the same two engines, so that all slots go to others.

Promotion happens at chunk boundaries: a flow is placed anew at each `Done`, and between chunks at the time that its
policy named. A posted chunk keeps its level and is never cancelled. After an event that is refused (`FlowError`)
nothing has changed.
"""

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

from policies.flow import events as ev
from policies.flow.ahead import bands_of
from policies.flow.alarms import Alarms
from policies.flow.base import (
    BadEvent,
    DuplicateFlow,
    FlowPolicy,
    Port,
    Side,
    Stage,
    TooManyFlows,
    UnknownFlow,
    standing,
)
from policies.flow.config import ArbiterConfig
from policies.flow.events import FlowEvent, Permit
from policies.flow.matching import count_passed, next_served
from policies.flow.ports import Held, OpenPermit, PortState, PortTable
from policies.flow.registry import flow_policy
from policies.flow.view import FlowView, view_of
from policies.state.views import NodeLoad, PortLoad

DELAY_WEIGHT = 0.1
"""Weight of the latest chunk in the moving average of the messages' delay."""
MOST_DELAY = 2.0
"""Most that the delay adds to a chunk, in chunks' times: what is posted is the bound on harm."""
MOST_IN_FLIGHT = 4096
"""Most chunks of one flow that are in flight when it is submitted: a bound on one event's cost. ASSUMPTION: more than
permits of all lives of an agent that a read outlasts."""
ORDERED_A_TURN = 256
"""Flows that hear of a new order in one event, a bound on its cost; the others do so in the ticks that follow at
once."""
PLACED_A_TURN = 4
"""Flows that one event places anew after a learned bandwidth has changed: a bound on an event's cost."""
LATE = 4.0
"""Multiple of the time that a chunk should take from which it is late. ASSUMPTION: the bandwidth that is left to a port
does not fall to less than a quarter during one chunk."""
MOST_LATE = 8
"""Windows of late chunks at a port that take no slot. If they all begin to move again, what is posted is 9 windows."""


class Arbiter:
    """Gives permits to flows in the order of a policy. Not thread-safe; time comes in with each event."""

    def __init__(self, policy: FlowPolicy, config: ArbiterConfig | None = None) -> None:
        self.policy = policy
        self.config = config or ArbiterConfig()
        self.ports = PortTable(self.config.port_bytes_per_s)
        self._flows: dict[str, Held] = {}
        self._number = 0
        self._now_s = -math.inf
        self._reds: dict[str, int] = {}
        self._pruned: frozenset[str] = frozenset()
        self._alarms = Alarms()
        self._delay_s = 0.0
        """Seconds of a chunk's two messages: from its permit to its report, less its time on the wire."""
        self.late_chunks = 0
        """Number of chunks that gave up their slots because they were late."""
        self._outdated: dict[Held, None] = {}
        self._unordered: list[Held] = []
        """Flows that have not heard of the latest order yet, the next one last."""
        self._dirty: dict[PortState, None] = {}
        self._takers: dict[type[FlowEvent], Callable[[Any, float], None]] = {
            ev.Submitted: self._submitted,
            ev.Done: self._done,
            ev.Posted: self._posted,
            ev.Cleared: self._cleared,
            ev.Advanced: self._advanced,
            ev.Unscheduled: self._unscheduled,
            ev.Withdrawn: self._withdrawn,
            ev.Lost: self._lost,
            ev.Ordered: self._ordered,
            ev.PolicySet: self._policy_set,
            ev.Bandwidth: self._bandwidth,
            ev.Tick: self._tick,
        }

    # ------------------------------------------------------------------------------------------------------ reading

    def __len__(self) -> int:
        return len(self._flows)

    def __contains__(self, flow_id: str) -> bool:
        return flow_id in self._flows

    @property
    def started(self) -> bool:
        """Whether an event was accepted yet."""
        return self._now_s > -math.inf

    def next_tick_s(self) -> float | None:
        """Returns the time by which a `Tick` is needed if no other event comes, None if none is."""
        return self._now_s if self._unordered else self._alarms.next_s()

    def view(self, flow_id: str, now_s: float) -> FlowView:
        """Returns where a flow stands. Raises UnknownFlow."""
        return view_of(self._held(flow_id), self.ports, now_s)

    def rank(self, flow_id: str) -> tuple[float, ...]:
        """Returns a flow's place in the policy's order; the least goes first. Raises UnknownFlow."""
        return self._held(flow_id).rank

    def blocked(self, flow_id: str) -> bool:
        """Returns whether a flow gets no permit because a chunk between its engines is late. Raises UnknownFlow."""
        return self._held(flow_id).blocked

    def flow_ids(self) -> list[str]:
        """Returns the ids of all flows that have not ended, by submission."""
        return list(self._flows)

    def load_of(self, node: str) -> NodeLoad:
        """Returns what is still to move at a node's two ports, in the policy's order."""
        return NodeLoad(node, self._load(Port(node, Side.EGRESS)), self._load(Port(node, Side.INGRESS)))

    def _load(self, name: Port) -> PortLoad:
        port = self.ports.at(name)
        flows = [state for pair in port.pairs.values() for state in pair.flows.values()]
        return PortLoad(port.known(), bands_of((state.rank[:-1], _to_move(state)) for state in flows))

    # ------------------------------------------------------------------------------------------------------- events

    def apply(self, event: FlowEvent, now_s: float) -> list[Permit]:
        """Takes an event into account and returns the permits that follow, in the order in which they are given.

        Raises a FlowError for an event that is refused; nothing has changed then.
        """
        if not math.isfinite(now_s) or now_s < self._now_s:
            raise BadEvent(f"now_s is {now_s!r}, after {self._now_s!r}: pass a monotonic clock's time")
        self._takers[type(event)](event, now_s)
        self._now_s = now_s
        self._pass_time(now_s)
        return self._grant(now_s) if self._dirty else []

    def _submitted(self, event: ev.Submitted, now_s: float) -> None:
        flow = event.flow
        if flow.flow_id in self._flows:
            raise DuplicateFlow(
                f"flow {flow.flow_id!r} is known already: submit each read under an id of its own"
            )
        if len(self._flows) >= self.config.most_flows:
            raise TooManyFlows(f"{len(self._flows)} flows are held: raise most_flows or submit fewer at once")
        _check_in_flight(event)
        if not (math.isfinite(event.weight) and event.weight > 0):
            raise BadEvent(f"flow {flow.flow_id!r}: weight {event.weight!r}: it must be finite and > 0")
        pair = self.ports.pair(flow.source, flow.target)
        turn = max(pair.egress.turn, pair.ingress.turn)
        state = pair.flows[flow.flow_id] = Held(flow, self._number, now_s, turn, pair, event.weight)
        self._number += 1
        state.red = float(self._reds.get(flow.batch, math.inf))
        state.pruned = flow.request_id in self._pruned
        state.lent = event.lent
        if event.gated:
            state.cleared = []
        self._flows[flow.flow_id] = state
        self._place(state, now_s)
        for size in event.in_flight:
            self._post(state, size, now_s, whole=state.posted + size == state.left)
        self._enqueue(state, now_s)

    def _done(self, event: ev.Done, now_s: float) -> None:
        state = self._held(event.flow_id)
        if not state.permits:
            raise BadEvent(f"flow {event.flow_id!r} has nothing posted: answer each permit once")
        if type(event.size) is not int or not 0 <= event.size <= state.left:
            raise BadEvent(f"flow {event.flow_id!r}: {event.size!r} bytes done, {state.left} were left")
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            raise BadEvent(f"flow {event.flow_id!r}: {event.seconds!r} seconds: they must be finite and >= 0")
        permit = _answered(state.permits, event.size)
        if not event.last and _would_end(state, permit, event.size):
            raise BadEvent(
                f"flow {event.flow_id!r}: nothing is left of it after these {event.size} bytes: say last"
            )
        self._learn(state, permit, event, now_s)
        if permit.late:
            self._count_again(state, permit, now_s)
        state.left -= event.size
        others = [other for other in state.permits if other is not permit]
        if permit.whole and event.size == permit.size and others:
            # it has overtaken chunks that were permitted before it, of which one is the flow's last now
            others[-1].whole = True
            self._close(state, permit, now_s)
        elif permit.whole or (permit.in_flight and event.size < permit.size):
            permit.size -= event.size
            state.posted -= event.size
            if state.lent and not (state.unscheduled or state.withdrawn):
                # its next chunk is posted when the reader's ingress has room
                self._stop(state, permit, now_s)
        else:
            self._close(state, permit, now_s)
        self._fill(state)
        if event.last:
            self._end(state, now_s)
        elif not state.withdrawn:
            # a chunk boundary: any timer of its old place is void
            state.place = None
            self._place(state, now_s)
            # its open permits may cover more than is left, because a chunk may move less than it was permitted
            self._requeue(state, now_s)

    def _posted(self, event: ev.Posted, now_s: float) -> None:
        state = self._held(event.flow_id)
        if not state.lent or not state.permits:
            raise BadEvent(f"flow {event.flow_id!r} is not lent or has no permit: post by permit only")
        for permit in state.permits:
            if not permit.moving:
                self._move(state, permit, now_s)
                return

    def _cleared(self, event: ev.Cleared, now_s: float) -> None:
        state = self._held(event.flow_id)
        if event.size is None:
            state.cleared = None
        elif type(event.size) is not int or event.size < 0:
            raise BadEvent(f"flow {event.flow_id!r}: {event.size!r} bytes cleared: it must be a whole number")
        elif event.size == 0:
            state.cleared = []
        elif state.cleared is not None:
            state.cleared.append(event.size)
        self._requeue(state, now_s)

    def _advanced(self, event: ev.Advanced, now_s: float) -> None:
        state = self._held(event.flow_id)
        if type(event.rli) is not int or event.rli < 0:
            raise BadEvent(
                f"flow {event.flow_id!r}: rli {event.rli!r}: it must be a whole number, at least 0"
            )
        state.rli = event.rli
        self._place(state, now_s)

    def _unscheduled(self, event: ev.Unscheduled, now_s: float) -> None:
        state = self._held(event.flow_id)
        if state.withdrawn:
            raise BadEvent(f"flow {event.flow_id!r} is withdrawn: nothing more of it may be posted")
        state.unscheduled = True
        self._post_only(state, state.left, now_s, whole=True)
        self._dequeue(state)

    def _withdrawn(self, event: ev.Withdrawn, now_s: float) -> None:
        state = self._held(event.flow_id)
        if type(event.posted) is not int or not 0 <= event.posted <= state.left:
            raise BadEvent(
                f"flow {event.flow_id!r}: {event.posted!r} bytes on their way, {state.left} were left"
            )
        state.withdrawn = True
        if event.posted:
            self._post_only(state, event.posted, now_s, whole=False)
            self._dequeue(state)
        else:
            self._end(state, now_s)

    def _lost(self, event: ev.Lost, now_s: float) -> None:
        gone = [self._flows[flow_id] for flow_id in event.flow_ids if flow_id in self._flows]
        if event.node is not None:
            gone += [
                state
                for state in self._flows.values()
                if event.node in (state.flow.source, state.flow.target)
            ]
        for state in dict.fromkeys(gone):
            self._end(state, now_s)

    def _ordered(self, event: ev.Ordered, now_s: float) -> None:
        self._reds = {batch: rank for rank, batch in enumerate(event.batches)}
        self._pruned = frozenset(event.pruned)
        self._unordered = list(self._flows.values())
        self._unordered.reverse()
        self._order_some(ORDERED_A_TURN, now_s)

    def _order_some(self, most: int, now_s: float) -> None:
        """Lets up to `most` flows hear of the latest order, by submission."""
        for _ in range(min(most, len(self._unordered))):
            state = self._unordered.pop()
            red = float(self._reds.get(state.flow.batch, math.inf))
            pruned = state.flow.request_id in self._pruned
            if self._flows.get(state.flow.flow_id) is not state or (
                red == state.red and pruned == state.pruned
            ):
                continue
            moved = pruned != state.pruned or state.flow.stage is not Stage.P2D
            state.red, state.pruned = red, pruned
            if moved:
                self._place(state, now_s)

    def _tick(self, event: ev.Tick, now_s: float) -> None:
        self._order_some(ORDERED_A_TURN, now_s)

    def _policy_set(self, event: ev.PolicySet, now_s: float) -> None:
        self.policy = flow_policy(event.choice.name, event.choice.params)
        for state in self._flows.values():
            state.level = None
            state.ready_at = now_s
            self._place(state, now_s)
            self._enqueue(state, now_s)

    def _bandwidth(self, event: ev.Bandwidth, now_s: float) -> None:
        if not (math.isfinite(event.bytes_per_s) and event.bytes_per_s > 0):
            raise BadEvent(f"port {event.port}: {event.bytes_per_s!r} bytes/s: it must be finite and > 0")
        port = self.ports.at(event.port)
        port.set_nominal(event.bytes_per_s)
        for pair in port.pairs.values():
            for state in pair.flows.values():
                self._place(state, now_s)

    # --------------------------------------------------------------------------------------------------- bookkeeping

    def _held(self, flow_id: str) -> Held:
        state = self._flows.get(flow_id)
        if state is None:
            raise UnknownFlow(f"flow {flow_id!r} is not known: it was never submitted, or it has ended")
        return state

    def _place(self, state: Held, now_s: float) -> None:
        """Asks the policy where the flow stands, and puts it there."""
        place = standing(self.policy, state, self.ports, now_s)
        if place == state.place and state.level == place.level:
            return
        state.stand(place)
        self._alarms.place_ends(state, place, len(self._flows))
        if state.entry:
            state.pair.push(state)
            self._touch(state)

    def _touch(self, state: Held) -> None:
        self._dirty[state.pair.egress] = self._dirty[state.pair.ingress] = None

    def _enqueue(self, state: Held, now_s: float) -> None:
        """Lets a flow wait for a permit if it has bytes without one, its source's arbiter permits them, and its rate
        allows it now. Its ports count it as waiting in any case.
        """
        self._touch(state)
        if state.entry or state.withdrawn or state.left <= state.posted:
            return
        if not state.counted:
            state.counted = True
            state.pair.egress.waiting += 1
            state.pair.ingress.waiting += 1
        if state.waiting <= 0:
            return
        if state.ready_at > now_s and state.place is not None and state.place.rate is not None:
            self._alarms.rests(state)
            return
        state.pair.push(state)

    def _dequeue(self, state: Held) -> None:
        state.pair.drop(state)
        if state.counted:
            state.counted = False
            state.pair.egress.waiting -= 1
            state.pair.ingress.waiting -= 1
        self._touch(state)

    def _requeue(self, state: Held, now_s: float) -> None:
        """Lets a flow wait for a permit, or no longer, as its bytes and its source's permits are now."""
        if state.waiting <= 0:
            self._dequeue(state)
        self._enqueue(state, now_s)

    def _post(
        self,
        state: Held,
        size: int,
        now_s: float,
        whole: bool = False,
        in_flight: bool = False,
        moves: bool = True,
    ) -> None:
        """Counts a chunk as posted at both ports; it `moves` now unless its permit waits for the reader's ingress."""
        egress, ingress = state.pair.egress, state.pair.ingress
        permit = OpenPermit(size, whole, in_flight)
        state.permits.append(permit)
        if moves:
            self._move(state, permit, now_s)
        state.posted += size
        state.passed = 0
        if state.stalled_at is not None:
            state.held_s += now_s - state.stalled_at
            state.stalled_at = None
        for port in (egress, ingress):
            port.posted += 1
            port.turn = max(port.turn, state.turn)
        state.turn += size / state.weight

    def _move(self, state: Held, permit: OpenPermit, now_s: float) -> None:
        """Begins to count a permit's chunk in the time in which both ports are busy."""
        egress, ingress = state.pair.egress, state.pair.ingress
        permit.begin(now_s, egress.integral(now_s), ingress.integral(now_s))
        egress.moving += 1
        ingress.moving += 1
        self._alarms.look(state, permit, now_s + self.config.late_s)

    def _stop(self, state: Held, permit: OpenPermit, now_s: float) -> None:
        """Ends what `_move` has begun."""
        if permit.moving:
            permit.moving = False
            permit.look = 0
            for port in (state.pair.egress, state.pair.ingress):
                port.integral(now_s)
                port.moving -= 1

    def _post_only(self, state: Held, size: int, now_s: float, whole: bool) -> None:
        """Replaces a flow's open permits by one for all that its worker has posted, up to `last`.

        Permits that crossed the worker's message on their way are void. What is posted between engines of which a chunk
        is late, is late at once.
        """
        blocked = state.blocked
        for permit in list(state.permits):
            self._close(state, permit, now_s)
        self._post(state, size, now_s, whole, not whole)
        if blocked:
            self._count_late(state, state.permits[0], now_s)

    def _is_late(self, state: Held, permit: OpenPermit, now_s: float) -> bool:
        """Returns whether a posted chunk takes longer than it may (`ArbiterConfig.late_s`)."""
        if now_s < permit.at_s + self.config.late_s or not permit.size:
            return False
        egress, ingress = state.pair.egress, state.pair.ingress
        share = min(egress.certain(), ingress.certain()) / max(egress.posted, ingress.posted)
        return now_s - permit.at_s >= LATE * permit.size / share

    def _count_late(self, state: Held, permit: OpenPermit, now_s: float) -> None:
        """Lets a late chunk take no slots, or looks at it again later where too many are late at its ports."""
        egress, ingress = state.pair.egress, state.pair.ingress
        if max(egress.late, ingress.late) >= MOST_LATE * self.config.window:
            self._alarms.look(state, permit, now_s + self.config.late_s)
            return
        permit.late = True
        permit.look = 0
        self.late_chunks += 1
        for port in (egress, ingress):
            port.integral(now_s)
            port.moving -= 1
            port.posted -= 1
            port.late += 1
        late = state.pair.late
        late[state.flow.engines] = late.get(state.flow.engines, 0) + 1
        self._requeue_like(state, now_s)

    def _count_again(self, state: Held, permit: OpenPermit, now_s: float) -> None:
        """Ends what `_count_late` has begun, because a part of the chunk has arrived, or its permit ends."""
        egress, ingress = state.pair.egress, state.pair.ingress
        permit.late = False
        for port in (egress, ingress):
            port.posted += 1
            port.late -= 1
        self._move(state, permit, now_s)
        late = state.pair.late
        late[state.flow.engines] -= 1
        if not late[state.flow.engines]:
            del late[state.flow.engines]
        self._requeue_like(state, now_s)

    def _requeue_like(self, state: Held, now_s: float) -> None:
        """Lets the flows between a flow's engines wait for permits, or no longer."""
        for other in state.pair.flows.values():
            if other.flow.engines == state.flow.engines:
                self._requeue(other, now_s)
        self._touch(state)

    def _fill(self, state: Held) -> None:
        """Lets a flow's whole permit, if it has one, cover what no other permit of it covers."""
        for permit in state.permits:
            if permit.whole:
                more = max(-permit.size, state.left - state.posted)
                permit.size += more
                state.posted += more

    def _close(self, state: Held, permit: OpenPermit, now_s: float) -> None:
        """Ends an open permit and frees its slots."""
        if permit.late:
            self._count_again(state, permit, now_s)
        self._stop(state, permit, now_s)
        state.permits.remove(permit)
        state.posted -= permit.size
        state.pair.egress.posted -= 1
        state.pair.ingress.posted -= 1
        if not state.permits:
            state.stalled_at = now_s
        self._touch(state)

    def _end(self, state: Held, now_s: float) -> None:
        for permit in list(state.permits):
            self._close(state, permit, now_s)
        self._dequeue(state)
        self._forget(state)

    def _forget(self, state: Held) -> None:
        del self._flows[state.flow.flow_id]
        state.withdrawn = True
        state.place = None  # voids its timers
        self.ports.leave(state.pair, state)

    def _learn(self, state: Held, permit: OpenPermit, event: ev.Done, now_s: float) -> None:
        """Learns from a chunk, and times what its permit still covers from now on."""
        if event.seconds <= 0.0 or not permit.moving:
            return
        egress, ingress = state.pair.egress, state.pair.ingress
        if self.config.learn:
            if permit.late or self._is_late(state, permit, now_s):
                for port in (egress, ingress):
                    self._learn_late(port, event)
            else:
                elapsed = now_s - permit.at_s
                delay_s = min(max(0.0, elapsed - event.seconds), MOST_DELAY * self.config.chunk_s)
                self._delay_s += DELAY_WEIGHT * (delay_s - self._delay_s)
                for port, since in ((egress, permit.egress_clock), (ingress, permit.ingress_clock)):
                    share = port.integral(now_s) - since
                    if share >= elapsed * ALONE:
                        share = min(share, max(event.seconds, LEAST_S))
                    port.late_in_a_row = 0
                    self._teach(port, event.size, share)
        permit.begin(now_s, egress.integral(now_s), ingress.integral(now_s))

    def _learn_late(self, port: PortState, event: ev.Done) -> None:
        """Learns from a late chunk only where it is the port that is slow: where more chunks in a row were late than
        can have been posted when an engine stood still.
        """
        port.late_in_a_row += 1
        if port.late_in_a_row > (1 + MOST_LATE) * self.config.window:
            self._teach(port, event.size, event.seconds)

    def _teach(self, port: PortState, size: int, share: float) -> None:
        if port.learn(size, share, self.config.learn_chunks):
            for pair in port.pairs.values():
                for other in pair.flows.values():
                    # places depend on the bandwidth by their deadlines
                    if other.due_at is not None:
                        self._outdated[other] = None

    def _pass_time(self, now_s: float) -> None:
        """Places flows anew whose time has come, or whose bandwidth has been learned anew."""
        for state in self._alarms.ended_places(now_s):
            if state.posted:
                continue  # placed at its next chunk boundary
            # its alarm is spent: the new place needs another
            state.place = None
            self._place(state, now_s)
        for state in self._alarms.rested(now_s):
            self._enqueue(state, now_s)
        for state, permit in self._alarms.due_looks(now_s):
            if self._is_late(state, permit, now_s):
                self._count_late(state, permit, now_s)
            else:
                self._alarms.look(state, permit, now_s + self.config.late_s)
        for state in list(islice(self._outdated, PLACED_A_TURN)):
            del self._outdated[state]
            if self._flows.get(state.flow.flow_id) is state:
                self._place(state, now_s)

    # ------------------------------------------------------------------------------------------------------- permits

    def _grant(self, now_s: float) -> list[Permit]:
        permits: list[Permit] = []
        while (state := next_served(self._dirty, self.config)) is not None:
            permits.append(self._permit(state, now_s))
            self._touch(state)
        return permits

    def _permit(self, state: Held, now_s: float) -> Permit:
        """Gives a flow its next chunk, or all that is left of it if it has its ports to itself."""
        place = state.place
        assert place is not None
        if place.rate is not None:
            # the rate that is needed from now on
            place = standing(self.policy, state, self.ports, now_s)
        count_passed(state)
        rate = self.ports.rate(state.flow.source, state.flow.target)
        waiting = state.waiting
        config = self.config
        # Without the delay, messages that take as long as a chunk make the port look slower and so each chunk smaller
        # than the one before, down to the least.
        least = max(config.least_chunk_bytes, state.flow.least)
        size = min(waiting, max(least, int(rate * (config.chunk_s + self._delay_s))))
        if state.cleared:
            # The source's arbiter does not see what other sources send to this ingress. Where nothing else is there,
            # its size stands, because both arbiters count the same chunks.
            if _is_alone_at(state.pair.ingress, state):
                size = waiting
        elif config.whole_read_when_alone and place.rate is None and _is_alone(state):
            most_s = config.whole_at_most_s
            size = waiting if most_s is None else min(waiting, max(size, int(rate * most_s) - state.posted))
        whole = size == state.left - state.posted
        self._post(state, size, now_s, whole, moves=not state.lent)
        if state.cleared:
            del state.cleared[0]
        if place.rate is not None:
            state.ready_at = now_s + size / place.rate
        level = place.level
        if state.waiting <= 0 or (place.rate is not None and state.ready_at > now_s):
            self._dequeue(state)
            self._enqueue(state, now_s)
        if self.policy.turns:
            self._place(state, now_s)
        return Permit(state.flow.flow_id, size, level, whole)


def _answered(permits: list[OpenPermit], size: int) -> OpenPermit:
    """Returns the permit that a chunk of `size` bytes answers: the least that allows as much, else the oldest.

    The oldest that allows as much may be one for several chunks in flight, which then never arrive in full. A permit
    whose chunk is not posted yet is answered only where there is no other, and of two alike one that is not late.
    """
    posted = [permit for permit in permits if permit.moving] or permits
    allow = [permit for permit in posted if permit.size >= size]
    return min(allow, key=lambda permit: (permit.size, permit.late)) if allow else posted[0]


def _would_end(state: Held, permit: OpenPermit, size: int) -> bool:
    """Returns whether a chunk of `size` bytes, which answers `permit`, is the last that the flow can have."""
    if state.withdrawn:
        return len(state.permits) == 1 and size >= permit.size
    return size == state.left


def _is_alone(state: Held) -> bool:
    """Returns whether no other flow waits at the flow's ports, and nothing is posted there but its own chunks.

    Who waits is not enough: where the last slot falls to a flow that waits alone behind another's chunks, as any flow
    does on its arrival, whole reads would fill the ports in the order of arrival, whatever the policy.
    """
    return _is_alone_at(state.pair.egress, state) and _is_alone_at(state.pair.ingress, state)


def _is_alone_at(port: PortState, state: Held) -> bool:
    return port.waiting == 1 and port.posted == len(state.permits)


def _to_move(state: Held) -> int:
    """Returns the bytes of a flow that may still pass its ports: of one that is withdrawn only those on their way, and
    of one between engines that stand still none, because others pass it.
    """
    if state.blocked:
        return 0
    return min(state.posted, state.left) if state.withdrawn else state.left


def _check_in_flight(event: ev.Submitted) -> None:
    """Raises BadEvent if the chunks in flight cannot be the flow's."""
    sizes, flow = event.in_flight, event.flow
    if len(sizes) > MOST_IN_FLIGHT:
        raise BadEvent(
            f"flow {flow.flow_id!r}: {len(sizes)} chunks in flight, at most {MOST_IN_FLIGHT} can be"
        )
    if any(type(size) is not int or size <= 0 for size in sizes) or sum(sizes) > flow.size:
        raise BadEvent(
            f"flow {flow.flow_id!r}: chunks {list(sizes[:8])} in flight: each has at least 1 byte, all together "
            f"at most the {flow.size} that are left"
        )


LEAST_S = 1e-6
"""Least seconds that a chunk is believed to take. A worker that says less must not make a bandwidth infinite, on which
the permits of all others rest.
"""

ALONE = 1 - 1e-9
"""Share of a chunk's time from which it counts as alone at its port, but for rounding."""
