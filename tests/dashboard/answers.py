"""The development server's answers beside the stream: policies, scaling, explain, audit, experiments and what-if.

Names, parameters and formulas of policies are the application's own, so that the page's forms meet real ones.
"""

import copy
import math
from typing import Any

from actors.router.decisions import described
from actors.router.flows import available
from policies.admission.registry import ADMISSION
from policies.dispatch.dispatcher import DispatchConfig
from policies.fairness.registry import FAIRNESS
from policies.journal.codec import encoder
from policies.routing.registry import DECODE, PREFILL

Json = dict[str, Any]


def policies(flow: bool) -> Json:
    """Returns the router's answer about policies, as `actors.router.admin` writes it."""
    config = encoder(DispatchConfig)
    assert config is not None
    flows = available()
    return {
        "prefill": described(PREFILL["join_shortest_queue"]()),
        "decode": described(DECODE["composition"]()),
        "admission": described(ADMISSION["open"]()),
        "fairness": described(FAIRNESS["vtc"]()),
        "dispatch": config(DispatchConfig()),
        "flow": flows[next(iter(flows))] if flow else None,
        "available": {
            "prefill": {name: described(kind()) for name, kind in PREFILL.items()},
            "decode": {name: described(kind()) for name, kind in DECODE.items()},
            "admission": {name: described(kind()) for name, kind in ADMISSION.items()},
            "fairness": {name: described(kind()) for name, kind in FAIRNESS.items()},
            "flow": flows,
        },
    }


def scaling(counts: dict[str, int] | None = None, bounds: dict[str, dict[str, int]] | None = None) -> Json:
    """Returns the autoscaler's answer, with the plan that these counts would make and these bounds of groups."""
    wanted, bounded = counts or {}, bounds or {}
    # one more replica than there is room for
    late = {"decode": 1}
    groups = [
        ("prefill", "prefill", 1, 12, 1, 6),
        ("decode", "decode", 2, 16, 1, 8),
        ("colocated", "colocated", 0, 4, 0, 2),
    ]
    serving = {name: wanted.get(name, present) for name, _, _, _, _, present in groups}
    moves = [
        {
            "way": "activate" if serving[name] > present else "deactivate",
            "engine": f"{name}-{present}",
            "role": role,
        }
        for name, role, _, _, _, present in groups
        if serving[name] != present
    ]
    return {
        "mode": "manual" if counts else "auto",
        "by": "admin" if counts else None,
        "policy": {"name": "joint", "params": {"headroom": 0.1, "quantile": 0.9}},
        "observed_for_s": 0.42,
        "phase": "awake",
        "leads": {"switch_s": 0.8, "activate_s": 0.3, "start_s": 41.0},
        "start_steps": None,
        "groups": [
            {
                "name": name,
                "role": role,
                "min": bounded.get(name, {}).get("min", low),
                "max": bounded.get(name, {}).get("max", high),
                "keeps_warm": bounded.get(name, {}).get("warm", warm),
                "warm_max": bounded.get(name, {}).get("warm_max", warm),
                "configured": {"min": low, "max": high, "warm": warm, "warm_max": warm},
                "wanted": wanted.get(name),
                "replicas": present + warm + late.get(name, 0),
                "active": present,
                "warm": warm,
                "starting": 0,
                "draining": 0,
                "overdue": late.get(name, 0),
            }
            for name, role, low, high, warm, present in groups
        ],
        "held": None,
        "plan": {
            "serving": serving,
            "warm": 2,
            "moves": moves,
            "engines": [],
            "replicas": {name: n + 1 for name, n in wanted.items()},
        },
        "reasons": [
            "decode = ceil(11.2 requests/s * 3.9 s / (32 slots * 0.8)) = ceil(1.71) = 2",
            "prefill = ceil(4,590 tokens/s / 980 tokens/s) = 5",
        ],
        "notes": [
            "decode-7 stays until 3 leases end",
            "decode: 1 of 10 replicas have not started within 600 s (scaling.start_limit_s) and count as capacity no"
            " longer; see what they lack (`ray status`, `serve status`) and their logs, or ask for fewer",
        ],
    }


def explain(name: str, at: float, engines: list[str]) -> Json:
    """Returns two decisions about a request, with the terms that the policies' formulas name."""
    prefill, decode = PREFILL["join_shortest_queue"](), DECODE["netkv"]()
    queues = [
        {"worker": f"prefill-{n}", "cost": float(n), "terms": {"prefilling": float(n), "decoding": 0.0}}
        for n in range(6)
    ]
    costs = [
        {
            "worker": worker,
            "cost": 0.021 + 0.004 * n + 0.02 * math.log1p(n),
            "terms": {
                "transfer_s": 0.004 * n,
                "queue_s": 0.02 * math.log1p(n),
                "first_step_s": 0.021,
                "tier": float(n % 3),
                "load": -0.5 + 0.1 * n,
            },
        }
        for n, worker in enumerate(engines[:20])
    ]
    return {
        "id": name,
        "decisions": [
            {
                "at_s": at,
                "action": "RoutePrefill",
                "attempt_id": "a1-0-0",
                "colocated": False,
                "degraded": False,
                "waited_s": 0.0041,
                "decision": {"worker": "prefill-0", "ranking": queues, "reason": "policy"},
                "policy": described(prefill),
                "quarantined": {"decode-3": "failure_rate"},
            },
            {
                "at_s": at + 0.182,
                "action": "RouteDecode",
                "attempt_id": "a1-0-0",
                "waited_s": 0.0123,
                "kv_due_s": 0.31,
                "decision": {"worker": costs[0]["worker"], "ranking": costs, "reason": "policy"},
                "policy": described(decode),
            },
        ],
        "transfers": [
            {
                "at_s": at + 0.24,
                "attempt_id": "a1-0-0",
                "n_bytes": 31_457_280,
                "seconds": 0.034,
                "held_s": 0.002,
                "descriptors": 30,
            }
        ],
        "flows": [
            {
                "source": "node-0",
                "target": "node-1",
                "first_level": 1,
                "last_level": 0,
                "mlu": 0.42,
                "size": 31_457_280,
                "chunks": 4,
                "held_s": 0.002,
                "moved_s": 0.034,
                "unscheduled": "",
            }
        ],
    }


SHIPPED = [
    {
        "name": "burst",
        "summary": "Eight times the load for half a minute.",
        "text": """name: burst
load:
  generator: synthetic-chat
  seed: 1
  phases:
    - {name: calm, for_s: 30, rate_per_s: 5}
    - {name: burst, for_s: 30, rate_per_s: 40}
    - {name: after, for_s: 60, rate_per_s: 5}
actions: []
""",
    },
    {
        "name": "policy-ab",
        "summary": "Two decode policies in turn, A B B A, under the same load.",
        "text": """name: policy-ab
load:
  phases:
    - {name: steady, for_s: 240, rate_per_s: 12}
actions:
  - {at_s: 60, policy: {decode: netkv}}
""",
    },
    {
        "name": "drain",
        "summary": "One decode engine drains under load.",
        "text": """name: drain
load:
  phases:
    - {name: steady, for_s: 120, rate_per_s: 12}
actions:
  - {at_s: 40, drain: decode-1}
""",
    },
]

PLAN = {
    "duration_s": 120.0,
    "requests": 1650,
    "phases": [
        {"name": "calm", "from_s": 0, "to_s": 30, "rate_per_s": 5},
        {"name": "burst", "from_s": 30, "to_s": 60, "rate_per_s": 40},
        {"name": "after", "from_s": 60, "to_s": 120, "rate_per_s": 5},
    ],
    "actions": [{"at_s": 45, "what": "decode policy netkv"}],
}


def run(name: str, began_at: float, state: str = "done", progress: float = 1.0) -> Json:
    """Returns one run of an experiment."""
    return {
        "id": f"{name}-{int(began_at)}",
        "name": name,
        "state": state,
        "began_at": began_at,
        "took_s": 120.0 * progress,
        "progress": progress,
        "phase": "burst" if state == "running" else "ended",
        "message": None,
        "summary": None
        if state == "running"
        else {
            "requests": 1650,
            "attainment": 0.953,
            "goodput_per_s": 12.9,
            "ttft_p95_s": 0.61,
            "tpot_p95_s": 0.034,
            "engine_hours": 0.53,
        },
    }


def samples(shift: float, until: int = 120) -> Json:
    """Returns the samples of a run by second; `shift` makes runs differ."""
    t = list(range(until))

    def wave(low: float, high: float) -> list[float | None]:
        return [
            None if n == 7 else low + (high - low) * (30 < n < 66) * shift + low * 0.1 * math.sin(n * shift)
            for n in t
        ]

    return {
        "t": t,
        "ttft_p95_s/interactive": wave(0.2, 0.9),
        "ttft_p95_s/standard": wave(0.4, 1.6),
        "tpot_p95_s/interactive": wave(0.025, 0.05),
        "tpot_p95_s/standard": wave(0.03, 0.06),
        "attainment/interactive": [1 - (v or 0) / 4 for v in wave(0.05, 0.9)],
        "requests_per_s": wave(5, 40),
        "tokens_per_s": wave(650, 5200),
        "queued": wave(0.5, 60),
        "pool": wave(0.4, 20),
        "kv_usage": wave(0.3, 0.8),
        "engines_active": [8.0 if n < 40 else 9.0 for n in t],
    }


def compared(ids: list[str], runs: list[Json]) -> Json:
    """Returns a comparison with every kind of line: with an interval, with one that includes zero, and without any."""
    rows = [
        ("attainment", "share", [0.953, 0.981], 0.028, [0.011, 0.046], "time blocks"),
        ("goodput", "1/s", [12.9, 13.2], 0.3, [-0.1, 0.7], "time blocks"),
        ("ttft_p95_s", "s", [0.61, 0.44], -0.17, [-0.23, -0.1], "time blocks"),
        ("tpot_p95_s", "s", [0.034, 0.035], 0.001, None, None),
        ("engine_hours", "h", [0.53, None], None, None, None),
    ]
    table = []
    for figure, unit, values, difference, interval, basis in rows:
        wide = [values[n % 2] for n in range(len(ids))]
        one = None if difference is None else {"difference": difference, "interval": interval}
        table.append(
            {
                "figure": figure,
                "unit": unit,
                "values": wide,
                "difference": difference,
                "interval": interval,
                "basis": basis,
                "differences": [None, *[one] * (len(ids) - 1)],
            }
        )
    chosen = [next(one for one in runs if one["id"] == name) for name in ids]
    return {
        "runs": chosen,
        "columns": [f"{one['name']}, run {n + 1}" for n, one in enumerate(chosen)],
        "table": table,
        "keys": ids,
        "samples": {name: samples(1.0 - 0.4 * n) for n, name in enumerate(ids)},
    }


BASE = {
    "base": "0123456789abcdef",
    "text": """cluster:
  engines:
    - {name: prefill, role: prefill, count: 6, profile: fitted-prefill.json}
    - {name: decode, role: decode, count: 8, profile: fitted-decode.json, slots: 32}
policies:
  prefill: {name: join_shortest_queue}
  decode: {name: composition}
workload: {journal: last-5-min, rate_per_s: 21.4}
""",
    "facts": {
        "engines": "6 prefill, 8 decode, 2 colocated",
        "requests in the journal": 6420,
        "fitted rows": 318,
        "network": "3 tiers, 41 pairs learnt",
    },
    "problems": [
        "The timing of colocated engines is taken from the decode engines: too few of their steps were seen."
    ],
}


def simulated(changes: list[Json], ok: bool = True) -> Json:
    """Returns the result of a what-if: the measured figures, the simulated base, and a column for each change."""
    measured = {
        "ttft_p95_s": 0.52,
        "tpot_p95_s": 0.031,
        "attainment": 0.97,
        "requests_per_s": 21.3,
        "kv_usage": None,
    }
    base = {
        "ttft_p95_s": 0.55,
        "tpot_p95_s": 0.033,
        "attainment": 0.962,
        "requests_per_s": 21.4,
        "kv_usage": 0.44,
    }
    columns = [{"name": "base", "figures": base}]
    for n, change in enumerate(changes):
        figures = {
            name: value * (0.9 - 0.1 * n) if name.endswith("_s") else value for name, value in base.items()
        }
        columns.append({"name": change["name"], "figures": figures})
    text = (
        "The simulated base is within 15 % of what was measured: TTFT 6 %, TPOT 6 %."
        if ok
        else "The simulated base differs from what was measured by 31 % (TTFT): do not trust the rest."
    )
    return copy.deepcopy({"measured": measured, "trust": {"ok": ok, "text": text}, "columns": columns})
