"""Measures imbalance, throughput and waits of decode policies, which are switched under load on one app.

    python -m benchmarks.live.balance                       part of `make bench-policies`; about 12 minutes
    python -m benchmarks.live.balance --setup waits         entries wait in the pool for about a minute; 30 minutes
    python -m benchmarks.live.balance --setup waits-vllm    the same on real engines; 30 minutes
    python -m benchmarks.live.balance --policies join_shortest_queue balance_route_0 --rounds 1

The app serves more connections than it has slots, so that the prompt pool is never empty. Every round starts an app
and draws other requests. The length predictor is on, and learns from the answers of the round. The policy is changed
through the admin API while answers stream; each policy is measured for one window after a settling time. A finished
round is kept (`benchmarks.live.kept`), and the same command goes on after it. Imbalance is max - min over the decode
engines of L_g, the KV tokens of their running requests. It is read from the router's journal at the router's clock
ticks (5 a second), as are the waits in the pool; TTFT is the client's. Every answer is checked; the exit status is 1 if
one was lost, cut or refused. (`benchmarks.live.switching` checks explanations.)
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.live import machine as record
from benchmarks.live.balance_report import block_of, blocks_of, table
from benchmarks.live.kept import Parts
from benchmarks.live.load import Load, LoadResult, body_of, drive
from benchmarks.live.servers import ROOT, Server, ServerError, administrator, running
from benchmarks.live.targets import MODEL, EngineOptions, sluice_app
from benchmarks.loads import Window, look
from benchmarks.plots import bars, figure, save
from benchmarks.progress import teller

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
IN_LONG_POOLS = ("join_shortest_queue", "balance_route_0", "balance_route_h", "composition", "netkv")
"""The policies that are measured where entries wait for long: those that choose among the entries, and two that do not.
"""

OUT = ROOT / "benchmarks" / "results" / "balance"


@dataclass(frozen=True, slots=True)
class Setup:
    """The cluster and its load.

    Prompts and outputs are log-normal, so that some requests are twenty times as heavy as others. `params` are
    parameters of policies by name, and `dispatch` limits of the dispatcher; what they leave out keeps its default.
    """

    name: str = "balance"
    engines: str = "sim"
    policies: tuple[str, ...] = POLICIES
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dispatch: Mapping[str, Any] = field(default_factory=dict)
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
    # In each round the first policy serves for this long before its window, so that the predictor has seen answers.
    learn_s: float = 30.0
    settle_s: float = 10.0
    window_s: float = 12.0
    rounds: int = 2
    grace_s: float = 30.0
    seed: int = 0

    @property
    def connections(self) -> int:
        return round(self.decode_engines * self.slots * (1 + self.extra))

    @property
    def round_s(self) -> float:
        return self.learn_s + len(self.policies) * (self.settle_s + self.window_s)


# A slot is held for some 200 tokens of 50 ms, so 64 slots end 5 to 6 requests a second, and 5 requests a slot more than
# there are slots wait for about a minute.
WAITS = Setup(
    name="waits",
    policies=IN_LONG_POOLS,
    dispatch={"max_queue": 4096},
    prefill_engines=2,
    decode_engines=8,
    slots=8,
    extra=5.0,
    output_median=180,
    output_sigma=0.5,
    output_max=800,
    learn_s=60.0,
    settle_s=60.0,
    window_s=60.0,
    grace_s=300.0,
)
# Two engines on two cores make some 10 tokens a second for each of 4 slots, and hold a slot for some 5 s.
WAITS_VLLM = replace(
    WAITS,
    name="waits-vllm",
    engines="vllm",
    policies=("join_shortest_queue", "balance_route_0", "balance_route_h"),
    prefill_engines=1,
    decode_engines=2,
    slots=4,
    extra=8.0,
    prompt_median=80,
    prompt_sigma=0.8,
    prompt_max=400,
    output_median=48,
    output_max=160,
    settle_s=90.0,
    window_s=150.0,
)
SETUPS = {setup.name: setup for setup in (Setup(), WAITS, WAITS_VLLM)}


def command(setup: Setup, folder: Path) -> Any:
    """Returns the command that starts the app under test, whose journal is in `folder`/journal."""
    sim = setup.engines == "sim"
    args: dict[str, Any] = {"model": {"path": "sim", "name": "sim"} if sim else {"path": MODEL}}
    args["engines"] = sim_engines(setup) if sim else vllm_engines(setup)
    args["router"] = {
        "journal": {"folder": str(folder / "journal")},
        "decode": choice(setup, setup.policies[0]),
        "dispatch": dict(setup.dispatch),
        "predictor": {"enabled": True},
    }
    args["ingress"] = {"options": {"max_in_flight": 4 * setup.connections}}
    name = f"Sluice, {setup.decode_engines} decode {setup.engines} engines"
    return sluice_app(name, folder / "balance.yaml", args, 300.0 if sim else 600.0)


def choice(setup: Setup, policy: str) -> dict[str, Any]:
    """Returns the policy with its parameters, as the configuration and the admin API take it."""
    return {"name": policy, "params": dict(setup.params.get(policy, {}))}


def sim_engines(setup: Setup) -> list[dict[str, Any]]:
    timing = {"decode_base_s": setup.step_s, "prefill_base_s": 0.005}
    options = {"profile": "tick_1ms", "timing": timing, "slots": setup.slots}
    return [
        _group("prefill", setup.prefill_engines, "sim", {**options, "slots": 64}),
        _group("decode", setup.decode_engines, "sim", options),
    ]


def vllm_engines(setup: Setup) -> list[dict[str, Any]]:
    options = asdict(EngineOptions(max_model_len=1024, slots=setup.slots))
    return [
        _group("prefill", setup.prefill_engines, "vllm", options),
        _group("decode", setup.decode_engines, "vllm", options),
    ]


def _group(role: str, replicas: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"name": role, "role": role, "kind": kind, "replicas": replicas, "options": options}


def bodies(setup: Setup, count: int, round_: int = 0) -> list[bytes]:
    """Returns `count` request bodies drawn with the seed for a round; a word of a prompt is one token of the sim model,
    and about two of a real one.
    """
    rng = random.Random(1_000 * setup.seed + round_)
    model, word = ("sim", "w{i}-{k}") if setup.engines == "sim" else (MODEL, "sea")

    def draw(median: int, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))

    made = []
    for i in range(count):
        words = draw(setup.prompt_median, setup.prompt_sigma, setup.prompt_max)
        prompt = f"{i} " + " ".join(word.format(i=i, k=k) for k in range(words))
        tokens = draw(setup.output_median, setup.output_sigma, setup.output_max)
        made.append(body_of(model, prompt, tokens, chat=False))
    return made


def one_round(setup: Setup, round_: int, say: Any) -> dict[str, Any]:
    """Starts an app, measures each policy in one window, and returns what was found, as the result keeps it."""
    with tempfile.TemporaryDirectory(prefix="sluice-balance-") as name:
        folder = Path(name)
        with running(command(setup, folder), say) as server:
            windows, load = run(setup, round_, server, say)
            # for the journal's last lines
            time.sleep(1.0)
            seen, differ = look(folder / "journal", windows)
    blocks = [block_of(policy, what, ttft_s(load, windows, policy)) for policy, what in seen.items()]
    lost = dict(load.failures)
    return {"round": round_, "served": load.served, "lost": lost, "replay_differs": differ, "blocks": blocks}


def run(setup: Setup, round_: int, server: Server, say: Any) -> tuple[list[Window], LoadResult]:
    """Loads the app and switches its policy; returns the measured windows and how the load ended. The times of first
    texts in it are since the epoch.
    """
    load = Load(
        server.command.port,
        "/v1/completions",
        bodies(setup, 800, round_),
        setup.connections,
        10**9,
        setup.round_s + 2.0,
        grace_s=setup.grace_s,
    )
    results: list[LoadResult] = []
    epoch_s = time.time() - time.perf_counter()
    thread = threading.Thread(target=lambda: results.append(drive(load)), daemon=True)
    thread.start()
    windows = []
    with administrator(server.command.port, 30.0) as client:
        time.sleep(setup.learn_s)
        for policy in setup.policies:
            answer = client.put("/sluice/admin/policy", json={"decode": choice(setup, policy)})
            answer.raise_for_status()
            time.sleep(setup.settle_s)
            start_s = time.time()
            time.sleep(setup.window_s)
            windows.append(Window(policy, start_s, time.time()))
            say(f"round {round_}, {policy}: measured for {setup.window_s:.0f} s")
    thread.join(timeout=90 + setup.grace_s)
    if not results:
        raise ServerError("the load did not end")
    results[0].first_at_s = [at_s + epoch_s for at_s in results[0].first_at_s]
    return windows, results[0]


def ttft_s(load: LoadResult, windows: Sequence[Window], policy: str) -> list[float]:
    """Returns the TTFT of the answers whose first text came in one of the policy's windows."""
    mine = [window for window in windows if window.policy == policy]
    pairs = zip(load.first_at_s, load.ttft_s, strict=True)
    return [took_s for at_s, took_s in pairs if any(w.start_s <= at_s < w.end_s for w in mine)]


def draw(rows: Sequence[dict[str, Any]], setup: Setup, folder: Path) -> None:
    """Writes a plot with a bar for each policy, named as the setup."""
    made, (axes,) = figure()
    values = {row["policy"]: (float(row["imbalance_tokens"]), None) for row in rows}
    title = f"KV tokens, max - min over {setup.decode_engines} decode engines, mean"
    bars(axes, values, title, "Imbalance, live")
    save(folder, setup.name, made)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if no request was lost and the journal replays to the same decisions, else 1."""
    parser = argparse.ArgumentParser(prog="benchmarks.live.balance", description=__doc__)
    parser.add_argument("--setup", choices=list(SETUPS), default="balance", help="default %(default)s")
    parser.add_argument("--policies", nargs="+", help="the first is the baseline (default: the setup's)")
    parser.add_argument("--rounds", type=int, help="windows of each policy (default: the setup's)")
    parser.add_argument("--settle-s", type=float)
    parser.add_argument("--window-s", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--params", type=json.loads, help='parameters by policy: {"balance_route_h": {"beta": 3}}'
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result (default %(default)s)")
    args = parser.parse_args(argv)
    named = ("rounds", "settle_s", "window_s", "seed", "params")
    changes = {name: value for name in named if (value := getattr(args, name)) is not None}
    setup = replace(SETUPS[args.setup], **changes)
    if args.policies:
        setup = replace(setup, policies=tuple(args.policies))
    machine, say = record.facts("benchmarks.live.balance"), teller()
    kept = Parts(f"balance-{setup.name}", machine, asdict(setup))

    say(f"{setup.connections} connections, {setup.rounds} rounds of about {setup.round_s:.0f} s of load")
    rounds = []
    for round_ in range(setup.rounds):
        rounds.append(kept.once(f"round {round_}", partial(one_round, setup, round_, say), say))
    rows = table(setup.window_s, blocks_of(rounds))
    _print(rows)
    served, differ = (sum(one[count] for one in rounds) for count in ("served", "replay_differs"))
    lost = sum((Counter(one["lost"]) for one in rounds), Counter())
    print(
        f"{served} requests served, {lost.total()} lost {dict(lost) or ''}; {differ} events replay otherwise"
    )
    result = {
        "command": record.command("benchmarks.live.balance", argv),
        "config": asdict(setup),
        "machine": machine,
    }
    if not record.save(args.out / f"{setup.name}.json", result | {"rounds": rounds}, levels=5):
        return 1
    kept.forget()
    draw(rows, setup, args.out)
    return 1 if lost or differ else 0


def _print(rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0])
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
    for line in [dict(zip(names, names, strict=True)), *rows]:
        print("  ".join(str(line[name]).rjust(width) for name, width in zip(names, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
