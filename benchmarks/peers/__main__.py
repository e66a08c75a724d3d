"""Measures Sluice beside vllm-router, on engines that tick alike, in one run (`make bench-peers`).

    python -m benchmarks.peers              eight rounds of all rows (some 60 minutes on two cores)
    python -m benchmarks.peers --quick      two rounds of a few short rows, whose figures say nothing (4 minutes)
    python -m benchmarks.peers --sides sluice bare      without vllm-router

vllm-router is installed from PyPI into an environment of its own (`benchmarks.peers.environment`). In every round each
side (`benchmarks.peers.sides`) serves alone, one after another, for all rows (`benchmarks.peers.rows`), once on engines
with steps of 1 ms and once of 0.1 ms; the order of the sides changes from round to round. The clients are those of the
overhead benchmark: wrk for rates, the lean Python client for times to the first token as well. A row's ratio is paired
by round: the geometric mean of Sluice / peer, with the 95 % interval of Student's t on the logarithms. The aims stand
in `benchmarks.peers.rows`. A finished half of a round is kept (`benchmarks.live.kept`), and the same command goes on
after it. The exit status is 1 if a request failed or a server misbehaved; no time makes it fail.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.live import measure, targets, wrk
from benchmarks.live.kept import Parts
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.measure import Measurement
from benchmarks.live.servers import Server, ServerError, running
from benchmarks.peers import environment, tokenising, turns
from benchmarks.peers.report import draw, markdown, rows
from benchmarks.peers.rows import CLIENTS, PROMPTS, PYTHON, WRK, Case, chosen, times_of
from benchmarks.peers.sides import HOT, LEAN, MODEL, ROUTER, SIDES, SLUICE, Ticks, command_of
from benchmarks.progress import teller

CODE = (*LIVE_CODE, "benchmarks/peers")
"""The folders that decide what is measured; a part of this folder runs in processes of its own."""
ROUNDS = 8
SETTLE_S = 2.0
"""Seconds between the start of a side and its first row: processes of Ray are busy for a while after it."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """The extent of one run: `cases` are its rows, and `quick` makes each of them short."""

    rounds: int
    sides: tuple[str, ...]
    cases: tuple[Case, ...]
    seed: int = 0
    quick: bool = False

    def steps(self) -> list[float]:
        """Returns the steps of the engines in seconds, each once, in the order of the rows."""
        return list(dict.fromkeys(case.step_s for case in self.cases))


class Rounds:
    """The rounds of one run. `program` is vllm-router, `executable` is wrk; files of the servers lie in `folder`."""

    def __init__(
        self, setup: Setup, folder: Path, program: Path | None, executable: str | None, say: Say
    ) -> None:
        self.setup, self.folder, self.say = setup, folder, say
        self.program, self.executable = program, executable

    def half(self, number: int, step_s: float) -> dict[str, Any]:
        """Measures all sides in one round on engines with one step, and returns the samples.

        Raises ServerError, MeasureError and WrkError.
        """
        samples: list[dict[str, Any]] = []
        cases = [case for case in self.setup.cases if case.step_s == step_s]
        for side in turns.order(self.setup.sides, number):
            command = command_of(side, self.folder, Ticks(step_s), self.program)
            with running(command, self.say) as server:
                time.sleep(SETTLE_S)
                if side == SLUICE:
                    measure.first_answer(server, MODEL[side], 16)
                samples += [self.sample(server, case, number, side) for case in cases]
            self.say(f"round {number + 1} of {self.setup.rounds}, {1e3 * step_s:g} ms, {side}: measured")
        return {"samples": samples}

    def sample(self, server: Server, case: Case, number: int, side: str) -> dict[str, Any]:
        """Measures one row of a side."""
        plan, seed, model = case.plan(self.setup.quick), self.setup.seed + number, MODEL[side]
        if case.client == PYTHON:
            return sample_of(measure.with_python(server, model, plan, seed), case, number, side)
        assert self.executable is not None
        return sample_of(measure.with_wrk(server, model, plan, seed, self.executable), case, number, side)


def sample_of(found: Measurement, case: Case, number: int, side: str) -> dict[str, Any]:
    """Returns one row of one side and round, as the result keeps it. CPU times are milliseconds a request."""
    hot_ms = sum(found.cpu_ms_per_request.get(role, 0.0) for role in HOT[side])
    sample = {
        "round": number,
        "row": case.name,
        "side": side,
        "requests": found.requests,
        "requests_per_s": found.requests_per_s,
        "hot_cpu_ms": hot_ms,
        "hot_cpu_ms_per_token": hot_ms / case.tokens,
        "cpu_ms": found.cpu_ms_per_request,
        "client_cpu_ms": found.client_cpu_ms_per_request,
        "other_cores": found.other_cores,
        "failures": found.failures,
    }
    return sample | times_of(found)


def run(
    setup: Setup, program: Path | None, executable: str | None, kept: Parts, say: Say
) -> list[dict[str, Any]]:
    """Returns all rounds of a run, each with its samples; finished halves are those that `kept` has."""
    rounds = []
    with tempfile.TemporaryDirectory(prefix="sluice-peers-") as folder:
        made = Rounds(setup, Path(folder), program, executable, say)
        for number in range(setup.rounds):
            halves = [
                kept.once(
                    f"round {number + 1}, steps of {1e3 * step_s:g} ms",
                    partial(made.half, number, step_s),
                    say,
                )
                for step_s in setup.steps()
            ]
            rounds.append({"samples": [one for half in halves for one in half["samples"]]})
    return rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if a request failed, a server misbehaved, or the code changed meanwhile."""
    args = _arguments(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, turns.leave)
    say, begun_s, notes = teller(), time.monotonic(), []
    program = peer = None
    executable = wrk.find(args.wrk)
    try:
        if {ROUTER, LEAN} & set(args.sides):
            program, peer = environment.install(), environment.versions()
        model = Path(targets.model_directory())
        programs = (WRK, PYTHON) if executable else (PYTHON,)
        if executable is None:
            notes.append("wrk is not installed (Debian: apt install wrk): there are no rows of that client.")
        rounds = args.rounds or (turns.QUICK_ROUNDS if args.quick else ROUNDS)
        cases = tuple(chosen(args.quick, programs, args.clients))
        setup = Setup(rounds, tuple(args.sides), cases, args.seed, args.quick)
        machine = facts("benchmarks.peers.__main__", CODE)
        config = {**asdict(setup), "cases": [case.name for case in setup.cases]}
        kept = Parts("peers", machine, {**config, "peer": peer})
        found = run(setup, program, executable, kept, say)
        tokenised = tokenising.measured(model, PROMPTS, args.seed)
    except (environment.PeerError, ServerError, measure.MeasureError, wrk.WrkError) as error:
        print(f"ended early: {error}", file=sys.stderr)
        return 1
    result = {
        "command": command("benchmarks.peers", argv),
        "config": config,
        "machine": machine,
        "peer": peer or {},
        "notes": notes,
        "took_s": round(time.monotonic() - begun_s),
        "parts": kept.ends(),
        "tokenising": tokenised,
        "rounds": found,
    }
    failed = failures(result)
    other = statistics.median(one["other_cores"] for part in found for one in part["samples"])
    say(f"requests that failed: {failed or 'none'}; other programs took {other:.2f} cores (median)")
    if not save(args.out / "peers.json", result, levels=4):
        return 1
    kept.forget()
    (args.out / "peers.md").write_text(markdown(result) + "\n")
    draw(result, args.out, "peers")
    verdicts = [row for row in rows(result) if row.aim]
    say(
        f"{sum(row.met is True for row in verdicts)} of {len(verdicts)} aims are met; {args.out / 'peers.md'} has all"
    )
    return 1 if failed else 0


def failures(whole: Mapping[str, Any]) -> dict[str, int]:
    """Returns the failures of all requests of a result by side, row and reason."""
    samples = (one for part in whole["rounds"] for one in part["samples"])
    return turns.failures(SIDES, ((one["side"], one["row"], one["failures"]) for one in samples))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = turns.parser("benchmarks.peers", __doc__, SIDES, ROUNDS)
    parser.add_argument(
        "--clients",
        nargs="+",
        type=int,
        choices=CLIENTS,
        default=CLIENTS,
        help="only rows with as many clients",
    )
    parser.add_argument("--wrk", help="path of wrk, where it is not on PATH")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
