"""Measures imbalance and throughput of decode policies, which are switched under load on 16 sim engines.

    python -m benchmarks.live.balance                       part of `make bench-policies`; about 12 minutes
    python -m benchmarks.live.balance --policies join_shortest_queue balance_route_0 --rounds 1

One app (4 prefill and 16 decode engines, each a process) serves more connections than it has slots, so that the prompt
pool is never empty. The policy is changed through the admin API while answers stream. In every round, each policy is
measured for one window after a settling time. Imbalance is max - min over the decode engines of L_g, the KV tokens of
their running requests. It is read from the router's journal at the router's clock ticks (5 a second). Every answer is
checked; the exit status is 1 if one was lost, cut or refused. (`benchmarks.live.switching` checks explanations.)
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live.load import Load, LoadResult, body_of, drive
from benchmarks.live.machine import facts
from benchmarks.live.servers import ROOT, Server, ServerError, running
from benchmarks.live.targets import sluice_app
from benchmarks.loads import Seen, Window, look
from benchmarks.plots import bars, figure, save

POLICIES = (
    "join_shortest_queue",
    "balance_route_0",
    "balance_route_h",
    "composition",
    "netkv",
    "load_aware",
    "round_robin",
    "power_of_two",
    "random",
    "cache_load_aware",
    "cache_aware",
)
OUT = ROOT / "benchmarks" / "results" / "balance"


@dataclass(frozen=True, slots=True)
class Setup:
    """The cluster and its load.

    Prompts and outputs are log-normal, so that some requests are twenty times as heavy as others.
    """

    policies: tuple[str, ...] = POLICIES
    prefill_engines: int = 4
    decode_engines: int = 16
    slots: int = 20
    # The number of connections beyond the slots, as a share of the slots; their requests wait in the pool.
    extra: float = 0.3
    step_s: float = 0.05
    prompt_median: int = 600
    prompt_sigma: float = 1.0
    prompt_max: int = 6000
    output_median: int = 60
    output_sigma: float = 0.6
    output_max: int = 400
    settle_s: float = 10.0
    window_s: float = 12.0
    rounds: int = 2
    seed: int = 0

    @property
    def connections(self) -> int:
        return round(self.decode_engines * self.slots * (1 + self.extra))

    @property
    def total_s(self) -> float:
        return len(self.policies) * self.rounds * (self.settle_s + self.window_s)


def command(setup: Setup, folder: Path) -> Any:
    """Returns the command that starts the app under test, whose journal is in `folder`/journal."""
    timing = {"decode_base_s": setup.step_s, "prefill_base_s": 0.005}
    options = {"profile": "tick_1ms", "timing": timing, "slots": setup.slots}
    engines = [
        _group("prefill", setup.prefill_engines, {**options, "slots": 64}),
        _group("decode", setup.decode_engines, options),
    ]
    router = {"journal": {"folder": str(folder / "journal")}, "decode": {"name": setup.policies[0]}}
    args = {"model": {"path": "sim", "name": "sim"}, "engines": engines, "router": router}
    args["ingress"] = {"options": {"max_in_flight": 4 * setup.connections}}
    return sluice_app("Sluice, 16 decode sim engines", folder / "balance.yaml", args, 300.0)


def _group(role: str, replicas: int, options: dict[str, Any]) -> dict[str, Any]:
    return {"name": role, "role": role, "kind": "sim", "replicas": replicas, "options": options}


def bodies(setup: Setup, count: int) -> list[bytes]:
    """Returns `count` request bodies drawn with the seed; every word of a prompt is one token of the sim model."""
    rng = random.Random(setup.seed)

    def draw(median: int, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))

    made = []
    for i in range(count):
        words = draw(setup.prompt_median, setup.prompt_sigma, setup.prompt_max)
        prompt = " ".join(f"w{i}-{k}" for k in range(words))
        tokens = draw(setup.output_median, setup.output_sigma, setup.output_max)
        made.append(body_of("sim", prompt, tokens, chat=False))
    return made


def run(setup: Setup, server: Server, say: Any) -> tuple[list[Window], LoadResult]:
    """Loads the app and switches its policy; returns the measured windows and how the load ended."""
    load = Load(
        server.command.port,
        "/v1/completions",
        bodies(setup, 800),
        setup.connections,
        10**9,
        setup.total_s + 2.0,
    )
    results: list[LoadResult] = []
    thread = threading.Thread(target=lambda: results.append(drive(load)), daemon=True)
    thread.start()
    windows = []
    with httpx.Client(base_url=f"http://127.0.0.1:{server.command.port}", timeout=30) as client:
        for _ in range(setup.rounds):
            for policy in setup.policies:
                answer = client.put("/sluice/admin/policy", json={"decode": policy})
                answer.raise_for_status()
                time.sleep(setup.settle_s)
                start_s = time.time()
                time.sleep(setup.window_s)
                windows.append(Window(policy, start_s, time.time()))
                say(f"{policy}: measured for {setup.window_s:.0f} s")
    thread.join(timeout=120)
    if not results:
        raise ServerError("the load did not end")
    return windows, results[0]


def table(setup: Setup, seen: dict[str, Seen]) -> list[dict[str, Any]]:
    """Returns one row for each policy. `tok_s` counts the output of the requests that ended in the windows."""
    base = statistics.fmean(seen[setup.policies[0]].imbalance)
    rows = []
    for policy, what in seen.items():
        imbalance = statistics.fmean(what.imbalance)
        rows.append(
            {
                "policy": policy,
                "imbalance_tokens": round(imbalance),
                f"below_{setup.policies[0]}": round(base / imbalance, 2),
                "mean_load_tokens": round(statistics.fmean(what.mean_load)),
                "pool": round(statistics.fmean(what.pool), 1),
                "pool_empty_share": round(sum(p == 0 for p in what.pool) / len(what.pool), 3),
                "tok_s": round(what.tokens / (setup.window_s * setup.rounds)),
                "samples": len(what.imbalance),
            }
        )
    return rows


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes balance.png with a bar for each policy."""
    made, (axes,) = figure()
    values = {row["policy"]: (float(row["imbalance_tokens"]), None) for row in rows}
    bars(axes, values, "KV tokens, max - min over 16 decode engines, mean", "Imbalance, live")
    save(folder, "balance", made)


def main() -> int:
    """Runs the command; returns 0 if no request was lost and the journal replays to the same decisions, else 1."""
    parser = argparse.ArgumentParser(prog="benchmarks.live.balance", description=__doc__)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="the first is the baseline")
    parser.add_argument("--rounds", type=int, default=Setup().rounds)
    parser.add_argument("--window-s", type=float, default=Setup().window_s)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result (default %(default)s)")
    args = parser.parse_args()
    setup = Setup(tuple(args.policies), rounds=args.rounds, window_s=args.window_s, seed=args.seed)
    machine, begun_s = facts(), time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun_s:6.1f} s] {text}", flush=True)

    say(f"{setup.connections} connections, about {setup.total_s:.0f} s of load")
    with tempfile.TemporaryDirectory(prefix="sluice-balance-") as name:
        folder = Path(name)
        with running(command(setup, folder), say) as server:
            windows, load = run(setup, server, say)
            time.sleep(1.0)  # the journal's last lines
            seen, differ = look(folder / "journal", windows)
    rows = table(setup, seen)
    _print(rows)
    lost = dict(load.failures)
    print(
        f"{load.served} requests served, {sum(lost.values())} lost {lost or ''}; {differ} events replay otherwise"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"config": asdict(setup), "machine": machine, "rows": rows, "served": load.served}
    result |= {"lost": lost, "replay_differs": differ}
    (args.out / "balance.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, args.out)
    return 1 if lost or differ else 0


def _print(rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0])
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
    for line in [dict(zip(names, names, strict=True)), *rows]:
        print("  ".join(str(line[name]).rjust(width) for name, width in zip(names, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
