"""Measures the start of a server, from `python -m app.serve` to the first answer, and its memory after that.

    python -m benchmarks.live.coldstart                                  deploy/cpu.yaml
    python -m benchmarks.live.coldstart --config deploy/sim.yaml --runs 3

The phases of the start are those that the server prints. The model must have been converted before (`make serve` does
it once). Memory is that of all processes, including Ray's, after one answer. The results go to coldstart.json and
coldstart.md; the exit status is 1 when the server did not start or stop.
"""

import argparse
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.live import measure
from benchmarks.live.machine import command, facts, save
from benchmarks.live.report import memory_table, table
from benchmarks.live.servers import ROOT, Command, Server, ServerError, free_ports, python, running

_LINE = re.compile(r"^\[\s*([0-9.]+) s\] (.+)$")
_READY = re.compile(r"^ready: (\S+) on ")


@dataclass(slots=True)
class Start:
    """One cold start. `phases` are pairs (seconds since the start of app.serve, the line that it printed)."""

    ready_s: float
    first_answer_s: float
    phases: list[tuple[float, str]]
    tree: measure.TreeState


@dataclass(slots=True)
class Result:
    """All starts of one configuration."""

    config: dict[str, Any]
    machine: dict[str, Any]
    command: str
    starts: list[Start] = field(default_factory=list)


def phases(log: str) -> list[tuple[float, str]]:
    """Returns (seconds, text) for each line `[  12.3 s] text` of app.serve's output."""
    return [(float(match[1]), match[2]) for line in log.splitlines() if (match := _LINE.match(line))]


def model_name(said: Sequence[tuple[float, str]]) -> str:
    """Returns the served model's name, from the line that says `ready`. Raises ServerError without such a line."""
    for _, text in said:
        if match := _READY.match(text):
            return match[1]
    raise ServerError("app.serve printed no line `ready: MODEL on URL`")


def one(config: str) -> Start:
    """Starts the server, sends one request, reads its memory and stops it. Raises ServerError."""
    port, http_port = free_ports(2)
    argv = python("-m", "app.serve", "--config", config, "--port", str(port), "--http-port", str(http_port))
    command = Command(config, argv, port, "/health/ready", (http_port,), timeout_s=600.0)
    with running(command, lambda text: print(text, flush=True)) as server:
        said = _wait_printed(server)
        begin_s = time.monotonic()
        measure.probe(server, model_name(said), 1)
        first_s = time.monotonic() - begin_s
        measure.probe(server, model_name(said), 16)
        return Start(server.started_s, first_s, said, measure.tree_state(server, 3.0))


def markdown(result: Result) -> str:
    """Returns the report in Markdown: the phases of all starts side by side, and the memory after the last."""
    machine, starts = result.machine, result.starts
    title = f"# Cold start of {result.config['config']}\n\n{machine['cpu']}, {machine['cores']} cores, "
    parts = [title + f"commit {machine['commit']}, load before {machine['load_1min_before']}.\n"]
    ready = ", ".join(f"{start.ready_s:.1f} s" for start in starts)
    first = ", ".join(f"{start.first_answer_s * 1e3:.0f} ms" for start in starts)
    parts.append(f"Ready after {ready}; the first token then took {first}.\n")
    for start in starts:
        parts.append(table(["phase", "at s"], [[text, f"{at_s:.1f}"] for at_s, text in start.phases]) + "\n")
    last = starts[-1].tree
    gib = last.total["pss_bytes"] / 2**30
    parts.append(f"Memory of the whole tree: {gib:.2f} GiB PSS\n")
    parts.append(memory_table(last))
    return "\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 when the server misbehaved, or 130 after Ctrl-C."""
    args = _arguments(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    said = command("benchmarks.live.coldstart", argv)
    result = Result({"config": args.config, "runs": args.runs}, facts("benchmarks.live.coldstart"), said)
    status = 0
    try:
        for _ in range(args.runs):
            result.starts.append(one(args.config))
    except (ServerError, measure.MeasureError) as error:
        print(error, file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    if result.starts:
        print("\n" + markdown(result))
        status = status if _write(result, Path(args.out)) else 1
    return status


def _write(result: Result, folder: Path) -> bool:
    """Writes the result and its report; returns False if the code has changed since the beginning."""
    name = f"coldstart-{Path(result.config['config']).stem}"
    if not save(folder / f"{name}.json", asdict(result)):
        return False
    (folder / f"{name}.md").write_text(markdown(result))
    return True


def _wait_printed(server: Server) -> list[tuple[float, str]]:
    """Waits until the server has printed `ready`, which it does shortly after it answers; returns the phases."""
    for _ in range(100):
        said = phases(server.log.read_text(errors="replace"))
        if any(_READY.match(text) for _, text in said):
            return said
        time.sleep(0.1)
    raise ServerError(f"app.serve answers but does not say that it is ready:\n{server.tail()}")


def _leave(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.coldstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", default="deploy/cpu.yaml", help="a Serve config file (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=1, help="how often (default: %(default)s)")
    parser.add_argument(
        "--out", default=str(ROOT / "benchmarks" / "results" / "overhead"), help="folder of the results"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
