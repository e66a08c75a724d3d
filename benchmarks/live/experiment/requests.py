"""The requests of a plan's load, drawn from its seed, and the bodies in which they are sent.

Prompts are token ids, so that their lengths are exact with every tokenizer. Equal seeds give equal requests, whatever
arm they are sent in; two arms are therefore compared request by request.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.live.experiment.plan import ClassLoad, Load, PlanError, Spread
from benchmarks.workloads import catalog
from benchmarks.workloads.arrivals import Gamma, until
from benchmarks.workloads.lengths import Fixed, Lengths, Lognormal
from benchmarks.workloads.record import WorkloadError
from benchmarks.workloads.transform import LengthFilter
from predictors.traces import TraceError

FIRST_TOKEN, LAST_TOKEN = 1_000, 30_000
"""Token ids of prompts. ASSUMPTION: special tokens of a vocabulary lie below, and every vocabulary is larger. The ids
of `actors.engine.sim.faults.POISON` lie above."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request: when it is sent (seconds from the start of the load), its class, lengths and objectives.

    The first `shared_tokens` of its prompt are those of the beginning number `prefix`. `blocks` are the prompt's blocks
    of a trace (`block_tokens` tokens each), where it has any.
    """

    at_s: float
    phase: str
    request_class: str
    prompt_tokens: int
    output_tokens: int
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    prefix: int = 0
    shared_tokens: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


def planned(load: Load, repeat: int = 0) -> list[Planned]:
    """Returns the requests of one trial in order of time. Raises PlanError for a trace that cannot be read."""
    seed = load.seed + repeat
    if load.trace is not None:
        return _of_trace(load, seed)
    found: list[Planned] = []
    for number, (phase, (name, start_s, end_s, rate_per_s)) in enumerate(
        zip(load.phases, load.windows(), strict=True)
    ):
        rng = np.random.default_rng((seed, number))
        times = [start_s + at_s for at_s in _times(rate_per_s, load.cv, end_s - start_s, rng)]
        found += _of_classes(name, times, load.classes_of(phase), rng)
    return found


def _times(rate_per_s: float, cv: float, length_s: float, rng: np.random.Generator) -> list[float]:
    """Returns the arrivals in a phase of `length_s` seconds, from its start."""
    if rate_per_s <= 0:
        return []
    if cv == 0:
        return [i / rate_per_s for i in range(int(length_s * rate_per_s + 1e-9))]
    return list(until(Gamma(rate_per_s, cv).times(rng), length_s))


def _of_classes(
    phase: str, times: Sequence[float], classes: dict[str, ClassLoad], rng: np.random.Generator
) -> Iterator[Planned]:
    names = list(classes)
    shares = np.array([classes[name].share for name in names], dtype=np.float64)
    chosen = rng.choice(len(names), size=len(times), p=shares / shares.sum())
    # a uniform for each length, so that a change of one class leaves the requests of all others as they are
    u_prompt, u_output, u_prefix = rng.random((3, len(times)))
    prompts = {name: _lengths(classes[name].prompt_tokens).quantile(u_prompt) for name in names}
    outputs = {name: _lengths(classes[name].output_tokens).quantile(u_output) for name in names}
    for i, at_s in enumerate(times):
        name = names[int(chosen[i])]
        of = classes[name]
        prompt = int(prompts[name][i])
        yield Planned(
            at_s,
            phase,
            name,
            prompt,
            int(outputs[name][i]),
            _seconds(of.ttft_slo_ms),
            _seconds(of.tpot_slo_ms),
            int(u_prefix[i] * of.prefixes),
            min(of.shared_tokens, prompt),
        )


def _lengths(given: int | Spread) -> Lengths:
    return Fixed(given) if isinstance(given, int) else Lognormal.of_mean(given.mean, given.cv, given.cap)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _of_trace(load: Load, seed: int) -> list[Planned]:
    trace = load.trace
    assert trace is not None
    (name, of), *_ = load.classes.items()
    try:
        spec = catalog.WorkloadSpec(
            name=trace.name,
            path=trace.file,
            lengths=LengthFilter(None, trace.max_prompt_tokens, None, trace.max_output_tokens),
            rate_per_s=trace.rate_per_s,
            start_s=trace.start_s,
            end_s=trace.start_s + trace.for_s,
        )
        rows = catalog.build(spec, seed)
    except (WorkloadError, TraceError, OSError) as error:
        raise PlanError([f"load.trace: {error}"]) from None
    return [
        Planned(
            row.at_s,
            "trace",
            name,
            row.prompt_tokens,
            row.output_tokens,
            _seconds(of.ttft_slo_ms),
            _seconds(of.tpot_slo_ms),
            blocks=row.block_hashes,
            block_tokens=row.block_tokens,
        )
        for row in rows
    ]


def tokens_of(one: Planned, seed: int, number: int) -> list[int]:
    """Returns the prompt of request `number` of a load with this seed, as token ids."""
    parts: list[list[int]] = []
    if one.blocks and one.block_tokens:
        parts += [_drawn((block % 2**63, 1), one.block_tokens) for block in one.blocks]
    elif one.shared_tokens:
        parts.append(_drawn((seed, 2, one.prefix), one.shared_tokens))
    head = list(itertools.chain.from_iterable(parts))[: one.prompt_tokens]
    return head + _drawn((seed, 3, number), one.prompt_tokens - len(head))


def _drawn(key: tuple[int, ...], count: int) -> list[int]:
    """Returns the first `count` tokens of an endless text that `key` names."""
    drawn: list[int] = np.random.default_rng(key).integers(FIRST_TOKEN, LAST_TOKEN, count).tolist()
    return drawn


def body_of(one: Planned, model: str, seed: int, number: int) -> bytes:
    """Returns the body of a streamed completion of exactly `output_tokens` tokens."""
    slo = {"ttft_ms": one.ttft_slo_s, "tpot_ms": one.tpot_slo_s}
    body = {
        "model": model,
        "prompt": tokens_of(one, seed, number),
        "max_tokens": one.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "priority": one.request_class,
    }
    given = {name: value * 1e3 for name, value in slo.items() if value is not None}
    return json.dumps({**body, **({"slo": given} if given else {})}).encode()
