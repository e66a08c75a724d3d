"""Measures the composition's gain in TTFT on a live app, and simulates the same requests for comparison.

    python -m benchmarks.live.composition            3 loads, 5 policies, 2 rounds of blocks: less than 10 minutes
    python -m benchmarks.live.composition --quick    one load, one round: less than 2 minutes

One app (4 prefill and 8 decode sim engines on two network tiers: `composition_twin`) runs with the router's predictor.
The first part of the run is not measured; the predictor learns the clients' lengths from its requests. Then a round
has, at each load, a block for every policy, which is set through the admin API. All blocks of a round and load send the
same requests (times, lengths, clients) with new prompts, in an open loop. Each block starts on an idle app and waits
for the last answer. Every round begins with another policy. So a block is compared with NetKV's block of the same
requests. "Users not told" leaves out the field `user`, so its forecasts are not by client.

TTFT and TPOT are of the requests that were sent after the first second. tok/s counts the tokens that streamed between
that second and the last arrival. Afterwards each block is simulated under the same policy, with a predictor that has
learnt from the same training part. The live predictor has also learnt from the earlier blocks, so it knows the clients
a little better. Not claimed: real engines; links that several senders share, which the composition takes into account
and sim engines do not have.

The exit status is 1 if an answer was lost, cut or refused.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.experiments.composition_twin import (
    MODEL,
    Cluster,
    Contender,
    Mix,
    asked,
    capacity_per_s,
    cases,
    command,
    simulated,
    training,
)
from benchmarks.live import composition_report as report
from benchmarks.live import openloop
from benchmarks.live.composition_report import Block, Stream
from benchmarks.live.kept import Parts
from benchmarks.live.machine import command as said
from benchmarks.live.machine import facts, save
from benchmarks.live.netkv_tiers import scrape
from benchmarks.live.proctree import cpu_by_role, machine_busy_s, snapshot
from benchmarks.live.servers import ROOT, Server, ServerError, administrator, running
from benchmarks.live.stats import percentile
from benchmarks.progress import teller
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane
from benchmarks.workloads.record import WorkloadRequest

POLICIES = tuple(case.name for case in cases(Cluster()))
# The fields of Setup that are options of the command.
CHOSEN = ("policies", "loads", "rounds", "seconds", "train")
QUICK = ("NetKV", "JSQ", "composition")
OUT = ROOT / "benchmarks" / "results" / "composition"
COMPLETIONS = "/v1/completions"
# Prompts are random token ids below this number, so that no two of them share a prefix.
VOCABULARY = 30_000
# Seconds to wait for answers after the last request was sent.
PATIENCE_S = 60.0
IDLE_S = 30.0
# The router reports once a second, and the ingress shows the last report.
REPORTED_S = 2.5
PREDICTIONS = "sluice_router_predictor_predictions_total"


@dataclass(frozen=True, slots=True)
class Setup:
    """The measurement's parameters.

    Before the first block, `train` requests are sent at `train_load`. A block has `seconds` of arrivals. Each block is
    simulated `ties` times, with the policies' ties drawn anew.
    """

    cluster: Cluster = field(default_factory=Cluster)
    mix: Mix = field(default_factory=Mix)
    policies: tuple[str, ...] = POLICIES
    loads: tuple[float, ...] = (0.6, 0.9, 1.1)
    rounds: int = 2
    seconds: float = 8.0
    train: int = 600
    train_load: float = 0.8
    ties: int = 3
    seed: int = 0

    def rate_per_s(self, load: float) -> float:
        return load * capacity_per_s(self.cluster, self.mix)

    def trained_on(self) -> list[WorkloadRequest]:
        return training(self.mix, self.rate_per_s(self.train_load), self.seed, self.train)

    def work(self, load: float, round_: int) -> list[WorkloadRequest]:
        """Returns the requests of this round and load, which every policy's block sends."""
        seed = 1000 * self.seed + 100 * round_ + round(10 * load)
        return self.mix.requests(self.rate_per_s(load), self.seconds, seed)

    def order(self, round_: int) -> list[Contender]:
        """Returns the round's policies in order; each round begins with another one."""
        every = [case for case in cases(self.cluster) if case.name in self.policies]
        return [every[(i + round_) % len(every)] for i in range(len(every))]


class Run:
    """The live run. Its methods raise ServerError when the app does not become idle, and httpx's errors."""

    def __init__(self, server: Server, setup: Setup, say: Callable[[str], None]) -> None:
        self._server, self._setup, self._say = server, setup, say
        self._port = server.command.port
        self._client = administrator(self._port, 30.0)
        self._prompts = np.random.default_rng(setup.seed)
        self.problems: list[str] = []
        self.sent = 0

    def train(self) -> None:
        """Sends the training requests, which are not measured."""
        case = cases(self._setup.cluster)[-1]
        self._set(case)
        self._replay(self._setup.trained_on())

    def parts(self, kept: Parts) -> list[dict[str, Any]]:
        """Runs the blocks of all rounds and loads, as far as they are not kept, and returns what was found in each."""
        return [
            kept.once(f"round {round_}, load {load:g}", partial(self._part, load, round_), self._say)
            for round_ in range(self._setup.rounds)
            for load in self._setup.loads
        ]

    def _part(self, load: float, round_: int) -> dict[str, Any]:
        """Runs the blocks of a round at one load, which are compared with each other, in their order."""
        sent, lost, blocks = self.sent, len(self.problems), []
        for case in self._setup.order(round_):
            blocks.append(self._block(case, load, round_))
            self._say(report.line(blocks[-1]))
        return {
            "blocks": [asdict(block) for block in blocks],
            "sent": self.sent - sent,
            "lost": self.problems[lost:],
        }

    def _block(self, case: Contender, load: float, round_: int) -> Block:
        self._set(case)
        work = asked(case, self._setup.work(load, round_))
        before, busy_s, own_s, start_s = (
            snapshot(self._server.pid),
            machine_busy_s(),
            _own_cpu_s(),
            time.monotonic(),
        )
        answers = self._replay(work)
        wall_s, own_s, busy_s = time.monotonic() - start_s, _own_cpu_s() - own_s, machine_busy_s() - busy_s
        roles = cpu_by_role(before, snapshot(self._server.pid))
        cores = {role: spent / wall_s for role, spent in roles.items()} | {"client": own_s / wall_s}
        cores["others"] = max(0.0, busy_s / wall_s - sum(cores.values()))
        whole = [
            Stream(a.sent_s, a.first_s, a.last_s, one.output_tokens)
            for one, a in zip(work, answers, strict=True)
            if a.problem is None
        ]
        late_ms = 1e3 * percentile([a.late_s for a in answers], 0.95)
        lost = len(answers) - len(whole)
        measured = report.measure(whole, self._setup.seconds)
        return Block(case.name, load, round_, len(work), lost, measured, cores, late_ms)

    def forecasts(self) -> float:
        """Returns the number of predictions per request so far; it is 0 where the predictor has learnt nothing."""
        time.sleep(REPORTED_S)
        return scrape(self._port)[PREDICTIONS] / self.sent

    def _set(self, case: Contender) -> None:
        """Waits until the app has no request, then switches the policy."""
        deadline_s = time.monotonic() + IDLE_S
        while True:
            status = self._client.get("/sluice/status").raise_for_status().json()
            if not status["requests"]["in_flight"] and not status["leases"]:
                break
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"not idle after {IDLE_S:.0f} s: {status['requests']}, {status['leases']} leases"
                )
            time.sleep(0.1)
        change = {"decode": {"name": case.policy, "params": dict(case.params)}}
        self._client.put("/sluice/admin/policy", json=change).raise_for_status()

    def _replay(self, work: Sequence[WorkloadRequest]) -> list[openloop.Answer]:
        plan = [openloop.Planned(one.at_s, self._body(one)) for one in work]
        answers = openloop.replay(self._port, COMPLETIONS, plan, PATIENCE_S, finish="stop")
        self.sent += len(answers)
        self.problems += [a.problem for a in answers if a.problem is not None]
        return answers

    def _body(self, one: WorkloadRequest) -> bytes:
        """Returns the request's body.

        The engine ends the answer after `min_tokens`; router and predictor know only the cap.
        """
        body = {
            "model": MODEL,
            "prompt": self._prompts.integers(1, VOCABULARY, one.prompt_tokens).tolist(),
            "min_tokens": one.output_tokens,
            "max_tokens": one.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        return json.dumps(body | ({"user": one.client} if one.client else {})).encode()


def _own_cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


def simulate_block(setup: Setup, case: Contender, load: float, round_: int) -> Block:
    """Simulates a block and returns the mean of its runs. Raises ServerError if a request did not finish."""
    work = asked(case, setup.work(load, round_))
    runs = []
    for tie in range(setup.ties):
        config = simulated(setup.cluster, case, ControlPlane(), setup.trained_on(), tie)
        streams = []
        for one in simulate(config, work).requests:
            if one.first_token_s is None or one.finished_s is None:
                raise ServerError(f"simulated {one.request_id} did not finish: {one.rejected}")
            streams.append(Stream(one.arrived_s, one.first_token_s, one.finished_s, one.output_tokens))
        runs.append(report.measure(streams, setup.seconds))
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in report.FIGURES}
    return Block(case.name, load, round_, len(work), 0, mean, {}, 0.0)


def simulate_all(setup: Setup) -> list[Block]:
    """Simulates every block, on all cores, and returns the results."""
    todo = [
        (setup, case, load, round_)
        for round_ in range(setup.rounds)
        for load in setup.loads
        for case in setup.order(round_)
    ]
    with ProcessPoolExecutor() as pool:
        return list(pool.map(simulate_block, *zip(*todo, strict=True)))


def measure_live(setup: Setup, say: Callable[[str], None], kept: Parts) -> tuple[list[Block], dict[str, Any]]:
    """Starts an app and runs the blocks on it that are not kept; returns (all blocks, further facts for the report).

    An app that goes on after an interruption is trained anew; its predictor has not seen the blocks that are kept.
    Raises ServerError.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sluice-composition-") as folder,
        running(command(setup.cluster, setup.mix, Path(folder)), say) as server,
    ):
        run = Run(server, setup, say)
        run.train()
        capacity = setup.rate_per_s(1.0)
        say(f"the predictor has seen {setup.train} requests; capacity {capacity:.1f} requests/s")
        trained, problems = run.sent, list(run.problems)
        parts = run.parts(kept)
        return [Block(**block) for part in parts for block in part["blocks"]], {
            "sent": trained + sum(part["sent"] for part in parts),
            "lost": problems + [problem for part in parts for problem in part["lost"]],
            "parts": kept.ends(),
            "capacity_per_s": capacity,
            "forecasts_a_request": run.forecasts(),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status (module docstring)."""
    args = _arguments(argv)
    setup = Setup(**{name: getattr(args, name) for name in (*CHOSEN, "seed")})
    machine, say = facts("benchmarks.live.composition"), teller()
    kept = Parts("composition", machine, asdict(setup))

    try:
        live, seen = measure_live(setup, say, kept)
    except ServerError as error:
        print(f"composition: {error}", file=sys.stderr)
        return 1
    twins = simulate_all(setup)
    say(f"{len(twins)} blocks simulated")
    print(f"\n{report.text(live, twins)}")
    lost = seen["lost"]
    print(f"{seen['sent']} requests, {seen['forecasts_a_request']:.1f} forecasts each; {len(lost)} lost")
    for problem in sorted(set(lost))[:3]:
        print(f"lost: {problem}", file=sys.stderr)
    whole: dict[str, Any] = {
        "command": said("benchmarks.live.composition", argv),
        "config": asdict(setup),
        "cases": [asdict(case) for case in cases(setup.cluster)],
        "machine": machine,
        **seen,
        "rows": report.rows(live, twins),
        "live": [asdict(block) for block in live],
        "simulated": [asdict(block) for block in twins],
    }
    if not save(args.out / "composition.json", whole):
        return 1
    kept.forget()
    report.draw(live, twins, args.out)
    say(f"written to {args.out}")
    return 1 if lost else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live.composition", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    stock = Setup()
    quick = Setup(policies=QUICK, loads=(1.1,), rounds=1, seconds=6.0, train=300)
    parser.add_argument(
        "--quick", action="store_true", help="load 1.1, three policies, one round, short blocks"
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="NetKV is always among them")
    parser.add_argument(
        "--loads", type=float, nargs="+", help=f"shares of the decode slots' rate {stock.loads}"
    )
    parser.add_argument("--rounds", type=int, help=f"blocks of each policy and load ({stock.rounds})")
    parser.add_argument("--seconds", type=float, help=f"of arrivals in a block ({stock.seconds:g})")
    parser.add_argument("--train", type=int, help=f"requests before the first block ({stock.train})")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths, clients and prompts")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result (default %(default)s)")
    args = parser.parse_args(argv)
    for name in CHOSEN:
        given = getattr(args, name)
        if given is None:
            given = getattr(quick if args.quick else stock, name)
        setattr(args, name, tuple(given) if isinstance(given, list) else given)
    args.policies = tuple(dict.fromkeys((report.BASE, *args.policies)))
    return args


if __name__ == "__main__":
    sys.exit(main())
