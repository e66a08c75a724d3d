"""Measures a live fleet of sim engines that grows, shrinks and changes under load.

    python -m benchmarks.live.scaling                     all parts: part of `make bench-scaling-live`; half an hour
    python -m benchmarks.live.scaling --parts activation  one part
    python -m benchmarks.live.scaling --small             all parts with few engines and little load, as a trial

Each part has an app of its own, with the autoscaler on, and closed-loop or open-loop clients (`benchmarks.live.fleet`).

activation  A warm decode engine is activated by an administrator's order while requests come: seconds from the order,
            before it leaves the client, to the first text that the engine's first request shows its client. The plan is
            made after the order, so the time from the plan is shorter. Some engines a round, many rounds.
burst       Requests in an open loop, then eight times as many, then the first rate again: `joint` with warm engines, a
            fixed fleet as small as `joint` begins, and one as large as `joint` may become. Attainment is the client's:
            TTFT and TPOT within the objectives.
warm        The CPU that a warm replica takes while nothing comes. Then all engines of a large pool of warm ones are
            activated at once: seconds from the order to each one's first text.
idle        The CPU that replicas take while nothing comes, as many active decode engines as warm ones in one app and
            over the same seconds: what being warm saves today. Their ratio has no aim, since the aim for a warm one
            goes by what an idle replica took when it was written, on another machine.
cold        The same number of engines from one, without a pool: each is a new process.
zero        The application sleeps with no engine, and one request wakes it: seconds from the request to its first text,
            which are those of a start of one engine of each role. Some rounds.
streams     Many streams, some of minutes, while engines are added, drained (streams that are left then migrate) and
            switched between prefill and decode. The same requests have run before on the same app without any of this,
            and the texts must be equal.

Role switches are given by hand (`benchmarks.steering`), because no order of an administrator names a role. An engine's
memory is taken from a result (`ENGINE_BYTES`); where the machine has less than the pool needs, the pool is smaller, and
the result says of what size.

Aims, written before the first run: p99 of an activation at most 1 s; every warm engine's first text within 10 s, and at
most half of the idle CPU of before, which was 1.8 % of a core; no aim for the cold ones beside and none for a wake; no
stream cut, failed or with another text, and one of them at least still open after the last change; no request of the
burst lost. An engine that was ordered and gives no text has missed its aim. The exit status is 1 if a request was lost,
a text differs or such an engine gave none, whatever the times are.

The aim of the burst was written when every request waited for as long as it took. Since then one whose objective cannot
be met is refused at once (status 429, with the seconds after which to come again). Refused ones have a row of their own
and no aim; for the attainment they are late.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.live import machine as record
from benchmarks.live import proctree
from benchmarks.live import scaling_report as report
from benchmarks.live.fleet import Answer, Fleet, Streams, first_tokens
from benchmarks.live.idle import idle_cores, replicas
from benchmarks.live.kept import Parts
from benchmarks.live.load import body_of
from benchmarks.live.openloop import Planned
from benchmarks.live.servers import ROOT, Command, Server, ServerError, running
from benchmarks.live.targets import sluice_app
from benchmarks.progress import teller
from benchmarks.steering import HandGiven, first_routes

OUT = ROOT / "benchmarks" / "results" / "scaling_live"
ENGINE_BYTES = 140 * 2**20
"""Memory that a replica with a sim engine is taken to need. ASSUMPTION: a little above the PSS of one in
overhead/coldstart-sim.json."""
SPARE_BYTES = 4 * 2**30
"""Memory that is left for Ray, the rest of the app, clients and the machine."""
JOURNAL_S = 1.0
"""Wait for the last lines of the router's journal."""
REST_S = 10.0
"""Wait from when nothing is under way until idle CPU is measured. ASSUMPTION: a start's last work, such as the
announcement to all ingresses, is over by then."""
START_S = 300.0
"""Longest wait for replicas that start, beside `START_EACH_S` for each."""
START_EACH_S = 6.0


@dataclass(frozen=True, slots=True)
class Burst:
    """The load of the burst: the first rate, how many times it the burst is, and the seconds of its three parts."""

    rate_per_s: float = 3.0
    times: float = 8.0
    lead_s: float = 60.0
    burst_s: float = 60.0
    after_s: float = 30.0
    tokens: int = 50
    decode_most: int = 8
    warm: int = 4
    slots: int = 8
    # the small fleet serves the last request of the burst some 120 s late (`test_the_burst_outlasts_no_patience`)
    patience_s: float = 300.0
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.04

    def phase(self, at_s: float) -> str:
        """Returns the part in which a request is sent at `at_s`."""
        if at_s < self.lead_s:
            return "before"
        return "burst" if at_s < self.lead_s + self.burst_s else "after"


@dataclass(frozen=True, slots=True)
class Setup:
    """The sizes of all parts. `pool` is the number of warm engines that is wanted, and of cold ones beside it."""

    step_s: float = 0.02
    num_cpus: float = 0.02
    # activation: `batch` engines in each of `rounds` rounds
    batch: int = 4
    rounds: int = 30
    clients: int = 24
    tokens: int = 12
    pool: int = 64
    pool_tokens: int = 50
    idle_s: float = 30.0
    # active engines that idle beside as many warm ones, and for how long
    idle_engines: int = 8
    beside_s: float = 60.0
    # longest wait until each activated engine has got a request
    routed_s: float = 15.0
    zero_rounds: int = 10
    sleep_after_s: float = 5.0
    burst: Burst = field(default_factory=Burst)
    streams: int = 200
    stream_step_s: float = 0.05
    stream_tokens: tuple[int, int] = (100, 3600)
    streams_within_s: float = 20.0
    lease_s: float = 4.0
    drain_s: float = 6.0
    hold_s: float = 8.0
    seed: int = 0


SMALL = Setup(
    rounds=2,
    batch=2,
    clients=8,
    pool=3,
    idle_s=10.0,
    idle_engines=2,
    beside_s=10.0,
    zero_rounds=2,
    burst=Burst(lead_s=15.0, burst_s=15.0, after_s=5.0, decode_most=4, warm=2, rate_per_s=2.0),
    streams=20,
    stream_tokens=(60, 900),
    streams_within_s=3.0,
    hold_s=4.0,
)


# ------------------------------------------------------------------------------------------------------------- the app


def group(
    setup: Setup, name: str, replicas: int, most: int, warm: int = 0, least: int = 1, **options: Any
) -> dict[str, Any]:
    """Returns a group of sim engines named `p` or `d`, of `replicas` that serve and `warm` ones, `least` and `most`."""
    timing = {"prefill_base_s": 0.005, "decode_base_s": setup.step_s}
    engine = {"profile": "tick_1ms", "timing": timing, "slots": 64, "lease_s": setup.lease_s, **options}
    return {
        "name": name,
        "role": {"p": "prefill", "d": "decode"}[name],
        "kind": "sim",
        "num_cpus": setup.num_cpus,
        "replicas": replicas,
        "options": engine,
        "scaling": {"min": least, "max": most, "warm": warm, "drain_s": setup.drain_s},
    }


def command(
    folder: Path, prefill: dict[str, Any], decode: dict[str, Any], scaling: Mapping[str, Any]
) -> Command:
    """Returns the command that starts an app whose journals and sockets are in `folder`."""
    shortest = {"name": "join_shortest_queue"}
    args = {
        "model": {"path": "sim", "name": "sim"},
        "engines": [prefill, decode],
        "router": {"journal": {"folder": str(folder / "router")}, "prefill": shortest, "decode": shortest},
        "ingress": {"options": {"max_in_flight": 4096}},
        "wire": {"socket_dir": str(folder / "s")},
        "scaling": {"enabled": True, "policy": "fixed", "journal": {"folder": str(folder / "scaling")}}
        | dict(scaling),
    }
    most = decode["replicas"] + decode["scaling"]["warm"]
    return sluice_app("Sluice, sim engines", folder / "app.yaml", args, START_S + START_EACH_S * most)


class App:
    """A running app, its clients, and the folder of its journals."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.folder, self.pid = folder, server.pid
        self.fleet, self.streams = Fleet(server.command.port), Streams(server.command.port)

    def close(self) -> None:
        """Ends the clients."""
        self.streams.close()
        self.fleet.close()

    def routes(self) -> dict[str, str]:
        """Returns the engine of each request so far (`benchmarks.steering.first_routes`)."""
        time.sleep(JOURNAL_S)
        return first_routes(self.folder / "router")

    def at_rest(self, numbers: Mapping[str, int], timeout_s: float) -> float:
        """Waits for these ready engines by group and duty, and none else; returns when there were. The autoscaler takes
        orders then.
        """
        wanted = {name: number for name, number in numbers.items() if number}
        there_s = self.fleet.wait(lambda: self.fleet.numbers() == wanted, f"engines {wanted}", timeout_s)
        self.fleet.wait(self.fleet.takes_orders, "the autoscaler knows the fleet", timeout_s)
        return there_s


@contextmanager
def app(
    prefill: dict[str, Any],
    decode: dict[str, Any],
    say: Callable[[str], None],
    **scaling: Any,
) -> Iterator[App]:
    """A context in which such an app runs and its first replicas are ready."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        folder = Path(name)
        with running(command(folder, prefill, decode, scaling), say) as server:
            made = App(server, folder)
            try:
                first = {"p active": prefill["replicas"], "d active": decode["replicas"]}
                warm = {"p warm": prefill["scaling"]["warm"], "d warm": decode["scaling"]["warm"]}
                made.at_rest(first | warm, server.command.timeout_s)
                yield made
            finally:
                made.close()


def problems_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Returns how many answers are not whole, by reason."""
    return dict(Counter(answer.problem for answer in answers if answer.problem is not None))


# -------------------------------------------------------------------------------------------------- activation, pools


def activated(
    made: App,
    say: Callable[[str], None],
    batch: int,
    clients: int,
    tokens: int,
    wait_s: float,
    routed_s: float,
    model: str = "sim",
) -> dict[str, Any]:
    """Orders `batch` more decode engines than the one that serves, while clients send requests for `tokens`, until each
    engine has got one, for at most `routed_s`; returns the seconds to the first text of each engine.
    """

    def body(number: int) -> bytes:
        return body_of(model, f"{salt} {number} of the round", tokens, chat=False)

    salt = f"{time.time():.3f}"
    before = set(made.fleet.engines(role="decode", duty="active"))
    with made.streams.kept(body, clients) as answers:
        made.fleet.wait(lambda: len(answers) > clients, "the load runs", 60.0)
        # of earlier rounds, with the same engines
        known = first_routes(made.folder / "router")
        ordered_s = made.fleet.scale({"d": 1 + batch})
        full_s = made.fleet.wait(
            lambda: len(made.fleet.engines(role="decode", duty="active")) == 1 + batch,
            f"{1 + batch} decode engines are active",
            wait_s,
        )
        engines = sorted(set(made.fleet.engines(role="decode")) - before)
        _routed(made, engines, known, routed_s)
    found = first_tokens(answers, made.routes(), engines, ordered_s)
    say(
        f"{batch} engines ordered: all active after {full_s - ordered_s:.2f} s; first texts of {len(found)} after"
        f" {min(found.values(), default=0.0):.2f} to {max(found.values(), default=0.0):.2f} s; {len(answers)} answers"
    )
    return {
        "wanted": batch,
        "active_s": round(full_s - ordered_s, 4),
        "first_text_s": [round(took_s, 4) for took_s in sorted(found.values())],
        "served": sum(answer.problem is None for answer in answers),
        "lost": problems_of(answers),
    }


def _routed(made: App, engines: Sequence[str], known: Mapping[str, str], timeout_s: float) -> None:
    """Waits until each engine has got a request that is not `known`, or the time is over."""
    end_s = time.perf_counter() + timeout_s
    while time.perf_counter() < end_s:
        now = first_routes(made.folder / "router")
        if {now[request] for request in now.keys() - known.keys()} >= set(engines):
            return
        time.sleep(0.2)


def activation(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Activates warm engines in rounds and returns each round's figures."""
    rounds = []
    decode = group(setup, "d", 1, 1 + setup.batch, setup.batch)
    with app(group(setup, "p", 1, 1), decode, say) as made:
        for _ in range(setup.rounds):
            rounds.append(
                activated(made, say, setup.batch, setup.clients, setup.tokens, 60.0, setup.routed_s)
            )
            made.fleet.scale({"d": 1})
            made.at_rest({"p active": 1, "d active": 1, "d warm": setup.batch}, 60.0)
            made.fleet.wait_idle()
    return {"rounds": rounds}


def pool_size(setup: Setup) -> tuple[int, int]:
    """Returns the number of engines that the machine's free memory has room for, at most `setup.pool`, and that
    memory.
    """
    free = psutil.virtual_memory().available
    return max(1, min(setup.pool, (free - SPARE_BYTES) // ENGINE_BYTES)), free


def mean_idle_cores(made: App, size: int, seconds: float) -> float:
    """Returns the cores that a decode replica takes while nothing comes: the mean of `size` warm ones and the one that
    serves.
    """
    made.fleet.wait_idle()
    before, begun_s = proctree.snapshot(made.pid), time.perf_counter()
    time.sleep(seconds)
    spent = proctree.cpu_by_role(before, proctree.snapshot(made.pid))
    return spent["replica DEngine"] / (time.perf_counter() - begun_s) / (size + 1)


def warm(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Activates a pool of warm engines at once."""
    size, free = pool_size(setup)
    with app(group(setup, "p", 1, 1), group(setup, "d", 1, 1 + size, size), say) as made:
        used = free - psutil.virtual_memory().available
        idle = mean_idle_cores(made, size, setup.idle_s)
        say(f"warm: an idle replica takes {100 * idle:.2f} % of a core")
        found = activated(made, say, size, 2 * size + 2, setup.pool_tokens, 120.0, setup.routed_s)
    return {
        "wanted_pool": setup.pool,
        "free_bytes": free,
        "used_bytes": used,
        "idle_cores": round(idle, 5),
        **found,
    }


def idle(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures active and warm engines beside one another while nothing comes."""
    number = setup.idle_engines
    with app(group(setup, "p", 1, 1), group(setup, "d", number, 2 * number, number), say) as made:
        return idle_by_duty(made, setup.beside_s, say)


def idle_by_duty(made: App, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the cores that each decode engine takes, with all its processes, while nothing comes for `seconds`, in a
    list for each duty. Raises ServerError if the process of an engine is not found.
    """
    made.fleet.wait_idle()
    time.sleep(REST_S)
    by_duty = {duty: made.fleet.engines(role="decode", duty=duty) for duty in ("active", "warm")}
    pids = replicas(made.pid, made.folder / "s")
    missing = [engine for engines in by_duty.values() for engine in engines if engine not in pids]
    if missing:
        raise ServerError(f"no process has the sockets of {', '.join(missing)}")
    cores = idle_cores({engine: pids[engine] for engines in by_duty.values() for engine in engines}, seconds)
    found = {duty: sorted(round(cores[engine], 5) for engine in engines) for duty, engines in by_duty.items()}
    shares = ", ".join(f"{duty} {100 * sum(each) / len(each):.2f} %" for duty, each in found.items() if each)
    say(f"idle: of a core, {shares}")
    return {"seconds": seconds, **found}


def cold(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Has as many engines started as the pool has, from one."""
    size, free = pool_size(setup)
    with app(group(setup, "p", 1, 1), group(setup, "d", 1, 1 + size), say) as made:
        wait_s = START_S + START_EACH_S * size
        found = activated(made, say, size, 2 * size + 2, setup.pool_tokens, wait_s, setup.routed_s)
    return {"wanted_pool": setup.pool, "free_bytes": free, **found}


# ---------------------------------------------------------------------------------------------------------------- zero


def zero(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Has a request wake the sleeping application, in rounds; returns the seconds to each one's first text."""
    took_s: list[float] = []
    answers: list[Answer] = []
    prefill, decode = (group(setup, name, 1, 1, least=0) for name in ("p", "d"))
    with app(prefill, decode, say, sleep_after_s=setup.sleep_after_s) as made:
        for number in range(setup.zero_rounds):
            made.fleet.wait(made.fleet.sleeps, "no engine is left, and the application sleeps", 120.0)
            body = body_of("sim", f"wake {number}", setup.tokens, chat=False)
            answers += made.streams.send([Planned(0.0, body)], START_S).result()
            if answers[-1].problem is None:
                took_s.append(round(answers[-1].first_s - answers[-1].sent_s, 4))
            say(f"zero: first text after {took_s[-1:]} s; {answers[-1].problem or 'whole'}")
    return {"rounds": setup.zero_rounds, "first_text_s": took_s, "lost": problems_of(answers)}


# --------------------------------------------------------------------------------------------------------------- burst


def burst_plan(setup: Setup) -> list[Planned]:
    """Returns the requests of the burst: Poisson arrivals at the rates of the three parts, drawn with the seed."""
    load, rng = setup.burst, random.Random(setup.seed)
    slo = {"slo": {"ttft_ms": 1e3 * load.ttft_slo_s, "tpot_ms": 1e3 * load.tpot_slo_s}}
    plan: list[Planned] = []
    at_s, end_s = 0.0, load.lead_s + load.burst_s + load.after_s
    while True:
        at_s += rng.expovariate(load.rate_per_s * (load.times if load.phase(at_s) == "burst" else 1.0))
        if at_s >= end_s:
            return plan
        body = body_of("sim", f"{len(plan)} of the burst", load.tokens, chat=False, extra=slo)
        plan.append(Planned(at_s, body))


def burst(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Sends the burst to the three fleets."""
    load = setup.burst
    joint = {"policy": "joint", "params": {"limits": {"step": load.decode_most}}}
    fleets = {
        "joint": (1, load.warm, joint),
        "fixed, small": (1, 0, {}),
        "fixed, large": (load.decode_most, 0, {}),
    }
    return {name: _burst(setup, name, *fleet, say) for name, fleet in fleets.items()}


def _burst(
    setup: Setup, name: str, first: int, warm: int, scaling: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    load, plan = setup.burst, burst_plan(setup)
    decode = group(setup, "d", first, load.decode_most, warm, slots=load.slots)
    with app(group(setup, "p", 1, 2), decode, say, **scaling) as made:
        start_s = time.perf_counter()
        future = made.streams.send(plan, load.patience_s)
        numbers = []
        while not future.done():
            now = made.fleet.numbers()
            active = sum(number for key, number in now.items() if key.endswith("active"))
            numbers.append((round(time.perf_counter() - start_s, 2), active, sum(now.values())))
            time.sleep(0.5)
        answers = future.result()
        held = made.fleet.scaling()["held"]
    requests = [_latency(planned, answer, load) for planned, answer in zip(plan, answers, strict=True)]
    grown_s = next((at_s - load.lead_s for at_s, active, _ in numbers if active > numbers[0][1]), None)
    shares = ", ".join(
        f"{phase} {share:.3f}" for phase, share in report.attainment(requests, asdict(load)).items()
    )
    said = "never" if grown_s is None else f"{grown_s:.1f} s after the burst began"
    say(f"burst, {name}: attainment {shares}; first more engines {said}; {held or 'nothing held'}")
    return {"requests": requests, "engines": numbers, "lost": problems_of(answers)}


def _latency(planned: Planned, answer: Answer, load: Burst) -> list[Any]:
    """Returns [planned at, TTFT, TPOT] in seconds; the last two are None for an answer that is not whole."""
    at_s = round(planned.at_s, 3)
    if answer.problem is not None:
        return [at_s, None, None]
    ttft_s, stream_s = answer.first_s - answer.sent_s, answer.last_s - answer.first_s
    return [at_s, round(ttft_s, 4), round(stream_s / max(1, load.tokens - 1), 5)]


# ------------------------------------------------------------------------------------------------------------- streams


def stream_plans(setup: Setup) -> tuple[list[Planned], list[Planned]]:
    """Returns the streams in two halves, each sent within a short time: log-uniform lengths, so that some last for
    minutes.
    """
    rng, (least, most) = random.Random(setup.seed), setup.stream_tokens
    lengths = [round(least * (most / least) ** (i / max(1, setup.streams - 1))) for i in range(setup.streams)]
    rng.shuffle(lengths)
    times = sorted(rng.uniform(0.0, setup.streams_within_s) for _ in lengths)
    plan = [
        Planned(at_s, body_of("sim", f"stream {i} of all", tokens, chat=False))
        for i, (at_s, tokens) in enumerate(zip(times, lengths, strict=True))
    ]
    return plan[::2], plan[1::2]


MIGRATIONS = "sluice_migrations_total"


def streams(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the streams undisturbed and then disturbed, and compares their texts."""
    halves = stream_plans(setup)
    patience_s = 60.0 + 4.0 * setup.stream_tokens[1] * setup.stream_step_s
    slow = replace(setup, step_s=setup.stream_step_s)
    slots = 2 * setup.streams
    prefill, decode = group(slow, "p", 1, 2, slots=slots), group(slow, "d", 2, 5, 1, slots=slots)
    with app(prefill, decode, say) as made:
        quiet = [made.streams.send(half, patience_s) for half in halves]
        undisturbed = [answer for half in quiet for answer in half.result()]
        say(f"undisturbed: {len(undisturbed)} streams, not whole: {problems_of(undisturbed) or 'none'}")
        made.fleet.wait_idle()
        begun_s = time.perf_counter()
        first = made.streams.send(halves[0], patience_s)
        time.sleep(setup.streams_within_s)
        done = _numbers(made, {"p": 2, "d": 4}, {"p active": 2, "d active": 4, "d warm": 1}, say)
        # to the new engines too, which are the first to stop
        second = made.streams.send(halves[1], patience_s)
        time.sleep(setup.streams_within_s)
        done += _numbers(made, {"p": 1, "d": 1}, {"p active": 1, "d active": 1, "d warm": 1}, say)
        time.sleep(setup.hold_s)
        done += _numbers(made, {"d": 2}, {"p active": 1, "d active": 2, "d warm": 1}, say)
        switches = _switched(made, setup, say)
        open_at_end = not (first.done() and second.done())
        disturbed = first.result() + second.result()
        # the ingress reports its totals once a second
        time.sleep(2.0)
        migrations = made.fleet.metric(MIGRATIONS)
    pairs = list(zip(undisturbed, disturbed, strict=True))
    longest_s = max((a.last_s - a.sent_s for a in disturbed if a.problem is None), default=0.0)
    found = {
        "streams": len(pairs),
        "undisturbed_lost": problems_of(undisturbed),
        "lost": problems_of(disturbed),
        "other_texts": sum(
            one.text != other.text for one, other in pairs if one.problem is None and other.problem is None
        ),
        "longest_s": round(longest_s, 1),
        "all_s": round(time.perf_counter() - begun_s, 1),
        "open_at_the_last_change": open_at_end,
        "migrations": migrations,
        "grown": done["grown"],
        "drained": done["drained"],
        **switches,
    }
    say(f"streams: {found}")
    return found


def _numbers(
    made: App, counts: Mapping[str, int], numbers: Mapping[str, int], say: Callable[[str], None]
) -> Counter[str]:
    """Orders numbers of engines and waits until they are there; returns how many engines came and how many left."""
    before = set(made.fleet.engines())
    made.fleet.scale(counts)
    made.at_rest(numbers, START_S + 4 * START_EACH_S)
    after = set(made.fleet.engines())
    say(f"streams: now {dict(numbers)}")
    return Counter(grown=len(after - before), drained=len(before - after))


def _switched(made: App, setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Switches engines between prefill and decode and back, one after the other, and sends a few requests after each
    switch. Two engines decode and one prefills before and after.
    """
    (own,) = made.fleet.engines(role="prefill", duty="active")
    lent = made.fleet.engines(role="decode", duty="active")[0]
    seconds, probes = [], []
    hand = HandGiven(made.folder / "s")
    try:
        for engine, role in ((lent, "prefill"), (own, "decode"), (own, "prefill"), (lent, "decode")):
            given_s = hand.assign(engine, role)
            there_s = made.fleet.wait_role(engine, role)
            seconds.append(round(there_s - given_s, 3))
            plan = [Planned(0.1 * i, body_of("sim", f"probe {i}", 20, chat=False)) for i in range(10)]
            probes.append(made.streams.send(plan, 60.0).result())
            say(f"streams: {engine} serves {role} after {seconds[-1]:.2f} s")
            time.sleep(setup.hold_s / 2)
    finally:
        hand.close()
    lost = Counter[str]()
    for answers in probes:
        lost.update(problems_of(answers))
    texts = {tuple(answer.text for answer in answers) for answers in probes}
    return {
        "switches": len(seconds),
        "switch_s": seconds,
        "probes": sum(map(len, probes)),
        "probes_lost": dict(lost),
        "probes_differ": len(texts) > 1,
    }


PARTS: dict[str, Callable[[Setup, Callable[[str], None]], dict[str, Any]]] = {
    "activation": activation,
    "burst": burst,
    "warm": warm,
    "idle": idle,
    "cold": cold,
    "zero": zero,
    "streams": streams,
}
"""The parts of the measurement by name, in the order in which they run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if every part ran and there was no harm (`report.harm`), else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--small", action="store_true", help="few engines and little load, as a trial")
    parser.add_argument("--pool", type=int, help=f"engines of the large pool (default {Setup().pool})")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result (default %(default)s)")
    args = parser.parse_args(argv)
    setup = replace(SMALL if args.small else Setup(), seed=args.seed)
    if args.pool is not None:
        setup = replace(setup, pool=args.pool)
    machine, say = record.facts("benchmarks.live.scaling"), teller()
    kept = Parts("scaling", machine, asdict(setup))

    parts: dict[str, Any] = {}
    for name in args.parts:
        found = kept.get(name)
        if found is not None:
            say(f"{name}: kept already, from {found['ended_at']}")
        else:
            try:
                found = kept.put(name, PARTS[name](setup, say))
            except (ServerError, httpx.HTTPError) as error:
                print(f"scaling, {name}: {error}", file=sys.stderr)
                return 1
        parts[name] = found
    result = {
        "command": record.command("benchmarks.live.scaling", argv),
        "config": asdict(setup),
        "machine": machine,
        "parts": parts,
    }
    for row in report.scaling_rows(result):
        print(report.line(row))
    if not record.save(args.out / "scaling.json", result, levels=5):
        return 1
    kept.forget()
    return 1 if report.harm(result) else 0


if __name__ == "__main__":
    sys.exit(main())
