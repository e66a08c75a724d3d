"""Measures Sluice beside vLLM's own server and beside vllm-router on one GPU (`make bench-gpu`).

    python -m benchmarks.peers.gpu               both comparisons, as many of four rounds as the time allows
    python -m benchmarks.peers.gpu --quick       two rounds
    python -m benchmarks.peers.gpu --only one    without vllm-router, which then need not be installed
    python -m benchmarks.peers.gpu --only pd --program PATH --tokenizer DIR --commit HASH
                                                 where nothing can be installed, in a copy of the files without git

The sides, rows and aims are in `benchmarks.peers.gpu.sides`, and the model, whose texts mean nothing, is in
`benchmarks.peers.gpu.model`. Both sides of a comparison start at the same time and serve all the time; one is idle
while the other is loaded by the same client. They alternate by row, and the side that begins alternates by round. A
row's ratio is paired by round: the geometric mean of Sluice / peer, with the 95 % interval of Student's t on the
logarithms.

No round starts after `--budget` seconds, of which the starts of the servers are a part; two comparisons divide them.
The result is written after every round, so that an end from outside loses no finished one. The exit status is 1 if a
request failed, a server misbehaved, or a comparison has fewer rounds than an interval needs; no time makes it fail.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.live import measure, targets
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.servers import Server, ServerError, running_together
from benchmarks.peers import environment as router_environment
from benchmarks.peers import turns
from benchmarks.peers.gpu import model
from benchmarks.peers.gpu.report import INTERVALS, markdown, rows
from benchmarks.peers.gpu.sides import CASES, COMPARISONS, NAMES, OPTIONS, PD, commands
from benchmarks.peers.real.rows import sample_of
from benchmarks.progress import teller

CODE = (*LIVE_CODE, "benchmarks/peers")
NAME = "gpu"
ROUNDS = 4
BUDGET_S = 480.0
SETTLE_S = 5.0
"""Seconds between the first answers and what is measured: processes of Ray are busy for a while after them."""
FIRST_S = 60.0
"""Longest time for the first answer: a router may take a while to find engines that are ready."""

Say = Callable[[str], None]
Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """The extent of one run: rounds of each comparison, at most, and the seconds after which none starts."""

    rounds: int
    comparisons: tuple[str, ...]
    budget_s: float
    seed: int = 0


def seed_of(seed: int, number: int, row: int) -> int:
    """Returns the seed of the prompts of a row in a round. No two rows have a prompt in common, so none finds its KV in
    a prefix cache; every other seed is that of a warm-up (`measure.warm_up`).
    """
    return seed + 2 * (number * len(CASES) + row)


def gpus() -> list[str]:
    """Returns name, memory and driver of every GPU, as nvidia-smi prints them; none without that program."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def deadlines(begun_s: float, budget_s: float, count: int) -> Iterator[float]:
    """Yields for each of `count` comparisons the time after which it starts no round: what is left when it begins is
    divided among it and those behind it.
    """
    for left in range(count, 0, -1):
        now_s = time.monotonic()
        yield now_s + (begun_s + budget_s - now_s) / left


def rounds_of(
    setup: Setup, comparison: str, servers: Mapping[str, Server], until_s: float, say: Say
) -> Iterator[list[Part]]:
    """Yields the samples of each round, a part for each side, until the rounds or the time are over. Raises
    MeasureError.
    """
    for number in range(setup.rounds):
        if time.monotonic() > until_s:
            say(f"{comparison}: the time is over after {number} of {setup.rounds} rounds")
            return
        begun_s = time.monotonic()
        samples: dict[str, list[dict[str, Any]]] = {side: [] for side in servers}
        for row, case in enumerate(CASES.values()):
            for side in turns.order(list(servers), number):
                seed = seed_of(setup.seed, number, row)
                found = measure.with_python(servers[side], targets.MODEL, case.plan(quick=False), seed)
                samples[side].append(sample_of(found, case.name))
                ttft_ms = found.ttft_ms["p50"] if found.ttft_ms else float("nan")
                say(f"{side}, {case.name}: {found.requests_per_s:.2f} requests/s, TTFT {ttft_ms:.0f} ms")
        say(
            f"{comparison}: round {number + 1} of {setup.rounds} is done, after {time.monotonic() - begun_s:.0f} s"
        )
        yield [
            {"round": number, "side": side, "started_s": servers[side].started_s, "rows": own}
            for side, own in samples.items()
        ]


def measured(
    setup: Setup, comparison: str, folder: Path, peers: tuple[str, Path | None], until_s: float, say: Say
) -> Generator[list[Part]]:
    """Starts both sides of a comparison and yields the parts of each round. Raises ServerError and MeasureError, whose
    messages have the ends of the logs.

    `peers` are the model's folder and the program of vllm-router.
    """
    served = commands(comparison, folder, *peers)
    with running_together(list(served.values()), say) as started:
        servers = dict(zip(served, started, strict=True))
        try:
            for side, server in servers.items():
                _, problem = measure.first_answer(server, targets.MODEL, 16, FIRST_S)
                if problem is not None:
                    say(f"{side} {problem}")
            time.sleep(SETTLE_S)
            yield from rounds_of(setup, comparison, servers, until_s, say)
        except (measure.MeasureError, OSError) as error:
            logs = (f"the log of {server.command.name} ends:\n{server.tail()}" for server in started)
            raise measure.MeasureError("\n".join([str(error), *logs])) from error


def ran(parts: Sequence[Part]) -> dict[str, int]:
    """Returns the number of finished rounds by comparison."""
    sides = {compared.ours: name for name, compared in COMPARISONS.items()}
    found: dict[str, int] = {}
    for part in parts:
        if part["side"] in sides:
            name = sides[part["side"]]
            found[name] = found.get(name, 0) + 1
    return found


def failures(whole: Mapping[str, Any]) -> dict[str, int]:
    """Returns the failures of all requests of a result by side, row and reason."""
    names = {side: name for compared in COMPARISONS.values() for side, name in compared.sides.items()}
    samples = ((part["side"], one["row"], one["failures"]) for part in whole["parts"] for one in part["rows"])
    return turns.failures(names, samples)


class Result:
    """The result of a run, written again whenever it grows."""

    def __init__(self, out: Path, whole: Mapping[str, Any]) -> None:
        self._out = out
        self._begun_s = time.monotonic()
        self.parts: list[Part] = []
        self._whole = whole
        self.ended_early = ""

    @property
    def whole(self) -> dict[str, Any]:
        """The result as it stands."""
        return {
            **self._whole,
            "took_s": round(time.monotonic() - self._begun_s),
            "rounds": ran(self.parts),
            "ended_early": self.ended_early,
            "parts": self.parts,
        }

    def write(self) -> bool:
        """Writes the result and its report. Returns False if the code has changed meanwhile (`machine.save`)."""
        kept = save(self._out / f"{NAME}.json", self.whole, levels=4)
        if kept:
            (self._out / f"{NAME}.md").write_text(markdown(self.whole) + "\n")
        return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 as the module says."""
    parser = turns.parser(
        "benchmarks.peers.gpu", __doc__, NAMES, ROUNDS, chosen_by="--only", quick="fewer rounds"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="after which no round starts (default: %(default)s)",
    )
    parser.add_argument("--program", type=Path, help="vllm-router, where it cannot be installed")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of the tokenizer (default: the built-in model's)"
    )
    parser.add_argument("--commit", help="the commit of the code, where there is no git")
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, turns.leave)
    say, begun_s = teller(), time.monotonic()
    rounds = args.rounds or (turns.QUICK_ROUNDS if args.quick else ROUNDS)
    setup = Setup(rounds, tuple(args.only), args.budget, args.seed)
    failure: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="sluice-gpu-") as name:
        try:
            program, versions = _router(args.program) if PD in setup.comparisons else (None, {})
            tokenizer = args.tokenizer or Path(targets.model_directory())
            peers = model.write(Path(name) / "model", tokenizer), program
        except (router_environment.PeerError, ServerError, OSError) as error:
            print(f"not started: {error}", file=sys.stderr)
            return 1
        result = Result(args.out, _described(setup, argv, args.commit, versions))
        try:
            ends = deadlines(begun_s, setup.budget_s, len(setup.comparisons))
            for comparison, until_s in zip(setup.comparisons, ends, strict=True):
                if time.monotonic() > until_s:
                    say(f"{comparison}: the time is over, so its servers are not started")
                    continue
                with closing(measured(setup, comparison, Path(name), peers, until_s, say)) as finished:
                    for parts in finished:
                        result.parts += parts
                        result.write()
        except (ServerError, measure.MeasureError) as error:
            failure, result.ended_early = error, str(error)
    if failure is not None:
        print(f"ended early: {failure}", file=sys.stderr)
    return _concluded(result, setup, args.out, say)


def _router(program: Path | None) -> tuple[Path, dict[str, str]]:
    """Returns vllm-router and the versions of its packages; those of a given one are not known. Raises PeerError."""
    if program is None:
        return router_environment.install(), router_environment.versions()
    if not program.exists():
        raise router_environment.PeerError(f"--program {program}: there is no such file")
    return program.resolve(), {router_environment.NAME: "unknown: its program was given"}


def _described(
    setup: Setup, argv: Sequence[str] | None, commit: str | None, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what a result says beside its samples."""
    engines = {name: asdict(OPTIONS[name]) for name in setup.comparisons}
    return {
        "command": command("benchmarks.peers.gpu", argv),
        "config": {**asdict(setup), "rows": list(CASES), "engines": engines, "model": model.CONFIG},
        "machine": {**facts("benchmarks.peers.gpu.__main__", CODE, commit), "gpus": gpus()},
        "peers": versions,
    }


def _concluded(result: Result, setup: Setup, out: Path, say: Say) -> int:
    """Writes the result for the last time, says what it is worth, and returns the exit status."""
    if not result.write():
        return 1
    whole, finished = result.whole, ran(result.parts)
    failed = failures(whole)
    say(f"requests that failed: {failed or 'none'}")
    for comparison in setup.comparisons:
        say(f"{comparison}: {finished.get(comparison, 0)} of {setup.rounds} rounds")
    verdicts = [row for row in rows(whole) if row.aim]
    met = sum(row.met is True for row in verdicts)
    say(f"{met} of {len(verdicts)} aims are met; {out / f'{NAME}.md'} has all")
    enough = all(finished.get(comparison, 0) >= INTERVALS for comparison in setup.comparisons)
    return 1 if failed or result.ended_early or not enough else 0


if __name__ == "__main__":
    sys.exit(main())
