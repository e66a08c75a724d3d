"""Measures the cost of a change: it compares this checkout with another one of the project on one machine.

    python -m benchmarks.live.versus --base ../other-checkout                     rounds of all rows (some 25 minutes)
    python -m benchmarks.live.versus --base ../other-checkout --together          both serve all the time (15 minutes)
    python -m benchmarks.live.versus --base ../other-checkout --only decisions    without the servers
    python -m benchmarks.live.versus --base ../other-checkout --keys              requests have an API key
    python -m benchmarks.live.versus --pure --together                            compiled modules against pure Python

In every round each checkout serves sim engines for all rows, one checkout after the other, loaded by the same client of
this checkout. With --together both serve all the time, one idle while the other is loaded, and alternate by row; their
processes then share the caches of the machine. With --keys each checkout that knows API keys has a key file with one
key, without limits, and every request has this key: a base from before them shows what they cost. The order changes
from round to round. The decisions are measured with `python -m benchmarks.decisions` of each checkout, also
alternately. The result of a row is the ratio ours / base, paired by round: its geometric mean and the 95 % interval of
Student's t on the logarithms. The measures are CPU times, latencies and the inverse of requests/s, so a ratio above 1
is worse. A second table gives the CPU time of each process that spends 2 % or more of the sum. The exit status is 1
when requests failed; no result makes it fail.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from scipy.special import stdtrit

from benchmarks.checkout import commit
from benchmarks.live import measure, targets, wrk
from benchmarks.live.machine import HOT_PATH, command, facts, form_of_hot_path, save
from benchmarks.live.measure import COMPLETIONS, Plan
from benchmarks.live.servers import ROOT, Command, Server, python, running

TOKENS = 16
ROW_S = 4.0
"""The longest time in seconds of one row in one round; the Python client ends sooner when its requests are done."""
ROWS: Mapping[str, tuple[str, Plan]] = {
    "python c=1": ("python", Plan(1, 100, TOKENS, ROW_S)),
    "python c=8": ("python", Plan(8, 800, TOKENS, ROW_S)),
    "python c=32": ("python", Plan(32, 2500, TOKENS, ROW_S)),
    "python c=128": ("python", Plan(128, 3000, TOKENS, ROW_S)),
    "python c=32, completions": ("python", Plan(32, 2500, TOKENS, ROW_S, COMPLETIONS)),
    "python c=8, 500 tokens": ("python", Plan(8, 32, 500, 10.0)),
    "wrk c=128": ("wrk", Plan(128, 3000, TOKENS, ROW_S)),
}
LIMIT = 1.02
"""A row is marked as worse where its whole interval lies above this ratio."""
KEY_COMMAND = "app/ingress/tenants/command.py"
"""The module of a checkout that makes API keys; one from before them has none."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One measure of one row over all rounds: medians of both checkouts, and their paired ratio (ours / base)."""

    row: str
    measure: str
    rounds: int
    base: float
    ours: float
    ratio: float
    low: float
    high: float

    @property
    def worse(self) -> bool:
        """Returns whether the whole interval lies above LIMIT."""
        return self.low > LIMIT


def ratio_of(row: str, name: str, base: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Returns the paired ratio of positive values, one for each round. Raises ValueError for fewer than two rounds."""
    if len(base) != len(ours) or len(base) < 2:
        raise ValueError(f"{row}, {name}: {len(base)} and {len(ours)} rounds; two or more of each are needed")
    logs = [math.log(b / a) for a, b in zip(base, ours, strict=True)]
    n, mean = len(logs), math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1))
    half = float(stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)
    middle = n // 2
    return Ratio(
        row,
        name,
        n,
        sorted(base)[middle],
        sorted(ours)[middle],
        math.exp(mean),
        math.exp(mean - half),
        math.exp(mean + half),
    )


def measures_of(case: measure.Measurement) -> dict[str, float]:
    """Returns the measures of a row that are compared; in each of them a larger value is worse."""
    found = {
        "server CPU, ms a request": case.server_cpu_ms_per_request,
        "wall, ms a request": 1e3 / case.requests_per_s,
    }
    hot = [role for role in ("ingress", "router") if role in case.cpu_ms_per_request]
    if hot:
        found["ingress + router CPU, ms a request"] = sum(case.cpu_ms_per_request[role] for role in hot)
    if case.ttft_ms is not None and case.concurrency <= 32:
        found["TTFT p50, ms"] = case.ttft_ms["p50"]
    return found


def pure_of(base: Path, side: str) -> dict[str, str]:
    """Returns the variables that have a side run in pure Python or compiled.

    Only the sources of one checkout are compiled in an environment, so two checkouts are compared in pure Python.
    """
    return {"SLUICE_PURE": "" if (side, base) == ("ours", ROOT) else "1"}


def form_of_sides(base: Path) -> str:
    """Returns in which form the hot path of the sides runs, which is not always that of this process (`pure_of`)."""
    if base != ROOT:
        return "pure Python on both sides"
    return f"{form_of_hot_path(pure_of(base, 'ours'))}, of the base pure Python"


def served_by(
    checkout: Path, folder: Path, variables: Mapping[str, str] | None = None, keys: bool = False
) -> Command:
    """Returns the command that serves sim engines from a checkout, whose modules are imported in all processes. With
    `keys` its requests have an API key, if the checkout knows them. Raises CalledProcessError if no key can be made.
    """
    folder.mkdir()
    options, head = with_key(checkout, folder / "keys.json") if keys else ({}, [])
    command = targets.sim(folder, targets.SimTiming(), prefill=1, decode=1, options=options)
    env = {**command.env, "PYTHONPATH": str(checkout), "RAY_worker_niceness": "0"} | dict(variables or {})
    return replace(command, name=f"Sluice at {checkout.name}", cwd=checkout, env=env, head=head)


def with_key(checkout: Path, file: Path) -> tuple[dict[str, Any], list[str]]:
    """Makes a key file with one key, by the checkout's own command, because its form may differ. Returns the ingress's
    options that name the file, and the header lines that have the key; nothing for a checkout that knows no keys.
    """
    if not (checkout / KEY_COMMAND).exists():
        return {}, []
    module = KEY_COMMAND.removesuffix(".py").replace("/", ".")
    made = subprocess.run(
        python("-m", module, "create", "--tenant", "versus", "--file", str(file)),
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        check=True,
        capture_output=True,
        text=True,
    )
    return {"key_file": str(file)}, [f"authorization: Bearer {made.stdout.strip()}"]


def sample_of(case: measure.Measurement, number: int, row: str, side: str) -> dict[str, Any]:
    """Returns a row of one round and checkout as the samples hold it."""
    found = {
        "round": number,
        "row": row,
        "side": side,
        "failures": case.failures,
        "cpu": case.cpu_ms_per_request,
    }
    return found | measures_of(case)


class Sides:
    """The two checkouts and the rows that are measured on them. With this checkout as its own base, ours is compiled
    and the base is not.
    """

    def __init__(
        self,
        base: Path,
        folder: Path,
        seed: int,
        executable: str | None,
        rows: Sequence[str] = (),
        keys: bool = False,
    ) -> None:
        self.checkouts = {"base": base, "ours": ROOT}
        self.folder = folder
        self.seed = seed
        self.executable = executable
        self.keys = keys
        self.rows = {
            name: row
            for name, row in ROWS.items()
            if (row[0] == "python" or executable) and (not rows or name in rows)
        }

    def served(self, side: str, part: str) -> AbstractContextManager[Server]:
        """Returns the context in which a checkout serves; `part` names its folder."""
        command = served_by(
            self.checkouts[side],
            self.folder / f"{side}{part}",
            pure_of(self.checkouts["base"], side),
            self.keys,
        )
        return running(command, lambda text: print(text, flush=True))

    def sample(self, server: Server, row: str, number: int, side: str) -> dict[str, Any]:
        """Measures one row on the server of a side. Raises MeasureError."""
        client, plan = self.rows[row]
        if client == "python":
            case = measure.with_python(server, "sim", plan, self.seed + number)
        else:
            assert self.executable is not None
            case = measure.with_wrk(server, "sim", plan, self.seed + number, self.executable)
        return sample_of(case, number, row, side)

    def in_turn(self, rounds: int) -> Iterator[dict[str, Any]]:
        """Yields every sample; at each moment one checkout serves."""
        for number in range(rounds):
            for side in sorted(self.checkouts, reverse=bool(number % 2)):
                with self.served(side, f"-{number}") as server:
                    measure.first_answer(server, "sim", TOKENS)
                    for row in self.rows:
                        yield self.sample(server, row, number, side)
            print(f"round {number + 1} of {rounds} is done", flush=True)

    def together(self, rounds: int) -> Iterator[dict[str, Any]]:
        """Yields every sample; both checkouts serve all the time."""
        with ExitStack() as stack:
            servers = {side: stack.enter_context(self.served(side, "")) for side in self.checkouts}
            for server in servers.values():
                measure.first_answer(server, "sim", TOKENS)
            for number in range(rounds):
                for row in self.rows:
                    for side in sorted(servers, reverse=bool(number % 2)):
                        yield self.sample(servers[side], row, number, side)
                print(f"round {number + 1} of {rounds} is done", flush=True)


def serve_rounds(
    base: Path,
    rounds: int,
    seed: int,
    executable: str | None,
    together: bool,
    rows: Sequence[str] = (),
    keys: bool = False,
) -> list[dict[str, Any]]:
    """Returns the samples of every row, round and checkout. Raises ServerError and MeasureError."""
    with tempfile.TemporaryDirectory(prefix="sluice-versus-") as folder:
        sides = Sides(base, Path(folder), seed, executable, rows, keys)
        return list(sides.together(rounds) if together else sides.in_turn(rounds))


def decision_rounds(base: Path, rounds: int, calls: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields the CPU times of every decision of both checkouts, round by round."""
    with tempfile.TemporaryDirectory(prefix="sluice-versus-") as folder:
        for number in range(rounds):
            sides = [("base", base), ("ours", ROOT)]
            for name, checkout in sides if number % 2 == 0 else reversed(sides):
                out = Path(folder) / f"{name}-{number}.json"
                arguments = (
                    "--quick",
                    "--calls",
                    str(calls),
                    "--seed",
                    str(seed + number),
                    "--out",
                    str(out),
                )
                subprocess.run(
                    python("-m", "benchmarks.decisions", *arguments),
                    cwd=checkout,
                    env=os.environ | {"PYTHONPATH": str(checkout)} | pure_of(base, name),
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                for row in json.loads(out.read_text())["rows"]:
                    yield {
                        "round": number,
                        "row": row["name"],
                        "side": name,
                        "CPU p50, us": row["cpu_p50_us"],
                        "wall p50, us": row["p50_us"],
                    }
            print(f"decisions, round {number + 1} of {rounds}, are done", flush=True)


def ratios(samples: Sequence[Mapping[str, Any]]) -> list[Ratio]:
    """Returns the ratio of every measure of every row that both checkouts have, in the order of first occurrence."""
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for sample in samples:
        for name, value in sample.items():
            if name not in ("round", "row", "side", "failures", "cpu") and value > 0:
                sides = values.setdefault((sample["row"], name), {"base": {}, "ours": {}})
                sides[sample["side"]][sample["round"]] = value
    found = []
    for (row, name), sides in values.items():
        both = sorted(sides["base"].keys() & sides["ours"].keys())
        if len(both) > 1:
            base, ours = ([sides[side][number] for number in both] for side in ("base", "ours"))
            found.append(ratio_of(row, name, base, ours))
    return found


def table(found: Sequence[Ratio]) -> str:
    """Returns the ratios as Markdown."""
    lines = ["| row | measure | base | ours | ours / base, 95 % | |", "|---|---|--:|--:|--:|---|"]
    for r in found:
        mark = f"above {LIMIT}" if r.worse else ""
        interval = f"{r.ratio:.3f} ({r.low:.3f} to {r.high:.3f})"
        lines.append(f"| {r.row} | {r.measure} | {r.base:.4g} | {r.ours:.4g} | {interval} | {mark} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Share:
    """The CPU time of one process in one row, as medians over the rounds in milliseconds a request."""

    row: str
    process: str
    base: float
    ours: float


def shares(samples: Sequence[Mapping[str, Any]]) -> list[Share]:
    """Returns the processes that spend 2 % or more of the CPU time of a row, in the order of the rows."""
    rows: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for sample in samples:
        if "cpu" in sample:
            rows.setdefault(sample["row"], {"base": [], "ours": []})[sample["side"]].append(sample["cpu"])
    found = []
    for row, sides in rows.items():
        names = dict.fromkeys(name for cpus in sides.values() for cpu in cpus for name in cpu)
        table = {
            name: {side: median(cpu.get(name, 0.0) for cpu in cpus) for side, cpus in sides.items()}
            for name in names
        }
        total = max(sum(own[side] for own in table.values()) for side in sides)
        own = [Share(row, name, both["base"], both["ours"]) for name, both in table.items()]
        found += [one for one in own if max(one.base, one.ours) >= 0.02 * total]
    return found


def table_of_shares(found: Sequence[Share]) -> str:
    """Returns the CPU times of processes as Markdown."""
    lines = ["| row | process | base, CPU ms a request | ours |", "|---|---|--:|--:|"]
    lines += [f"| {one.row} | {one.process} | {one.base:.4g} | {one.ours:.4g} |" for one in found]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 when requests failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.versus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    base = parser.add_mutually_exclusive_group(required=True)
    base.add_argument("--base", type=Path, help="the other checkout")
    base.add_argument(
        "--pure", dest="base", action="store_const", const=ROOT, help="this checkout in pure Python"
    )
    parser.add_argument(
        "--row", action="append", default=[], choices=ROWS, help="only this row of the servers"
    )
    parser.add_argument("--rounds", type=int, default=12, help="alternations (default: %(default)s)")
    parser.add_argument(
        "--calls", type=int, default=60, help="calls of a decision a round (default: %(default)s)"
    )
    parser.add_argument("--only", choices=("serve", "decisions"), help="only one half")
    parser.add_argument("--together", action="store_true", help="both checkouts serve all the time")
    parser.add_argument("--keys", action="store_true", help="requests have an API key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wrk", help="path of wrk, where it is not on PATH")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "versus")
    args = parser.parse_args(argv)
    other, started_s = args.base.resolve(), time.time()
    machine = facts("benchmarks.live.versus") | {HOT_PATH: form_of_sides(other)}
    samples: list[dict[str, Any]] = []
    if args.only != "decisions":
        executable = wrk.find(args.wrk)
        samples += serve_rounds(other, args.rounds, args.seed, executable, args.together, args.row, args.keys)
    if args.only != "serve":
        samples += decision_rounds(other, args.rounds, args.calls, args.seed)
    found, processes = ratios(samples), shares(samples)
    text = f"{table(found)}\n\n{table_of_shares(processes)}"
    print(text)
    result = {
        "base": f"{commit(other)} in pure Python" if other == ROOT else commit(other),
        "ours": commit(ROOT),
        "command": command("benchmarks.live.versus", argv),
        "machine": machine,
        "rounds": args.rounds,
        "seed": args.seed,
        "together": args.together,
        "keys": args.keys,
        "took_s": round(time.time() - started_s),
        "ratios": [asdict(r) for r in found],
        "processes": [asdict(one) for one in processes],
    }
    if not save(args.out / "versus.json", result):
        return 1
    (args.out / "versus.md").write_text(
        f"# {result['ours']} against {result['base']}, {args.rounds} rounds in turn\n\n{text}\n"
    )
    return 1 if any(sample.get("failures") for sample in samples) else 0


if __name__ == "__main__":
    sys.exit(main())
