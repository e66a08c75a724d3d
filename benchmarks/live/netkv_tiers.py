"""Measures mean KV transfer times of cache+load-aware and NetKV on tiers that differ by a factor of 4.

The command is `python -m benchmarks.live.netkv_tiers`. Sim engines run on one machine. Prefill engines and half of the
decode engines are in one rack, and the other half in another. A prefill engine's link into the far rack has a quarter
of the bandwidth; its transfers over a link share it. A prompt is a popular prefix (Zipf) and a part of its own, so both
policies can use cache hits. The application is started for each case. After a warm-up, each case gets the same requests
(by seed):

    cache_load_aware    prefix hits and load, no network
    netkv-file          NetKV, tiers from a file, no estimator
    netkv-file-live     NetKV, tiers from a file, and estimates from observed transfers
    netkv-live          NetKV, estimates from observed transfers only

Transfer times are the engines' own (`sluice_kv_transfer_seconds_total` and `..._transfers_total` of /metrics).
"""

import argparse
import dataclasses
import itertools
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.live import load, machine
from benchmarks.live.kept import Parts
from benchmarks.live.servers import ROOT, Command, ServerError, running
from benchmarks.live.stats import differences, summarise
from benchmarks.live.targets import sluice_app

MODEL = "sim"
COMPLETIONS = "/v1/completions"
# Seconds to wait for current values: engines and router report at least every second, and the ingress shows the last
# report.
REPORTED_S = 2.5
WARM_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """The engines and links, in seconds and bytes/s. The prefill engines are in the near rack."""

    prefill: int = 2
    near: int = 3
    far: int = 3
    slots: int = 8
    near_bytes_per_s: float = 400e6
    far_bytes_per_s: float = 100e6
    latency_s: float = 1e-3
    step_s: float = 0.01
    prefill_base_s: float = 0.005


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop of `concurrency` requests; lengths are in tokens, and one word is one token."""

    requests: int = 240
    warm_up: int = 60
    concurrency: int = 12
    prefixes: int = 24
    prefix_tokens: int = 256
    own_tokens: int = 256
    output_tokens: int = 24

    def bodies(self, seed: int, count: int) -> list[bytes]:
        """Returns request bodies drawn with `seed`; different seeds have different prefixes, so none is cached."""
        rng = random.Random(seed)
        heads = [_words(rng, self.prefix_tokens) for _ in range(self.prefixes)]
        weights = [1 / rank for rank in range(1, self.prefixes + 1)]
        texts = [f"{head} {_words(rng, self.own_tokens)}" for head in rng.choices(heads, weights, k=count)]
        return [load.body_of(MODEL, text, self.output_tokens, chat=False) for text in texts]


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A decode policy, and what it knows of the network."""

    name: str
    policy: str
    file: bool = False
    estimate: bool = False


CASES = (
    Scheduler("cache_load_aware", "cache_load_aware"),
    Scheduler("netkv-file", "netkv", file=True),
    Scheduler("netkv-file-live", "netkv", file=True, estimate=True),
    Scheduler("netkv-live", "netkv", estimate=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one case with one seed.

    `near_share` is the share of transfers within the near rack; `learned` are the router's network gauges at the end.
    """

    case: str
    seed: int
    requests: int
    failures: dict[str, int]
    transfers: int
    transfer_ms: float
    transfer_mb: float
    near_share: float
    ttft_ms: float
    ttft_p95_ms: float
    wall_s: float
    learned: dict[str, float]


def application(folder: Path, cluster: Cluster, case: Scheduler) -> Command:
    """Returns the command that starts the application of a case; its network file is in `folder` too."""
    file = folder / "network.yaml"
    tiers = {
        1: {"bandwidth_bytes_per_s": cluster.near_bytes_per_s, "latency_s": cluster.latency_s},
        3: {"bandwidth_bytes_per_s": cluster.far_bytes_per_s, "latency_s": cluster.latency_s},
    }
    file.write_text(yaml.safe_dump({"tiers": tiers}))
    network: dict[str, Any] = {"estimate": case.estimate}
    if case.file:
        network["file"] = str(file)
    params = {"step_base_s": cluster.step_s, "step_per_seq_s": 0.0} if case.policy == "netkv" else {}
    args = {
        "model": {"path": MODEL, "name": MODEL},
        "engines": _engines(cluster),
        "router": {"decode": {"name": case.policy, "params": params}, "network": network},
    }
    return sluice_app(f"Sluice, {case.name}", folder / f"{case.name}.yaml", args, 240.0)


def _engines(cluster: Cluster) -> list[dict[str, Any]]:
    timing = {"prefill_base_s": cluster.prefill_base_s, "decode_base_s": cluster.step_s}
    links = {
        "near-*": {"bandwidth_bytes_per_s": cluster.near_bytes_per_s, "latency_s": cluster.latency_s},
        "far-*": {"bandwidth_bytes_per_s": cluster.far_bytes_per_s, "latency_s": cluster.latency_s},
    }
    options = {"profile": "tick_1ms", "timing": timing, "slots": cluster.slots}
    groups: list[dict[str, Any]] = [
        {
            "name": "prefill",
            "role": "prefill",
            "replicas": cluster.prefill,
            "options": options | {"links": links},
        },
        {"name": "near", "role": "decode", "replicas": cluster.near, "options": options},
        {"name": "far", "role": "decode", "replicas": cluster.far, "options": options},
    ]
    for group in groups:
        rack = "r2" if group["name"] == "far" else "r1"
        group |= {"kind": "sim", "topology": {"node": f"host-{group['name']}", "rack": rack}}
    return groups


def measure(port: int, case: Scheduler, workload: Workload, seed: int) -> Row:
    """Measures and returns one row. Raises ServerError where nothing was transferred."""
    before = scrape(port)
    bodies = workload.bodies(seed, workload.requests)
    result = load.drive(
        load.Load(port, COMPLETIONS, bodies, workload.concurrency, workload.requests, max_s=300.0)
    )
    time.sleep(REPORTED_S)
    after = scrape(port)
    moved = differences(after, before)
    transfers, ttft = moved["sluice_kv_transfers_total"], summarise(result.ttft_s, 1e3)
    if not transfers or ttft is None:
        raise ServerError(f"{case.name}: nothing was transferred; failures: {dict(result.failures)}")
    by_group = {
        group: sum(
            value for key, value in moved.items() if key.startswith(f"sluice_engine_transfers_total|{group}-")
        )
        for group in ("near", "far")
    }
    return Row(
        case=case.name,
        seed=seed,
        requests=result.served,
        failures=dict(result.failures),
        transfers=int(transfers),
        transfer_ms=1e3 * moved["sluice_kv_transfer_seconds_total"] / transfers,
        transfer_mb=1e-6 * moved["sluice_kv_transfer_bytes_total"] / transfers,
        near_share=by_group["near"] / max(1.0, by_group["near"] + by_group["far"]),
        ttft_ms=ttft.mean,
        ttft_p95_ms=ttft.p95,
        wall_s=result.wall_s,
        learned={k: v for k, v in sorted(after.items()) if k.startswith("sluice_router_network_")},
    )


def scrape(port: int) -> dict[str, float]:
    """Reads /metrics and returns the values by name, or by `name|engine` for those of an engine.

    Histogram buckets are left out.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                engine = sample.labels.get("engine")
                found[f"{sample.name}|{engine}" if engine else sample.name] = float(sample.value)
    return found


def run(args: argparse.Namespace, folder: Path, rows: list[Row], kept: Parts) -> None:
    """Measures all cases with all seeds and adds the results to `rows`. A case is a part of the measurement.

    Raises ServerError; `rows` then has what was measured before.
    """
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        found = kept.once(case.name, partial(_case, args, folder, case), _say)
        rows += [Row(**row) for row in found["rows"]]


def _case(args: argparse.Namespace, folder: Path, case: Scheduler) -> dict[str, Any]:
    """Measures one case with all seeds on an app of its own; returns its rows."""
    workload, rows = Workload(requests=args.requests), []
    with running(application(folder, Cluster(), case), _say) as server:
        port = server.command.port
        warm = dataclasses.replace(workload, requests=workload.warm_up)
        measure(port, case, warm, WARM_SEED)
        for seed in args.seeds:
            row = measure(port, case, workload, seed)
            rows.append(asdict(row))
            _say(_line(row))
    return {"rows": rows}


def table(rows: Sequence[Row]) -> str:
    """Returns a table of means over the seeds, and of each case's mean transfer time against cache+load-aware's.

    The comparison is seed by seed.
    """
    base = {row.seed: row.transfer_ms for row in rows if row.case == CASES[0].name}
    lines = [
        "| case | mean transfer, ms | of cache+load-aware | lower in | bytes moved, MB | near rack | TTFT mean, ms "
        "| TTFT p95, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, group in itertools.groupby(rows, key=lambda row: row.case):
        own = list(group)
        ratios = [row.transfer_ms / base[row.seed] for row in own if row.seed in base]
        against = (
            f"{_mean(ratios):.2f} | {sum(r < 1 for r in ratios)} of {len(ratios)} seeds"
            if ratios
            else "- | -"
        )
        lines.append(
            f"| {name} | {_mean([r.transfer_ms for r in own]):.1f} | {against} "
            f"| {_mean([r.transfer_mb for r in own]):.2f} | {100 * _mean([r.near_share for r in own]):.0f} % "
            f"| {_mean([r.ttft_ms for r in own]):.0f} | {_mean([r.ttft_p95_ms for r in own]):.0f} |"
        )
    return "\n".join(lines)


def write(rows: Sequence[Row], facts: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes a JSON file with everything and a file with the table; returns their paths.

    The list is empty if the code has changed since the beginning (`machine.save`).
    """
    result = {**facts, "rows": [asdict(row) for row in rows]}
    files = [folder / "netkv_tiers.json", folder / "netkv_tiers.md"]
    if not machine.save(files[0], result):
        return []
    files[1].write_text(table(rows) + "\n")
    return files


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 when requests failed or a server misbehaved."""
    args = _arguments(argv)
    facts: dict[str, Any] = {
        "command": machine.command("benchmarks.live.netkv_tiers", argv),
        "config": {
            "cluster": asdict(Cluster()),
            "workload": asdict(Workload(requests=args.requests)),
            "seeds": args.seeds,
            "cases": [asdict(case) for case in CASES],
        },
        "machine": machine.facts("benchmarks.live.netkv_tiers"),
    }
    kept = Parts("netkv_tiers", facts["machine"], facts["config"])
    rows: list[Row] = []
    failed = False
    with tempfile.TemporaryDirectory(prefix="sluice-netkv-") as folder:
        try:
            run(args, Path(folder), rows, kept)
        except ServerError as error:
            print(f"ended early: {error}", file=sys.stderr)
            failed = True
    if not rows:
        return 1
    print("\n" + table(rows) + "\n")
    files = write(rows, facts | {"parts": kept.ends()}, Path(args.out))
    if files and not failed:
        kept.forget()
    _say("written: " + ", ".join(map(str, files)))
    return 1 if failed or not files or any(row.failures for row in rows) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.netkv_tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument(
        "--requests", type=int, default=Workload().requests, help="a seed and case (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="only these cases")
    parser.add_argument(
        "--out", default=str(ROOT / "benchmarks" / "results" / "netkv_tiers"), help="folder of the results"
    )
    return parser.parse_args(argv)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.getrandbits(40):x}" for _ in range(count))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _line(row: Row) -> str:
    return (
        f"{row.case} seed {row.seed}: {row.transfers} transfers, {row.transfer_ms:.1f} ms and {row.transfer_mb:.2f} MB "
        f"each, {100 * row.near_share:.0f} % near; TTFT {row.ttft_ms:.0f} ms; failures {row.failures or 'none'}"
    )


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
