"""A made-up cluster as the dashboard's server would describe it: one snapshot, then a delta for each step, by a seed.

The load swings, an engine is stalled now and then, policies change, requests fail: every part of the page has something
to show. Nothing here claims how a cluster behaves; the page is tested with it, not the policies.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

CLASSES = ("interactive", "standard", "batch")
SLO = {
    "interactive": {"ttft_s": 0.5, "tpot_s": 0.05},
    "standard": {"ttft_s": 2.0, "tpot_s": 0.1},
    "batch": {"ttft_s": None, "tpot_s": None},
}
KEEP = 900
SLOTS, BLOCKS = 32, 4096
HEAT_BINS, BIN_S = 60, 10

Json = dict[str, Any]


@dataclass
class Cluster:
    """A cluster of `size` engines. `hostile` puts HTML into every name that a client or an operator chooses."""

    size: int = 16
    seed: int = 1
    at: float = 1_800_000_000.0
    hostile: bool = False
    absent: dict[str, str] = field(default_factory=dict)
    seq: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.engines = {engine["id"]: engine for engine in self._make_engines()}
        self.series: dict[str, deque[float | None]] = {"t": deque(maxlen=KEEP)}
        self.events: deque[Json] = deque(maxlen=500)
        self.latest: deque[Json] = deque(maxlen=50)
        self.worst: list[Json] = []
        self._numbers = self._event_numbers = 0
        self._fresh: list[Json] = []
        for n in range(KEEP):
            self.step(still=self.size > 64 and n < KEEP - 5)

    # ------------------------------------------------------------------------------------------------------ engines

    def _make_engines(self) -> list[Json]:
        shares = (("prefill", 0.375), ("decode", 0.5), ("colocated", 0.125))
        made = []
        for role, share in shares:
            count = round(self.size * share)
            groups = max(1, count // 128)
            for n in range(count):
                group = role if groups == 1 else f"{role}-{n % groups}"
                number = n // groups
                made.append(self._engine(f"{group}-{number}", group, role, warm=n == count - 1 and count > 2))
        return made

    def _engine(self, name: str, group: str, role: str, warm: bool) -> Json:
        node = "<i>node</i>" if self.hostile else f"node-{sum(name.encode()) % max(2, self.size // 8)}"
        return {
            "id": name,
            "group": group,
            "role": role,
            "home_role": role,
            "duty": "warm" if warm else "active",
            "state": "ready",
            "kind": "sim",
            "node": node,
            "slots": SLOTS,
            "running": 0,
            "waiting": 0,
            "kv_usage": 0.0,
            "kv_blocks_used": 0,
            "kv_blocks_total": BLOCKS,
            "leases": 0,
            "quarantine": [],
            "started": {"process_s": 3.2, "weights_s": 1.4, "post_load_s": 0.7, "announce_s": 0.02},
        }

    def _move(self, engine: Json, load: float) -> None:
        if engine["duty"] == "warm" or engine["state"] != "ready":
            engine.update(running=0, waiting=0, kv_usage=0.0, kv_blocks_used=0, leases=0)
            return
        draw = self._random
        share = min(1.0, max(0.0, load * draw.uniform(0.7, 1.25)))
        waiting = draw.randrange(6) if share > 0.9 else 0
        kv = min(0.98, share * draw.uniform(0.7, 0.95))
        leases = draw.randrange(9) if engine["role"] == "prefill" else 0
        engine.update(
            running=round(share * SLOTS),
            waiting=waiting,
            kv_usage=round(kv, 4),
            kv_blocks_used=round(kv * BLOCKS),
            leases=leases,
        )

    # --------------------------------------------------------------------------------------------------------- steps

    def step(self, still: bool = False) -> Json:
        """Goes on by a second and returns the delta. In a `still` step no engine moves, which is cheap for many."""
        self.seq += 1
        self.at += 1.0
        load = 0.55 + 0.3 * math.sin(self.at / 97.0) + self._random.uniform(-0.05, 0.05)
        changed = self._incidents()
        for engine in () if still else self.engines.values():
            before = (engine["running"], engine["kv_usage"], engine["waiting"])
            self._move(engine, load)
            if before != (engine["running"], engine["kv_usage"], engine["waiting"]):
                changed.add(engine["id"])
        requests = [self._request() for _ in range(self._random.randrange(1, 4))]
        self.latest.extendleft(requests)
        events, self._fresh = self._fresh, []
        point = self._point(load)
        for name, value in point.items():
            column = self.series.setdefault(
                name, deque([None] * (len(self.series["t"]) - (name != "t")), maxlen=KEEP)
            )
            column.append(value)
        delta: Json = {
            "seq": self.seq,
            "at": self.at,
            "line": self._line(load),
            "series": point,
            "engines": {name: dict(self.engines[name]) for name in sorted(changed)},
            "events": events,
            "transfers": self._transfers(load),
            "requests": {"latest": requests[::-1]},
        }
        if self._worse(requests):
            delta["requests"]["worst"] = self.worst
        return delta

    def _incidents(self) -> set[str]:
        """Lets something happen now and then, and returns the engines that it changed."""
        if self.seq % 120 == 60:
            name = sorted(self.engines)[self.seq % len(self.engines)]
            self.engines[name]["state"] = "stalled"
            self.event("engine_state", f"{name} is stalled: its core has shown no sign for 4 s", "warn", name)
            return {name}
        if self.seq % 120 == 85:
            back = {name for name, engine in self.engines.items() if engine["state"] == "stalled"}
            for name in back:
                self.engines[name]["state"] = "ready"
                self.event("engine_state", f"{name} is ready again", "info", name)
            return back
        if self.seq % 200 == 20:
            self.event("policy", "decode: join_shortest_queue → composition, by admin", "info")
        if self.seq % 170 == 90:
            self.event(
                "retry", f"{self._name()}: engine decode-0 failed before its first token", "warn", "decode-0"
            )
        if self.seq % 430 == 330:
            self.event("router_lost", "2 ingresses lost the router and decide alone", "error")
        if self.seq % 430 == 342:
            self.event("router_found", "2 ingresses have the router again", "info")
        return set()

    def event(self, kind: str, text: str, level: str, engine: str | None = None) -> None:
        """Notes an event, which the delta of this step tells, or of the next one where this was told already."""
        self._event_numbers += 1
        event: Json = {
            "seq": self._event_numbers, "at": self.at, "kind": kind, "text": text, "engine": engine, "level": level,
        }  # fmt: skip
        self.events.append(event)
        self._fresh.append(event)

    def _point(self, load: float) -> dict[str, float | None]:
        draw = self._random
        rate = 42 * load * self.size / 16
        kv = [e["kv_usage"] for e in self.engines.values() if e["duty"] == "active"]
        point: dict[str, float | None] = {
            "t": self.at,
            "requests_per_s": rate,
            "errors_per_s": draw.choice((0.0, 0.0, 0.0, 0.1)),
            "tokens_per_s": rate * 130,
            "prompt_tokens_per_s": rate * 410,
            "retries_per_s": draw.choice((0.0, 0.0, 0.2)),
            "migrations_per_s": 0.0,
            "queued": max(0.0, round((load - 0.75) * 90)),
            "pool": max(0.0, round((load - 0.6) * 40)),
            "in_flight": round(rate * 5.2),
            "leases": sum(e["leases"] for e in self.engines.values()),
            "kv_usage": sum(kv) / len(kv),
            "kv_usage_max": max(kv),
            "engines_active": sum(
                e["duty"] == "active" and e["state"] == "ready" for e in self.engines.values()
            ),
            "engines_warm": sum(e["duty"] == "warm" for e in self.engines.values()),
            "engines_planned": None if "scaling" in self.absent else round(self.size * min(1.0, load + 0.3)),
            "kv_bytes_per_s": rate * 27e6,
            "bytes_per_s/tier/0": rate * 9e6,
            "bytes_per_s/tier/1": rate * 12e6,
            "bytes_per_s/tier/2": rate * 6e6,
            "bytes_per_s/level/0": rate * 15e6,
            "bytes_per_s/level/1": rate * 12e6,
        }
        for n, name in enumerate(CLASSES):
            slow = (1 + n) * (1 + max(0.0, load - 0.7) * 6)
            ttft, tpot = 0.14 * slow * draw.uniform(0.9, 1.1), 0.021 * slow * draw.uniform(0.95, 1.05)
            point |= {f"ttft_p50_s/{name}": ttft, f"ttft_p95_s/{name}": ttft * 2.4}
            point |= {f"tpot_p50_s/{name}": tpot, f"tpot_p95_s/{name}": tpot * 1.5}
            point |= {f"e2e_p50_s/{name}": ttft + 120 * tpot, f"e2e_p95_s/{name}": 2.4 * ttft + 200 * tpot}
            met = None if name == "batch" else min(1.0, max(0.5, 1.12 - 0.2 * load * (2 - n)))
            point[f"attainment/{name}"] = met
        return point

    def _line(self, load: float) -> Json:
        last = {name: values[-1] for name, values in self.series.items() if values}
        states: dict[str, int] = {}
        for engine in self.engines.values():
            warm = engine["duty"] == "warm" and engine["state"] == "ready"
            state = "warm" if warm else engine["state"]
            states[state] = states.get(state, 0) + 1
        stalled = [name for name, engine in self.engines.items() if engine["state"] == "stalled"]
        warnings = [
            {
                "level": "warn",
                "text": f"Engine {name} is stalled.",
                "do": "Its log tells the last step; it comes back by itself or is replaced.",
            }
            for name in stalled
        ]
        scaled = "scaling" not in self.absent
        return {
            "ready": True,
            "detail": None,
            "attainment": {name: last.get(f"attainment/{name}") for name in CLASSES},
            "requests_per_s": last.get("requests_per_s"),
            "tokens_per_s": last.get("tokens_per_s"),
            "queued": last.get("queued"),
            "pool": last.get("pool"),
            "in_flight": last.get("in_flight"),
            "leases": last.get("leases"),
            "engines": states,
            "router": {"connected": True, "fallback": 0},
            "ingresses": 2,
            "policies": {
                "prefill": "join_shortest_queue",
                "decode": "composition",
                "flow": None if "flow" in self.absent else "mfs",
            },
            "plan": {"prefill": 6, "decode": 8, "colocated": 2} if scaled else None,
            "warnings": warnings,
        }

    def _transfers(self, load: float) -> Json:
        if "transfers" in self.absent:
            return {
                "pairs": [],
                "slowest": [],
                "seconds": {"p50": None, "p95": None},
                "held_s": {"p50": None, "p95": None},
                "levels": [],
            }
        prefill = [name for name, e in self.engines.items() if e["role"] == "prefill"][:6]
        decode = [name for name, e in self.engines.items() if e["role"] == "decode"][:6]
        pairs = [
            {
                "from": p,
                "to": d,
                "tier": (n + m) % 3,
                "bytes_per_s": load * 4e7 * ((n * 7 + m * 3) % 5),
                "learnt_bytes_per_s": None if n == m == 0 else 9.1e8 * (1 + (n * m) % 3) / 2,
                "configured_bytes_per_s": None if (n + m) % 3 == 2 else 1.25e9,
                "transfers": 37 * (n + 1) * (m + 1),
            }
            for n, p in enumerate(prefill)
            for m, d in enumerate(decode)
        ]
        slowest = [
            {
                "id": self._name(n),
                "at": self.at - 13 * n,
                "from": prefill[n % len(prefill)],
                "to": decode[n % len(decode)],
                "bytes": 31_457_280 + 1_048_576 * n,
                "seconds": 0.9 - 0.07 * n,
                "held_s": 0.2 if n % 3 == 0 else 0.0,
                "level": n % 2,
                "tier": n % 3,
            }
            for n in range(10)
        ]
        return {
            "pairs": pairs,
            "slowest": slowest,
            "seconds": {"p50": 0.034, "p95": 0.21},
            "held_s": {"p50": 0.0, "p95": 0.062},
            "levels": [
                {"level": n + 1, "bytes_per_s": load * 3e8 / (n + 1), "held": n, "held_s": 0.004 * n}
                for n in range(2)
            ],
        }

    # ------------------------------------------------------------------------------------------------------ requests

    def _name(self, n: int | None = None) -> str:
        if n is None:
            self._numbers += 1
            n = self._numbers
        return f"<img src=x onerror=alert({n})>" if self.hostile else f"chat-{n:06d}-7f3a91c2"

    def _request(self) -> Json:
        draw = self._random
        kind = draw.choices(CLASSES, (5, 4, 1))[0]
        queue, prefill = draw.expovariate(40), draw.uniform(0.05, 0.3)
        pool, transfer = draw.expovariate(60), draw.uniform(0.01, 0.06)
        tokens = draw.randrange(20, 300)
        decode = tokens * draw.uniform(0.018, 0.03)
        failed = draw.random() < 0.04
        p, d = f"prefill-{draw.randrange(6)}", f"decode-{draw.randrange(8)}"
        steps = [
            ("queue", queue, None),
            ("prefill", prefill, p),
            ("pool", pool, None),
            ("transfer", transfer, d),
        ]
        if failed:
            steps += [("decode", 0.05, d), ("retry", 0.2, None)]
            steps += [("prefill", prefill, p), ("pool", pool, None), ("transfer", transfer, "decode-7")]
        steps.append(("decode", decode, "decode-7" if failed else d))
        parts, now = [], 0.0
        for n, (name, took, engine) in enumerate(steps):
            bad = failed and n == 4
            note = "the engine was lost; the request began anew" if bad else None
            parts.append(
                {
                    "name": name,
                    "start_s": now,
                    "end_s": now + took,
                    "engine": engine,
                    "failed": bad,
                    "note": note,
                }
            )
            now += took
        ttft = now - decode + 0.02
        slo = SLO[kind]["ttft_s"]
        return {
            "id": self._name(),
            "attempts": [f"a{self._numbers:x}-0-0"],
            "at": self.at - now,
            "class": kind,
            "status": 200,
            "result": None if slo is None else "met" if ttft <= slo else "ttft",
            "ttft_s": ttft,
            "tpot_s": decode / tokens,
            "e2e_s": now,
            "prompt_tokens": draw.randrange(30, 900),
            "output_tokens": tokens,
            "cached_tokens": draw.randrange(0, 30),
            "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736" if tokens % 2 else None,
            "parts": parts,
        }

    def _worse(self, requests: list[Json]) -> bool:
        known = {one["id"] for one in self.worst}
        self.worst = sorted([*self.worst, *requests], key=lambda one: -one["ttft_s"])[:50]
        return {one["id"] for one in self.worst} != known

    def request(self, name: str) -> Json | None:
        """Returns a request that is still kept."""
        return next((one for one in [*self.latest, *self.worst] if one["id"] == name), None)

    # --------------------------------------------------------------------------------------------------------- reads

    def snapshot(self) -> Json:
        """Returns all that a page needs to begin with."""
        load = 0.6
        return {
            "seq": self.seq,
            "at": self.at,
            "period_s": 1,
            "keep": KEEP,
            "line": self._line(load),
            "classes": list(CLASSES),
            "slo": SLO,
            "series": {name: list(values) for name, values in self.series.items()},
            "engines": {name: dict(engine) for name, engine in self.engines.items()},
            "events": list(self.events),
            "transfers": self._transfers(load),
            "requests": {"latest": list(self.latest), "worst": self.worst},
            "absent": self.absent,
        }

    def heat(self, names: list[str]) -> Json:
        """Returns ten minutes of these engines in bins."""
        end = self.at // BIN_S * BIN_S
        rows = {}
        for name in names:
            if name in self.engines:
                phase = sum(name.encode()) % 17
                share = [
                    0.55 + 0.4 * math.sin((end / BIN_S - HEAT_BINS + n + 3 * phase) / 9.7)
                    for n in range(HEAT_BINS)
                ]
                rows[name] = {"running": share, "kv": [max(0.0, 0.8 * s - 0.1) for s in share]}
        return {"t": [end - BIN_S * (HEAT_BINS - 1 - n) for n in range(HEAT_BINS)], "engines": rows}
