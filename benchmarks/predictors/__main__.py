"""`python -m benchmarks.predictors --traces DIR --out benchmarks/results/predictors`.

On the last 20 % by time of each trace that is in DIR (default: $SLUICE_TRACES): every realisation, every
metric; then what a call, a fit and the memory cost. Writes results.json, README.md and a PNG per trace. A trace that
is finished is kept, and the same command goes on after it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkout import code_digest, depends_on, origin_of
from benchmarks.live.kept import Parts
from benchmarks.live.machine import command
from benchmarks.plots import with_palette
from benchmarks.predictors import cost
from benchmarks.predictors.page import markdown
from benchmarks.results_io import json_lines, rounded, write_text
from benchmarks.workloads.catalog import digest_of
from predictors.lgbm_fit import LgbmConfig
from predictors.permutation import permuted_brier
from predictors.report import plot
from predictors.store import library_versions
from predictors.traces import TraceError
from predictors.train import load_source, train_and_judge

CODE = ("predictors", "benchmarks/predictors")
"""The folders whose code decides the results, beside the files that this module imports."""

# The number of significant digits of a stored figure.
DIGITS = 6
TRACES = {
    "mooncake-conversation": "mooncake_conversation_trace.jsonl",
    "azure2023-conversation": "azure2023_AzureLLMInferenceTrace_conv.csv",
    "azure2023-code": "azure2023_AzureLLMInferenceTrace_code.csv",
    "servegen-reasoning": "servegen_deepseek-r1.tar",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0 also when there are no traces, with a line that says so."""
    args = _arguments().parse_args(argv)
    if args.traces is None:
        print("bench-predictors: skipped: give --traces DIR or set SLUICE_TRACES (see predictors/traces.py)")
        return 0
    found = {name: path for name, file in TRACES.items() if (path := _find(args.traces, file)) is not None}
    if not found:
        print(f"bench-predictors: skipped: none of {sorted(TRACES.values())} (or .xz) in {args.traces}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    code = depends_on("benchmarks.predictors.__main__", CODE)
    origin = origin_of(code, [digest_of(path) for path in found.values()])
    config = LgbmConfig(threads=args.threads, seed=args.seed)
    results: dict[str, Any] = {}
    known = {"code_of": code, "code": origin.code, "machine": origin.machine, "traces": origin.traces}
    kept = Parts(
        "predictors", known, {"config": asdict(config), "requests": args.requests, "seed": args.seed}
    )
    for name, path in found.items():
        print(f"== {name}", flush=True)
        done = kept.get(name)
        if done is not None and (args.out / f"{name}.png").exists():
            print(f"  kept already, from {done['ended_at']}", flush=True)
            results[name] = done["judged"]
            continue
        try:
            results[name] = kept.put(name, {"judged": _judge(name, path, config, args)})["judged"]
        except TraceError as error:
            print(f"bench-predictors: {error}", file=sys.stderr)
            return 2
    print("== cost", flush=True)
    costs = cost.measure(config, args.seed, lambda line: print(f"  {line}", flush=True))
    whole = {
        "command": command("benchmarks.predictors", argv),
        "origin": origin.as_json(),
        "code_of": code,
        "versions": library_versions(),
        "seed": args.seed,
        "config": asdict(config),
        "traces": results,
        "cost": costs,
    }
    whole = rounded(whole, DIGITS)
    if code_digest(code) != origin.code:
        write_text(args.out / "results.json.aside", json_lines(whole, 5))
        print(
            "bench-predictors: the code changed meanwhile: kept in results.json.aside, no result",
            file=sys.stderr,
        )
        return 1
    write_text(args.out / "results.json", json_lines(whole, 5))
    kept.forget()
    write_text(args.out / "README.md", markdown(json.loads(json.dumps(whole))))
    print(f"written to {args.out}")
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictors", description=__doc__)
    traces = os.environ.get("SLUICE_TRACES")
    parser.add_argument("--traces", type=Path, default=None if traces is None else Path(traces))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/predictors"))
    parser.add_argument("--requests", type=int, default=20_000, help="requests to sample from ServeGen")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _find(folder: Path, file: str) -> Path | None:
    return next((p for p in (folder / file, folder / f"{file}.xz") if p.exists()), None)


def _judge(name: str, path: Path, config: LgbmConfig, args: argparse.Namespace) -> dict[str, Any]:
    start_s = time.perf_counter()
    outcomes = load_source(path, args.requests, args.seed)
    judged = train_and_judge(outcomes, config, progress=lambda line: print(f"  {line}", flush=True))
    plot(args.out / f"{name}.png", name, judged.evaluations)
    with_palette(args.out / f"{name}.png")
    own, permuted = permuted_brier(judged.predictor.predict_rows, judged.held, seed=args.seed)
    print(f"  {time.perf_counter() - start_s:.0f} s", flush=True)
    survival, learned = judged.evaluations["survival"].overall, judged.evaluations["lightgbm"].overall
    model = judged.predictor.model
    return {
        "file": path.name,
        "requests": judged.requests,
        "held_out_requests": judged.requests - judged.first_held_out,
        "held_out_age_points": len(judged.held.rows),
        "windows": judged.held.windows,
        "signal": None if judged.signal is None else {**asdict(judged.signal), "found": judged.signal.found},
        "brier_h_max": {"own_features": own, "permuted_features": permuted},
        "model": {
            "ladder": [asdict(rung) for rung in model.design.ladder],
            "classifier_trees": 0 if model.classifier is None else model.classifier.num_trees(),
            "regressor_trees": 0 if model.regressor is None else model.regressor.num_trees(),
            "quantile_trees": [0 if q is None else q.num_trees() for q in model.quantiles],
            "calibration": model.calibration.kind,
        },
        "lightgbm_against_survival": {
            "brier": _relative(learned.brier, survival.brier),
            "conditional_mae": _relative(learned.conditional_mae_tokens, survival.conditional_mae_tokens),
        },
        "evaluations": {n: e.as_json() for n, e in judged.evaluations.items()},
    }


def _relative(new: float | None, old: float | None) -> float | None:
    return None if new is None or not old else new / old - 1.0


if __name__ == "__main__":
    raise SystemExit(main())
