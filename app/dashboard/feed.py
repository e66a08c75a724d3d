"""The dashboard's memory: messages of router and ingresses go in, the whole state and one delta a second come out.

Nothing here does I/O or reads a clock. `tick` ends a second: it appends one value to each series and returns what has
changed since the tick before. Sequence numbers go on over a restart, because they begin at the Unix time.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from actors.telemetry.facts import Answered
from actors.wire.messages import Fleet, FleetStatus, IngressObserved, PathsSeen
from app.api.extensions import CLASSES, ClassSlo
from app.dashboard.advice import State, warnings
from app.dashboard.engines import Engines, Happened
from app.dashboard.ingresses import Ingresses
from app.dashboard.policies import Policies
from app.dashboard.registry import Registry
from app.dashboard.requests import Requests
from app.dashboard.rings import KEEP, HeatStrips, Rings, Value
from app.dashboard.transfers import Transfers
from app.fleet.figures import Seen

MOST_EVENTS = 500
MOST_CLASSES = 16
"""Classes that get series of their own; a request's class is one of three, and more only come from later versions."""

Shown = dict[str, Any]


class Feed:
    """All that the page shows. `slo` are the objectives of the classes, and `name` is that of this process."""

    def __init__(self, slo: Mapping[str, ClassSlo], name: str = "dashboard") -> None:
        self.engines = Engines()
        self.ingresses = Ingresses()
        self.registry = Registry(self.engines.nodes, name)
        self.requests = Requests()
        self.heat = HeatStrips()
        self.seq = 0
        self._slo = {name: slo.get(name, ClassSlo()) for name in (*CLASSES, *slo)}
        self._transfers = Transfers()
        self._policies = Policies()
        self._rings = Rings()
        self._classes = list(CLASSES)
        self._events: deque[Shown] = deque(maxlen=MOST_EVENTS)
        self._new_events: list[Shown] = []
        self._event_seq = 0
        self._at = 0.0
        self._line: Shown = {}
        self._sent_engines: Mapping[str, Shown] = {}
        self._absent: dict[str, str] = {}
        self._plan: Shown | None = None
        self._no_plan: str | None = "The autoscaler has not answered yet."
        self._leases_idle_since_s: float | None = None

    # ---------------------------------------------------------------------------------------------------- messages

    def router_up(self, now_s: float) -> None:
        """Takes in that a router is connected."""
        if self.seq and not self.engines.connected:
            self.event(now_s, Happened("router_found", "the router is connected"))
        self.engines.router_up(now_s)

    def router_down(self, now_s: float, reason: str) -> None:
        """Takes in that the router is lost."""
        self.engines.router_down()
        self.event(now_s, Happened("router_lost", f"the router is lost ({reason})", "error"))

    def fleet_is(self, fleet: Fleet) -> None:
        """Takes in the fleet."""
        self.engines.fleet_is(fleet)

    def status_is(self, status: FleetStatus, now_s: float) -> None:
        """Takes in the router's figures."""
        self.engines.status_is(status, now_s)

    def paths_are(self, message: PathsSeen) -> None:
        """Takes in what the router knows of the network."""
        self._transfers.paths(message.paths)

    def ingress_up(self, ingress: str, now_s: float) -> None:
        """Takes in that an ingress is connected."""
        if self.seq:
            self.event(now_s, Happened("ingress_found", f"ingress {ingress} is connected"))

    def ingress_down(self, ingress: str, now_s: float, reason: str) -> None:
        """Takes in that an ingress is lost."""
        self.ingresses.lost(ingress)
        self.registry.lost(ingress)
        self._transfers.lost(ingress)
        self.event(now_s, Happened("ingress_lost", f"ingress {ingress} is lost ({reason})", "warn"))

    def observed(self, ingress: str, message: IngressObserved, now_s: float) -> None:
        """Takes in what an ingress reports. Its clock is related to ours by the time at which the report came."""
        self.ingresses.take(ingress, message, now_s)
        self.registry.take(ingress, message.figures)
        self._transfers.take(ingress, message.figures, now_s)
        offset_s = now_s - message.now_s
        for answered in message.requests:
            self._ended(answered, offset_s)
        for note in message.notes:
            self.event(now_s - note.ago_s, Happened(note.kind, note.text, "warn", note.engine))

    def _ended(self, answered: Answered, offset_s: float) -> None:
        shown = self.requests.add(answered, answered.started_s + offset_s)
        self.ingresses.ended(shown, answered.ended_s + offset_s)
        for attempt in answered.kept.attempts:
            source, target = (
                self.engines.node(attempt.prefill_engine),
                self.engines.node(attempt.decode_engine),
            )
            if attempt.transfer_bytes and source is not None and target is not None:
                self._transfers.add(shown["id"], attempt, (source, target), attempt.ended_s + offset_s)

    def scaled(self, now_s: float, answer: Shown | None, why: str) -> None:
        """Takes in what the autoscaler answers; None where there is none, and `why`."""
        if answer is None:
            self._plan, self._no_plan = None, why
            return
        self._no_plan = None
        for happened in self._policies.autoscaler(answer):
            self.event(now_s, happened)
        plan = answer.get("plan")
        before, self._plan = self._plan, plan
        if plan is not None and (before is None or _wanted(plan) != _wanted(before)):
            reasons = "; ".join(map(str, answer.get("reasons", ()))) or "no reason given"
            wanted = ", ".join(f"{n} {role}" for role, n in _wanted(plan).items() if n)
            self.event(now_s, Happened("plan", f"plan: {wanted or 'no engine'} ({reasons})"))

    def policies_are(self, now_s: float, answer: Shown) -> None:
        """Takes in what the router answers about its policies; each one that has changed since is an event."""
        for happened in self._policies.router(answer):
            self.event(now_s, happened)

    def event(self, at: float, happened: Happened) -> None:
        """Adds an event to those that the page shows."""
        self._event_seq += 1
        shown = {
            "seq": self._event_seq,
            "at": round(at, 3),
            "kind": happened.kind,
            "text": happened.text,
            "engine": happened.engine,
            "level": happened.level,
        }
        self._events.append(shown)
        self._new_events = [*self._new_events[-MOST_EVENTS:], shown]

    # -------------------------------------------------------------------------------------------------------- views

    def seen(self) -> Seen:
        """Returns the fleet for its metric families. Alerts ask of every ingress whether it has a router and whether it
        can serve, so both hold only if they hold for all.
        """
        reports, engines = self.ingresses.present(self._at), self.engines
        connected = all(one.router_connected for one in reports) if reports else engines.connected
        ready = bool(reports) and all(one.detail is None for one in reports)
        return Seen(list(engines.infos.values()), engines.status, connected, ready)

    @property
    def line(self) -> Shown:
        """The line of state as of the last tick."""
        return self._line

    def snapshot(self) -> Shown:
        """Returns the whole state as of the last tick."""
        return {
            "seq": self.seq,
            "at": self._at,
            "period_s": 1,
            "keep": KEEP,
            "line": self._line,
            "classes": self._classes,
            "slo": self._objectives(),
            "series": self._rings.shown(),
            "engines": self.engines.shown(),
            "events": list(self._events),
            "transfers": self._transfers.shown(self.engines.levels()),
            "requests": {"latest": self.requests.latest(), "worst": self.requests.worst()},
            "absent": self._absent,
        }

    def tick(self, now_s: float) -> Shown:
        """Ends a second, and returns what has changed since the last one."""
        self.seq = self.seq + 1 if self.seq else int(now_s)
        self._at = round(now_s, 3)
        for happened in self.engines.tick(now_s):
            self.event(now_s, happened)
        self.ingresses.tick(now_s)
        status = self.engines.status if self.engines.connected else None
        self.registry.tick(now_s, None if status is None else status.ingresses)
        self._transfers.tick(now_s, self.engines.nodes())
        delta: Shown = {"seq": self.seq, "at": self._at, "period_s": 1, "keep": KEEP}
        new_classes = sorted(self.ingresses.classes() - set(self._classes))
        if new_classes and len(self._classes) + len(new_classes) <= MOST_CLASSES:
            self._classes += new_classes
            delta |= {"classes": self._classes, "slo": self._objectives()}
        values = self._values(now_s)
        self._rings.add(self._at, values)
        self.heat.add(now_s, self.engines.shares())
        self._line = self._state_line(now_s, values)
        absent = self._missing_parts()
        if absent != self._absent:
            self._absent = absent
            delta["absent"] = absent
        latest = self.requests.take_new(now_s)
        requests: Shown = {"latest": latest}
        if self.requests.worst_changed:
            self.requests.worst_changed = False
            requests["worst"] = self.requests.worst()
        events, self._new_events = self._new_events, []
        return delta | {
            "line": self._line,
            "series": {"t": self._at, **values},
            "engines": self._changed_engines(),
            "events": events,
            "transfers": self._transfers.shown(self.engines.levels()),
            "requests": requests,
        }

    def _objectives(self) -> Shown:
        return {
            name: {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
            for name in self._classes
            if (slo := self._slo.get(name, ClassSlo()))
        }

    def _changed_engines(self) -> Shown:
        before, now = self._sent_engines, self.engines.shown()
        self._sent_engines = now
        changed: Shown = {engine: one for engine, one in now.items() if before.get(engine) != one}
        return changed | {engine: None for engine in before if engine not in now}

    def _values(self, now_s: float) -> dict[str, Value]:
        """Returns the value of each series at the present tick."""
        rates = self.ingresses.rates(now_s)
        values: dict[str, Value] = {
            name: rates[name]
            for name in ("requests_per_s", "errors_per_s", "retries_per_s", "migrations_per_s")
        }
        values |= self.engines.rates
        values |= self._load(now_s)
        values["kv_usage"], values["kv_usage_max"] = self.engines.kv_usage()
        counts = self.engines.counts()
        values["engines_active"] = counts.get("ready", 0)
        values["engines_warm"] = counts.get("warm", 0)
        values["engines_planned"] = sum(_wanted(self._plan).values()) if self._plan is not None else None
        attained = self.ingresses.attainment()
        values |= {f"attainment/{name}": attained.get(name) for name in self._classes}
        values |= self.ingresses.quantiles(self._classes)
        values |= self._transfers.by_tier()
        values |= {f"bytes_per_s/level/{one['level']}": one["bytes_per_s"] for one in self.engines.levels()}
        return {name: None if value is None else round(value, 6) for name, value in values.items()}

    def _load(self, now_s: float) -> dict[str, Value]:
        """Returns what waits and runs: as the router says, or without one as the ingresses say together."""
        status = self.engines.status
        if self.engines.connected and status is not None:
            return {
                "queued": status.queued,
                "pool": status.pool,
                "in_flight": status.in_flight,
                "leases": status.leases,
            }
        stages = [one.stages for one in self.ingresses.present(now_s)]
        if not stages:
            return dict.fromkeys(("queued", "pool", "in_flight", "leases"))
        queued, pooled, moving = (
            sum(one.get(stage, 0) for one in stages) for stage in ("queued", "pooled", "transferring")
        )
        running = sum(sum(one.values()) for one in stages)
        return {"queued": queued, "pool": pooled, "in_flight": running, "leases": pooled + moving}

    def _state_line(self, now_s: float, values: Mapping[str, Value]) -> Shown:
        reports = self.ingresses.present(now_s)
        details = [one.detail for one in reports]
        ready = any(detail is None for detail in details)
        detail = None if ready else next(iter(details), "no ingress reports to the dashboard")
        fleet, status = self.engines.fleet, self.engines.status
        fallback = sum(one.decides_here for one in reports)
        if not values["leases"] or values["in_flight"]:
            self._leases_idle_since_s = None
        elif self._leases_idle_since_s is None:
            self._leases_idle_since_s = now_s
        rates, idle_s = self.ingresses.rates(now_s), self._leases_idle_since_s
        attainment = {name: values.get(f"attainment/{name}") for name in self._classes}
        state = State(
            self.engines.connected,
            len(reports),
            fallback,
            detail,
            self.engines.shown(),
            attainment,
            rates["errors_per_s"],
            self.engines.refused_per_s,
            rates["transfer_failures_per_s"],
            values["kv_usage"],
            0.0 if idle_s is None else now_s - idle_s,
        )
        return {
            "ready": ready,
            "detail": detail,
            "attainment": attainment,
            **{
                name: values[name]
                for name in ("requests_per_s", "tokens_per_s", "queued", "pool", "in_flight", "leases")
            },
            "engines": self.engines.counts(),
            "router": {"connected": self.engines.connected, "fallback": fallback},
            "ingresses": len(reports),
            "policies": {
                "prefill": None if fleet is None else fleet.prefill_policy,
                "decode": None if fleet is None else fleet.decode_policy,
                "flow": status.flows[0].policy if status is not None and status.flows else None,
            },
            "plan": None if self._plan is None else _wanted(self._plan),
            "warnings": warnings(state),
        }

    def _missing_parts(self) -> dict[str, str]:
        """Returns why parts of the page have nothing to show."""
        found: dict[str, str] = {}
        status = self.engines.status
        if self._no_plan is not None:
            found["scaling"] = self._no_plan
        if status is None or not status.flows:
            found["flow"] = "No agent schedules KV transfers: set flow.enabled in the configuration."
        roles = {info.role for info in self.engines.infos.values()}
        if roles and roles <= {"colocated"}:
            found["transfers"] = "All engines are colocated, so no KV moves."
        if status is None or "predictor_model_in_use" not in status.gauges:
            found["predictor"] = "No predictor runs: set router.predictor.enabled in the configuration."
        return found


def _wanted(plan: Mapping[str, Any]) -> dict[str, int]:
    """Returns the engines that a plan wants, by role, and those that wait warm."""
    return {**plan["serving"], **({"warm": plan["warm"]} if plan.get("warm") else {})}
