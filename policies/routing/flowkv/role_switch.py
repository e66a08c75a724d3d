"""FlowKV's role switch (appendix B.1, lines 17-24 of its algorithm 1): in the imbalanced regime idle engines of one
role serve the other "for several scheduling cycles", here for `switch_s`.

    C^p, C^d        mean load scores of the roles             -> `regimes.Assessment`
    idle nodes      {i : C_i < idle}                          -> `Assessment.idle`
    busy role       the role whose mean is above its low threshold, of two such the one that is further above

An idle engine of the role that is not busy is lent to the busy role. It serves there for `switch_s`, and then goes back
to the role in which it was started (its home role), or stays for another `switch_s` if that role is still busy and its
home role is not. It goes back at once when its home role rises above its high threshold.

Three rules keep engines from swinging between the roles. A role must have been busy for `after_s` before an engine is
lent to it. One engine is lent at a time, and `after_s` passes before the next one, so that the effect is seen first. An
engine that has come back stays at home for `switch_s`.

The last engine of a role in its group is never lent, because KV does not move between groups. Colocated engines serve
both roles already.

The thresholds decide whether this helps. Prefills that full decode engines cannot take yet stay in the sending queues
and the KV of prefill nodes, and so raise C^p: with a low threshold for prefill that is too low for a load, loans to
prefill are renewed while decode is short (the experiments `flowkv_roles` and `flowkv_roles_tuning`).

Deviations: the paper notifies all idle nodes at once and does not say which role they take, nor when they go back; the
busy role, the three rules and the call home are ours. It switches roles in the imbalanced regime only and scales in the
extreme one; without an autoscaler an idle engine is lent there, too. Not claimed: the paper's number of cycles, which
it does not print.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from policies.routing.flowkv.regimes import Assessment, RegimeThresholds
from policies.routing.params import Number, check
from policies.state.views import Health, Role, Snapshot, Worker, WorkerId

EngineId = str

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class RoleSwitchConfig:
    """How long idle engines are lent. Raises BadParameter for a value out of range."""

    switch_s: Annotated[float, Number(low=0.0, unit="s")] = 0.0
    """Time for which an idle engine serves the other role; 0 lends none."""
    # ASSUMPTION: FlowKV's window of indicators is as long, so a mean that lasts for this is no burst
    after_s: Annotated[float, Number(low=0.0, unit="s")] = 2.0
    """Time for which a role must have been busy before an engine is lent to it, and between two loans."""

    def __post_init__(self) -> None:
        check(self, "role_switch")


class Engine(NamedTuple):
    """An engine: the role in which it was started, and its workers, which switch together."""

    home: Role
    workers: tuple[WorkerId, ...]


class Switch(NamedTuple):
    """The order that an engine serves `role` from now on, and why, in words for a log."""

    engine_id: EngineId
    role: Role
    reason: str


@dataclass(slots=True)
class RoleSwitcher:
    """The loans of one fleet over time. `look` is called about once a second, with times that do not decrease."""

    config: RoleSwitchConfig = field(default_factory=RoleSwitchConfig)
    thresholds: RegimeThresholds = field(default_factory=RegimeThresholds)
    _until_s: dict[EngineId, float] = field(default_factory=dict)
    """When each engine that is away goes back, or one that came back may be lent again."""
    _away: set[EngineId] = field(default_factory=set)
    _busy: Role | None = None
    _busy_since_s: float = 0.0
    _lent_at_s: float = float("-inf")

    def look(
        self, snapshot: Snapshot, seen: Assessment, engines: Mapping[EngineId, Engine]
    ) -> tuple[Switch, ...]:
        """Returns the switches to be ordered now. An engine's role is that of its workers in the snapshot, so an engine
        that has not come home yet is called again. An engine that is not ready, or not there, gets no order, and its
        loan goes on.
        """
        now_s, known = snapshot.now_s, _present(snapshot, engines)
        busy = self._busiest(seen)
        if busy is not self._busy:
            self._busy, self._busy_since_s = busy, now_s
        self._note_away(known, now_s)
        switches = [
            switch
            for engine_id in sorted(self._away)
            if (switch := self._goes_back(known.get(engine_id), engine_id, seen, now_s))
        ]
        if not switches and (lent := self._lends(known, seen, now_s)):
            switches.append(lent)
        return tuple(switches)

    def _note_away(self, known: "Mapping[EngineId, _Present]", now_s: float) -> None:
        """Notes which engines are away, and which have come home since the last look. An engine that is not seen is
        taken to be where it was, and forgotten `switch_s` after its loan or its rest has ended. A loan that this
        switcher has not made, because the router has restarted, lasts for `switch_s` from now on.
        """
        switch_s = self.config.switch_s
        away = {name for name, engine in known.items() if engine.workers[0].role is not engine.home}
        back = dict.fromkeys((self._away & known.keys()) - away, now_s + switch_s)
        until_s = dict.fromkeys(away, now_s + switch_s) | self._until_s | back
        self._until_s = {
            name: at_s for name, at_s in until_s.items() if name in known or now_s < at_s + switch_s
        }
        self._away = away | (self._away & (self._until_s.keys() - known.keys()))

    def _busiest(self, seen: Assessment) -> Role | None:
        """Returns the role that is furthest above its low threshold; None if neither is above it."""
        limits = self.thresholds
        above = {
            Role.PREFILL: (seen.prefill_mean or 0.0) - limits.prefill_low,
            Role.DECODE: (seen.decode_mean or 0.0) - limits.decode_low,
        }
        role = max(above, key=above.__getitem__)
        return role if above[role] > 0 else None

    def _overloaded(self, role: Role, seen: Assessment) -> bool:
        if role is Role.PREFILL:
            return (seen.prefill_mean or 0.0) > self.thresholds.prefill_high
        return (seen.decode_mean or 0.0) > self.thresholds.decode_high

    def _goes_back(
        self, lent: "_Present | None", engine_id: EngineId, seen: Assessment, now_s: float
    ) -> Switch | None:
        """Returns the order for a lent engine to go home; None while it stays away, or can get no order."""
        if lent is None or not lent.well:
            return None
        home, switch_s = lent.home, self.config.switch_s
        if self._overloaded(home, seen):
            return Switch(engine_id, home, f"{home} is overloaded")
        if now_s < self._until_s[engine_id]:
            return None
        if switch_s and self._busy is _OTHER[home]:
            self._until_s[engine_id] = now_s + switch_s
            return None
        return Switch(engine_id, home, "its loan is over")

    def _lends(self, known: "Mapping[EngineId, _Present]", seen: Assessment, now_s: float) -> Switch | None:
        """Returns the order to lend the idle engine whose name comes first; None if none may be lent now."""
        config, busy = self.config, self._busy
        if not config.switch_s or busy is None or now_s - self._busy_since_s < config.after_s:
            return None
        if now_s - self._lent_at_s < config.after_s:
            return None
        lender, idle = _OTHER[busy], set(seen.idle)
        well = {name: engine for name, engine in known.items() if engine.well}
        left = Counter(
            engine.workers[0].group for engine in well.values() if engine.workers[0].role is lender
        )
        for engine_id, (home, workers, _) in sorted(well.items()):
            at_home = workers[0].role is lender is home
            rested = now_s >= self._until_s.get(engine_id, now_s)
            if at_home and rested and left[workers[0].group] > 1 and all(w.id in idle for w in workers):
                self._until_s[engine_id] = now_s + config.switch_s
                self._lent_at_s = now_s
                return Switch(engine_id, busy, f"it is idle and {busy} is busy")
        return None


class _Present(NamedTuple):
    """An engine whose workers are known. It is `well` if they are all ready and under no quarantine."""

    home: Role
    workers: tuple[Worker, ...]
    well: bool


def _present(snapshot: Snapshot, engines: Mapping[EngineId, Engine]) -> dict[EngineId, _Present]:
    """Returns the engines of one role, all of whose workers are known."""
    known: dict[EngineId, _Present] = {}
    for engine_id, engine in engines.items():
        workers = tuple(snapshot.workers[name] for name in engine.workers if name in snapshot.workers)
        if workers and len(workers) == len(engine.workers) and engine.home in _OTHER:
            well = all(w.health is Health.READY and w.quarantine is None for w in workers)
            known[engine_id] = _Present(engine.home, workers, well)
    return known
