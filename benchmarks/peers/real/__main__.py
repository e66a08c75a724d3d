"""Measures Sluice and others on real engines, in turn in one run (`make bench-peers-real`).

    python -m benchmarks.peers.real              four rounds of all rows (some 75 minutes on two cores)
    python -m benchmarks.peers.real --quick      two rounds of short rows, whose figures say nothing (half as long)
    python -m benchmarks.peers.real --sides sluice ray          without vllm-router
    python -m benchmarks.peers.real --sides colocated vllm      one engine, beside vLLM's own server

Two comparisons alternate. With one prefill and one decode engine Sluice stands beside vllm-router and Ray Serve LLM;
with one engine that does both it stands beside vLLM's own server, which has an idle Ray beside it. The engines are of
the installed vLLM with SmolLM2-135M in float32 (`benchmarks.peers.real.sides`). Every side serves alone and is measured
by the same client; the order changes from round to round. First the idle side is watched, then come the rows
(`benchmarks.peers.real.rows`), in which the aims stand, too. A row's ratio is paired by round: the geometric mean of
Sluice / peer, with the 95 % interval of Student's t on the logarithms. A finished side of a round is kept
(`benchmarks.live.kept`), and the same command goes on after it. The exit status is 1 if a request failed or a server
misbehaved; no time makes it fail.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.live import measure, targets
from benchmarks.live.kept import Parts
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.servers import ServerError, running
from benchmarks.peers import environment as router_environment
from benchmarks.peers import turns
from benchmarks.peers.real import environment as ray_environment
from benchmarks.peers.real.report import COMPARISONS, comparison_of, draw, markdown, rows
from benchmarks.peers.real.rows import sample_of
from benchmarks.peers.real.sides import ONE_OPTIONS, OPTIONS, RAY, ROUTER, SIDES, command_of
from benchmarks.progress import teller

CODE = (*LIVE_CODE, "benchmarks/peers")
NAME = "real"
ROUNDS = 4
SETTLE_S = 5.0
"""Seconds between the first answer of a side and what is measured: processes of Ray are busy for a while after it."""
IDLE_S, QUICK_IDLE_S = 15.0, 3.0
FIRST_S = 60.0
"""Longest time for the first answer: a router may take a while to find engines that are ready."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """The extent of one run; `quick` makes each row short."""

    rounds: int
    sides: tuple[str, ...]
    seed: int = 0
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Peers:
    """The parts of the other sides: program of vllm-router, interpreter of Ray Serve LLM, and the model."""

    program: Path | None
    interpreter: Path | None
    model: str


def measured(setup: Setup, peers: Peers, number: int, side: str, folder: Path, say: Say) -> dict[str, Any]:
    """Starts a side, measures all rows of a round, and returns the samples. Raises ServerError and MeasureError."""
    served = command_of(side, folder, peers.model, peers.program, peers.interpreter)
    with running(served, say) as server:
        _, problem = measure.first_answer(server, targets.MODEL, 16, FIRST_S)
        time.sleep(SETTLE_S)
        idle = measure.tree_state(server, QUICK_IDLE_S if setup.quick else IDLE_S)
        samples = []
        for case in comparison_of(side).cases.values():
            plan = case.plan(setup.quick)
            found = measure.with_python(server, targets.MODEL, plan, setup.seed + number)
            samples.append(sample_of(found, case.name))
            say(
                f"round {number + 1} of {setup.rounds}, {side}, {case.name}: {found.requests_per_s:.2f} requests/s"
            )
    return {
        "round": number,
        "side": side,
        "started_s": server.started_s,
        "problem": problem,
        "idle": asdict(idle),
        "rows": samples,
    }


def run(setup: Setup, peers: Peers, kept: Parts, say: Say) -> list[dict[str, Any]]:
    """Returns the samples of every side in every round; finished ones are those that `kept` has."""
    found = []
    with tempfile.TemporaryDirectory(prefix="sluice-peers-") as folder:
        for number in range(setup.rounds):
            for side in round_of(setup, number):
                part = partial(measured, setup, peers, number, side, Path(folder), say)
                found.append(kept.once(f"round {number + 1}, {side}", part, say))
    return found


def round_of(setup: Setup, number: int) -> Iterator[str]:
    """Yields the sides of a round in their order. Those that are compared follow one another, so that little time lies
    between the figures of a pair.
    """
    for compared in COMPARISONS.values():
        if sides := [side for side in compared.sides if side in setup.sides]:
            yield from turns.order(sides, number)


def failures(whole: Mapping[str, Any]) -> dict[str, int]:
    """Returns the failures of all requests of a result by side, row and reason."""
    samples = ((part["side"], one["row"], one["failures"]) for part in whole["parts"] for one in part["rows"])
    return turns.failures(SIDES, samples)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if a request failed, a server misbehaved, or the code changed meanwhile."""
    args = turns.parser("benchmarks.peers.real", __doc__, SIDES, ROUNDS).parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, turns.leave)
    say, begun_s = teller(), time.monotonic()
    try:
        peers = Peers(
            router_environment.install() if ROUTER in args.sides else None,
            ray_environment.install() if RAY in args.sides else None,
            targets.model_directory(),
        )
        rounds = args.rounds or (turns.QUICK_ROUNDS if args.quick else ROUNDS)
        setup = Setup(rounds, tuple(args.sides), args.seed, args.quick)
        machine = facts("benchmarks.peers.real.__main__", CODE)
        config = {
            **asdict(setup),
            "rows": {heading: list(compared.cases) for heading, compared in COMPARISONS.items()},
            "engines": {"two": asdict(OPTIONS), "one": asdict(ONE_OPTIONS)},
        }
        versions = router_environment.versions() if peers.program else {}
        versions |= {"ray-serve-llm": ", ".join(ray_environment.REQUIREMENTS)} if peers.interpreter else {}
        kept = Parts(NAME, machine, {**config, "peers": versions})
        found = run(setup, peers, kept, say)
    except (router_environment.PeerError, ServerError, measure.MeasureError) as error:
        print(f"ended early: {error}", file=sys.stderr)
        return 1
    result = {
        "command": command("benchmarks.peers.real", argv),
        "config": config,
        "machine": machine,
        "peers": versions,
        "took_s": round(time.monotonic() - begun_s),
        "ends": kept.ends(),
        "parts": found,
    }
    failed = failures(result)
    say(f"requests that failed: {failed or 'none'}")
    if not save(args.out / f"{NAME}.json", result, levels=4):
        return 1
    kept.forget()
    (args.out / f"{NAME}.md").write_text(markdown(result) + "\n")
    draw(result, args.out, NAME)
    verdicts = [row for row in rows(result) if row.aim]
    met = sum(row.met is True for row in verdicts)
    say(f"{met} of {len(verdicts)} aims are met; {args.out / f'{NAME}.md'} has all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
