"""A fleet with two exact queues, for closed loops: FIFO before prefill, then FIFO before decode slots.

A prefill engine serves one prompt at a time; a decode engine holds `slots` sequences. Lengths are constant, or
lognormal where `Load.cv` is above 0. Engines follow a plan's moves after the leads of their ways. Times are exact: only
decisions come once a second.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

from policies.engine_model.timing import TimingProfile
from policies.scaling.base import Move, ScalingPolicy, Way
from policies.scaling.observation import Capability, Duty, EngineView, Leads, Observation, Observer, Outcome
from policies.state.views import Role

PROFILE = TimingProfile("test", 0.0, 1e-4, 0.02, 0.0, 0.0, 131_072, 1.25e10, 0.0)
"""A prompt of 2,000 tokens takes 0.2 s; every step takes 20 ms, whatever the batch."""
CAPABILITY = Capability(PROFILE, slots=16, kv_tokens=1_000_000)
PROMPT_TOKENS, OUTPUT_TOKENS = 2_000, 100
TTFT_S, TPOT_S = 2.0, 0.05
LEADS = Leads(switch_s=1.0, activate_s=1.0, start_s=60.0)


@dataclass(frozen=True)
class Load:
    """Mean tokens of prompts and outputs, the coefficient of variation of both, and the objective of TTFT."""

    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    cv: float = 0.0
    ttft_s: float = TTFT_S


@dataclass
class Engine:
    """One engine; it serves from `ready_s` on. `busy` has the ends of the requests that it serves."""

    name: str
    role: Role
    duty: Duty
    since_s: float
    ready_s: float
    busy: list[float] = field(default_factory=list)

    def slots(self) -> int:
        return 1 if self.role is Role.PREFILL else CAPABILITY.slots


@dataclass
class Fleet:
    """Runs a policy against arrivals of a given rate; keeps what a test asks for."""

    policy: ScalingPolicy
    prefill: int
    decode: int
    warm: int = 0
    seed: int = 0
    load: Load = Load()
    engines: list[Engine] = field(default_factory=list)
    served: int = 0
    late: int = 0
    changes: list[tuple[float, tuple[int, int, int]]] = field(default_factory=list)
    engine_s: float = 0.0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._names = 0
        for number, role, duty in (
            (self.prefill, Role.PREFILL, Duty.ACTIVE),
            (self.decode, Role.DECODE, Duty.ACTIVE),
            (self.warm, Role.DECODE, Duty.WARM),
        ):
            for _ in range(number):
                self._add(role, duty, 0.0, 0.0)
        # (arrived_s, prompt tokens, output tokens), then (prefilled_s, arrived_s, output tokens)
        self._prompts: deque[tuple[float, int, int]] = deque()
        self._streams: list[tuple[float, float, int]] = []
        self._observer = Observer()
        self._state = self.policy.initial()

    def _add(self, role: Role, duty: Duty, now_s: float, ready_s: float) -> None:
        self.engines.append(Engine(f"e{self._names}", role, duty, now_s, ready_s))
        self._names += 1

    def run(self, rates: list[float], report: bool = True) -> None:
        """Runs one second for each of `rates` (requests/s)."""
        for second, rate in enumerate(rates):
            now_s = float(second)
            arrivals = sorted(now_s + self._rng.random() for _ in range(self._poisson(rate)))
            for at_s in arrivals:
                prompt, output = self._length(self.load.prompt_tokens), self._length(self.load.output_tokens)
                expected = float(self.load.output_tokens)
                self._observer.arrived("chat", now_s, prompt, 0, expected, self.load.ttft_s, TPOT_S)
                self._prompts.append((at_s, prompt, output))
            self._serve(now_s + 1.0)
            # the second's arrivals have come at its end, when their number is compared with the time that has passed
            if report:
                self._observer.heard(now_s + 1.0)
            self._decide(now_s + 1.0)
            self.engine_s += len(self.engines)

    def _length(self, mean: int) -> int:
        """Returns one length in tokens."""
        if not self.load.cv:
            return mean
        variance = math.log(1.0 + self.load.cv**2)
        return max(1, round(mean * self._rng.lognormvariate(-variance / 2.0, math.sqrt(variance))))

    def _poisson(self, rate: float) -> int:
        count, at = 0, self._rng.expovariate(rate) if rate > 0.0 else math.inf
        while at < 1.0:
            count += 1
            at += self._rng.expovariate(rate)
        return count

    def _serve(self, until_s: float) -> None:
        """Starts all prompts and streams whose turn comes before `until_s`."""
        while self._prompts:
            engine, free_s = self._free(Role.PREFILL, self._prompts[0][0])
            if engine is None or free_s >= until_s:
                break
            arrived_s, prompt, output = self._prompts.popleft()
            done_s = free_s + PROFILE.step_s(prompt, 0, 0)
            engine.busy = [done_s]
            heapq.heappush(self._streams, (done_s, arrived_s, output))
        while self._streams and self._streams[0][0] < until_s:
            engine, free_s = self._free(Role.DECODE, self._streams[0][0])
            if engine is None or free_s >= until_s:
                break
            _, arrived_s, output = heapq.heappop(self._streams)
            while engine.busy and engine.busy[0] <= free_s:
                heapq.heappop(engine.busy)
            heapq.heappush(engine.busy, free_s + output * PROFILE.decode_base_s)
            ttft_s = free_s + PROFILE.decode_base_s - arrived_s
            self.served += 1
            self.late += ttft_s > self.load.ttft_s
            now_s = until_s - 1.0
            self._observer.closed("chat", now_s, Outcome.SERVED, ttft_s, PROFILE.decode_base_s, output)

    def _free(self, role: Role, at_s: float) -> tuple[Engine | None, float]:
        """Returns the engine of a role that has room first, from `at_s` on, and when."""
        best: Engine | None = None
        best_s = math.inf
        for engine in self.engines:
            if engine.role is not role or engine.duty is not Duty.ACTIVE:
                continue
            while engine.busy and engine.busy[0] <= at_s:
                heapq.heappop(engine.busy)
            free_s = max(engine.busy[0] if len(engine.busy) >= engine.slots() else at_s, engine.ready_s)
            if free_s < best_s:
                best, best_s = engine, free_s
            if best_s <= at_s:
                break
        return best, best_s

    def seen(self, now_s: float) -> Observation:
        """Returns the observation at the end of a second."""
        views = []
        for e in self.engines:
            running = sum(end > now_s for end in e.busy)
            share = running / e.slots()
            kv = share if e.role is Role.DECODE else 0.0
            views.append(EngineView(e.name, e.role, e.duty, e.since_s, running, 0, kv, share))
        oldest = now_s - self._prompts[0][0] if self._prompts else 0.0
        pooled = sum(done_s <= now_s for done_s, _, _ in self._streams)
        return self._observer.freeze(
            now_s, tuple(views), CAPABILITY, LEADS, len(self._prompts), pooled, max(0.0, oldest)
        )

    def _decide(self, now_s: float) -> None:
        for engine in self.engines:
            if engine.duty is Duty.STARTING and engine.ready_s <= now_s:
                engine.duty, engine.since_s = Duty.WARM, now_s
        seen = self.seen(now_s)
        step = self.policy.step(seen, self._state)
        self._state = step.state
        counts = (step.plan.serving.prefill, step.plan.serving.decode, step.plan.serving.colocated)
        if not self.changes or self.changes[-1][1] != counts:
            self.changes.append((now_s, counts))
        for move in step.plan.moves:
            self._follow(move, now_s)

    def _follow(self, move: Move, now_s: float) -> None:
        if move.way is Way.START:
            self._add(move.role, Duty.STARTING, now_s, now_s + LEADS.start_s)
            return
        engine = next(e for e in self.engines if e.name == move.engine)
        if move.way is Way.STOP:
            self.engines.remove(engine)
        elif move.way is Way.DEACTIVATE:
            engine.duty, engine.since_s = Duty.WARM, now_s
        else:
            lead_s = LEADS.switch_s if move.way is Way.SWITCH else LEADS.activate_s
            engine.role, engine.duty, engine.since_s = move.role, Duty.ACTIVE, now_s
            engine.ready_s = max([now_s + lead_s, *engine.busy])
            engine.busy = []
