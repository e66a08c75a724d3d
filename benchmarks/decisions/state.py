"""Measures events, snapshots and prefix look-ups with 256 engines, 10,000 requests and a prompt of 100,000 tokens."""

import random
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.decisions.measure import Timing, timed
from policies.engine_model.blocks import Removed, Stored
from policies.state import events as ev
from policies.state.prefix_index import PrefixIndex
from policies.state.reducer import ClusterState
from policies.state.views import Request, Role

ENGINES = 256
LIVE = 10_000
BLOCKS = 100_000 // 16
OTHER_BLOCKS = 1_000_000


def full_cluster(rng: random.Random) -> ClusterState:
    """Returns a state in which a quarter of the engines do prefill, and all live requests decode.

    One request in twenty has a forecast.
    """
    state = ClusterState()
    for i in range(ENGINES):
        role = Role.PREFILL if i % 4 == 0 else Role.DECODE
        state.apply(ev.EngineUp(0.0, f"w{i:03d}", role, "g", f"n{i}", 96, 1_000_000))
    prefill = [f"w{i:03d}" for i in range(ENGINES) if i % 4 == 0]
    decode = [f"w{i:03d}" for i in range(ENGINES) if i % 4]
    for i in range(LIVE):
        attempt_id = f"r{i}"
        state.apply(ev.Arrived(0.0, Request(attempt_id, 0.0, rng.randint(50, 8000), 1024)))
        state.apply(ev.PrefillRouted(0.0, attempt_id, rng.choice(prefill), colocated=False))
        state.apply(ev.PrefillDone(0.0, attempt_id, 30.0, 1, 0))
        state.apply(ev.DecodeRouted(0.0, attempt_id, rng.choice(decode)))
        state.apply(ev.Admitted(0.0, attempt_id))
        if i % 20 == 0:
            state.apply(ev.ForecastMade(0.0, attempt_id, 0, float(rng.randint(1, 48))))
    state.snapshot(0.0)
    return state


def events_and_snapshots(calls: int, seed: int) -> list[Timing]:
    """Measures one event, one event with the snapshot after it, and the progress of a whole step with one snapshot."""
    rng = random.Random(seed)
    state = full_cluster(rng)
    tokens = dict.fromkeys((f"r{i}" for i in range(LIVE)), 0)

    def progress() -> ev.Progressed:
        attempt_id = f"r{rng.randrange(LIVE)}"
        tokens[attempt_id] += 1
        return ev.Progressed(1.0, attempt_id, tokens[attempt_id])

    def status(i: int) -> ev.EngineStatus:
        return ev.EngineStatus(1.0 + i / 1000, f"w{i % ENGINES:03d}", 40, 2, 100_000)

    def both(event: ev.Event) -> None:
        state.apply(event)
        state.snapshot(1.0)

    def step(events: list[ev.Progressed]) -> None:
        for event in events:
            state.apply(event)
        state.snapshot(1.0)

    def steps() -> Iterator[Callable[[], object]]:
        for _ in range(max(5, calls // 100)):
            yield partial(step, [progress() for _ in range(1000)])

    return [
        timed("event: progress", (partial(state.apply, progress()) for _ in range(calls))),
        timed("event: engine status", (partial(state.apply, status(i)) for i in range(calls))),
        timed("event + snapshot", (partial(both, progress()) for _ in range(calls))),
        timed("1,000 progress events + 1 snapshot, per event", steps(), 1000),
        *whole_steps(state, tokens, max(5, calls // 100), rng),
        timed("snapshot without a change", (partial(state.snapshot, 1.0) for _ in range(calls))),
    ]


def whole_steps(state: ClusterState, tokens: dict[str, int], steps: int, rng: random.Random) -> list[Timing]:
    """Measures an event by which all requests gain a token: with few forecasts, then with a forecast for each request.

    A length predictor makes forecasts for all requests.
    """

    def many(apply: Callable[[ev.Event], object]) -> Iterator[Callable[[], object]]:
        for _ in range(steps):
            for attempt_id in tokens:
                tokens[attempt_id] += 1
            yield partial(apply, ev.ProgressedMany(1.0, tuple(tokens.items())))

    def look_after(event: ev.Event) -> None:
        state.apply(event)
        state.snapshot(1.0)

    rows = [timed("10,000 in one ProgressedMany, per item", many(state.apply), LIVE)]
    for attempt_id, done in tokens.items():
        state.apply(ev.ForecastMade(1.0, attempt_id, done, float(rng.randint(1, 300))))
    rows.append(timed("the same, a forecast on every request", many(state.apply), LIVE))
    rows.append(timed("the same, and a snapshot after each", many(look_after), LIVE))
    return rows


def prefix_index(calls: int, seed: int, quick: bool) -> list[Timing]:
    """Measures the look-up of a 100,000-token prompt (6,250 blocks) in the prefix index of 256 workers.

    The workers hold beginnings of the prompt among a million other blocks.
    """
    rng = random.Random(seed)
    index = PrefixIndex()
    others = OTHER_BLOCKS // (20 if quick else 1)
    chain = tuple(rng.getrandbits(63) for _ in range(BLOCKS))
    seqs = dict.fromkeys((f"w{i}" for i in range(ENGINES)), 0)
    for worker in seqs:
        held = rng.choice([0, 100, BLOCKS // 2, BLOCKS, rng.randrange(BLOCKS)])
        filler = tuple(rng.getrandbits(63) for _ in range(others // ENGINES))
        index.apply(worker, "e", 0, (Stored(chain[:held]), Stored(filler)))
        seqs[worker] = 1

    def batch() -> tuple[str, str, int, tuple[Stored, Removed]]:
        worker = f"w{rng.randrange(ENGINES)}"
        seqs[worker] += 1
        blocks = tuple(rng.getrandbits(63) for _ in range(8))
        return worker, "e", seqs[worker] - 1, (Stored(blocks), Removed(blocks))

    def orphaned() -> Iterator[Callable[[], object]]:
        worker = "w1"
        index.restore(worker, "f", 1, [Stored(chain)])
        index.apply(worker, "f", 1, (Removed((chain[3000],)),))
        for _ in range(calls):
            yield partial(index.lookup, chain)

    size = f"{index.blocks:,} blocks, {index.memory_bytes() / 1e6:.0f} MB"
    return [
        timed(
            "prefix index: lookup of 100,000 tokens",
            (partial(index.lookup, chain) for _ in range(calls)),
            1,
            size,
        ),
        timed(
            "prefix index: stored or removed block",
            (partial(index.apply, *batch()) for _ in range(calls)),
            16,
        ),
        timed("prefix index: lookup, one worker with a hole", orphaned()),
    ]
