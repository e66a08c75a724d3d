"""Measures starts, activations, role switches and drains of live vLLM engines on this machine's CPUs.

    python -m benchmarks.live.scaling_steps                   all parts: part of `make bench-scaling-live`; 25 minutes
    python -m benchmarks.live.scaling_steps --parts starts    one part
    python -m benchmarks.live.scaling_steps --small           all parts with few rounds and streams, as a trial

Three vLLM engines run at once; each needs a little more than 2 GB. The parts:

idle        One prefill and one decode engine serve, one decode engine waits warm, and nothing comes: the CPU of the
            active and of the warm decode engine over the same seconds, their cores and workers included. One of each
            says less than the many of `benchmarks.live.scaling`.
activation  One prefill and one decode engine serve, and one decode engine waits warm. It is activated under load, and
            made warm again: seconds from the order to its first text, as `benchmarks.live.scaling` takes them.
switch      On the same fleet, with both decode engines active, streams run while engines are switched between prefill
            and decode by hand. The same streams have run undisturbed; the texts must be equal, up to near ties: at the
            first token that differs, the two best candidates of the undisturbed answer lie within `NEAR_TIE` nats.
            Before, as many short streams tell how long a token takes, so that streams last as long on any machine.
drain       Two prefill engines hold prompts that wait for the few slots of one decode engine, and one of the two is
            stopped by an order. All requests must be served, without a repeated attempt and without an expired lease.
starts      One colocated engine serves, and a second one is started, and stopped again, several times each way:
              page cache   the weights are in the page cache
              cold         they are not (`posix_fadvise`); the largest share that stayed in it is a row of the result
              overlapped   as `page cache`, and replica and engine core import at the same time
              read ahead   as `overlapped`, with weights that are not in the page cache before the start, and are read
                           during its imports
              pre-warmed   as `page cache`, by a process that waits with its imports done (`scaling.prewarmed`)
              peer         as `page cache`, but the weights come from the first engine (`weights_from: peer`); that one
                           maps its files on the same machine, so nothing is said about a network or a disk
            `page cache` and `cold` are without overlap and without reading ahead. Beside them stands the activation of
            a warm engine. The steps are those of DeepFlow's Table 2, as far as one machine has them (`steps_of`). The
            packages are in the page cache in all starts, since engines run. The means are written as profiles of starts
            for the simulator (`benchmarks.sim.starts`), those of a trial beside its result.

A start has all cores but for an idle engine beside it.

Aims, written before the first run: order to the first text of an activated engine at most 1 s at p99, and none without
a text; texts equal, at least half of them to the end and not only up to a near tie, with a stream under way at the last
switch; no lease lost and no request repeated by a drain; and once they exist, overlapped at most 0.65 times the process
and imports of a start without, pre-warmed at most a fifth of cold. The exit status is 1 if a request was lost, a text
differs or an activated engine gave none.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL, addressof, c_size_t, c_ubyte, c_void_p, get_errno
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.live import machine as record
from benchmarks.live import scaling_report as report
from benchmarks.live.fleet import Answer
from benchmarks.live.kept import Parts
from benchmarks.live.load import body_of
from benchmarks.live.openloop import Planned
from benchmarks.live.scaling import OUT, App, activated, idle_by_duty, problems_of
from benchmarks.live.servers import Server, ServerError, running
from benchmarks.live.targets import MODEL, EngineOptions, model_directory, sluice_app
from benchmarks.progress import teller
from benchmarks.sim import starts as starts_of_sim
from benchmarks.steering import HandGiven

NEAR_TIE = 0.01
"""Nats between the two best tokens that count as a tie, in float32 (`benchmarks.chaos.vllm_asks`)."""
PROBE_TOKENS, PROBE_PATIENCE_S = 17, 120.0
"""Tokens of a stream that tells how long a token takes, and the longest wait for it."""
PROMPT_TOKENS = 24
"""Tokens that are kept for a stream's prompt, which has fewer."""
START_S = 300.0
STORAGE_PATH = "RAY_gcs_storage_path"
"""The environment variable of the app's processes with a folder in Ray's (`app.own_ray`)."""
PLAIN = {"overlap_imports": False, "preload_weights": False}
"""The options of vLLM engines without what shortens their starts."""
WAITING = 'sluice_router_prewarmed_processes{state="waiting"}'
SETTLED_S = 10.0
"""Seconds after which a process that waits is not made anew any more (twice `app.prewarmed.pool.MISPLACED_S`)."""
RETRIES, EXPIRED = "sluice_retries_total", "sluice_engine_leases_expired_total"
_libc = CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """The sizes of all parts."""

    kv_space_gib: float = 0.5
    max_model_len: int = 1024
    slots: int = 16
    idle_s: float = 60.0
    rounds: int = 30
    clients: int = 4
    tokens: int = 8
    streams: int = 16
    # of a stream that nothing disturbs, at the speed of this machine
    stream_s: tuple[float, float] = (9.0, 45.0)
    streams_within_s: float = 20.0
    hold_s: float = 4.0
    # each of two engines must be seen to hold these; half as many again keep the moment from being missed
    leases: int = 20
    drain_slots: int = 2
    drain_tokens: int = 12
    starts: int = 3
    # longest wait until an activated engine has got a request
    routed_s: float = 30.0
    seed: int = 0

    @property
    def drain_requests(self) -> int:
        """The requests of the part `drain`, over two prefill engines."""
        return 3 * self.leases


SMALL = Setup(
    idle_s=5.0,
    rounds=2,
    streams=6,
    stream_s=(4.5, 13.5),
    streams_within_s=6.0,
    hold_s=1.0,
    leases=6,
    starts=1,
)


# ------------------------------------------------------------------------------------------------------------- the app


def group(setup: Setup, role: str, replicas: int, most: int, warm: int = 0, **options: Any) -> dict[str, Any]:
    """Returns a group of vLLM engines, named by the first letter of its role."""
    engine = asdict(EngineOptions(max_model_len=setup.max_model_len, slots=setup.slots))
    return {
        "name": role[0],
        "role": role,
        "kind": "vllm",
        "replicas": replicas,
        "options": {**engine, "kv_space_gib": setup.kv_space_gib, **options},
        "scaling": {"max": most, "warm": warm},
    }


@contextmanager
def app(
    groups: Sequence[Mapping[str, Any]], say: Callable[[str], None], prewarmed: int = 0
) -> Iterator[tuple[App, Server]]:
    """A context in which an app of these groups runs, with the autoscaler on, and its first replicas are ready."""
    shortest = {"name": "join_shortest_queue"}
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        folder = Path(name)
        args = {
            "model": {"path": MODEL},
            "engines": list(groups),
            "router": {
                "journal": {"folder": str(folder / "router")},
                "prefill": shortest,
                "decode": shortest,
            },
            "wire": {"socket_dir": str(folder / "s")},
            "scaling": {"enabled": True, "policy": "fixed", "prewarmed": prewarmed},
        }
        command = sluice_app("Sluice, vLLM engines", folder / "app.yaml", args, 2 * START_S)
        with running(command, say) as server:
            made = App(server, folder)
            try:
                first = {f"{one['name']} active": one["replicas"] for one in groups}
                made.at_rest(
                    first | {f"{one['name']} warm": one["scaling"]["warm"] for one in groups}, 2 * START_S
                )
                yield made, server
            finally:
                made.close()


# --------------------------------------------------------------------------------------------- activation and switches


def idle_activation_and_switch(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the figures of the parts `idle`, `activation` and `switch`, which run on one app."""
    groups = [group(setup, "prefill", 1, 1), group(setup, "decode", 1, 2, 1)]
    with app(groups, say) as (made, _):
        idle = idle_by_duty(made, setup.idle_s, say)
        rounds = []
        for _round in range(setup.rounds):
            rounds.append(activated(made, say, 1, setup.clients, setup.tokens, 60.0, setup.routed_s, MODEL))
            made.fleet.scale({"d": 1})
            made.at_rest({"p active": 1, "d active": 1, "d warm": 1}, 60.0)
            made.fleet.wait_idle()
        return {"idle": idle, "activation": {"rounds": rounds}, "switch": switched(made, setup, say)}


def measured_step_s(made: App, setup: Setup) -> float:
    """Returns the seconds that a token takes here, the median of as many streams at once as are compared later. Raises
    ServerError if none of them is whole.
    """
    plan = [
        Planned(0.0, body_of(MODEL, f"Probe {i}. Once upon a time", PROBE_TOKENS, chat=False))
        for i in range(setup.streams)
    ]
    answers = made.streams.send(plan, PROBE_PATIENCE_S).result()
    made.fleet.wait_idle()
    steps_s = [(a.last_s - a.first_s) / (PROBE_TOKENS - 1) for a in answers if a.problem is None]
    if not steps_s:
        raise ServerError(f"no probe of {len(plan)} is whole: {problems_of(answers)}")
    return statistics.median(steps_s)


def tokens_in(seconds: float, step_s: float, setup: Setup) -> int:
    """Returns how many tokens take `seconds`, at least a few, and at most what the context has room for."""
    return max(PROBE_TOKENS, min(setup.max_model_len - PROMPT_TOKENS, round(seconds / step_s)))


def stream_plan(setup: Setup, step_s: float) -> list[Planned]:
    """Returns streams that last differently long where a token takes `step_s`, sent evenly over a while, which show the
    two best tokens at each place.
    """
    rng = random.Random(setup.seed)
    plan = []
    for i in range(setup.streams):
        tokens = tokens_in(rng.uniform(*setup.stream_s), step_s, setup)
        body = body_of(MODEL, f"Story {i}. Once upon a time", tokens, chat=False, extra={"logprobs": 2})
        plan.append(Planned(i * setup.streams_within_s / setup.streams, body))
    return plan


def switched(made: App, setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the streams undisturbed, and again while engines switch roles; returns what was lost and what differs."""
    made.fleet.scale({"d": 2})
    made.at_rest({"p active": 1, "d active": 2}, 60.0)
    step_s = measured_step_s(made, setup)
    say(f"switch: a token takes {1e3 * step_s:.0f} ms")
    plan = stream_plan(setup, step_s)
    patience_s = 120.0 + 4.0 * setup.stream_s[1]
    undisturbed = made.streams.send(plan, patience_s).result()
    made.fleet.wait_idle()
    (own,), (lent, _) = made.fleet.engines(role="prefill"), sorted(made.fleet.engines(role="decode"))
    hand, seconds, given_s = HandGiven(made.folder / "s"), [], 0.0
    try:
        future = made.streams.send(plan, patience_s)
        time.sleep(setup.hold_s)
        for engine, role in ((lent, "prefill"), (own, "decode"), (own, "prefill"), (lent, "decode")):
            given_s = hand.assign(engine, role)
            seconds.append(round(made.fleet.wait_role(engine, role) - given_s, 3))
            say(f"switch: {engine} serves {role} after {seconds[-1]:.2f} s")
            time.sleep(setup.hold_s)
        disturbed = future.result()
    finally:
        hand.close()
    verdicts = [
        compared(one, other)
        for one, other in zip(undisturbed, disturbed, strict=True)
        if one.problem is None and other.problem is None
    ]
    found = {
        "streams": len(plan),
        "step_s": round(step_s, 4),
        "switch_s": seconds,
        "undisturbed_lost": problems_of(undisturbed),
        "lost": problems_of(disturbed),
        "other_texts": verdicts.count("other"),
        "near_ties": verdicts.count("near tie"),
        "equal_texts": verdicts.count("equal"),
        "open_at_the_last_switch": under_way(disturbed, given_s, given_s + seconds[-1]),
    }
    say(f"switch: {found}")
    return found


def under_way(answers: Sequence[Answer], from_s: float, to_s: float) -> int:
    """Returns how many whole answers had begun before `from_s` and ended after `to_s`."""
    return sum(a.problem is None and a.first_s < from_s and a.last_s > to_s for a in answers)


def tokens_of(answer: Answer) -> list[tuple[str, float]]:
    """Returns each token of an answer with the distance in nats between the two best ones at its place."""
    found: list[tuple[str, float]] = []
    for event in answer.events:
        for choice in event.get("choices") or ():
            shown = choice.get("logprobs") or {}
            for token, best in zip(shown.get("tokens", ()), shown.get("top_logprobs", ()), strict=True):
                first, second = sorted(best.values(), reverse=True)[:2]
                found.append((token, first - second))
    return found


def compared(undisturbed: Answer, other: Answer) -> str:
    """Returns "equal", "near tie" for texts that part at one, or "other"."""
    if undisturbed.text == other.text:
        return "equal"
    pairs = zip(tokens_of(undisturbed), tokens_of(other), strict=False)
    margin = next((margin for (token, margin), (seen, _) in pairs if token != seen), None)
    return "near tie" if margin is not None and margin <= NEAR_TIE else "other"


# --------------------------------------------------------------------------------------------------------------- drain


def drain(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Stops one of two prefill engines while it holds leases; returns what was lost, repeated and expired."""
    most = setup.drain_requests
    groups = [
        group(setup, "prefill", 2, 2, slots=most, kv_space_gib=max(1.0, setup.kv_space_gib)),
        group(setup, "decode", 1, 1, slots=setup.drain_slots),
    ]
    with app(groups, say) as (made, _):
        before = made.fleet.metric(RETRIES)
        plan = [
            Planned(0.0, body_of(MODEL, f"Request {i}: tell me more", setup.drain_tokens, chat=False))
            for i in range(most)
        ]
        future = made.streams.send(plan, 300.0)

        def leases() -> dict[str, int]:
            engines = made.fleet.status()["engines"]
            return {e["id"]: e["leases"] or 0 for e in engines if e["role"] == "prefill"}

        made.fleet.wait(
            lambda: min(leases().values()) >= setup.leases, f"each holds {setup.leases} leases", 120.0
        )
        held, ordered_s, expired = leases(), made.fleet.scale({"p": 1}), 0.0
        say(f"drain: one of two engines with {held} leases is to stop")

        def gone() -> bool:
            nonlocal expired
            # an engine's figures go with it
            expired = max(expired, made.fleet.metric(EXPIRED))
            return len(leases()) == 1

        stopped_s = made.fleet.wait(gone, "one prefill engine is left", 180.0) - ordered_s
        (left,) = leases()
        answers = future.result()
        time.sleep(2.0)
        retries = made.fleet.metric(RETRIES) - before
        expired = max(expired, made.fleet.metric(EXPIRED))
    found = {
        "requests": most,
        "leases": min(number for engine, number in held.items() if engine != left),
        "stopped_s": round(stopped_s, 2),
        "lost": problems_of(answers),
        "retries": retries,
        "expired": expired,
    }
    say(f"drain: {found}")
    return found


# -------------------------------------------------------------------------------------------------------------- starts


def evict(folder: Path) -> None:
    """Drops the weights of a model from the page cache, as far as no process has them mapped."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(folder: Path) -> float:
    """Returns the share of a model's weights that is in the page cache, by `mincore`. Raises OSError."""
    pages = resident = 0
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE,
                                                  prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:  # fmt: skip
            number = -(-size // mmap.PAGESIZE)
            seen, begin = (c_ubyte * number)(), c_ubyte.from_buffer(mapped)
            failed = _libc.mincore(c_void_p(addressof(begin)), c_size_t(size), seen)
            del begin
            if failed:
                raise OSError(get_errno(), f"mincore of {file.name} failed")
            pages, resident = pages + number, resident + sum(byte & 1 for byte in seen)
    return resident / pages


def read_whole(folder: Path) -> None:
    """Reads the weights of a model, so that they are in the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def replica_logs(server: Server) -> Path:
    """Returns the folder of the replicas' logs of an app. Raises ServerError if no process tells it."""
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            storage = process.environ().get(STORAGE_PATH)
        except psutil.Error:
            continue
        if storage:
            return Path(storage).parent / "session_latest" / "logs" / "serve"
    raise ServerError("no process of the app knows the folder of Ray's files")


def start_of(logs: Path, engine: str) -> dict[str, Any]:
    """Returns what the replica of an engine has logged of its start (`app.replicas.start_of`)."""
    mark = f"start of {engine}: "
    for file in logs.glob("replica_*.log"):
        for line in file.read_text(errors="replace").splitlines():
            if mark in line:
                told: dict[str, Any] = json.loads(line.partition(mark)[2])
                return told
    raise ServerError(f"no replica has logged the start of {engine} in {logs}")


def steps_of(told: Mapping[str, Any], ordered_s: float, seen_s: float, first_s: float) -> dict[str, float]:
    """Returns the seconds of each step of a start (`report.STEPS`), from the order to the first token. All times are
    Unix seconds: `ordered_s` of the order, `seen_s` when the API showed the engine active, `first_s` of the first text.

    - reserve: the autoscaler and Serve decide, and Ray places the replica and makes its process, unless one waits idle
    - process: Python, Ray's worker and Serve's replica, until the engine's own start begins
    - imports: vLLM in the replica
    - core: the engine's configuration, its core's process, and the core's imports
    - weights: the model
    - post-load: KV cache and NIXL, the rest until the core answers, and the first steps of a dummy request
    - announce: until router and ingress know the engine and it is active
    - first token: of the first request after that
    """
    phases = told["phases"]
    process_s = max(ordered_s, min(told["process_at_s"], told["replica_at_s"]))
    begun_s = told["ready_at_s"] - phases.get("ready", told["ready_at_s"] - told["replica_at_s"])
    core = sum(phases.get(name, 0.0) for name in ("config", "core_spawn", "worker_imports"))
    after = sum(phases.get(name, 0.0) for name in ("kv_cache", "core_ready", "warm_up"))
    return {
        "reserve": process_s - ordered_s,
        "process": max(0.0, begun_s - process_s),
        "imports": phases.get("imports", 0.0),
        "core": core,
        "weights": phases.get("weights", 0.0),
        "post-load": after,
        "announce": max(0.0, seen_s - told["ready_at_s"]),
        "first token": first_s - seen_s,
    }


def one_start(made: App, server: Server, way: str, rest: Mapping[str, int]) -> dict[str, Any]:
    """Has a second engine serve, asks it for a token, and waits until the fleet is at `rest` again; returns the steps.
    A warm engine has announced itself before, so it has the last two only.
    """
    share = cached_share(Path(model_directory()))
    epoch_s = time.time() - time.perf_counter()
    present = set(made.fleet.engines(duty="active"))
    ordered_s = made.fleet.scale({"c": 2})
    new = ""

    def there() -> bool:
        nonlocal new
        new = next(iter(set(made.fleet.engines(duty="active")) - present), "")
        return bool(new)

    seen_s = made.fleet.wait(there, "the second engine is active", START_S)
    # one of two idle engines gets each request, so several are sent
    plan = [Planned(0.0, body_of(MODEL, f"Say {i}", 2, chat=False)) for i in range(8)]
    answers = made.streams.send(plan, 60.0).result()
    routes = made.routes()
    firsts = [a.first_s for a in answers if a.problem is None and routes.get(a.request_id) == new]
    if not firsts:
        raise ServerError(f"{new} got none of {len(plan)} requests: {problems_of(answers)}")
    if way == "warm":
        phases, steps = {}, {"announce": seen_s - ordered_s, "first token": min(firsts) - seen_s}
        read = None
    else:
        told = start_of(replica_logs(server), new)
        phases, read = told["phases"], told["weights"]
        if way == "peer" and read["source"] != "peer":
            raise ServerError(f"{new} has read its weights from disk: {read['reason']}")
        steps = steps_of(told, ordered_s + epoch_s, seen_s + epoch_s, min(firsts) + epoch_s)
    made.fleet.scale({"c": 1})
    made.at_rest(rest, 120.0)
    made.fleet.wait_idle()
    return {
        "way": way,
        "cached_share": round(share, 4),
        "steps": {step: round(took_s, 3) for step, took_s in steps.items()},
        "phases": phases,
        "weights": read,
    }


def write_profiles(runs: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the mean steps of each way to start as a profile for the simulator; returns the files."""
    written = []
    for way, steps in report.start_profiles(runs).items():
        number = sum(run["way"] == way for run in runs)
        source = (
            f"measured by benchmarks.live.scaling_steps: the mean of {number} starts of a vLLM engine with {MODEL} on"
            f" {machine['cores']} cores of {machine['cpu']}, {way}, beside an idle engine; commit {machine['commit']}"
        )
        written.append(folder / f"cpu_smollm2_{way.replace(' ', '_')}.yaml")
        starts_of_sim.dump(written[-1], steps, source)
    return written


START_WAYS: tuple[tuple[dict[str, Any], int, tuple[str, ...]], ...] = (
    (PLAIN, 0, ("cold", "page cache")),
    ({"overlap_imports": True}, 0, ("overlapped", "read ahead")),
    ({}, 1, ("pre-warmed",)),
    ({**PLAIN, "weights_from": "peer"}, 0, ("peer",)),
)
"""Options of the engines, the number of pre-warmed processes, and the ways that engines are started with them."""


def starts(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Starts an engine each way, in turn, and activates a warm one."""
    folder, runs = Path(model_directory()), []
    for options, prewarmed, ways in START_WAYS:
        with app([group(setup, "colocated", 1, 2, **options)], say, prewarmed) as (made, server):
            for _ in range(setup.starts):
                for way in ways:
                    if prewarmed:
                        made.fleet.wait(settled(made), "a pre-warmed process waits", START_S)
                    (evict if way in report.EVICTED else read_whole)(folder)
                    runs.append(one_start(made, server, way, {"c active": 1}))
                    total_s = sum(runs[-1]["steps"].values())
                    say(
                        f"start, {way}: {total_s:.1f} s; {runs[-1]['cached_share']:.0%} of the weights cached"
                    )
    with app([group(setup, "colocated", 1, 2, 1)], say) as (made, server):
        for _ in range(setup.starts):
            runs.append(one_start(made, server, "warm", {"c active": 1, "c warm": 1}))
            say(f"start, warm: {sum(runs[-1]['steps'].values()):.2f} s")
    return {"runs": runs}


def settled(made: App) -> Callable[[], bool]:
    """Returns a function that says whether a pre-warmed process has waited for `SETTLED_S` without a break. The engine
    of the start before has just stopped, and the process may be made anew for its cores.
    """
    since_s: float | None = None

    def holds() -> bool:
        nonlocal since_s
        now_s = time.monotonic()
        if made.fleet.metric(WAITING) < 1:
            since_s = None
        elif since_s is None:
            since_s = now_s
        return since_s is not None and now_s - since_s >= SETTLED_S

    return holds


PARTS: dict[str, Callable[[Setup, Callable[[str], None]], dict[str, Any]]] = {
    "fleet": idle_activation_and_switch,
    "drain": drain,
    "starts": starts,
}
"""The parts by name; `fleet` has the figures of `FLEET`, which are parts of the result."""
FLEET = ("idle", "activation", "switch")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if every part ran and there was no harm (`report.harm`), else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.scaling_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--small", action="store_true", help="few rounds and streams, as a trial")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of streams")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result (default %(default)s)")
    args = parser.parse_args(argv)
    setup = replace(SMALL if args.small else Setup(), seed=args.seed)
    machine, say = record.facts("benchmarks.live.scaling_steps"), teller()
    kept = Parts("scaling_steps", machine, asdict(setup))

    parts: dict[str, Any] = {}
    for name in args.parts:
        found = kept.get(name)
        if found is not None:
            say(f"{name}: kept already, from {found['ended_at']}")
        else:
            try:
                found = kept.put(name, PARTS[name](setup, say))
            except (ServerError, httpx.HTTPError) as error:
                print(f"scaling_steps, {name}: {error}", file=sys.stderr)
                return 1
        parts |= {name: found} if name != "fleet" else {key: found[key] for key in FLEET}
    result = {
        "command": record.command("benchmarks.live.scaling_steps", argv),
        "config": asdict(setup),
        "machine": machine,
        "parts": parts,
    }
    for row in report.steps_rows(result):
        print(report.line(row))
    if not record.save(args.out / "steps.json", result, levels=5):
        return 1
    kept.forget()
    if "starts" in parts:
        runs = parts["starts"]["runs"]
        report.draw(runs, args.out, "steps")
        for file in write_profiles(runs, machine, args.out if args.small else starts_of_sim.FOLDER):
            say(f"wrote {file.name}")
    return 1 if report.harm(result) else 0


if __name__ == "__main__":
    sys.exit(main())
