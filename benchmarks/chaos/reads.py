"""Harms single reads of KV between two vLLM engines on hosts of their own, and judges each answer.

    python -m benchmarks.chaos.reads                    three rounds, ten minutes (root, Linux, tc)
    python -m benchmarks.chaos.reads --rounds 20        an hour and a quarter

A prefill and a decode engine (SmolLM2-135M in float32) lie on two hosts, which are network namespaces, with a link of
400 Mbit/s between them. Reads go by permits of a flow agent, and all blocks are compared by checksums (`two_hosts`).
Every request has a fresh prompt, whose KV takes two seconds over the link, and is first answered undisturbed. A round
has each of these faults once, in an order by the seed:

    cut        the link is down for 5 s while KV moves
    expired    the KV's lease has ended before the decode engine hears of it
    swapped    the decode engine gets the handle of another prompt, and that of a shorter one, its own beginning
    changed    bytes of the lender's KV change after it was computed
    lender     the prefill engine is killed while KV moves
    reader     the decode engine is killed while KV moves
    agent      the flow agent is killed while KV moves
    stopped    the flow agent is stopped for 3 s while KV moves

What fails is tried again from the prompt, once a second, as a router does; what was killed is started again after half
a second. Kept of each fault: why the first try failed ("" if it went on), the seconds from the fault to the first token
of the first whole answer, whether every answer was the undisturbed one, and whether both engines were idle again, with
no lease and no block in use, and no process too many. Aims: no wrong answer, one right answer to each request, nothing
left. The exit status is 1 if one of them is missed, and 2 where hosts cannot be made. Each round has engines of its
own. Finished rounds are kept until the result is written, and the same command, also with more rounds, goes on after an
interruption.
"""

import asyncio
import functools
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.wire.messages import Failed, PrefillDone
from benchmarks.chaos import memory
from benchmarks.chaos.hosted import AGENT
from benchmarks.chaos.rounds import BITS_PER_S, carry_out, parser_of
from benchmarks.chaos.two_hosts import ENGINES, LEASE_S, LENDER, READER, Attempt, Lost, TwoHosts
from benchmarks.experiments.base import Row
from benchmarks.mfs import link
from benchmarks.mfs.workload import Workload

MODULE = "benchmarks.chaos.reads"
MOVING_S = 0.5
"""Seconds from the beginning of a read to the fault: a quarter of the bytes have moved."""

CUT_S = 5.0
STOPPED_S = 3.0
RESTART_S = 0.5
PATIENCE_S = 60.0
LEFT_S = 60.0
"""Seconds in which both engines must be idle. Leases of a reader that has gone end by themselves."""

PROMPT_TOKENS = 2_000
PROMPTS_PER_SEED = 1_000_000
SHORTER = 3
"""Tokens by which a prompt is shorter whose KV fills the same blocks."""

MOVING = ("cut", "lender", "reader", "agent", "stopped")
KINDS = ("expired", "swapped", "swapped, shorter", "changed", *MOVING)
KILLED = {"lender": LENDER, "reader": READER, "agent": AGENT}


@dataclass(slots=True)
class Fault:
    """One fault and what came of it. `first` says why the first try failed, "" if it did not."""

    kind: str
    first: str = ""
    tries: int = 1
    right: bool = True
    recovery_s: float | None = None
    left: str = ""


class Round:
    """Carries out faults, one after another."""

    def __init__(self, hosts: TwoHosts, seed: int, say: Callable[[str], None]) -> None:
        self._hosts, self._say = hosts, say
        self._workload = Workload(loose_tokens=PROMPT_TOKENS)
        self._prompts = itertools.count(PROMPTS_PER_SEED * seed)
        self._processes = 0
        self._others: list[Attempt] = []

    async def warm(self) -> None:
        """Sends some requests, and notes how many processes there are."""
        for _ in range(2):
            found = await self._hosts.whole(self._prompt())
            if not isinstance(found, list):
                raise TypeError(f"an undisturbed request failed: {found}")
        self._processes = self._hosts.count()

    async def fault(self, kind: str) -> Fault:
        """Harms one request, and returns what came of it."""
        tokens = self._prompt()
        expected = await self._hosts.whole(tokens)
        if not isinstance(expected, list):
            raise TypeError(f"an undisturbed request failed: {expected}")
        found = Fault(kind)
        attempt, at_s, task = await self._harmed(kind, tokens)
        answer = await self._hosts.answer(attempt)
        for other in self._others:
            self._hosts.release(other)
        self._others.clear()
        first_s = attempt.first_s
        if not isinstance(answer, list):
            found.first = answer.code
            answer, first_s = await self._again(tokens, found, task)
        await task
        found.right = answer == expected
        found.recovery_s = None if first_s is None else round(first_s - at_s, 2)
        found.left = await self._left()
        return found

    async def _again(
        self, tokens: list[int], found: Fault, fault: "asyncio.Task[None]"
    ) -> tuple[list[int] | Failed | Lost, float | None]:
        """Tries from the prompt until there is an answer, for a while after the fault is over."""
        answer: list[int] | Failed | Lost = Lost()
        over_s: float | None = None
        while not isinstance(answer, list) and (over_s is None or time.monotonic() < over_s + PATIENCE_S):
            await asyncio.sleep(1.0)
            if over_s is None and fault.done():
                over_s = time.monotonic()
            found.tries += 1
            attempt = self._hosts.prefill(tokens)
            done = await attempt.prefilled
            if isinstance(done, PrefillDone):
                self._hosts.decode(attempt, done.handle)
            answer = await self._hosts.answer(attempt)
            if isinstance(answer, list):
                return answer, attempt.first_s
        return answer, None

    async def _harmed(self, kind: str, tokens: list[int]) -> "tuple[Attempt, float, asyncio.Task[None]]":
        """Sends a prompt through both engines and harms it on the way. Returns the attempt, the time of the fault, and
        what ends it.
        """
        hosts = self._hosts
        lender = hosts.core(LENDER).pid
        before: memory.Pages = {}
        if kind == "changed":
            # the undisturbed request has left the same bytes in blocks that may be taken again: others take them first
            await hosts.whole(self._prompt())
            # in a thread: the engines lose a client whose loop stands still
            before = await asyncio.to_thread(memory.pages, lender)
        attempt = hosts.prefill(tokens)
        done = await attempt.prefilled
        if not isinstance(done, PrefillDone):
            raise TypeError(f"an undisturbed prefill failed: {done}")
        handle, at_s = done.handle, time.monotonic()
        if kind == "expired":
            await asyncio.sleep(LEASE_S + 3.0)
            at_s = time.monotonic()
        elif kind.startswith("swapped"):
            # the lease of the other prompt holds until the answer: nothing but the name tells that it is another
            shorter = kind == "swapped, shorter"
            other = hosts.prefill(tokens[:-SHORTER] if shorter else self._prompt())
            self._others.append(other)
            given = await other.prefilled
            if not isinstance(given, PrefillDone):
                raise TypeError(f"an undisturbed prefill failed: {given}")
            handle, at_s = given.handle, time.monotonic()
        elif kind == "changed":
            after = await asyncio.to_thread(memory.pages, lender)
            if not memory.flip(lender, memory.written(before, after)):
                raise RuntimeError("nothing of the KV was found in the lender's memory")
            at_s = time.monotonic()
        hosts.decode(attempt, handle)
        if kind not in MOVING:
            return attempt, at_s, asyncio.create_task(asyncio.sleep(0))
        await attempt.reading
        await asyncio.sleep(MOVING_S)
        at_s = time.monotonic()
        return attempt, at_s, asyncio.create_task(self._end_of(kind))

    async def _end_of(self, kind: str) -> None:
        """Begins a fault of a link or a process, and ends it."""
        hosts = self._hosts
        if kind == "cut":
            hosts.pair.decode.link("down")
            await asyncio.sleep(CUT_S)
            hosts.pair.decode.link("up")
        elif kind == "stopped":
            # nsenter, its parent, stops itself when it stops
            tree = hosts.tree(AGENT)
            tree[-1].send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            for process in tree:
                process.send_signal(signal.SIGCONT)
        else:
            name = KILLED[kind]
            await hosts.kill(name)
            await asyncio.sleep(RESTART_S)
            hosts.begin(name)
            if name in ENGINES:
                await hosts.ready(name)

    async def _left(self) -> str:
        """Returns what is left on the engines or of processes after a while, "" for nothing."""
        begun_s = time.monotonic()
        left = ["no report"]
        while left and time.monotonic() < begun_s + LEFT_S:
            await asyncio.sleep(0.5)
            left = [text for name in ENGINES if (text := self._busy(name, begun_s))]
            if (count := self._hosts.count()) != self._processes:
                left.append(f"{count} processes instead of {self._processes}")
        return "; ".join(left)

    def _busy(self, name: str, since_s: float) -> str:
        at_s, status = self._hosts.statuses.get(name, (0.0, None))
        if status is None or at_s <= since_s:
            return f"{name}: no report"
        counts = {
            "running": status.running,
            "waiting": status.waiting,
            "leases": status.leases,
            "blocks": status.kv_blocks_used,
        }
        return ", ".join(f"{name}: {n} {what}" for what, n in counts.items() if n)

    def _prompt(self) -> list[int]:
        return self._workload.prompt("loose", next(self._prompts))


def schedule(seed: int, number: int) -> list[str]:
    """Returns the kinds of all faults of a round in order: each round has all of them."""
    return random.Random(f"{seed} {number}").sample(KINDS, len(KINDS))


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result."""
    faults = whole["faults"]
    yield Row("reads harmed", None, float(len(faults)))
    for name, bad in (
        ("without a right answer", [one for one in faults if not one["right"]]),
        ("after which something was left", [one for one in faults if one["left"]]),
    ):
        yield Row(f"of them {name}", None, float(len(bad)), aim="0", met=not bad)
    for kind in KINDS:
        mine = [one for one in faults if one["kind"] == kind]
        if mine:
            yield Row(f"{kind}: went on at the first try", None, float(sum(not one["first"] for one in mine)))
            known = [one["recovery_s"] for one in mine if one["recovery_s"] is not None]
            if known:
                yield Row(f"{kind}: longest from the fault to the first token", None, max(known), "s")


async def measured(seed: int, number: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns what came of each fault of a round, as the result keeps it."""
    found = []
    with tempfile.TemporaryDirectory(prefix="sluice-reads-") as folder, link.pair(BITS_PER_S) as pair:
        hosts = TwoHosts(pair, Path(folder))
        try:
            await hosts.start()
            say(f"round {number + 1}: both engines serve")
            faults = Round(hosts, seed, say)
            await faults.warm()
            for kind in schedule(seed, number):
                fault = await faults.fault(kind)
                say(f"round {number + 1}: {fault}")
                found.append(asdict(fault))
        finally:
            await hosts.stop()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 1 if an aim is missed, or 2 where hosts cannot be made."""
    args = parser_of(MODULE, __doc__, rounds=3).parse_args(argv)

    def missed(fault: Mapping[str, Any]) -> bool:
        return not fault["right"] or bool(fault["left"])

    made = functools.partial(measured, args.seed)
    return carry_out(MODULE, argv, args, {"seed": args.seed}, made, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
