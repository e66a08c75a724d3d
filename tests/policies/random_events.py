"""Random but plausible lives of a cluster, event by event, from a seed: such events may come in any order.

The driver looks at the actions, so that most requests get through, and throws in what goes wrong live: stale events,
lost engines, retries, cancellations, refused and accepted changes of policy, costs that are not finite.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from policies.dispatch.dispatcher import Action, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.journal.lines import JournalWriter, outcome_lines
from policies.network.oracle import NodePlace, Oracle, PairEstimate
from policies.request.terms import Terms
from policies.routing.base import PolicyError
from policies.routing.registry import DECODE, PREFILL
from policies.state import events as ev
from policies.state.prefix_index import Change, Cleared, Removed, Stored
from policies.state.views import Health, Request, Role

GOOD = Oracle(
    {0: 1e10, 1: 5e9, 3: 1e9},
    {0: 1e-5, 3: 1e-3},
    {("n0", "n1"): 1},
    {"n0": NodePlace("r0", "p0"), "n2": NodePlace("r1", "p0")},
    {3: 0.25},
    10.0,
    {("p0", "d0"): PairEstimate(2e9, 10.0)},
)
# a transfer takes longer than a float can say: the policies refuse such a cost
HOPELESS = Oracle({3: 1e-308})


@dataclass
class Life:
    """`next_event` makes one event; `saw` tells it what that event led to."""

    rng: random.Random
    now_s: float = 10.0
    tenants: tuple[str, ...] = ("", "", "acme", "beta")
    changes_fairness: bool = True
    changes_admission: bool = True
    slos: tuple[float | None, ...] = (None, 0.5)
    requests: int = 0
    queued: set[str] = field(default_factory=set)
    prefilling: dict[str, bool] = field(default_factory=dict)  # attempt_id -> colocated
    pooled: set[str] = field(default_factory=set)
    decoding: dict[str, int] = field(default_factory=dict)  # attempt_id -> tokens
    kv_seq: int = 0

    def start(self) -> Iterator[ev.Event]:
        """A fleet of two groups, with the network known."""
        for i, (role, group) in enumerate(
            [(Role.PREFILL, "a"), (Role.PREFILL, "a"), (Role.COLOCATED, "b"), (Role.COLOCATED, "b")]
            + [(Role.DECODE, "a")] * 4
        ):
            name = f"{role.value[0]}{i}"
            yield ev.EngineUp(self.now_s, name, role, group, f"n{i % 3}", 3, 4000)
            yield ev.EngineStatus(self.now_s, name, 0, 0, 0)
        yield ev.OracleRefreshed(self.now_s, GOOD)

    def next_event(self) -> ev.Event:
        self.now_s += self.rng.choice([0.0, 0.001, 0.02, 0.1])
        kinds = [self._arrive] * 4 + [self._advance] * 10 + [self._engine] * 4 + [self._kv]
        kinds += [self._stale, self._change, self._tick, self._oracle, self._cancel, self._fail]
        return self.rng.choice(kinds)()

    def saw(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self.queued.discard(action.attempt_id)
            self.pooled.discard(action.attempt_id)
            match action:
                case RoutePrefill():
                    self.prefilling[action.attempt_id] = action.colocated
                case RouteDecode():
                    self.decoding[action.attempt_id] = 0
                case Reject():
                    self._forget(action.attempt_id)

    def _forget(self, attempt_id: str) -> None:
        self.queued.discard(attempt_id)
        self.pooled.discard(attempt_id)
        self.prefilling.pop(attempt_id, None)
        self.decoding.pop(attempt_id, None)

    def _arrive(self) -> ev.Event:
        rng = self.rng
        again = sorted(self.prefilling) if rng.random() < 0.2 else []
        if again:
            attempt_id = rng.choice(again)
            self._forget(attempt_id)
        else:
            self.requests += 1
            attempt_id = f"r{self.requests}"
        self.queued.add(attempt_id)
        tokens = rng.choice([1, 64, 640, 2000])
        return ev.Arrived(
            self.now_s,
            Request(
                attempt_id,
                self.now_s,
                tokens,
                rng.choice([1, 100]),
                slots=rng.choice([1, 1, 1, 2]),
                terms=self._terms(),
                deadline_s=rng.choice([float("inf"), self.now_s + 3.0]),
                avoid=rng.choice([(), ("d4",)]),
                block_hashes=tuple(range(100, 100 + tokens // 16)),
                block_tokens=16,
                predicted_tokens=rng.choice([None, 12.5]),
            ),
        )

    def _terms(self) -> Terms:
        rng = self.rng
        return Terms(
            priority=rng.choice([0, 0, 1]),
            ttft_slo_s=rng.choice(self.slos),
            tenant=rng.choice(self.tenants),
            weight=rng.choice([1.0, 1.0, 0.5, 3.0]),
            slo_presses=self.requests % 4 != 0,
        )

    def _advance(self) -> ev.Event:
        rng, now_s = self.rng, self.now_s
        if self.prefilling and rng.random() < 0.5:
            attempt_id = rng.choice(sorted(self.prefilling))
            if self.prefilling.pop(attempt_id):
                self.decoding[attempt_id] = 0
                return ev.Admitted(now_s, attempt_id)
            self.pooled.add(attempt_id)
            return ev.PrefillDone(
                now_s, attempt_id, now_s + rng.choice([0.75, 30.0]), 3 * 2**20, rng.choice([0, 16])
            )
        if self.pooled and rng.random() < 0.2:
            return ev.LeaseRenewed(now_s, rng.choice(sorted(self.pooled)), now_s + 30.0)
        if not self.decoding:
            return ev.Tick(now_s)
        attempt_id = rng.choice(sorted(self.decoding))
        roll = rng.random()
        if roll < 0.3:
            return ev.Closed(now_s, attempt_id, "finished", self.decoding.pop(attempt_id))
        if roll < 0.5:
            return ev.ForecastMade(
                now_s, attempt_id, self.decoding[attempt_id], rng.choice([None, 0.5, 7.25, 1e-9])
            )
        self.decoding[attempt_id] += rng.randrange(5)
        if roll < 0.7:
            return ev.Progressed(now_s, attempt_id, self.decoding[attempt_id])
        return ev.ProgressedMany(now_s, ((attempt_id, self.decoding[attempt_id]), ("gone", 3)))

    def _fail(self) -> ev.Event:
        """An engine fails an attempt, mostly d4; the attempt's end follows as a cancellation, or never."""
        live = sorted({*self.prefilling, *self.decoding})
        attempt_id = self.rng.choice(live or ["nobody"])
        worker = self.rng.choice(["d4", "d4", "d5", "p0", "p1"])
        code = self.rng.choice(["internal", "engine_lost", "kv_load", "bad_request", None])
        return ev.AttemptFailed(self.now_s, attempt_id, (worker,), "decode", code)

    def _cancel(self) -> ev.Event:
        live = sorted({*self.queued, *self.prefilling, *self.pooled, *self.decoding})
        attempt_id = self.rng.choice(live or ["nobody"])
        self._forget(attempt_id)
        return ev.Closed(self.now_s, attempt_id, "cancelled")

    def _engine(self) -> ev.Event:
        rng, now_s = self.rng, self.now_s
        name = rng.choice(["p0", "p1", "c2", "c3", "d4", "d5", "d6", "d7"])
        if rng.random() < 0.1:
            return ev.EngineDown(now_s, name)
        if rng.random() < 0.3:
            role = {"p": Role.PREFILL, "c": Role.COLOCATED, "d": Role.DECODE}[name[0]]
            health = rng.choice([*[Health.READY] * 8, Health.WARM, Health.DRAINING])
            return ev.EngineUp(
                now_s, name, role, "b" if name[0] == "c" else "a", f"n{name[1]}", 3, 4000, health
            )
        shares = rng.choice([None, 0.1, 1 / 3])
        return ev.EngineStatus(now_s, name, 1, rng.randrange(3), 500, swapped=None, compute=shares)

    def _kv(self) -> ev.Event:
        worker, epoch = self.rng.choice(["p0", "c2", "d4"]), "e1"
        self.kv_seq += 1
        if self.kv_seq % 10 == 0:
            return ev.KvSnapshot(self.now_s, worker, epoch, self.kv_seq, (Stored((100, 101, 2**70)),))
        changes: list[Change] = [Stored((100, 101)), Stored((102,), 101), Removed((102,)), Cleared()]
        return ev.KvBatch(self.now_s, worker, epoch, self.kv_seq, (self.rng.choice(changes),))

    def _oracle(self) -> ev.Event:
        return ev.OracleRefreshed(self.now_s, self.rng.choice([GOOD, GOOD, None, HOPELESS]))

    def _stale(self) -> ev.Event:
        request = Request("ad", self.now_s, 9, 9)
        events: list[ev.Event] = [
            ev.PrefillDone(self.now_s, "nobody", 1e9, 1, 0),
            ev.Adopted(self.now_s, request, "decoding", "gone", "d4", 3, self.now_s, 0),
            ev.EngineDown(self.now_s, "nobody"),
        ]
        return self.rng.choice(events)

    def _tick(self) -> ev.Event:
        return ev.Tick(self.now_s)

    def _change(self) -> ev.Event:
        rng = self.rng
        prefill = rng.choice([None, ev.PolicyChoice(rng.choice(sorted(PREFILL)))])
        decode = rng.choice(
            [ev.PolicyChoice(rng.choice(sorted(DECODE))), ev.PolicyChoice("power_of_two", {"choices": 0})]
        )
        wrong = {"kv_high_water": 2} if self.now_s % 1 < 0.5 else {"no_such_limit": 1}
        config = rng.choice([{}, {"max_queue": rng.choice([1, 4, 64])}, wrong])
        admission = rng.choice([None, ev.PolicyChoice("open"), ev.PolicyChoice("by_wait", {"hold_s": 0.2})])
        admission = admission if self.changes_admission else None
        fairness = rng.choice([None, ev.PolicyChoice("none"), ev.PolicyChoice("vtc", {"slack_tokens": 100})])
        fairness = fairness if self.changes_fairness else None
        return ev.PoliciesChanged(self.now_s, prefill, decode, config, admission, fairness)


def recorded(
    dispatcher: Dispatcher, life: Life, events: int, then: Callable[[], None] = lambda: None
) -> list[str]:
    """Returns the journal's lines of a life of `events` events after its start, which the dispatcher hears; `then` is
    called after each of these. Only errors that say what was wrong with an event may be raised.
    """
    lines: list[str] = []
    writer = JournalWriter(lambda text: lines.extend(text.splitlines()), dispatcher, "test")

    def feed(event: ev.Event) -> None:
        actions: tuple[Action, ...] = ()
        failure: Exception | None = None
        try:
            actions = tuple(dispatcher.handle(event))
        except PolicyError as error:
            actions, failure = error.decided, error
        except (ev.StaleEvent, ValueError) as error:
            failure = error
        writer.record(event, actions, failure)
        life.saw(actions)

    for event in life.start():
        feed(event)
    for _ in range(events):
        feed(life.next_event())
        then()
    return lines


def decided_alike(dispatchers: Sequence[Dispatcher], life: Life, events: int) -> int:
    """Has all dispatchers hear the same life of `events` events after its start, and asserts that the journal's lines
    of each event are the same. Returns the number of requests that were rejected.
    """
    for event in life.start():
        for dispatcher in dispatchers:
            dispatcher.handle(event)
    rejected = 0
    for _ in range(events):
        event = life.next_event()
        lines: list[tuple[str, ...]] = []
        actions: tuple[Action, ...] = ()
        for dispatcher in dispatchers:
            try:
                actions = tuple(dispatcher.handle(event))
                lines.append(outcome_lines(actions))
            except PolicyError as error:
                actions = error.decided
                lines.append(outcome_lines(actions, error))
            except (ev.StaleEvent, ValueError) as error:
                actions = ()
                lines.append(outcome_lines((), error))
        assert all(one == lines[0] for one in lines)
        life.saw(actions)
        rejected += sum(isinstance(action, Reject) for action in actions)
    return rejected
