"""One run: an application, its clients, and faults one after the other until the time is up; then it must come to rest.

The next fault begins when no request waits in vain any more and enough of the application is well, or when a bound has
passed. A process that is stopped for a minute may thus still be stopped while another one is killed, as long as one
engine of each role is well.
"""

import asyncio
import contextlib
import functools
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.engine.sim.faults import POISON
from benchmarks.chaos.asks import Ask, poison_ask
from benchmarks.chaos.clients import Apart, Clients, Judge
from benchmarks.chaos.harm import APART_AFTER_S, Harm, Harmer
from benchmarks.chaos.http import connect
from benchmarks.chaos.loans import AWAITED_S, PARTS, at_loans
from benchmarks.chaos.placement import gcs_of
from benchmarks.chaos.processes import Member, Track, by_part, measure, members
from benchmarks.chaos.scaling import DUTIES, STATES, Administrator, State
from benchmarks.chaos.schedule import ENGINES, OTHERS, Schedule, role_of
from benchmarks.chaos.setups import Setup
from benchmarks.chaos.watch import Watch
from benchmarks.live.servers import ROOT, ServerError

SERVED_S = 1.0
"""A request that has made no progress for longer than this waits in vain. ASSUMPTION: twice the longest prefill."""

SETTLE_S = 1.5
"""Seconds after the beginning of a fault before which nobody can say that its effect is over."""

REST_S = 240.0
"""Seconds for the requests under way and the faults in force to end, when the time is up."""

IDLE_S = 90.0
"""Seconds for all slots, leases and blocks to be given back, when the last request has ended."""

POISON_S = 30.0
"""Seconds after poison in which a refusal of others is laid to it. ASSUMPTION: both deaths are over by then."""

TWO_FAULTS = "bystander of two faults"
"""The name under which requests count apart that were refused as poison after two faults took their engines."""

TAKING = frozenset({"kill", "stop", "stall", "memory", "partition"})
"""Actions that take an engine away from the requests that it has."""

MEASURE_S = 10.0

JUDGED_S = 30.0
"""Seconds for Ray to remove the placement groups of replicas that have ended, and for the autoscaler to answer."""

COUNTED_S = 60.0
"""Longest wait for the number of placement groups. ASSUMPTION: Ray's imports take some seconds on a busy machine, and
Ray's client gives up a silent control process by itself after less than half a minute.
"""


def bystander(cause: str, harms: Iterable[Harm], sent_s: float, now_s: float) -> str | None:
    """Returns the fault of which a failed request was a bystander, or None if nothing explains its `cause`.

    A request with which two engines of a role die or stall, one soon after the other, before it has got tokens, is
    refused as poison (`policies.request.troubles`). So it may die twice with real poison; and two faults that took away
    two engines of a role in its life may both have been its engines'. A fault that began before the request was sent is
    none of these, because who comes to a silent engine is no suspect, unless it is a lack of memory, which kills later.
    """
    if not cause.endswith("request_kills_engines"):
        return None
    those = list(harms)
    if any(h.fault.kind.action == "poison" and now_s - h.at_s < POISON_S for h in those):
        return "bystander of poison"
    met = Counter(
        role_of(h.part)
        for h in those
        if h.fault.kind.action in TAKING
        and h.at_s <= now_s
        and (h.ends_s if h.fault.kind.action == "memory" else h.at_s) >= sent_s
    )
    return TWO_FAULTS if any(met[role] >= 2 for role in ENGINES) else None


@dataclass(slots=True)
class Timeline:
    """One entry for each second: seconds, requests ended so far, the longest time that a request waits in vain."""

    at_s: list[float] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    waiting_s: list[float] = field(default_factory=list)


class Survey:
    """The application as the last look found it: its processes, what the ingresses say, and which members are well.

    `wanted` has the number of members that each part should have. Where the fleet is scaled, the part of an engine is
    what the ingresses say that it does: its role, or one of `DUTIES`.

    Processes are looked at in a thread, each once a look, because the loop in which stalls are counted must not wait.
    """

    def __init__(self, setup: Setup, root_pid: int, port: int, harmer: Harmer) -> None:
        self._setup, self._root_pid, self._harmer = setup, root_pid, harmer
        self.members: dict[int, Member] = {}
        self._running: set[int] = set()
        """Pids of the members that live and are not stopped."""
        self._well: dict[tuple[str, ...], dict[str, list[Member]]] = {}
        self.wanted: dict[str, int] = dict(setup.parts)
        self._doing: dict[str, str] = {}
        """The part of each engine by its id, as far as an ingress has ever known it."""
        self.watch = Watch(port, self._ingresses)

    async def look(self) -> None:
        """Looks at all processes and asks all ingresses."""
        self.members, self._running = await asyncio.to_thread(self._scan)
        await self.watch.look()
        if self._setup.scaled:
            self._doing |= doing(self.watch.statuses())
        self._well.clear()

    def part_of(self, member: Member) -> str:
        """Returns the part of a process."""
        if not self._setup.scaled or member.part not in ENGINES:
            return member.part
        return self._doing.get(member.engine_id or "", "starting")

    def _scan(self) -> tuple[dict[int, Member], set[int]]:
        found = members(self._root_pid, self.members)
        return found, {member.pid for member in found.values() if member.running()}

    def _ingresses(self) -> list[Member]:
        return [m for m in self.members.values() if m.part == "ingress" and m.pid in self._running]

    def well(self, states: tuple[str, ...] = ("ready",)) -> dict[str, list[Member]]:
        """Returns the well members of each part, whose engines are in one of `states`. A harmed or incomplete pair of
        ingresses has none.
        """
        if states not in self._well:
            self._well[states] = self._find_well(states)
        return self._well[states]

    def _find_well(self, states: tuple[str, ...]) -> dict[str, list[Member]]:
        statuses = self.watch.statuses()
        ready = {e["id"] for s in statuses for e in s["engines"] if e["state"] in states}
        connected = bool(statuses) and all(s["router"]["connected"] for s in statuses)
        found: dict[str, list[Member]] = {}
        for part, those in by_part(self.members.values(), self.part_of).items():
            found[part] = [m for m in those if self._is_well(m, ready, connected)]
        answering = [pid for pid, seen in self.watch.seen.items() if seen.answered]
        if len(answering) < self._setup.parts["ingress"]:
            found["ingress"] = []
        return found

    def _is_well(self, member: Member, ready: set[str], connected: bool) -> bool:
        if member.name in self._harmer.harmed or member.pid not in self._running:
            return False
        if member.part in ENGINES and self.part_of(member) not in ("starting", "draining"):
            # Ingresses that have no router may not know yet that a core has died.
            own = [m for m in self.members.values() if m.engine_id == member.engine_id]
            running = [m for m in own if m.pid in self._running]
            has_core = "core" not in self._setup.parts or any(m.part == "core" for m in running)
            return member.engine_id in ready and has_core and len(running) == len(own)
        return connected if member.part == "router" else True

    def is_whole(self, part: str) -> bool:
        """Returns whether a part has as many well members as it should have; that of an engine which does not serve is
        whole when all engines are as they should be.
        """
        if part in DUTIES:
            return not self.missing().keys() & {*ENGINES, *DUTIES}
        well = self.well().get(part, [])
        return len(well) >= self.wanted.get(part, 0)

    def missing(self) -> dict[str, int]:
        """Returns how many members of each part are more (+) or fewer (-) than they should be, where they are.

        A quarantined engine is not missing: without requests nothing shows that it is well again.
        """
        well = self.well(("ready", "quarantined"))
        counts = {part: len(well.get(part, [])) - number for part, number in self.wanted.items()}
        return {part: count for part, count in counts.items() if count}


class Run:
    """One run against an application that serves already; `root_pid` is the root of its processes."""

    def __init__(
        self,
        setup: Setup,
        seed: int,
        port: int,
        root_pid: int,
        orders: Path,
        judge: Judge,
        say: Callable[[str], None],
    ) -> None:
        self._setup, self._seed, self._port, self._say = setup, seed, port, say
        self._schedule = Schedule(setup.kinds, seed, setup.parts)
        self.harms: list[Harm] = []
        self.timeline = Timeline()
        self.tracks: dict[tuple[int, float], Track] = {}
        self.clients = Clients(port, judge, self._ingress_fault, self._excused)
        self._harmer = Harmer(orders, self._send_poison, lambda: self.clients.clock.now_s)
        self._resting = False
        self.survey = Survey(setup, root_pid, port, self._harmer)
        self._root_pid = root_pid
        self.administrator: Administrator | None = None
        if setup.scaled:
            self.administrator = Administrator(
                port, seed, lambda: self.clients.clock.now_s, say, self._ordered
            )
            self._ordered(STATES[0])
        self.leaks: dict[str, Any] = {}
        self.open_at_end = 0
        self.minutes = 0.0
        self._poisons = 0
        self._apart: list[Harm] = []
        self._due_s: float | None = None
        """The time at which the next fault might have begun; None: it may not yet."""

    async def go(self, minutes: float, make: Callable[[random.Random], Ask], stop: asyncio.Event) -> None:
        """Runs for `minutes`, or until `stop` is set, and then waits for rest."""
        clock = asyncio.create_task(self.clients.clock.run())
        rngs = [random.Random(f"client {self._seed} {i}") for i in range(self._setup.clients)]
        tasks: list[asyncio.Task[None]] = []
        try:
            if not await self._until_whole(REST_S):
                raise ServerError(f"not whole at the beginning: {self.survey.missing()}")
            tasks += [asyncio.create_task(self.clients.run(functools.partial(make, rng))) for rng in rngs]
            if self.administrator is not None:
                tasks.append(asyncio.create_task(self.administrator.run()))
            begun_s = time.monotonic()
            while time.monotonic() < begun_s + 60 * minutes and not stop.is_set():
                await self._step(True)
            self.minutes = (time.monotonic() - begun_s) / 60
            await self._come_to_rest(tasks)
        finally:
            await self._harmer.end_all()
            clock.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(clock, *tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ faults

    async def _step(self, harming: bool) -> None:
        """Looks once, notes what has recovered, and begins the next fault if its time has come."""
        began_s = time.monotonic()
        await self.survey.look()
        self._note()
        if harming and self._may_begin():
            self._begin_next()
        await asyncio.sleep(max(0.05, self._setup.survey_s - (time.monotonic() - began_s)))

    def _note(self) -> None:
        clients, now_s = self.clients, self.clients.clock.now_s
        waiting_s = clients.waiting_s()
        clients.cut_hung()
        if self.administrator is not None:
            self.administrator.note(not self.survey.missing().keys() & {*ENGINES, *DUTIES})
        if self.harms and waiting_s > SERVED_S and not self._resting:
            self.harms[-1].service_s = now_s - self.harms[-1].at_s
        for harm in self.harms:
            waits = harm.whole_s is None and harm.over_s is not None and now_s - harm.at_s > SETTLE_S
            if waits and self.survey.is_whole(role_of(harm.part)):
                harm.whole_s = now_s - harm.at_s
        for harm in list(self._apart):
            if harm.over_s is not None and harm.whole_s is not None and now_s - harm.at_s > APART_AFTER_S:
                self._apart.remove(harm)
                clients.end_apart(harm.ports)
        line = self.timeline
        if not line.at_s or now_s >= line.at_s[-1] + 1.0:
            line.at_s.append(round(now_s, 1))
            line.ended.append(clients.tally.requests)
            line.waiting_s.append(round(waiting_s, 2))
        if not self.tracks or now_s >= self._measured_s + MEASURE_S:
            self._measured_s = now_s
            measure(self.survey.members.values(), now_s, self.tracks)

    _measured_s = 0.0

    def _may_begin(self) -> bool:
        now_s = self.clients.clock.now_s
        if not self.harms:
            return True
        last = self.harms[-1]
        if now_s < last.at_s + max(self._setup.every_s, SETTLE_S):
            return False
        if self.clients.waiting_s() <= SERVED_S and now_s > last.at_s + last.service_s + self._setup.survey_s:
            return True
        if now_s > last.at_s + self._setup.bound_s:
            last.bounded = True
            return True
        return False

    def _begin_next(self) -> None:
        well = self.survey.well()
        engines = {part: {m.engine_id for m in those} for part, those in well.items()}
        # what belongs to an engine is harmed only where the engine itself is well
        those = {
            part: [m for m in found if role_of(part) == part or m.engine_id in engines.get(role_of(part), ())]
            for part, found in well.items()
        }
        those |= at_loans(self.survey.watch.statuses(), those)
        now_s = self.clients.clock.now_s
        self._due_s = now_s if self._due_s is None else self._due_s
        awaited = PARTS if now_s < self._due_s + AWAITED_S else ()
        fault = self._schedule.next({part: len(found) for part, found in those.items()}, awaited)
        if fault is None:
            return
        self._due_s = None
        part = fault.kind.part
        victim = fault.victim([m.name for m in those[part]])
        member = next(m for m in those[part] if m.name == victim)
        other = None
        if fault.kind.action == "partition":
            found = [m for name in OTHERS[part] for m in those.get(name, ())]
            chosen = fault.other([m.name for m in found])
            other = next(m for m in found if m.name == chosen)
            victim = f"{victim} / {other.name}"
        harm = Harm(fault, victim, now_s, now_s + fault.seconds)
        if part in PARTS:
            harm.hit, harm.outcome = member.part, f"{member.part} engine"
        if part == "ingress" and fault.kind.action in ("kill", "stop"):
            # it takes no further connection while they are listed
            member.signal(signal.SIGSTOP)
            harm.ports = member.remote_ports()
            self.clients.set_apart(harm.ports, Apart(fault.kind.name, lambda: not member.alive()))
            self._apart.append(harm)
        self.harms.append(harm)
        self._say(f"fault {len(self.harms)}: {fault.kind.name} {victim} {fault.seconds:.0f} s")
        self._harmer.begin(harm, member, other)

    def _ordered(self, state: State) -> None:
        self.survey.wanted |= state.engines

    def _ingress_fault(self) -> str | None:
        """Returns the name of the fault for which an ingress may refuse or ignore connections now."""
        return self._apart[-1].fault.kind.name if self._apart else None

    def _excused(self, cause: str, sent_s: float) -> str | None:
        """Returns what explains that a request, sent at `sent_s`, was refused as poison, or None."""
        return bystander(cause, self.harms, sent_s, self.clients.clock.now_s)

    async def _send_poison(self, part: str) -> None:
        """Sends a prompt that kills two engines of a role, on a connection of its own."""
        self._poisons += 1
        tokens = POISON["prefill" if part == "prefill" else "decode"]
        with contextlib.suppress(OSError, TimeoutError):
            connection = await connect(self._port, 5.0)
            await self.clients.send(connection, poison_ask(tokens, self._seed * 1000 + self._poisons))
            connection.drop()

    # ------------------------------------------------------------------------------------------------ the end

    async def _until_whole(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await self._step(False)
            if not self.survey.missing():
                return True
        return False

    async def _come_to_rest(self, tasks: list[asyncio.Task[None]]) -> None:
        """Ends all faults and clients, and notes what is not given back."""
        self._resting = True
        await self._harmer.end_all()
        self.clients.stop()
        if self.administrator is not None:
            self.administrator.stop()
        end_s = time.monotonic() + REST_S
        while time.monotonic() < end_s and not all(task.done() for task in tasks):
            await self._step(False)
        self.open_at_end = len(self.clients.open)
        for task in tasks:
            if task.done() and not task.cancelled():
                # A fault of a client is one of this program.
                task.result()
        whole = await self._until_whole(REST_S)
        if not whole:
            self.leaks |= {f"{part}: processes": count for part, count in self.survey.missing().items()}
        await self._until_idle()
        self.leaks |= dict(self._strays())
        if self.administrator is not None:
            await self._judge_scaling(self.administrator)

    async def _until_idle(self) -> None:
        end_s = time.monotonic() + IDLE_S
        held: dict[str, Any] = {}
        while time.monotonic() < end_s:
            await self._step(False)
            held = held_of(self.survey.watch.statuses())
            if not held:
                return
        self.leaks |= held

    def _strays(self) -> Iterator[tuple[str, int]]:
        """Yields the parts of which more processes live than there should be."""
        alive = Counter(self.survey.part_of(m) for m in self.survey.members.values() if m.alive())
        for part, number in self.survey.wanted.items():
            if alive[part] > number:
                yield f"{part}: stray processes", alive[part] - number

    async def _judge_scaling(self, administrator: Administrator) -> None:
        """Notes in what the autoscaler and Ray are not as was acknowledged last."""
        if administrator.refused is not None:
            self.leaks["order refused"] = administrator.refused
        if administrator.orders and administrator.orders[-1].acknowledged_s is None:
            self.leaks["order not acknowledged"] = dict(administrator.orders[-1].body)
        end_s = time.monotonic() + JUDGED_S
        differences = await self._differences(administrator)
        while differences and time.monotonic() < end_s:
            await self._step(False)
            differences = await self._differences(administrator)
        self.leaks |= differences

    async def _differences(self, administrator: Administrator) -> dict[str, str]:
        """Returns in what the autoscaler and Ray are not as was acknowledged last, by name."""
        told, found = await administrator.told(), await self._placement_groups()
        rules = "the autoscaler does not answer" if told is None else administrator.state.differs(told)
        wanted = administrator.state.replicas
        groups = None if found == wanted else f"{found}, for {wanted} replicas"
        differences = {"what rules": rules, "placement groups": groups}
        return {name: why for name, why in differences.items() if why is not None}

    async def _placement_groups(self) -> int | None:
        """Returns the number of placement groups in the application's Ray, None where it cannot be read."""
        address = await asyncio.to_thread(gcs_of, self._root_pid)
        if address is None:
            return None
        program = (sys.executable, "-m", "benchmarks.chaos.placement", address)
        asked = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        try:
            printed, _ = await asyncio.wait_for(asked.communicate(), COUNTED_S)
        except TimeoutError:
            return None
        finally:
            if asked.returncode is None:
                asked.kill()
                await asked.wait()
        return int(printed.split()[-1]) if asked.returncode == 0 else None


def doing(statuses: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the part of each engine by its id, as ingresses say it: its role while it serves, else one of `DUTIES`.
    Of ingresses that differ the last one counts.
    """
    idle = {"starting": "starting", "draining": "draining", "down": "draining"}
    return {
        engine["id"]: idle.get(engine["state"], "warm" if engine["duty"] == "warm" else engine["role"])
        for status in statuses
        for engine in status["engines"]
    }


def held_of(statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what idle ingresses and engines still hold, by name; empty when all was given back."""
    if not statuses:
        return {"no ingress answers": True}
    held: dict[str, Any] = {}
    for status in statuses:
        counts = {f"requests.{name}": value for name, value in status["requests"].items()}
        counts |= {"leases": status["leases"], "replica.in_flight": status["replica"]["in_flight"]}
        for engine in status["engines"]:
            names = ("running", "waiting", "kv_blocks_used", "leases")
            counts |= {f"{engine['id']}.{name}": engine[name] for name in names}
        held |= {name: value for name, value in counts.items() if value and isinstance(value, int | float)}
    return held
