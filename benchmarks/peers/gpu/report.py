"""The report of Sluice beside others on one GPU, by the report of those on CPUs (`benchmarks.peers.real.report`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.experiments.base import Row
from benchmarks.peers.gpu.sides import COMPARISONS, NAMES
from benchmarks.peers.real import report as real
from benchmarks.peers.report import ratio_table

INTERVALS = 2
"""Least number of rounds for an interval."""


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the ratios of both comparisons, as far as they ran."""
    for compared in COMPARISONS.values():
        yield from real.ratios(whole, compared)


def markdown(whole: Mapping[str, Any]) -> str:
    """Returns the whole report."""
    machine = whole["machine"]
    gpus = ", ".join(machine["gpus"]) or "no GPU that nvidia-smi knows"
    parts = [
        "# Sluice beside vLLM's own server and vllm-router on one GPU",
        f"{gpus}; {machine['cores']} cores of {machine['cpu']}. Commit {_commit(machine)}, code {machine['code']}.",
        "The model has the shape of Llama 3 8B with vLLM's dummy weights in bfloat16: what it says means nothing, and "
        "only times count. Every answer has its full number of tokens. Both sides are up at the same time and "
        "alternate by row, and the client runs on the same cores.",
    ]
    if whole["ended_early"]:
        parts.append(f"**The run ended early.** {whole['ended_early'].splitlines()[0]}")
    for name, compared in COMPARISONS.items():
        if name not in whole["config"]["comparisons"]:
            continue
        ran, wanted = whole["rounds"].get(name, 0), whole["config"]["rounds"]
        few = "" if ran >= INTERVALS else f" Fewer than {INTERVALS} rounds give no interval."
        parts += [
            f"## {NAMES[name][0].upper()}{NAMES[name][1:]}",
            f"{ran} of {wanted} rounds ran.{few}",
            real.medians(whole, compared),
            ratio_table(list(real.ratios(whole, compared))),
        ]
    return "\n\n".join(parts)


def _commit(machine: Mapping[str, Any]) -> str:
    source = f" ({machine['commit_from']})" if "commit_from" in machine else ""
    return f"{machine['commit']}{source}"
