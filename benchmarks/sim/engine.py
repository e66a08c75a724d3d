"""Simulated engines, which run `policies.engine_model` on the virtual clock.

A `StepGroup` has the workers that step together. A *run* is a number of plain decode steps that a group makes in one
kernel event. Its step times are known in advance, because the KV tokens of a batch grow by the batch size each step:

    alone        step i lasts first_s + i * growth_s, so the k-th ends after T(k) = k first_s + growth_s k (k-1) / 2
    at a barrier step i lasts the longest of the members' steps; the others are idle for the difference

A change of a member (a new request, KV that has arrived, a cancellation) ends the run with the step in progress. A real
engine would see the change at the same moment, so all times equal those of steps made one by one.

A step that begins at some instant sees everything else that happens at that instant (kernel priority BEGIN).
"""

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.sim.config import EngineSpec
from benchmarks.sim.kernel import Kernel, Timer
from benchmarks.sim.records import StepStats
from policies.engine_model.blocks import BlockPool, Change
from policies.engine_model.leases import LeaseTable, renewal_s, tokens_too_many
from policies.engine_model.scheduler import EngineModel, Sequence, SequenceStage, StepResult, Steps
from policies.state.views import Health, Role

# Kernel priority of the beginning of a step: it comes after everything that arrives at the same instant.
BEGIN = 10
# Two times that differ by at most this many seconds are one instant, computed in two ways.
SAME_S = 1e-9
MOST_STEPS = 1 << 30
# Bounds the arrays of a run of a barrier group.
MOST_STEPS_AT_BARRIER = 256


class Owner(Protocol):
    """The interface of the receiver of an engine's events, which is the simulated ingress."""

    def admitted(self, worker: "Worker", seq: Sequence) -> None: ...
    def first_token(self, seq: Sequence, at_s: float) -> None: ...
    def prefilled(self, worker: "Worker", seq: Sequence) -> None: ...
    def finished(self, worker: "Worker", seq: Sequence) -> None: ...
    def preempted(self, worker: "Worker", seq: Sequence) -> None: ...
    def layer_done(self, worker: "Worker", seqs: list[Sequence], done: int, groups: int) -> None: ...
    def kv_events(self, worker: "Worker", events: list[Change]) -> None: ...


class Meter:
    """The statistics of decode steps, which step groups add to while `measuring` is true."""

    def __init__(self) -> None:
        self.stats = StepStats()
        self.measuring = False


class Worker:
    """One simulated engine: its model, its KV blocks, its leases, and the group in which it steps."""

    def __init__(
        self, name: str, node: str, nic: int | None, spec: EngineSpec, owner: Owner, record_kv: bool
    ) -> None:
        self.name, self.node, self.nic, self.spec, self.owner = name, node, nic, spec, owner
        # All nodes of the engine, its own first.
        self.span: tuple[str, ...] = (node,)
        self.pool = BlockPool(spec.kv_blocks, spec.block_size_tokens, record_kv and spec.prefix_cache)
        self.model = EngineModel(
            spec.profile,
            self.pool,
            spec.slots,
            spec.prefill_budget_tokens,
            spec.chunked_prefill,
            spec.receive_ahead,
        )
        self.leases = LeaseTable(spec.lease_s)
        self.decodes = spec.role is not Role.PREFILL
        # As it announces and reports it.
        self.health = Health.READY
        self.group: StepGroup
        # Sequences whose KV has arrived; the first step with them makes their first token.
        self._fresh: list[Sequence] = []
        self._doomed: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Queues a sequence. Raises BlockError if it can never fit into the worker's KV blocks."""
        self.model.add(seq)
        self.group.kick()

    def loaded(self, seq: Sequence) -> None:
        """Notes that the KV of a remote sequence has arrived."""
        self.model.loaded(seq)
        self._fresh.append(seq)
        self.group.kick()

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence: at the end of the step that computes it, or at once where no step does."""
        if self.group.stepping and seq.stage in (SequenceStage.DECODING, SequenceStage.PREFILLING):
            self._doomed.append(seq)
        else:
            self.model.remove(seq)
        self.group.kick()

    def free(self, key: str) -> None:
        """Frees the KV blocks of the lease `key`, which no decode engine will read."""
        lease = self.leases.release(key)
        if lease is not None:
            self.pool.release(lease.allocation)
            self.group.kick()

    def renew(self, key: str, now_s: float) -> float | None:
        """Renews the lease `key` if it may last longer, by the rule of the live engines. Returns the seconds that are
        left of it, or None if it was not renewed.
        """
        spec = self.spec
        kv_tokens = self.pool.total * spec.block_size_tokens
        too_many = tokens_too_many(self.pool.used / self.pool.total, kv_tokens, self.n_waiting)
        is_to_end = too_many > 0 and self.leases.older_tokens(key) < too_many
        lease_s = renewal_s(spec.lease_s, spec.max_lease_s, self.leases.age_s(key, now_s), is_to_end)
        return None if lease_s is None else self.leases.renew(key, lease_s, now_s)

    def read_ended(self, key: str) -> None:
        """Notes that the decode engine has read the KV of the lease `key`, and frees its blocks."""
        lease = self.leases.end_read(key)
        if lease is not None:
            self.pool.release(lease.allocation)
            self.group.kick()

    # ------------------------------------------------------------------------------------------ as of this instant

    @property
    def n_active(self) -> int:
        """The number of sequences that hold a slot."""
        return self.model.n_active

    @property
    def n_waiting(self) -> int:
        return self.model.n_waiting

    @property
    def done_now(self) -> int:
        """The number of steps of the present run that have ended by now, which the model has not counted yet."""
        return self.group.done_now() if self.group.stepping else 0

    def generated(self, seq: Sequence) -> int:
        """Returns the number of output tokens of `seq` that have been generated by now."""
        return self.model.generated(seq) + (self.done_now if seq in self.model.running else 0)

    def kv_load_tokens(self, done: int) -> int:
        """Returns L_g, the KV tokens of the running batch, after `done` steps of the present run."""
        return self.model.kv_tokens + done * len(self.model.running)

    def used_blocks(self, done: int) -> int:
        return self.pool.used + (self.model.batch.growth(done) if done else 0)

    # ------------------------------------------------------------------------------------------ for the step group

    def begin(self, most: int) -> Steps | None:
        """Starts a run of up to `most` steps and returns its plan, or None where there is nothing to compute."""
        plan = self.model.begin_steps(most)
        for seq in self.model.take_admitted():
            self.owner.admitted(self, seq)
        self._publish()
        return plan

    def began(self, first_end_s: float) -> None:
        """Reports the first token of each sequence whose KV has arrived and that has a slot; the run's first step,
        which ends at `first_end_s`, makes it.
        """
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            for seq in fresh:
                if self.model.awaits_slot(seq):
                    self._fresh.append(seq)
                elif seq.stage is SequenceStage.DECODING:
                    self.owner.first_token(seq, first_end_s)

    def end(self, steps: int, now_s: float) -> StepResult:
        """Ends the run after `steps` steps, reports the results to the owner, and returns them."""
        result = self.model.end_steps(steps)
        for seq in result.started:
            self.owner.first_token(seq, now_s)
        for seq in result.prefilled:
            self.owner.prefilled(self, seq)
        for seq in result.finished:
            self.owner.finished(self, seq)
        for seq in result.preempted:
            self.owner.preempted(self, seq)
        for seq in self._doomed:
            self.model.remove(seq)
        self._doomed.clear()
        self._publish()
        return result

    def _publish(self) -> None:
        events = self.pool.drain_changes()
        if events:
            self.owner.kv_events(self, events)


class StepGroup:
    """The workers that step together: one worker, or several in a `BarrierGroup`. `stepping` is true during a run."""

    def __init__(self, kernel: Kernel, workers: list[Worker], meter: Meter) -> None:
        self.kernel, self.workers, self.meter = kernel, workers, meter
        self.stepping = False
        self._begins = False
        self._start_s = 0.0
        self._steps = 0
        # The number of steps of the run that the meter has counted.
        self._counted = 0
        self._plans: list[Steps | None] = []
        self._timer: Timer | None = None
        for worker in workers:
            worker.group = self

    def kick(self) -> None:
        """Reacts to a change of a worker: an idle group begins a run, a present run ends with the step in progress."""
        if self.stepping:
            self._cut()
        elif not self._begins:
            self._begins = True
            self.kernel.at(self.kernel.now_s, self._begin, BEGIN)

    def done_now(self) -> int:
        """Returns the number of steps of the run that have ended by now."""
        return min(self._steps, self._done_at(self.kernel.now_s - self._start_s + SAME_S))

    def settle(self) -> None:
        """Counts the steps that have ended by now. This is called when the meter starts or stops measuring."""
        if self.stepping:
            self._count(self.done_now())

    # --------------------------------------------------------------------------------------------------- one worker

    def _plan(self) -> int | None:
        """Plans the next run. Returns its number of steps, or None if there is nothing to compute."""
        plan = self.workers[0].begin(MOST_STEPS)
        self._plans = [plan]
        return None if plan is None else plan.n

    def _end_after_s(self, steps: int) -> float:
        plan = self._plans[0]
        assert plan is not None
        return steps * plan.first_s + plan.growth_s * (steps * (steps - 1) / 2)

    def _done_at(self, elapsed_s: float) -> int:
        """Returns the greatest number of steps that end within `elapsed_s` of the run's start."""
        plan = self._plans[0]
        assert plan is not None
        a, b = plan.growth_s / 2, plan.first_s - plan.growth_s / 2  # T(k) = a k^2 + b k
        steps = int((-b + math.sqrt(b * b + 4 * a * elapsed_s)) / (2 * a)) if a > 0 else int(elapsed_s / b)
        while steps > 0 and self._end_after_s(steps) > elapsed_s:
            steps -= 1
        while self._end_after_s(steps + 1) <= elapsed_s:
            steps += 1
        return steps

    def _count(self, upto: int) -> None:
        first, self._counted = self._counted, upto
        worker, plan = self.workers[0], self._plans[0]
        if not self.meter.measuring or not worker.decodes or upto <= first:
            return
        assert plan is not None
        stats, batch = self.meter.stats, len(worker.model.running)
        stats.busy_s += self._end_after_s(upto) - self._end_after_s(first)
        if batch:
            stats.steps += upto - first
            stats.tokens += batch * (upto - first)

    # ----------------------------------------------------------------------------------------------------- the loop

    def _begin(self) -> None:
        self._begins = False
        # Planning called back into this group and has begun a run already; end that run with its step in progress.
        if self.stepping:
            self._cut()
            return
        steps = self._plan()
        if steps is None:
            return
        self.stepping = True
        self._start_s, self._steps, self._counted = self.kernel.now_s, steps, 0
        first_end_s = self._start_s + self._end_after_s(1)
        for worker in self.workers:
            worker.began(first_end_s)
        self._wait()

    def _wait(self) -> None:
        """Sets the timer for the end of the run."""
        end_s = self._start_s + self._end_after_s(self._steps)
        self._timer = self.kernel.at(max(end_s, self.kernel.now_s), self._end)

    def _cut(self) -> None:
        elapsed_s = self.kernel.now_s - self._start_s
        done = self._done_at(elapsed_s + SAME_S)
        at_boundary = done > 0 and self._end_after_s(done) >= elapsed_s - SAME_S
        steps = done if at_boundary else done + 1
        if steps < self._steps:
            assert self._timer is not None
            self._timer.cancel()
            self._steps = steps
            self._wait()

    def _end(self) -> None:
        self._count(self._steps)
        self.stepping = False
        started = 0
        for worker, plan in zip(self.workers, self._plans, strict=True):
            if plan is not None:
                started += len(worker.end(self._steps, self.kernel.now_s).started)
        if self.meter.measuring:
            self.meter.stats.tokens += started
        self.kick()


class BarrierGroup(StepGroup):
    """A group whose every step lasts as long as its slowest member's. The imbalance is measured at every step."""

    # Shape (steps + 1,): the seconds from the run's start to the end of each step; the first element is 0.
    _ends: npt.NDArray[np.float64]

    def _plan(self) -> int | None:
        self._plans = [worker.begin(MOST_STEPS_AT_BARRIER) for worker in self.workers]
        steps = min((plan.n for plan in self._plans if plan is not None), default=None)
        if steps is None:
            return None
        first = np.array([plan.first_s if plan else 0.0 for plan in self._plans])
        growth = np.array([plan.growth_s if plan else 0.0 for plan in self._plans])
        self._times = first + growth * np.arange(steps)[:, None]
        self._ends = np.concatenate(([0.0], self._times.max(axis=1).cumsum()))
        return steps

    def _end_after_s(self, steps: int) -> float:
        return float(self._ends[steps])

    def _done_at(self, elapsed_s: float) -> int:
        return int(np.searchsorted(self._ends, elapsed_s, side="right")) - 1

    def _count(self, upto: int) -> None:
        first, self._counted = self._counted, upto
        if not self.meter.measuring or upto <= first:
            return
        models = [worker.model for worker in self.workers]
        batch = np.array([len(model.running) for model in models])
        if not batch.any():
            return
        load = np.array([model.kv_tokens for model in models]) + batch * np.arange(first, upto)[:, None]
        times, stats = self._times[first:upto], self.meter.stats
        stats.steps += upto - first
        imbalance = float((load.max(axis=1) - load.min(axis=1)).sum())
        stats.imbalance_sum += imbalance
        if all(len(worker.model.running) == worker.spec.slots for worker in self.workers):
            stats.full_steps += upto - first
            stats.full_imbalance_sum += imbalance
        stats.idle_s += float((times.max(axis=1, keepdims=True) - times).sum())
        stats.busy_s += float(times.sum())
        stats.tokens += int(batch.sum()) * (upto - first)
