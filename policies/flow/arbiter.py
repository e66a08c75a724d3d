"""The arbiter turns the order of a flow policy into permits. The agent of a node and the simulator use this one object.

    permits = arbiter.apply(Submitted(flow), now_s)

A chunk needs a free slot at both of its ports, the source's egress and the target's ingress, and takes both at once or
none. At most `window` chunks are posted at a port. Each event frees slots or changes the order at a few ports only;
among the flows that wait there and have room at both ports, the first in the policy's order is served, until none is
left. While no other flow waits at a flow's ports, one permit covers all that is left of it.

Which flow is served next, and which slots are kept for whom, is `policies.flow.matching`'s; the arbiter conserves work.

Promotion happens at chunk boundaries: a flow is placed anew at each `Done`, and between chunks at the time that its
policy named. A posted chunk keeps its level and is never cancelled. After an event that is refused (`FlowError`)
nothing has changed.
"""

import math
from itertools import islice

from policies.flow import events as ev
from policies.flow.alarms import Alarms
from policies.flow.base import (
    BadEvent,
    DuplicateFlow,
    FlowPolicy,
    Stage,
    TooManyFlows,
    UnknownFlow,
)
from policies.flow.config import ArbiterConfig
from policies.flow.events import FlowEvent, Permit
from policies.flow.matching import count_passed, next_served
from policies.flow.ports import Held, OpenPermit, PortState, PortTable
from policies.flow.registry import flow_policy
from policies.flow.view import FlowView, view_of

PLACED_A_TURN = 4
"""Flows that one event places anew after a learned bandwidth has changed: a bound on an event's cost."""


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
        self._outdated: dict[Held, None] = {}
        self._dirty: dict[PortState, None] = {}

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
        return self._alarms.next_rested_s()

    def view(self, flow_id: str, now_s: float) -> FlowView:
        """Returns where a flow stands. Raises UnknownFlow."""
        return view_of(self._held(flow_id), self.ports, now_s)

    def flow_ids(self) -> list[str]:
        """Returns the ids of all flows that have not ended, by submission."""
        return list(self._flows)

    # ------------------------------------------------------------------------------------------------------- events

    def apply(self, event: FlowEvent, now_s: float) -> list[Permit]:
        """Takes an event into account and returns the permits that follow, in the order in which they are given.

        Raises a FlowError for an event that is refused; nothing has changed then.
        """
        if not math.isfinite(now_s) or now_s < self._now_s:
            raise BadEvent(f"now_s is {now_s!r}, after {self._now_s!r}: pass a monotonic clock's time")
        match event:
            case ev.Done():
                self._done(event, now_s)
            case ev.Submitted():
                self._submitted(event, now_s)
            case ev.Advanced():
                self._advanced(event, now_s)
            case ev.Unscheduled():
                self._unscheduled(event, now_s)
            case ev.Withdrawn():
                self._withdrawn(event, now_s)
            case ev.Lost():
                self._lost(event, now_s)
            case ev.Ordered():
                self._ordered(event, now_s)
            case ev.PolicySet():
                self._policy_set(event, now_s)
            case ev.Bandwidth():
                self._bandwidth(event, now_s)
            case ev.Tick():
                pass
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
        if not 0 <= event.posted <= flow.size:
            raise BadEvent(f"flow {flow.flow_id!r}: {event.posted!r} of {flow.size} bytes cannot be posted")
        pair = self.ports.pair(flow.source, flow.target)
        turn = max(pair.egress.turn, pair.ingress.turn)
        state = pair.flows[flow.flow_id] = Held(flow, self._number, now_s, turn, pair)
        self._number += 1
        state.red = float(self._reds.get(flow.batch, math.inf))
        state.pruned = flow.request_id in self._pruned
        self._flows[flow.flow_id] = state
        self._place(state, now_s)
        if event.posted:
            # Chunks in flight are one permit here, of which each Done takes its part.
            self._post(state, event.posted, True, now_s)
        self._enqueue(state, now_s)

    def _done(self, event: ev.Done, now_s: float) -> None:
        state = self._held(event.flow_id)
        if not state.permits:
            raise BadEvent(f"flow {event.flow_id!r} has nothing posted: answer each permit once")
        if type(event.size) is not int or not 0 <= event.size <= state.left:
            raise BadEvent(f"flow {event.flow_id!r}: {event.size!r} bytes done, {state.left} were left")
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            raise BadEvent(f"flow {event.flow_id!r}: {event.seconds!r} seconds: they must be finite and >= 0")
        permit = next((each for each in state.permits if each.size == event.size), state.permits[0])
        self._learn(state, permit, event, now_s)
        state.left -= event.size
        if permit.whole and event.size < permit.size and not event.last:
            permit.size -= event.size
            state.posted -= event.size
        else:
            self._close(state, permit, now_s)
        if event.last or not state.left or (state.withdrawn and not state.permits):
            self._end(state, now_s)
        elif not state.withdrawn:
            # a chunk boundary: any timer of its old place is void
            state.place = None
            self._place(state, now_s)
            self._enqueue(state, now_s)

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
        self._post_only(state, state.left, now_s)
        self._dequeue(state)

    def _withdrawn(self, event: ev.Withdrawn, now_s: float) -> None:
        state = self._held(event.flow_id)
        if type(event.posted) is not int or not 0 <= event.posted <= state.left:
            raise BadEvent(
                f"flow {event.flow_id!r}: {event.posted!r} bytes on their way, {state.left} were left"
            )
        state.withdrawn = True
        if event.posted:
            self._post_only(state, event.posted, now_s)
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
        for state in self._flows.values():
            red = float(self._reds.get(state.flow.batch, math.inf))
            pruned = state.flow.request_id in self._pruned
            if red == state.red and pruned == state.pruned:
                continue
            moved = pruned != state.pruned or state.flow.stage is not Stage.P2D
            state.red, state.pruned = red, pruned
            if moved:
                self._place(state, now_s)

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
        place = self.policy.place(state, self.ports, now_s)
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
        """Lets a flow wait for a permit if it has bytes without one and its rate allows it now."""
        self._touch(state)
        if state.entry or state.withdrawn or state.waiting <= 0:
            return
        if not state.counted:
            state.counted = True
            state.pair.egress.waiting += 1
            state.pair.ingress.waiting += 1
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

    def _post(self, state: Held, size: int, whole: bool, now_s: float) -> None:
        """Counts a chunk as posted at both ports."""
        egress, ingress = state.pair.egress, state.pair.ingress
        clocks = egress.integral(now_s), ingress.integral(now_s)
        state.permits.append(OpenPermit(size, whole, now_s, *clocks))
        state.posted += size
        state.passed = 0
        if state.stalled_at is not None:
            state.held_s += now_s - state.stalled_at
            state.stalled_at = None
        for port in (egress, ingress):
            port.posted += 1
            port.turn = max(port.turn, state.turn)
        state.turn += size

    def _post_only(self, state: Held, size: int, now_s: float) -> None:
        """Replaces a flow's open permits by one for all that its worker has posted, up to `last`.

        Permits that crossed the worker's message on their way are void.
        """
        for permit in list(state.permits):
            self._close(state, permit, now_s)
        self._post(state, size, True, now_s)

    def _close(self, state: Held, permit: OpenPermit, now_s: float) -> None:
        """Ends an open permit and frees its slots."""
        state.permits.remove(permit)
        state.posted -= permit.size
        for port in (state.pair.egress, state.pair.ingress):
            port.integral(now_s)
            port.posted -= 1
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
        if not self.config.learn or event.seconds <= 0.0:
            return
        elapsed = now_s - permit.at_s
        for port, since in (
            (state.pair.egress, permit.egress_clock),
            (state.pair.ingress, permit.ingress_clock),
        ):
            share = port.integral(now_s) - since
            if share >= elapsed * ALONE:
                share = min(share, event.seconds)
            if port.learn(event.size, share, self.config.learn_chunks):
                for pair in port.pairs.values():
                    for other in pair.flows.values():
                        # places depend on the bandwidth by their deadlines
                        if other.due_at is not None:
                            self._outdated[other] = None
        permit.at_s = now_s
        permit.egress_clock = state.pair.egress.integral(now_s)
        permit.ingress_clock = state.pair.ingress.integral(now_s)

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
        """Gives a flow its next chunk, or all that is left of it if nobody else waits at its ports."""
        place = state.place
        assert place is not None
        if place.rate is not None:
            # the rate that is needed from now on
            place = self.policy.place(state, self.ports, now_s)
        egress, ingress = state.pair.egress, state.pair.ingress
        count_passed(state)
        rate = self.ports.rate(state.flow.source, state.flow.target)
        waiting = state.waiting
        config = self.config
        size = min(waiting, max(config.least_chunk_bytes, int(rate * config.chunk_s)))
        alone = egress.waiting == 1 and ingress.waiting == 1 and place.rate is None
        if alone and config.whole_read_when_alone:
            most_s = config.whole_at_most_s
            size = waiting if most_s is None else min(waiting, max(size, int(rate * most_s)))
        whole = size == waiting
        self._post(state, size, whole, now_s)
        if place.rate is not None:
            state.ready_at = now_s + size / place.rate
        level = place.level
        if state.waiting <= 0 or (place.rate is not None and state.ready_at > now_s):
            self._dequeue(state)
            self._enqueue(state, now_s)
        if self.policy.turns:
            self._place(state, now_s)
        return Permit(state.flow.flow_id, size, level, whole)


ALONE = 1 - 1e-9
"""Share of a chunk's time from which it counts as alone at its port, but for rounding."""
