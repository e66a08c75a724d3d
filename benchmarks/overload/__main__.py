"""`python -m benchmarks.overload`: goodput of a live application on sim engines at 0.8 to 20 times its capacity.

    python -m benchmarks.overload                                 both policies, all loads: some 20 minutes
    python -m benchmarks.overload --loads 0.8 2 --seconds 15      a short form

Two prefill and two decode sim engines, router and one ingress, without Ray (`benchmarks.chaos.bare`). The decode slots
are the tightest resource: 16 slots, a step of 30 ms, 60 output tokens on average. Lengths are lognormal. Half of the
requests are interactive (TTFT objective 2 s), four in ten standard (5 s), one in ten batch (30 s). An open loop sends
each request at its planned time. What comes in the second third of a load is measured, so that the queues are full
before and after; the next load begins when nothing is left.

Goodput counts the output tokens of the requests that were planned in the window and whose first text came within their
objective; the times are those of the client, from the planned time of a request. Aims, as those of the experiment
`overload` (issue 17), written before the first whole run: by_wait has at every load from 1.25 on at least 95 % of its
highest goodput or of what is offered, and the p99 of the TTFT of the interactive and of the standard requests that were
not refused is within their objective; half of the refusals take 50 ms at most. At 1.25 times capacity `open` has less
than half of by_wait's goodput. The simulator's figures are those of the experiment. Client and application share this
machine's cores: at the highest load the figures are also those of its cores.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.live.machine import command, facts, save
from benchmarks.live.measure import CHAT
from benchmarks.live.openloop import Answer, Planned, replay
from benchmarks.live.servers import ROOT, Server, ServerError, running
from benchmarks.live.targets import sluice_app
from benchmarks.progress import teller
from benchmarks.workloads.lengths import Lognormal, draw

MODULE = "benchmarks.overload.__main__"
OUT = ROOT / "benchmarks" / "results" / "overload"
CODE = ("actors", "app", "policies", "predictors", "benchmarks/overload", "benchmarks/live")
LOADS = (0.8, 1.0, 1.25, 2.0, 5.0, 20.0)
ADMISSION = ("open", "by_wait")
SLOTS, STEP_S, OUTPUT, PROMPT = 8, 0.03, 60.0, 200.0
DECODE, PREFILL = 2, 2
PROMPT_CV, OUTPUT_CV = 0.6, 0.8
# class -> share, TTFT objective in seconds
CLASSES = {"interactive": (0.5, 2.0), "standard": (0.4, 5.0), "batch": (0.1, 30.0)}
CAPACITY_PER_S = DECODE * SLOTS / (OUTPUT * STEP_S)
PATIENCE_S = 90.0
KEY = "of-this-benchmark"
AT_MOST_S = 0.05


@dataclass(frozen=True, slots=True)
class Sent:
    """A request: its plan, class and tokens."""

    planned: Planned
    request_class: str
    output_tokens: int


def application(folder: Path) -> Any:
    """Returns the command that starts the application."""
    timing = {"prefill_base_s": 0.005, "prefill_per_token_s": 0.0002, "decode_base_s": STEP_S}
    engines = [
        {
            "name": name,
            "role": name,
            "kind": "sim",
            "replicas": count,
            "options": {"slots": slots, "timing": timing, "vocab_size": 32_000},
        }
        for name, count, slots in (("prefill", PREFILL, 32), ("decode", DECODE, SLOTS))
    ]
    args = {
        "model": {"path": "sim", "name": "sim"},
        "engines": engines,
        "wire": {"socket_dir": str(folder / "sockets")},
        "router": {"journal": {}},
        "ingress": {
            "replicas": 1,
            "options": {
                "max_in_flight": 16_384,
                "admin_keys": [KEY],
                "class_slo": {name: {"ttft_s": slo} for name, (_, slo) in CLASSES.items()},
            },
        },
    }
    made = sluice_app("overload", folder / "app.yaml", args, 120.0)
    argv = list(made.argv)
    argv[argv.index("app.serve")] = "benchmarks.chaos.bare"
    return replace(made, argv=[*argv, "--orders", str(folder / "orders")])


def requests(load: float, seconds: float, seed: int) -> list[Sent]:
    """Returns the requests of one load, in order of time."""
    rng, uniform = random.Random(seed), np.random.default_rng(seed)
    rate = load * CAPACITY_PER_S
    outputs, prompts = Lognormal.of_mean(OUTPUT, OUTPUT_CV, 512), Lognormal.of_mean(PROMPT, PROMPT_CV, 4_000)
    found, at_s = list[Sent](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        name = rng.choices(list(CLASSES), [share for share, _ in CLASSES.values()])[0]
        words, tokens = (int(draw(of, uniform, 1)[0]) for of in (prompts, outputs))
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": " ".join(["word"] * max(1, words))}],
            "max_tokens": max(1, tokens),
            "stream": True,
            "priority": name,
        }
        found.append(Sent(Planned(at_s, json.dumps(body).encode()), name, max(1, tokens)))
    return found


def figures(sent: Sequence[Sent], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Returns the figures of one load, over the requests planned in its second third."""
    length_s = seconds / 3.0
    window = [
        (one, got) for one, got in zip(sent, answers, strict=True) if length_s <= got.planned_s < 2 * length_s
    ]
    times: dict[str, list[float]] = {name: [] for name in CLASSES}
    refusals: list[float] = []
    problems: Counter[str] = Counter()
    good = met = offered = 0
    for one, got in window:
        offered += one.output_tokens
        if got.problem is not None:
            problems[_kind(got.problem)] += 1
            if "status 429" in got.problem:
                refusals.append(got.ended_s - got.sent_s)
            continue
        ttft_s = got.first_s - got.planned_s
        times[one.request_class].append(ttft_s)
        if ttft_s <= CLASSES[one.request_class][1]:
            good, met = good + one.output_tokens, met + 1
    return {
        "requests": len(window),
        "offered_tokens_per_s": offered / length_s,
        "goodput_tokens_per_s": good / length_s,
        "goodput_per_s": met / length_s,
        "problems": dict(problems),
        "refusal_p50_s": _percentile(refusals, 50),
        "refusal_p99_s": _percentile(refusals, 99),
        "late_sending_p99_s": _percentile([got.late_s for _, got in window], 99),
        **{f"ttft_p99_s/{name}": _percentile(of, 99) for name, of in times.items()},
    }


def _kind(problem: str) -> str:
    """Returns a problem without what is different in each answer."""
    code = problem.partition('"code":"')[2].partition('"')[0]
    return f"{problem[:10]} {code}".strip()


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None


def measure(
    server: Server, loads: Sequence[float], seconds: float, seed: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yields the figures of each policy at each load."""
    port = server.command.port
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30.0) as admin:
        for policy in ADMISSION:
            admin.put("/sluice/admin/policy", json={"admission": policy}).raise_for_status()
            # the first requests show how fast the engines are
            replay(port, CHAT, [one.planned for one in requests(0.5, 5.0, seed + 1)], PATIENCE_S)
            for load in loads:
                sent = requests(load, seconds, seed)
                answers = replay(port, CHAT, [one.planned for one in sent], PATIENCE_S)
                found = {"policy": policy, "load": load, **figures(sent, answers, seconds)}
                say(json.dumps({name: _shown(value) for name, value in found.items()}))
                yield found
                _wait_idle(admin)


def _shown(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _wait_idle(admin: httpx.Client) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        status = admin.get("/sluice/status").json()
        if not status["requests"]["in_flight"]:
            return
        time.sleep(0.2)
    raise ServerError("requests are left after a load")


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the aims with what was found."""
    of = {(run["policy"], run["load"]): run for run in runs}
    loads = sorted({run["load"] for run in runs})
    peak = max(of["by_wait", load]["goodput_tokens_per_s"] for load in loads)
    found = []
    for load in loads:
        ours, none = of["by_wait", load], of["open", load]
        if load > 1:
            share = ours["goodput_tokens_per_s"] / min(peak, ours["offered_tokens_per_s"])
            found.append(
                _row(f"load {load:g}: goodput of by_wait, share of its peak", share, ">= 0.95", share >= 0.95)
            )
        if load == 1.25:
            share = none["goodput_tokens_per_s"] / ours["goodput_tokens_per_s"]
            found.append(
                _row(f"load {load:g}: goodput of open, share of by_wait's", share, "< 0.5", share < 0.5)
            )
        for name in ("interactive", "standard"):
            p99_s, slo_s = ours[f"ttft_p99_s/{name}"], CLASSES[name][1]
            if p99_s is not None:
                found.append(
                    _row(f"load {load:g}: p99 TTFT, {name}, s", p99_s, f"<= {slo_s:g}", p99_s <= slo_s)
                )
        if load > 1 and ours["refusal_p50_s"] is not None:
            p50_s = ours["refusal_p50_s"]
            found.append(
                _row(f"load {load:g}: half of the refusals, s", p50_s, "<= 0.05", p50_s <= AT_MOST_S)
            )
    return found


def _row(name: str, ours: float, aim: str, met: bool) -> dict[str, Any]:
    return {"name": name, "ours": ours, "aim": aim, "met": met}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the aims with what was found, and with --out writes all of it. Returns 1 if a load failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.overload", description=__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the result, as benchmarks/results/overload")
    args = parser.parse_args(argv)
    machine, say = facts(MODULE, CODE), teller()
    with tempfile.TemporaryDirectory(prefix="sluice-overload-") as folder:
        (Path(folder) / "orders").mkdir()
        with running(application(Path(folder)), say) as server:
            runs = list(measure(server, args.loads, args.seconds, args.seed, say))
    judged = rows(runs)
    for row in judged:
        print(
            f"{row['name']:60} {row['ours']:10.3f}  aim {row['aim']:8} {'met' if row['met'] else 'NOT met'}"
        )
    if args.out is not None:
        whole = {
            "command": command("benchmarks.overload", argv),
            "machine": machine,
            "rows": judged,
            "runs": runs,
        }
        if not save(args.out / "overload.json", whole):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
