"""Harms the lender of a prefix while a vLLM engine reads it, and judges each answer.

    python -m benchmarks.chaos.lenders                  one round (root, Linux, tc)
    python -m benchmarks.chaos.lenders --rounds 20      some hours
    python -m benchmarks.chaos.lenders --only killed    only the kinds of faults that are named

A prefill engine lies on one of two hosts, which are network namespaces with a slow link between them; another prefill
engine and a decode engine lie on the other one (`lending_hosts`). The first has computed a prompt, whose answer is the
undisturbed one. Then the same prompt comes to the other prefill engine. The router has the first one lend what it has
cached, and the other reads it over the link, by permits of a flow agent and with checksums of all blocks, which takes
two seconds. A round has each of these faults of the lender once, in an order by the seed:

    lending          it is killed while it makes the lease, before anything is read
    killed           it is killed while its prefix is read
    stopped          it is stopped for 5 s while its prefix is read
    stopped, long    it is stopped until the answer has come
    cut              the link to it is down for 5 s while its prefix is read
    cut, long        the link is down until the answer has come
    reset            the connections to it are reset while its prefix is read

A fault in the middle of a read begins when a quarter of the prefix has come over the link, by the counter of its
device. What was killed is started again after half a second. Whatever the fault, the borrower must give the undisturbed
answer in the same attempt: from the prefix if it still comes, else from the prompt, which it computes. The same prompt
is then sent to it once more, so that its cache is judged, too.

A prompt that the lender is to compute may be tried again at the other prefill engine: after a long cut the decode
engine's connection to the lender may be dead, which its next read finds out at its beginning or in its middle. Such a
prompt cannot be lent. It is counted, and the next one is taken.

Kept of each fault: the shares of the prefix that had come at the fault and in all, how the loan ended by the ingress's
counter, further attempts, whether both answers were the undisturbed one up to near ties, the seconds from the fault to
the first token, and what was left anywhere: open requests, leases, blocks, reads at the flow agent, processes. Then
loans are made until one is used again; those that were of no use are counted, and so are prompts that could not be
lent. Aims: no wrong answer, one attempt and one loan each, nothing left. The exit status is 1 if one of them is missed,
and 2 where hosts cannot be made. Each round has engines of its own. Finished rounds are kept until the result is
written, and the same command, also with more rounds, goes on after an interruption.
"""

import asyncio
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.answers import Answer
from benchmarks.chaos.hosted import send
from benchmarks.chaos.lenders_report import counted_once, rows
from benchmarks.chaos.lending_hosts import BORROWER, LENDER, PATIENCE_S, LendingHosts
from benchmarks.chaos.rounds import BITS_PER_S, carry_out, parser_of
from benchmarks.chaos.vllm_asks import compare
from benchmarks.mfs import link
from benchmarks.mfs.workload import Workload
from policies.request.life import Life
from policies.request.stage import Stage

MODULE = "benchmarks.chaos.lenders"
SHARE = 0.25
"""Share of the prefix that has come over the link when a fault begins."""

SHORT_S = 5.0
RESTART_S = 0.5
REST_S = 1.5
"""Seconds between two looks at what is left, of which both must find nothing: engines and flow agents report at least
once a second, and what they report may be from before the fault."""
LEFT_S = 60.0
"""Seconds in which everything must be given back. Leases of a lender that nobody releases end by themselves."""

PROMPTS_PER_ROUND = 10_000
PROMPTS_LEFT_OUT = 5

IN_THE_LEASE = "lending"
RESET = "reset"
KINDS = (IN_THE_LEASE, "killed", "stopped", "stopped, long", "cut", "cut, long", RESET)


@dataclass(slots=True)
class Loan:
    """One prompt of the borrower and its loan. `at_s` is the moment of the fault, and `moved` the share of the prefix
    that had come by then; both are None if that moment never came.
    """

    answer: Answer
    first_s: float | None
    at_s: float | None = None
    moved: float | None = None
    moved_in_all: float = 0.0
    attempts: int = 0
    loans: dict[str, int] = field(default_factory=dict)
    prompt_s: float | None = None
    """When the borrower had the KV of the whole prompt."""

    def since(self, at_s: float | None) -> float | None:
        """Returns the seconds from the moment of the fault to another one; None if one of the two never came."""
        return None if self.at_s is None or at_s is None else round(at_s - self.at_s, 2)


@dataclass(slots=True)
class Fault:
    """One fault and what came of it. The borrower had the prompt `prompt_s` after the fault, and the first token came
    `recovery_s` after it. `useless` loans were made later before one was used, and `strayed` prompts were tried again
    at another engine than the lender; `undisturbed_s` are the seconds of the loan that was used from the moment at
    which it would have been harmed to its first token.
    """

    kind: str
    moved: float | None
    moved_in_all: float
    loans: dict[str, int]
    attempts: int
    right: bool
    wrong: str
    prompt_s: float | None
    recovery_s: float | None
    left: str = ""
    useless: int = 0
    strayed: int = 0
    undisturbed_s: float | None = None


class Round:
    """Carries out faults, one after another."""

    def __init__(self, hosts: LendingHosts, first_prompt: int, say: Callable[[str], None]) -> None:
        self._hosts, self._say = hosts, say
        self._workload = Workload()
        self._prompts = itertools.count(first_prompt)
        self._processes = self._strayed = 0

    async def warm(self) -> None:
        """Has both prefill engines compute, so that the router knows their speeds, and makes loans until one is used.
        Notes how many processes there are.
        """
        tokens = self._prompt()
        for engine in (LENDER, BORROWER):
            await self._whole(tokens, engine)
        await self._hosts.speed_known(BORROWER)
        await self._until_used()
        self._processes = self._hosts.count()

    async def fault(self, kind: str) -> Fault:
        """Harms the lender of one prefix, and returns what came of it."""
        tokens, expected = await self._lendable()
        loan = await self._borrowed(tokens, kind)
        if loan.at_s is None:
            raise RuntimeError(f"{kind}: the fault found no loan, which ended as {loan.loans}")
        again, _ = await self._hosts.ask(tokens, BORROWER)
        verdicts = [judged(answer, expected) for answer in (loan.answer, again)]
        found = Fault(
            kind, loan.moved, loan.moved_in_all, loan.loans, loan.attempts,
            right=not any(verdict is not None and verdict[0] == "wrong" for verdict in verdicts),
            wrong="; ".join(": ".join(verdict) for verdict in verdicts if verdict is not None),
            prompt_s=loan.since(loan.prompt_s),
            recovery_s=loan.since(loan.first_s),
        )  # fmt: skip
        found.left = await self._left()
        self._strayed = 0
        found.useless, used = await self._until_used()
        found.strayed = self._strayed
        found.undisturbed_s = used.since(used.first_s)
        return found

    async def _whole(self, tokens: Sequence[int], engine: str) -> Answer:
        """Returns an undisturbed answer. Raises RuntimeError if it fails."""
        answer, _ = await self._hosts.ask(tokens, engine)
        if not answer.done or answer.error is not None:
            raise RuntimeError(
                f"an undisturbed request failed: {answer.status} {answer.error}: {answer.message}"
            )
        return answer

    async def _lendable(self) -> tuple[list[int], Answer]:
        """Returns a fresh prompt that the lender alone has cached, and its undisturbed answer. Raises RuntimeError if
        `PROMPTS_LEFT_OUT` prompts one after another were tried again elsewhere.
        """
        for _ in range(PROMPTS_LEFT_OUT):
            tokens = self._prompt()
            answer = await self._whole(tokens, LENDER)
            if not self._hosts.strayed:
                await self._hosts.cached(tokens, LENDER)
                return tokens, answer
            self._strayed += 1
            self._say("a prompt was tried again at another engine, so it is not lent")
        raise RuntimeError(f"{PROMPTS_LEFT_OUT} prompts were tried again at another engine than the lender")

    async def _until_used(self) -> tuple[int, Loan]:
        """Makes loans of fresh prompts until one is used. Returns how many were not, and that one. Raises TimeoutError
        if none is used for long.
        """
        end_s = time.monotonic() + PATIENCE_S
        for useless in itertools.count():
            tokens, _ = await self._lendable()
            loan = await self._borrowed(tokens)
            if loan.loans.get("used"):
                return useless, loan
            self._say(f"a loan was of no use: {loan.loans}")
            if time.monotonic() > end_s:
                break
        raise TimeoutError(f"no loan was used in {PATIENCE_S:g} s")

    async def _borrowed(self, tokens: Sequence[int], kind: str = "") -> Loan:
        """Sends the borrower a prompt that the lender has cached, and returns what came of it. With a `kind` the lender
        is harmed meanwhile.
        """
        hosts = self._hosts
        tree, before, received = hosts.tree(LENDER), hosts.loans(), hosts.received_bytes()
        asked = asyncio.create_task(hosts.ask(tokens, BORROWER))
        harm = None
        try:
            request = await self._moment(asked, kind == IN_THE_LEASE, received)
            loan = Loan(Answer(stream=True), None)
            if request is not None:
                if kind != IN_THE_LEASE:
                    loan.moved = self._moved(request, received)
                loan.at_s = time.monotonic()
                harm = asyncio.create_task(self._harm(kind, tree, asked))
            loan.answer, loan.first_s = await asked
            if request is not None:
                loan.moved_in_all, loan.attempts = self._moved(request, received), request.attempts
                loan.prompt_s = request.times.pooled_s
            loan.loans = {
                how: count - before[how] for how, count in hosts.loans().items() if count > before[how]
            }
            if harm is not None:
                await harm
            return loan
        finally:
            asked.cancel()
            if harm is not None:
                # without an answer the round ends, and what was killed must not be started again behind it
                harm.cancel()

    async def _moment(self, asked: "asyncio.Task[Any]", in_the_lease: bool, received: int) -> Life | None:
        """Returns the request when its prefix is being lent, or else when `SHARE` of the prefix has come over the link;
        None if it ends before that.
        """
        request: Life | None = None

        def come() -> bool:
            nonlocal request
            request = self._hosts.request()
            if asked.done() or request is None:
                return asked.done()
            if in_the_lease:
                return request.stage is Stage.LENDING
            return request.lender is not None and self._moved(request, received) >= SHARE

        await self._hosts.until(come, "a loan")
        return None if asked.done() else request

    def _moved(self, request: Life, received: int) -> float:
        """Returns the share of the lent prefix that has come over the link since it had `received` as many bytes; 0
        while nothing is lent.
        """
        if request.lent is None:
            return 0.0
        return round((self._hosts.received_bytes() - received) / request.lent.kv_bytes, 3)

    async def _harm(self, kind: str, tree: list[psutil.Process], asked: "asyncio.Task[Any]") -> None:
        """Begins a fault of the lender or of the link to it, and ends it. `tree` has the lender's processes."""
        hosts = self._hosts
        last_s = PATIENCE_S if kind.endswith("long") else SHORT_S
        if kind.startswith("stopped"):
            # nsenter, the first of them, stops itself when the engine stops
            send(tree[1:], signal.SIGSTOP)
            try:
                await asyncio.wait([asked], timeout=last_s)
            finally:
                send(tree, signal.SIGCONT)
        elif kind.startswith("cut"):
            hosts.pair.prefill.link("down")
            try:
                await asyncio.wait([asked], timeout=last_s)
            finally:
                hosts.pair.prefill.link("up")
        elif kind == RESET:
            hosts.pair.reset()
        elif kind:
            await hosts.kill(LENDER, tree)
            await asyncio.sleep(RESTART_S)
            hosts.begin(LENDER)
            await hosts.ready(LENDER)

    async def _left(self) -> str:
        """Returns what is left anywhere after a while, "" for nothing."""
        begun_s = time.monotonic()
        left, before = ["no look"], ["no look"]
        while (left or before) and time.monotonic() < begun_s + LEFT_S:
            await asyncio.sleep(REST_S)
            left, before = self._hosts.held(), left
            if (count := self._hosts.count()) != self._processes:
                left.append(f"{count} processes instead of {self._processes}")
        return "; ".join(left or before)

    def _prompt(self) -> list[int]:
        return self._workload.prompt("loose", next(self._prompts))


def judged(answer: Answer, expected: Answer) -> tuple[str, str] | None:
    """Returns None for the undisturbed answer, or ("wrong" or "near tie", why)."""
    if not answer.done or answer.error is not None:
        return "wrong", f"{answer.status} {answer.error}: {answer.message}"
    return compare(answer.choices[0], expected.choices[0])


def schedule(seed: int, number: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """Returns the kinds of all faults of a round in order: each round has all of them."""
    return random.Random(f"{seed} {number}").sample(kinds, len(kinds))


def first_prompt(seed: int, number: int) -> int:
    """Returns the number of the first prompt of a round: no two rounds share one."""
    return (seed * PROMPTS_PER_ROUND + number) * PROMPTS_PER_ROUND


async def measured(
    seed: int, number: int, kinds: Sequence[str], say: Callable[[str], None], logs: Path | None = None
) -> list[dict[str, Any]]:
    """Returns what came of each fault of a round, as the result keeps it. The logs of all processes go to `logs`."""
    found = []
    with tempfile.TemporaryDirectory(prefix="sluice-lenders-") as folder, link.pair(BITS_PER_S) as pair:
        hosts = LendingHosts(pair, Path(folder))
        try:
            await hosts.start()
            say(f"round {number + 1}: all engines serve")
            faults = Round(hosts, first_prompt(seed, number), say)
            await faults.warm()
            say(f"round {number + 1}: a loan was used")
            for kind in schedule(seed, number, kinds):
                fault = await faults.fault(kind)
                say(f"round {number + 1}: {fault}")
                found.append(asdict(fault))
        finally:
            await hosts.stop()
            if logs is not None:
                hosts.keep_logs(logs / f"round-{number + 1}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 1 if an aim is missed, or 2 where hosts cannot be made."""
    parser = parser_of(MODULE, __doc__, rounds=1)
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help="kinds of faults"
    )
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of all processes")
    args = parser.parse_args(argv)

    def made(number: int, say: Callable[[str], None]) -> Coroutine[Any, Any, list[dict[str, Any]]]:
        return measured(args.seed, number, args.only, say, args.logs)

    def missed(fault: Mapping[str, Any]) -> bool:
        return not fault["right"] or bool(fault["left"]) or not counted_once(fault)

    config = {"seed": args.seed, "kinds": list(args.only)}
    return carry_out(MODULE, argv, args, config, made, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
