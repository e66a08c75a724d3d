"""Measures KV reads that are unscheduled, by EDF and by MFS over one shaped link (see the package's docstring).

    python -m benchmarks.mfs [--policies ...] [--loads ...] [--runs N] [--requests N]

First, requests alone tell what the link carries and how long each class takes by itself; loads and promises come from
that, and are the same for all policies. Then each run starts the engines for each policy, in another order each time,
and sends the same requests. Finished parts are kept, and the same command goes on after an interruption. It needs root,
for network namespaces, and `tc`; without them it says so and ends with 2.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
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
from benchmarks.mfs.engines import TOKEN_BYTES, UNSCHEDULED, Sizes, StartError, running
from benchmarks.mfs.workload import KINDS, Arrival, Kind, Workload, arrivals, rate
from benchmarks.results_io import write_text

MODULE = "benchmarks.mfs.__main__"
CODE = (*LIVE_CODE, "benchmarks/hosts", "benchmarks/mfs")
OUT = ROOT / "benchmarks" / "results" / "mfs"
LONE = 8
"""Requests of each class that are sent alone, over all decode engines, to learn what the link carries."""


class BadRunError(Exception):
    """A run measured something else than it should. The message says what."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement: everything that decides a figure beside the code and the machine."""

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    runs: int
    bits_per_s: int
    workload: Workload
    sizes: Sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 1 if something failed, or 2 where the link cannot be made."""
    args = _arguments(argv)
    if (reason := link.why_not()) is not None:
        print(f"benchmarks.mfs: {reason}: nothing is measured here", file=sys.stderr)
        return 2
    plan = Plan(
        policies=tuple(args.policies),
        loads=tuple(args.loads),
        runs=args.runs,
        bits_per_s=round(args.mbit * 1e6),
        workload=Workload(requests=args.requests),
        sizes=Sizes(prefill_kv_gib=args.prefill_kv_gib, decode_kv_gib=args.decode_kv_gib),
    )
    facts, begun_s = machine.facts(MODULE, CODE), time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun_s:6.1f} s] {text}", flush=True)

    parts = Parts("mfs", facts, asdict(plan))
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-mfs-") as folder, link.pair(plan.bits_per_s) as pair:
            lone, cells = _measure(plan, pair, Path(folder), parts, say)
    except (StartError, BadRunError, ConnectionError) as error:
        print(f"benchmarks.mfs: ended early, finished parts are kept: {error}", file=sys.stderr)
        return 1
    return _finish(plan, facts, argv, lone, cells, parts, Path(args.out))


def _measure(
    plan: Plan, pair: link.Pair, folder: Path, parts: Parts, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what lone requests told, and the cells of all policies, runs and loads."""
    lone = parts.get("lone")
    if lone is None:
        with running(pair, folder / "lone", UNSCHEDULED, plan.sizes, say) as engines:
            found = asyncio.run(_alone(Client(engines, _pools(plan), {}), plan))
        lone = parts.put("lone", found)
    say(f"alone: {lone['bytes_per_s'] / 1e6:.1f} MB/s; TTFT {lone['ttft_s']}")
    promises = {kind: _promise(lone, kind, plan.workload) for kind in KINDS}
    cells = []
    for run in range(plan.runs):
        # in another order each time, so that no policy is always the first or the last
        turned = plan.policies[run % len(plan.policies) :] + plan.policies[: run % len(plan.policies)]
        for policy in turned:
            names = {load: f"{policy}, run {run}, load {load:g}" for load in plan.loads}
            if any(parts.get(name) is None for name in names.values()):
                with running(pair, folder / f"{policy}-{run}", policy, plan.sizes, say) as engines:
                    client = Client(engines, _pools(plan), promises)
                    asyncio.run(_loads(client, plan, pair, lone, promises, run, names, parts, say))
            cells += [
                {"policy": policy, "run": run, "load": load, **(parts.get(name) or {})}
                for load, name in names.items()
            ]
    return lone, cells


def _pools(plan: Plan) -> dict[Kind, list[list[int]]]:
    return {kind: plan.workload.prompts(kind) for kind in KINDS}


async def _warm(client: Client, plan: Plan) -> None:
    """Has the prefill engine cache every prompt, and every decode engine read from it once. Raises BadRunError."""
    sizes = {"tight": plan.workload.tight_prompts, "loose": plan.workload.loose_prompts}
    asks = [
        await client.alone(Arrival(0.0, kind, place, place % plan.sizes.decodes))
        for kind in KINDS
        for place in range(sizes[kind])
    ]
    _check(asks)


async def _alone(client: Client, plan: Plan) -> dict[str, Any]:
    """Returns the bandwidth of loose reads without others, and the medians of both classes' times in seconds."""
    await client.connect()
    await _warm(client, plan)
    asks = {
        kind: [await client.alone(Arrival(0.0, kind, n, n % plan.sizes.decodes)) for n in range(LONE)]
        for kind in KINDS
    }
    client.close()
    for own in asks.values():
        _check(own)
    loose = asks["loose"]
    return {
        "bytes_per_s": statistics.median(ask.bytes / ask.busy_s for ask in loose),
        "ttft_s": {kind: round(_median(own, "first_s", "sent_s"), 4) for kind, own in asks.items()},
        "transfer_s": {kind: round(_median(own, "admitted_s", "reading_s"), 4) for kind, own in asks.items()},
        "after_kv_s": {kind: round(_median(own, "first_s", "admitted_s"), 4) for kind, own in asks.items()},
    }


async def _loads(
    client: Client,
    plan: Plan,
    pair: link.Pair,
    lone: Mapping[str, Any],
    promises: Mapping[Kind, Promise],
    run: int,
    names: Mapping[float, str],
    parts: Parts,
    say: Callable[[str], None],
) -> None:
    await client.connect()
    await _warm(client, plan)
    for load, name in names.items():
        if parts.get(name) is not None:
            continue
        per_s = rate(plan.workload, load, lone["bytes_per_s"], TOKEN_BYTES)
        before = pair.received_bytes()
        asks = await client.run(arrivals(plan.workload, per_s, plan.sizes.decodes, run))
        cell = report.cell(asks, promises, pair.received_bytes() - before)
        _check_read(plan, cell)
        parts.put(name, cell)
        tight = cell["tight"]
        say(
            f"{name}: {tight['in_time']} of {tight['requests']} tight in time, failures {cell['failures'] or 'none'}"
        )
    client.close()


def _promise(lone: Mapping[str, Any], kind: Kind, workload: Workload) -> Promise:
    return Promise(workload.slo_factor * lone["ttft_s"][kind], lone["after_kv_s"][kind])


def _median(asks: Sequence[Ask], end: str, begin: str) -> float:
    return statistics.median(getattr(ask, end) - getattr(ask, begin) for ask in asks)


def _check(asks: Sequence[Ask]) -> None:
    """Raises BadRunError unless all these requests, sent alone, were read over the link and answered."""
    for ask in asks:
        if ask.failed is not None or ask.reading_s is None or ask.bytes == 0:
            raise BadRunError(f"{ask.attempt_id}, sent alone: failed {ask.failed}, read {ask.bytes} bytes")


def _check_read(plan: Plan, cell: Mapping[str, Any]) -> None:
    """Raises BadRunError where prompts were not cached, or the KV went another way than over the link."""
    for kind in KINDS:
        # the last token of a prompt is always computed, and with it at most a block of others
        if cell[kind]["least_cached_tokens"] < plan.workload.tokens(kind) / 2:
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
    """Prints the table, and writes result, table and plot."""
    found = report.rows(cells)
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
    if not machine.save(out / "link.json", whole, 4):
        return 1
    write_text(out / "link.md", text)
    report.plot(cells, out, "link")
    parts.forget()
    return 1 if any(cell["failures"] for cell in cells) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mfs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default, sizes = Workload(), Sizes()
    parser.add_argument(
        "--policies", nargs="+", default=[UNSCHEDULED, "edf", "mfs"], help="default: %(default)s"
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
        "--prefill-kv-gib", type=float, default=sizes.prefill_kv_gib, help="default: %(default)s"
    )
    parser.add_argument(
        "--decode-kv-gib", type=float, default=sizes.decode_kv_gib, help="default: %(default)s"
    )
    parser.add_argument("--out", default=str(OUT), help="folder of the result")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
