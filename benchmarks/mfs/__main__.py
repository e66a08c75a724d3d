"""Measures KV reads that are unscheduled, by EDF and by MFS over one shaped link (see the package's docstring).

    python -m benchmarks.mfs [--setup link|sim] [--policies ...] [--loads ...] [--runs N] [--requests N]

First, requests alone tell what the link carries and how long each class takes by itself; loads and promises come from
that, and are the same for all policies. Then each run starts the engines for each policy, in another order each time,
and sends the same requests. Finished parts are kept, and the same command goes on after an interruption.

A run in which more than 1 % of the flows moved without a permit says nothing about its policy: the table calls it
invalid, no aim is judged by it, the command ends with 1, and the same command measures it again.

The setup `link` needs root, for network namespaces, and `tc`; without them it says so and ends with 2. The setup `sim`
has 16 sim engines on this machine, of which one sends to all others over two simulated links; each load is measured
with lent prefixes and without (`engines`).
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.live import machine
from benchmarks.live.kept import Parts
from benchmarks.live.machine import LIVE_CODE
from benchmarks.mfs import link, report
from benchmarks.mfs.drive import Ask, Client, Promise
from benchmarks.mfs.engines import (
    AGENTS,
    UNSCHEDULED,
    OneMachine,
    OnLink,
    Setup,
    Sizes,
    StartError,
    running,
)
from benchmarks.mfs.reports import Reports
from benchmarks.mfs.workload import BLOCK_TOKENS, KINDS, Arrival, Kind, Workload, arrivals, rate
from benchmarks.progress import teller
from benchmarks.results_io import write_text

MODULE = "benchmarks.mfs.__main__"
CODE = (*LIVE_CODE, "benchmarks/hosts", "benchmarks/mfs")
OUT = ROOT / "benchmarks" / "results" / "mfs"
POLICIES: Mapping[str, tuple[str, ...]] = {
    "link": (UNSCHEDULED, "edf", "mfs", "mfs-swept"),
    "sim": (UNSCHEDULED, "edf", "mfs-swept", "mfs-gated"),
}
"""The policies that are measured unless others are named, by setup."""
COLD_SHARE = 0.5
"""Share of the requests of the setup `sim` that go to prefill engines without the prefix."""
LONE = 8
"""Requests of each class that are sent alone, over all decode engines, to learn what the link carries."""
FIRST_LONE = 1_000
"""Number of the first fresh prompt; those before it warm the engines up."""

FIRST_COLD = 900
"""Number of the first fresh prompt that warms a prefill engine up beside the first one."""

HELD_MS = 5.0
"""Shortest hold that a policy makes: the reading thread's own polls and the way to the agent take less."""


class BadRunError(Exception):
    """A run measured something else than it should. The message says what."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement: everything that decides a figure beside the code and the machine."""

    setup: str
    policies: tuple[str, ...]
    loads: tuple[float, ...]
    runs: int
    bits_per_s: int
    workload: Workload
    sizes: Sizes

    @property
    def forms(self) -> tuple[bool, ...]:
        """Whether prefixes are lent: in both ways where there is somebody to lend them to."""
        return (True, False) if self.sizes.others else (True,)


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the measurement."""

    policy: str
    run: int
    load: float
    lends: bool

    @property
    def name(self) -> str:
        """The name under which the cell is kept."""
        return f"{self.policy}, run {self.run}, load {self.load:g}{'' if self.lends else ', stage 1 off'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 1 if something failed, or 2 where the link cannot be made."""
    args = _arguments(argv)
    on_link = args.setup == "link"
    if on_link and (reason := link.why_not()) is not None:
        print(f"benchmarks.mfs: {reason}: nothing is measured here", file=sys.stderr)
        return 2
    plan = Plan(
        setup=args.setup,
        policies=tuple(args.policies or POLICIES[args.setup]),
        loads=tuple(args.loads),
        runs=args.runs,
        bits_per_s=round(args.mbit * 1e6),
        workload=Workload(
            requests=args.requests, fresh=not on_link, cold_share=0.0 if on_link else COLD_SHARE
        ),
        sizes=Sizes(
            decodes=2 if on_link else 10,
            others=0 if on_link else 5,
            silent_s=args.silent_ms / 1e3,
            prefill_kv_gib=args.prefill_kv_gib,
            decode_kv_gib=args.decode_kv_gib,
            bytes_per_s=args.mbit * 1e6 / 8,
            arbiter=args.arbiter,
        ),
    )
    facts, say = machine.facts(MODULE, CODE), teller()

    parts = Parts(f"mfs-{plan.setup}", facts, asdict(plan))
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-mfs-")))
            pair = stack.enter_context(link.pair(plan.bits_per_s)) if on_link else None
            setup = OneMachine(plan.sizes) if pair is None else OnLink(pair, plan.sizes)
            bench = Bench(plan, setup, pair, folder, parts, say)
            lone, cells = bench.measure()
    except (StartError, BadRunError, ConnectionError) as error:
        print(f"benchmarks.mfs: ended early, finished parts are kept: {error}", file=sys.stderr)
        return 1
    return _finish(plan, facts, argv, lone, cells, parts, Path(args.out))


@dataclass
class Bench:
    """One measurement under way. `pair` is None where there is no real link, whose bytes could be counted."""

    plan: Plan
    setup: Setup
    pair: link.Pair | None
    folder: Path
    parts: Parts
    say: Callable[[str], None]

    def measure(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns what lone requests told, and the cells of all policies, runs, loads and forms."""
        plan, parts = self.plan, self.parts
        lone = parts.get("lone")
        if lone is None:
            with running(self.setup, self.folder / "lone", UNSCHEDULED, plan.sizes, self.say) as engines:
                lone = parts.put("lone", asyncio.run(self._alone(Client(engines, plan.workload, {}))))
        self.say(f"alone: {lone['bytes_per_s'] / 1e6:.1f} MB/s; TTFT {lone['ttft_s']}")
        promises = {kind: _promise(lone, kind, plan.workload) for kind in KINDS}
        cells = []
        for run in range(plan.runs):
            # in another order each time, so that no policy is always the first or the last
            turned = plan.policies[run % len(plan.policies) :] + plan.policies[: run % len(plan.policies)]
            for policy in turned:
                cases = [Case(policy, run, load, lends) for load in plan.loads for lends in plan.forms]
                if any(self._is_due(case) for case in cases):
                    folder = self.folder / f"{policy}-{run}"
                    with running(self.setup, folder, policy, plan.sizes, self.say) as engines:
                        client = Client(engines, plan.workload, promises)
                        asyncio.run(self._cases(client, Reports(engines.router), lone, promises, cases))
                cells += [{**asdict(case), **(parts.get(case.name) or {})} for case in cases]
        return lone, cells

    def _is_due(self, case: Case) -> bool:
        """Whether a cell has not been measured, or only in a way that says nothing about its policy."""
        found = self.parts.get(case.name)
        return found is None or report.invalid(found) != ""

    async def _warm(self, client: Client) -> None:
        """Has the first prefill engine cache every prompt of the pool, every decode engine read from it, and every
        other prefill engine borrow from it. Raises BadRunError.
        """
        workload, decodes = self.plan.workload, self.plan.sizes.decodes
        sizes = {"tight": workload.tight_prompts, "loose": workload.loose_prompts}
        warming = [
            Arrival(0.0, kind, place, place % decodes)
            for kind in KINDS
            for place in range(max(decodes, sizes[kind]))
        ]
        for other in range(1, 1 + self.plan.sizes.others):
            warming += [Arrival(0.0, kind, FIRST_COLD + other, other % decodes, other) for kind in KINDS]
        _check([await client.alone(arrival) for arrival in warming])

    async def _alone(self, client: Client) -> dict[str, Any]:
        """Returns the bandwidth of loose reads without others, and the medians of both classes' bytes and times in
        seconds. Requests go to the first prefill engine, and for `cold_ttft_s` to the others, with lent prefixes.

        The bandwidth is that of the time in which bytes moved: the engines' steps before and after them add to the time
        of a read, but others use the link meanwhile.
        """
        await client.connect()
        await self._warm(client)
        workload, decodes = self.plan.workload, self.plan.sizes.decodes
        lone = {
            kind: [Arrival(0.0, kind, lone_prompt(workload, kind, n), n % decodes) for n in range(LONE)]
            for kind in KINDS
        }
        for arrivals_of in lone.values():
            await self._fill(client, arrivals_of)
        asks = {kind: [await client.alone(arrival) for arrival in lone[kind]] for kind in KINDS}
        cold_ttft_s = await self._cold(client)
        client.close()
        for own in asks.values():
            _check(own)
        return {
            "bytes_per_s": statistics.median(ask.bytes / ask.busy_s for ask in asks["loose"]),
            "bytes": {kind: statistics.median(ask.bytes for ask in own) for kind, own in asks.items()},
            "prefill_s": {
                kind: round(_median(own, "prefilled_s", "sent_s"), 4) for kind, own in asks.items()
            },
            "ttft_s": {kind: round(_median(own, "first_s", "sent_s"), 4) for kind, own in asks.items()},
            "transfer_s": {
                kind: round(_median(own, "admitted_s", "reading_s"), 4) for kind, own in asks.items()
            },
            "after_kv_s": {
                kind: round(_median(own, "first_s", "admitted_s"), 4) for kind, own in asks.items()
            },
            "cold_ttft_s": cold_ttft_s,
        }

    async def _cold(self, client: Client) -> dict[str, float]:
        """Returns the median TTFT in seconds of a request of each class that is alone and borrows its prefix; empty
        where there is nobody to borrow.
        """
        sizes = self.plan.sizes
        found: dict[str, float] = {}
        for kind in KINDS if sizes.others else ():
            lone = [
                Arrival(0.0, kind, FIRST_LONE + LONE + n, n % sizes.decodes, 1 + n % sizes.others)
                for n in range(LONE)
            ]
            await self._fill(client, lone)
            asks = [await client.alone(arrival) for arrival in lone]
            _check(asks)
            found[kind] = round(_median(asks, "first_s", "sent_s"), 4)
        return found

    async def _fill(self, client: Client, requests: Sequence[Arrival]) -> None:
        """Has the first prefill engine cache the prefixes of fresh prompts; those of a pool are cached already."""
        if self.plan.workload.fresh:
            failed = [ask.failed for ask in await client.fill(requests) if ask.failed is not None]
            if failed:
                raise BadRunError(f"{len(failed)} prefixes could not be computed: {failed[0]}")

    async def _cases(
        self,
        client: Client,
        reports: Reports,
        lone: Mapping[str, Any],
        promises: Mapping[Kind, Promise],
        cases: Sequence[Case],
    ) -> None:
        """Measures those of the cases that are due, all of one policy. Raises BadRunError and ConnectionError."""
        await reports.start()
        await client.connect()
        await self._warm(client)
        for place, case in enumerate(cases):
            if self._is_due(case):
                cell = await self._case(client, reports, lone, promises, case, place)
                tight, failures = cell["tight"], cell["failures"] or "none"
                why = report.invalid(cell)
                self.say(
                    f"{case.name}: {tight['in_time']} of {tight['requests']} tight in time, failures {failures}"
                    + (f"; invalid: {why}" if why else "")
                )
        client.close()
        reports.stop()

    async def _case(
        self,
        client: Client,
        reports: Reports,
        lone: Mapping[str, Any],
        promises: Mapping[Kind, Promise],
        case: Case,
        place: int,
    ) -> dict[str, Any]:
        """Measures and keeps one cell, the `place`-th of its policy."""
        plan, sizes = self.plan, self.plan.sizes
        sent = {kind: lone["bytes"][kind] * self.setup.sent_share(plan.workload, kind) for kind in KINDS}
        per_s = rate(plan.workload, case.load, self.setup.ports * lone["bytes_per_s"], sent)
        first_fresh = FIRST_LONE + 2 * LONE + place * plan.workload.requests
        requests = arrivals(plan.workload, per_s, sizes.decodes, case.run, first_fresh, sizes.others)
        await self._fill(client, requests)
        # what warmed the engines up does not count
        await reports.taken()
        client.lends, before = case.lends, self._received_bytes()
        asks = await client.run(requests)
        received = self._received_bytes() - before
        flows, lost = await reports.taken()
        permits = None if case.policy == UNSCHEDULED else flows
        cell = report.cell(asks, promises, received, permits, lost)
        _check_read(plan, case, cell)
        return self.parts.put(case.name, cell)

    def _received_bytes(self) -> int:
        return 0 if self.pair is None else self.pair.received_bytes()


def lone_prompt(workload: Workload, kind: Kind, place: int) -> int:
    """Returns the number of the prompt of a request that is sent alone: a fresh one, or one of the pool, because a
    prompt that nobody has cached would add its computation to what a class takes by itself.
    """
    if workload.fresh:
        return FIRST_LONE + place
    return place % (workload.tight_prompts if kind == "tight" else workload.loose_prompts)


def _promise(lone: Mapping[str, Any], kind: Kind, workload: Workload) -> Promise:
    """Returns what a class is promised: a multiple of what its slowest way takes alone, which is a borrowed prefix."""
    alone_s = max(lone["ttft_s"][kind], lone["cold_ttft_s"].get(kind, 0.0))
    return Promise(workload.slo_factor * alone_s, lone["after_kv_s"][kind])


def _median(asks: Sequence[Ask], end: str, begin: str) -> float:
    return statistics.median(getattr(ask, end) - getattr(ask, begin) for ask in asks)


def _check(asks: Sequence[Ask]) -> None:
    """Raises BadRunError unless all these requests, sent alone, were read over the link and answered."""
    for ask in asks:
        if ask.failed is not None or ask.reading_s is None or ask.bytes == 0:
            raise BadRunError(f"{ask.attempt_id}, sent alone: failed {ask.failed}, read {ask.bytes} bytes")


def _check_read(plan: Plan, case: Case, cell: Mapping[str, Any]) -> None:
    """Raises BadRunError where prompts were not cached, the KV went another way than over the link, or reads were held
    without a policy, or none of them with one: then the policy did not decide.
    """
    if plan.setup == "link":
        _check_link(plan, cell)
    held = sum(value > HELD_MS for kind in KINDS for value in cell[kind]["held_ms"])
    if (held > 0) != (case.policy != UNSCHEDULED):
        raise BadRunError(f"{case.name}: {held} reads were held back; see the agent's log")


def _check_link(plan: Plan, cell: Mapping[str, Any]) -> None:
    for kind in KINDS:
        # the last token of a prompt is always computed, and with it those of its block
        if cell[kind]["least_cached_tokens"] < plan.workload.tokens(kind) - BLOCK_TOKENS:
            raise BadRunError(f"{kind} prompts were not cached ({cell[kind]['least_cached_tokens']} tokens)")
    read_mb = sum(cell[kind]["read_mb"] for kind in KINDS)
    if cell["wire_mb"] < read_mb:
        raise BadRunError(f"{read_mb} MB of KV, but {cell['wire_mb']} MB over the link: see UCX_TLS")


def _finish(
    plan: Plan,
    facts: Mapping[str, Any],
    argv: Sequence[str] | None,
    lone: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    parts: Parts,
    out: Path,
) -> int:
    """Prints the table, and writes result, table and plot. Returns 1 if a request failed or a cell is invalid, else 0;
    the valid cells are then kept, so that the same command measures the others again.
    """
    found = report.rows(cells, lone["bytes_per_s"] if plan.setup == "link" else None)
    reached = report.aims(found)
    text = report.table(found, reached)
    print("\n" + text)
    whole = {
        "command": machine.command(MODULE, argv),
        "machine": facts,
        "config": asdict(plan),
        "lone": lone,
        "rows": [asdict(row) for row in found],
        "aims": [asdict(aim) for aim in reached],
        "cells": cells,
    }
    if not machine.save(out / f"{plan.setup}.json", whole, 4):
        return 1
    write_text(out / f"{plan.setup}.md", text)
    report.plot(cells, out, plan.setup)
    if any(row.invalid for row in found):
        print("benchmarks.mfs: some rows are invalid; the same command measures them again", file=sys.stderr)
        return 1
    parts.forget()
    return 1 if any(cell["failures"] for cell in cells) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mfs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default, sizes = Workload(), Sizes()
    parser.add_argument("--setup", choices=("link", "sim"), default="link", help="default: %(default)s")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=(UNSCHEDULED, *AGENTS),
        help=f"default: {' '.join(POLICIES['link'])}; with the setup sim {' '.join(POLICIES['sim'])}",
    )
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.8, 1.1],
        help="shares of what the link carries (%(default)s)",
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each policy and load (%(default)s)")
    parser.add_argument("--requests", type=int, default=default.requests, help="requests a run (%(default)s)")
    parser.add_argument(
        "--mbit", type=float, default=400.0, help="bandwidth of the link in Mbit/s (%(default)s)"
    )
    parser.add_argument(
        "--silent-ms",
        type=float,
        default=1e3 * sizes.silent_s,
        help="silence of the agent after which held reads go on without it (%(default)s)",
    )
    parser.add_argument(
        "--prefill-kv-gib", type=float, default=sizes.prefill_kv_gib, help="default: %(default)s"
    )
    parser.add_argument(
        "--decode-kv-gib", type=float, default=sizes.decode_kv_gib, help="default: %(default)s"
    )
    parser.add_argument(
        "--arbiter", type=json.loads, default={}, help="fields of the agent's ArbiterConfig, as a JSON object"
    )
    parser.add_argument("--out", default=str(OUT), help="folder of the result")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
