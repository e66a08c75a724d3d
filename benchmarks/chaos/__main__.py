"""Harms an application under load by a seeded schedule of faults, judges every answer, and adds runs up.

    python -m benchmarks.chaos                             10 minutes on sim engines, seed 1
    python -m benchmarks.chaos --minutes 60 --seeds 1 2 3  three runs; those that are kept already are skipped
    python -m benchmarks.chaos --engines vllm              1 prefill and 2 decode vLLM engines, SmolLM2-135M
    python -m benchmarks.chaos --bare                      sim engines without Ray, which brings processes back at once
    python -m benchmarks.chaos --flow                      reads of KV by permits of a flow agent, which fails as well
    python -m benchmarks.chaos --bare --flow --lend        engines lend prefixes, and are harmed while they do
    python -m benchmarks.chaos --flow --engines vllm       the same over NIXL
    python -m benchmarks.chaos --gcs                       also loses Ray's control process, whose state is in Redis
    python -m benchmarks.chaos --scaling                   with an autoscaler, while numbers of engines are ordered
    python -m benchmarks.chaos --soak                      an hour, a fault a minute, slopes of memory and open files

The exit status is 1 if a request failed, an answer was wrong, or something was left behind, if the clients did not
get enough of the processor to measure stalls, and with --lend if no loan was of use. Results are kept in
benchmarks/results/chaos: every run in one JSON file, a page and a picture of all.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.answers import Answer
from benchmarks.chaos.asks import Ask, Talks, difference, sim_ask
from benchmarks.chaos.clients import Judge
from benchmarks.chaos.redis_ray import has_redis
from benchmarks.chaos.report import draw, lines_of, page_of, slopes_of, table_of
from benchmarks.chaos.results import Kept, is_bad, machine_facts, result_of
from benchmarks.chaos.run import Run
from benchmarks.chaos.setups import Setup, sim_setup, vllm_setup
from benchmarks.chaos.totals import MOST_FROZEN, added_up, frozen_share
from benchmarks.chaos.vllm_asks import References, drawn, fixed_asks
from benchmarks.live.load import run_fast
from benchmarks.live.machine import at_the_end, command, save
from benchmarks.live.servers import ROOT, Server, answers, running
from benchmarks.progress import teller
from benchmarks.results_io import write_text

OUT = ROOT / "benchmarks" / "results" / "chaos"
SOAK_EVERY_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 1 if a run failed, got a wrong text, left something behind or measured no stalls."""
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description=__doc__)
    parser.add_argument("--engines", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--minutes", type=float, default=None, help="length of a run (default 10; --soak 60)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--clients", type=int, help="clients, each with one request at a time (32; vllm 3)")
    parser.add_argument(
        "--every-s", type=float, help="least seconds between two faults (3; vllm 5; --soak 60)"
    )
    parser.add_argument("--ingresses", type=int, default=2)
    parser.add_argument("--soak", action="store_true", help="moderate load and a fault a minute, for an hour")
    parser.add_argument(
        "--bare", action="store_true", help="sim engines without Ray: processes come back at once"
    )
    parser.add_argument(
        "--flow",
        action="store_true",
        help="reads of KV are scheduled, and there are faults of the agent",
    )
    parser.add_argument(
        "--lend",
        action="store_true",
        help="with --bare and --flow: engines lend each other prefixes, and are harmed while they do",
    )
    parser.add_argument(
        "--gcs",
        action="store_true",
        help="sim engines on a Ray with Redis, whose control process is killed as well; "
        "without redis-server: only reports how long it takes until it is back",
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="sim engines whose numbers and roles an autoscaler changes meanwhile, and faults of it",
    )
    parser.add_argument("--only", help="only kinds of faults whose name contains this text")
    parser.add_argument("--again", action="store_true", help="also run what is kept already")
    parser.add_argument("--logs", type=Path, help="folder for the logs of Ray and Serve of runs that are bad")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default %(default)s)")
    args = parser.parse_args(argv)
    if args.gcs and (args.bare or args.engines != "sim"):
        parser.error("--gcs is for sim engines with Ray")
    if args.scaling and (args.bare or args.flow or args.gcs or args.soak or args.engines != "sim"):
        parser.error("--scaling is for sim engines with Ray, without --flow, --gcs and --soak")
    if args.lend and not (args.bare and args.flow):
        parser.error(
            "--lend is for sim engines without Ray whose reads are scheduled: give --bare and --flow, too"
        )
    if args.engines == "vllm" and (args.bare or args.soak):
        parser.error("--bare and --soak are for sim engines")
    if args.gcs and not has_redis():
        return without_redis(sim_setup())
    minutes = args.minutes or (60.0 if args.soak else 10.0)
    setup = _setup(args)
    name = "-".join(
        [
            args.engines,
            *["bare"] * args.bare,
            *["flow"] * args.flow,
            *["lend"] * args.lend,
            *["gcs"] * args.gcs,
            *["scaling"] * args.scaling,
            *["soak"] * args.soak,
        ]
    )
    kept, bad = Kept(args.out / f"{name}.json"), False
    said = command("benchmarks.chaos", argv)
    for seed in args.seeds:
        if kept.has(seed, minutes) and not args.again:
            print(f"seed {seed}: kept already")
            continue
        result = run_once(setup, seed, minutes, said, args.logs)
        bad = bad or is_bad(result) or frozen_share(result) > MOST_FROZEN
        machine = at_the_end(result["machine"])
        if machine is None:
            # prints that the code has changed, and keeps the run where nothing reads it
            save(args.out / f"{name}-{seed}.json", result)
            bad = True
            continue
        kept.add(result | {part: machine[part] for part in ("commit", "clean")} | {"machine": machine})
        draw(args.out / f"{name}.png", result)
        write_text(args.out / f"{name}.md", page_of(kept.runs, f"{name}.png"))
        for at_s, cause, form, message in result["details"]:
            print(f"  {at_s} s: {cause}: {form}: {message}")
        print(
            "\n".join(["", *lines_of(added_up([result])), *table_of(added_up([result])), *slopes_of(result)])
        )
    if kept.runs:
        print("\n".join(["", "all kept runs:", *lines_of(added_up(kept.runs))]))
    return int(bad)


def run_once(setup: Setup, seed: int, minutes: float, said: str, logs: Path | None = None) -> dict[str, Any]:
    """Serves an application, harms it for `minutes`, and returns what was found; the application has ended then.

    `said` is the command, which the result keeps. If something is bad, the logs of all its processes go to `logs`.
    """
    say, machine = teller(), machine_facts()

    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
        served = setup.command(Path(folder))
        with running(served, say) as server:
            _weigh_as_much(server.pid)
            with _at_once() if setup.engines == "vllm" else contextlib.nullcontext():
                result = run_fast(
                    _harm(setup, seed, minutes, served.port, server.pid, Path(folder), say, said, machine)
                )
            if logs is not None and is_bad(result):
                _keep_logs(server, logs / f"seed-{seed}")
    return result


def _weigh_as_much(pid: int) -> None:
    """Gives the session of a process the scheduling weight of this one's, where the kernel weighs sessions (sched(7),
    autogroups): a harness that was started with less than a new session has would hardly run beside its server.
    """
    own, other = Path("/proc/self/autogroup"), Path(f"/proc/{pid}/autogroup")
    with contextlib.suppress(OSError):
        other.write_text(own.read_text().rpartition(" ")[2])


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Lets this process run whenever it has something to do (SCHED_RR of sched(7)), where that is allowed.

    Engine cores of vLLM would keep it waiting again and again, and meanwhile stalls could not be counted. It takes
    hardly any time itself. Processes that it starts meanwhile would run so, too.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def without_redis(setup: Setup) -> int:
    """Kills the control process of a Ray that keeps its state on its disk, says when it is back, and returns 0."""
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
        served = setup.command(Path(folder))
        with running(served, print) as server:
            (gcs,) = _gcs_of(server)
            killed_s = time.monotonic()
            gcs.kill()
            while not (_gcs_of(server) - {gcs} and answers(served.port, "/health/ready")):
                time.sleep(0.1)
            print(
                "no redis-server is installed here, so no faults are made beside the loss of Ray's control process: it "
                f"was back, and the application ready, {time.monotonic() - killed_s:.1f} s after it had been killed"
            )
    return 0


def _gcs_of(server: Server) -> set[psutil.Process]:
    return {
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if process.name() == "gcs_server"
    }


def _keep_logs(server: Server, to: Path) -> None:
    """Copies the logs of the server and of its Ray, whose folder is in the command line of its raylet."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    shutil.copy(server.log, to / "server.log")
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for argument in process.cmdline():
                if match := re.fullmatch(r"--session[-_]dir=(.+)", argument):
                    shutil.copytree(Path(match[1]) / "logs", to / "ray", dirs_exist_ok=True)
                    return


async def _harm(
    setup: Setup,
    seed: int,
    minutes: float,
    port: int,
    root_pid: int,
    folder: Path,
    say: Any,
    said: str,
    machine: Any,
) -> dict[str, Any]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    judge: Judge = _judge
    talks = Talks(seed) if setup.lends else None
    make: Callable[[random.Random], Ask] = functools.partial(
        sim_ask, long_share=setup.long_share, talks=talks
    )
    if setup.engines == "vllm":
        references, fixed = References(), fixed_asks()
        say(f"taking {len(fixed)} undisturbed answers")
        await references.take(port, fixed)
        judge, make = references.judge, functools.partial(drawn, fixed, long_share=setup.long_share)
    run = Run(setup, seed, port, root_pid, folder / "orders", judge, say)
    await run.go(minutes, make, stop)
    return result_of(run, setup, seed, said, machine)


def _judge(ask: Ask, answer: Answer) -> tuple[str, str] | None:
    why = difference(ask, answer)
    return None if why is None else ("wrong", why)


def _setup(args: argparse.Namespace) -> Setup:
    if args.engines == "vllm":
        setup = vllm_setup(args.clients or 3, args.every_s or 5.0, args.ingresses, args.flow)
    else:
        setup = sim_setup(
            args.clients or (16 if args.soak else 32),
            args.every_s or (SOAK_EVERY_S if args.soak else 3.0),
            args.ingresses,
            bare=args.bare,
            flow=args.flow,
            gcs=args.gcs,
            soak=args.soak,
            scaling=args.scaling,
            lend=args.lend,
        )
    if args.only:
        kinds = tuple(kind for kind in setup.kinds if args.only in kind.name)
        setup = dataclasses.replace(setup, kinds=kinds)
    return setup


if __name__ == "__main__":
    sys.exit(main())
