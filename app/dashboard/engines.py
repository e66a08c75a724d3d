"""The engines as the router reports them: what the page shows of each, what has changed, and rates of their totals."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from actors.scaling.fleet import group_of
from actors.wire.messages import EngineInfo, Fleet, FleetStatus, Quarantined, Status
from app.dashboard.rings import Value
from app.fleet.status import quarantined_by_engine, shown_engine

NEW_ROUTER_S = 15.0
"""Time that engines have to find a router that has just connected, before one that it does not name has gone."""
MOST_NODES = 8192
"""Engines, also gone ones, whose nodes are remembered for transfers that are told of later."""

COUNTED = {
    "tokens_per_s": "decode_tokens",
    "prompt_tokens_per_s": "prefill_tokens",
    "kv_bytes_per_s": "transfer_bytes",
}
"""Series by name, and the total of engines whose rate it is."""
LEAST_S = 0.5
"""Shortest time between two reports of the router from which rates are made."""

_STEPS = ("process_s", "weights_s", "post_load_s", "announce_s")


class Happened(NamedTuple):
    """An event of one engine, or of the fleet (`engine` None)."""

    kind: str
    text: str
    level: str = "info"
    engine: str | None = None


class Engines:
    """The fleet as the router told it last."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        self.status: FleetStatus | None = None
        self.infos: dict[str, EngineInfo] = {}
        self.rates: dict[str, Value] = dict.fromkeys(COUNTED)
        self.refused_per_s: Value = None
        self._nodes: OrderedDict[str, str] = OrderedDict()
        self._router_since_s: float | None = None
        self._missing: dict[str, EngineInfo] = {}
        self._totals: tuple[float, dict[str, dict[str, float]], dict[str, float]] | None = None
        self._levels: dict[str, float] = {}
        self._happened: list[Happened] = []
        self._shown: dict[str, dict[str, Any]] = {}
        self._stale = True

    # ---------------------------------------------------------------------------------------------------- messages

    def router_up(self, now_s: float) -> None:
        """Notes that a router is connected, which may have just started and know few engines."""
        self._router_since_s = now_s

    def router_down(self) -> None:
        """Notes that there is no router. What it said last stays known, its figures do not count."""
        self._router_since_s = None
        self._totals = None
        self.rates = dict.fromkeys(COUNTED)
        self.refused_per_s = None
        self._levels = {}

    @property
    def connected(self) -> bool:
        """Whether a router is connected."""
        return self._router_since_s is not None

    def fleet_is(self, fleet: Fleet) -> None:
        """Takes in the fleet, and notes what has changed."""
        before, self.fleet = self.fleet, fleet
        infos = {info.id: info for info in fleet.engines}
        for info in infos.values():
            self._nodes[info.id] = info.node
            self._nodes.move_to_end(info.id)
        while len(self._nodes) > MOST_NODES:
            self._nodes.popitem(last=False)
        for engine, info in infos.items():
            known = self.infos.get(engine)
            if known is not None:
                self._note_change(known, info)
            elif before is not None:
                self._happened.append(
                    Happened("engine_up", f"engine {engine} came ({info.role})", engine=engine)
                )
        self._missing = {engine: info for engine, info in self.infos.items() if engine not in infos}
        self.infos = {**self._missing, **infos}
        self._stale = True

    def status_is(self, status: FleetStatus, now_s: float) -> None:
        """Takes in the router's figures."""
        self.status = status
        self._stale = True
        self._rate(status, now_s)

    def tick(self, now_s: float) -> list[Happened]:
        """Returns what has happened since the last call. An engine that the router does not name any more has gone,
        unless the router is new.
        """
        known = self._router_since_s is not None and now_s - self._router_since_s >= NEW_ROUTER_S
        if self._missing and known:
            for engine in self._missing:
                del self.infos[engine]
                self._happened.append(Happened("engine_down", f"engine {engine} has gone", "warn", engine))
            self._missing = {}
            self._stale = True
        happened, self._happened = self._happened, []
        return happened

    def _note_change(self, was: EngineInfo, now: EngineInfo) -> None:
        if was.pid != now.pid:
            self._happened.append(Happened("engine_up", f"engine {now.id} came back", engine=now.id))
        if was.state != now.state:
            level = "info" if now.state == "ready" else "warn"
            text = f"engine {now.id}: {was.state} -> {now.state}"
            self._happened.append(Happened("engine_state", text, level, now.id))
        if (was.role, was.duty) != (now.role, now.duty):
            text = f"engine {now.id}: {was.role}, {was.duty} -> {now.role}, {now.duty}"
            self._happened.append(Happened("engine_role", text, engine=now.id))

    def _rate(self, status: FleetStatus, now_s: float) -> None:
        engines = {
            one.engine_id: {name: one.totals.get(name, 0.0) for name in COUNTED.values()}
            for one in status.statuses
        }
        if self._totals is None:
            self._totals = now_s, engines, status.totals
            return
        then_s, before, router_before = self._totals
        took_s = now_s - then_s
        if took_s < LEAST_S:
            return
        self._totals = now_s, engines, status.totals
        for series, name in COUNTED.items():
            # the totals of an engine that has started anew begin at 0
            grown = (
                max(0.0, totals[name] - before[engine][name])
                for engine, totals in engines.items()
                if engine in before
            )
            self.rates[series] = sum(grown) / took_s
        self.refused_per_s = _grown(router_before, status.totals, "decisions_reject_") / took_s
        levels = {name.removeprefix(_LEVEL) for name in status.totals if name.startswith(_LEVEL)}
        self._levels = {
            level: _grown(router_before, status.totals, _LEVEL + level) / took_s for level in levels
        }

    # ------------------------------------------------------------------------------------------------------- views

    def node(self, engine: str | None) -> str | None:
        """Returns the node of an engine, also of one that has gone; None if it is not remembered."""
        return None if engine is None else self._nodes.get(engine)

    def nodes(self) -> set[str]:
        """Returns the nodes of the engines that are there."""
        return {info.node for info in self.infos.values()}

    def role_and_duty(self, engine: str) -> dict[str, Any] | None:
        """Returns the role and the duty of an engine as the router told them last; None for an unknown one."""
        info = self.infos.get(engine)
        return None if info is None else {"role": info.role, "duty": info.duty}

    def levels(self) -> list[dict[str, Any]]:
        """Returns the priority levels of the flow scheduler with the bytes that agents permit per second, and the reads
        that they hold now; null without an agent.
        """
        agents = self.status.flows if self.status is not None and self.connected else ()
        held: Counter[str] = Counter()
        for agent in agents:
            held.update(agent.held_by_level)
        return [
            {
                "level": int(level),
                "bytes_per_s": round(self._levels.get(level, 0.0), 1),
                "held": held[level] if agents else None,
            }
            for level in sorted({*self._levels, *held}, key=int)
        ]

    def shown(self) -> dict[str, dict[str, Any]]:
        """Returns every engine for the page, by its id."""
        if self._stale:
            self._stale = False
            status = self.status
            statuses = {one.engine_id: one for one in status.statuses} if status else {}
            held = quarantined_by_engine(status.quarantined if status else ())
            self._shown = {
                engine: _shown(info, statuses.get(engine), held.get(engine, []))
                for engine, info in self.infos.items()
            }
        return self._shown

    def counts(self) -> dict[str, int]:
        """Returns the number of engines by state; those that wait warm count as `warm`."""
        return dict(
            Counter(
                "warm" if info.duty == "warm" and info.state == "ready" else info.state
                for info in self.infos.values()
            )
        )

    def shares(self) -> dict[str, tuple[float, float]]:
        """Returns each engine's shares of slots and of KV in use, 0..1."""
        return {
            engine: (
                min(1.0, (one["running"] or 0) / max(1, one["slots"])),
                min(1.0, one["kv_usage"] or 0.0),
            )
            for engine, one in self.shown().items()
        }

    def kv_usage(self) -> tuple[Value, Value]:
        """Returns mean and maximum of the share of KV in use over the engines that report it."""
        used = [one["kv_usage"] for one in self.shown().values() if one["kv_usage"] is not None]
        return (sum(used) / len(used), max(used)) if used else (None, None)


_LEVEL = "flow_bytes_level_"


def _grown(before: Mapping[str, float], after: Mapping[str, float], prefix: str) -> float:
    """Returns by how much the totals with this prefix have grown together."""
    return sum(
        max(0.0, total - before.get(name, 0.0)) for name, total in after.items() if name.startswith(prefix)
    )


def _shown(info: EngineInfo, status: Status | None, held: list[Quarantined]) -> dict[str, Any]:
    """Returns one engine for the page: what `/sluice/status` says, the group's name in the configuration, and how it
    started.
    """
    shown = shown_engine(info, status, held)
    if shown["kv_usage"] is not None:
        shown["kv_usage"] = round(shown["kv_usage"], 4)
    started = None if info.started is None else msgspec.structs.asdict(info.started)
    return {
        **shown,
        "group": group_of(info.id) or info.id,
        "home_role": info.home_role or info.role,
        "started": None if started is None else {step: started[step] for step in _STEPS},
    }
