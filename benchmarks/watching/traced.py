"""Traces of 1,000 requests while engines are killed: spans equal tasks, none is orphaned, times add up.

    python -m benchmarks.watching.traced                                  1,000 requests (some two minutes)
    python -m benchmarks.watching.traced --requests 100 --kill-every-s 2  a short form
    python -m benchmarks.watching.traced --bare                           without Ray (`benchmarks.chaos.bare`)

An application of sim engines sends the traces of all requests to a collector that reads them by the protocol's own
classes. Requests come at a constant rate. Every few seconds an engine that is ready is killed (SIGKILL), prefill and
decode engines in turn, as long as another of its role is ready; Serve replaces it, and its requests go on elsewhere.
The tasks are those of the router's journal, which knows nothing of spans. The time of each request is compared with
what its trace accounts for (`benchmarks.watching.spans`). The exit status is 1 if spans and tasks differ, a span is
orphaned, or the code changed meanwhile; no time makes it fail.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.live.collector import Collector, collector
from benchmarks.live.fleet import COMPLETIONS, Answer, Fleet, Streams
from benchmarks.live.load import body_of
from benchmarks.live.machine import command, facts, save
from benchmarks.live.measure import MeasureError, first_answer, prompts
from benchmarks.live.openloop import Planned
from benchmarks.live.servers import Command, Server, running
from benchmarks.live.targets import SimTiming
from benchmarks.progress import teller
from benchmarks.watching.app import Watched, pids, tracing, wait
from benchmarks.watching.cost import CODE, OUT
from benchmarks.watching.spans import differences, tasks_in, traces_of
from benchmarks.watching.traced_report import draw, rows

PROBE_TOKENS = 4
QUIET_S = 3.0
"""Seconds without a further span after which all have come. A batch waits for one second at most."""
ROLES = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Setup:
    """The engines and their timing, the load, and the faults.

    Requests begin at `rate_per_s` and take some 0.9 s each, so that a killed engine has work.
    """

    requests: int = 1000
    rate_per_s: float = 20.0
    tokens: int = 40
    kill_every_s: float = 5.0
    prefill: int = 3
    decode: int = 4
    prefill_base_s: float = 0.05
    decode_base_s: float = 0.02
    patience_s: float = 120.0
    bare: bool = False
    seed: int = 0


def application(setup: Setup, folder: Path, to: Collector) -> Command:
    """Returns the command that starts the application, whose journal is in `folder`/journal."""
    timing = SimTiming(prefill_base_s=setup.prefill_base_s, decode_base_s=setup.decode_base_s)
    # a request whose engines are killed several times is not given up
    ingress = {"replicas": 1, "options": {"max_retries": 20, "max_migrations": 20}}
    shortest = {"name": "join_shortest_queue"}
    router = {"prefill": shortest, "decode": shortest, "journal": {"folder": str(folder / "journal")}}
    args = {"ingress": ingress, "router": router, "wire": {"socket_dir": str(folder / "wire")}}
    env = tracing(to.endpoint, 1.0)
    made = Watched(folder, setup.prefill, setup.decode, timing, args, env).command(False)
    if not setup.bare:
        return made
    (folder / "orders").mkdir()
    argv = ["benchmarks.chaos.bare" if word == "app.serve" else word for word in made.argv]
    return replace(made, argv=[*argv, "--orders", str(folder / "orders")], ports=(made.port,))


@contextmanager
def killing(server: Server, fleet: Fleet, setup: Setup, say: Callable[[str], None]) -> Iterator[list[str]]:
    """A context in which engines are killed. The list grows with the roles of those that were."""
    killed: list[str] = []
    stop, rng = threading.Event(), random.Random(setup.seed)

    def run() -> None:
        while not stop.wait(setup.kill_every_s):
            role = ROLES[len(killed) % len(ROLES)]
            living = pids(server, role)
            if len(living) > 1 and len(fleet.engines(role=role)) > 1:
                os.kill(rng.choice(living), signal.SIGKILL)
                killed.append(role)
                say(f"a {role} engine was killed")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join(60.0)


def measured(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what was found, as the result keeps it. Raises MeasureError and ServerError."""
    with tempfile.TemporaryDirectory(prefix="sluice-traced-") as name, collector() as to:
        folder = Path(name)
        with running(application(setup, folder, to), say) as server:
            usage, _ = first_answer(server, "sim", PROBE_TOKENS)
            say(f"the first answer has {usage['completion_tokens']} tokens")
            answers, killed = loaded(setup, server, say)
            _all_have_come(to)
        expected, found = tasks_in(folder / "journal"), traces_of(to.spans)
    failed = Counter(one.problem for one in answers if one.problem is not None)
    # the first answer was asked for at another path
    whole = {name: span for name, span in found.whole.items() if span.name == f"POST {COMPLETIONS}"}
    rows = list(compared(answers, whole, found.missing_s))
    return {
        "killed": Counter(killed),
        "requests": len(answers),
        "failed": failed,
        "traced": len(whole),
        "attempts": len(expected),
        "going_on": found.going_on,
        "tasks": _sum(expected),
        "spans": _sum(found.tasks),
        "differences": differences(expected, found.tasks),
        "orphans": found.orphans,
        "rows": rows,
    }


def loaded(setup: Setup, server: Server, say: Callable[[str], None]) -> tuple[list[Answer], list[str]]:
    """Sends all requests while engines are killed; returns the answers and the roles of the killed engines."""
    texts = prompts(setup.seed, setup.requests)
    bodies = [body_of("sim", text, setup.tokens, chat=False) for text in texts]
    plan = [Planned(number / setup.rate_per_s, body) for number, body in enumerate(bodies)]
    port = server.command.port
    fleet, streams = Fleet(port), Streams(port, COMPLETIONS)
    try:
        with killing(server, fleet, setup, say) as killed:
            sent = streams.send(plan, setup.patience_s)
            answers = sent.result(plan[-1].at_s + setup.patience_s + 30.0)
        fleet.wait_idle()
    finally:
        streams.close()
        fleet.close()
    return answers, killed


def _all_have_come(to: Collector) -> None:
    """Waits until no span has come for `QUIET_S`."""
    seen = [len(to.spans), time.monotonic()]

    def quiet() -> bool:
        if len(to.spans) != seen[0]:
            seen[:] = len(to.spans), time.monotonic()
        return time.monotonic() - seen[1] > QUIET_S

    wait(quiet, "no further spans")


def compared(
    answers: Sequence[Answer], whole: Mapping[str, Any], missing_s: Callable[[str], float]
) -> Iterator[list[float | None]]:
    """Yields, for each request that has a trace: milliseconds of the whole span, those of it that the trace does not
    account for, and those that the client saw beyond the span (None where its answer was not whole).
    """
    seen_s = {str(one.events[0]["id"]): one.last_s - one.sent_s for one in answers if one.problem is None}
    for request, span in whole.items():
        span_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        beyond_s = seen_s[request] - span_s if request in seen_s else None
        beyond_ms = None if beyond_s is None else round(1e3 * beyond_s, 3)
        yield [round(1e3 * span_s, 3), round(1e3 * missing_s(request), 3), beyond_ms]


def _sum(counts: Mapping[str, Counter[str]]) -> dict[str, int]:
    return dict(sum(counts.values(), Counter()))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if spans are the tasks and none is orphaned, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching.traced",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=Setup().requests, help="default: %(default)s")
    parser.add_argument(
        "--kill-every-s", type=float, default=Setup().kill_every_s, help="default: %(default)s"
    )
    parser.add_argument("--bare", action="store_true", help="without Ray, which brings engines back at once")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and the killed engines")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    args = parser.parse_args(argv)
    setup = Setup(args.requests, kill_every_s=args.kill_every_s, bare=args.bare, seed=args.seed)
    machine, say = facts("benchmarks.watching.traced", CODE), teller()

    found = measured(setup, say)
    result = {
        "command": command("benchmarks.watching.traced", argv),
        "config": asdict(setup),
        "machine": machine,
        **found,
    }
    for row in rows(result):
        print(f"{row.name}: {row.ours:.4g} {row.unit}{f' ({row.aim})' if row.aim else ''}")
    for sentence in [*found["differences"][:10], *map(str, found["failed"].items())]:
        print(sentence)
    wrong = bool(found["differences"] or found["orphans"])
    if not found["rows"]:
        raise MeasureError("no trace of a request came")
    if not save(args.out / "traced.json", result, levels=2):
        return 1
    draw(result, args.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
