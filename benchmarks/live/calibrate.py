"""Fits a simulator's timing profile to a running server: `python -m benchmarks.live.calibrate --url URL --out FILE`.

It sends /v1/completions with random token ids (so that no prefix is shared) and reads the streams:
    prefill    single requests of one token with several prompt lengths: the median time to the first token
    decode     n requests at once, for several n and prompt lengths: the mean time between tokens while all n ran

Then it writes the profile with the residuals of the fit (`benchmarks.sim.profiles`). The times include everything
between client and engine, so base and prefill include the server's overhead. KV size and transfer times cannot be seen
over HTTP and are taken from `--like`. The server should have no other load.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.live.sse import StreamReader
from benchmarks.sim import profiles
from benchmarks.sim.calibration import DecodeTime, PrefillTime, write_profile


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests to send. Lengths are in tokens; token ids are drawn from 1 .. vocabulary - 1."""

    prompts: tuple[int, ...] = (32, 128, 256, 384)
    repeats: int = 5
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    decode_prompts: tuple[int, ...] = (32, 256)
    output_tokens: int = 48
    vocabulary: int = 30_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    first_s: float
    last_s: float
    tokens: int


async def _ask(client: httpx.AsyncClient, prompt: Sequence[int], output: int) -> _Answer:
    """Sends one streamed completion and returns its answer, with times of this process's clock.

    Raises RuntimeError if the answer is not whole.
    """
    body = {
        "prompt": list(prompt),
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reader = StreamReader()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"the server answered {answer.status_code}: {(await answer.aread())[:300]!r}")
        async for data in answer.aiter_raw():
            reader.feed(data, time.perf_counter())
    problem = reader.problem()
    if problem is not None or reader.first_s is None or reader.finish_s is None:
        raise RuntimeError(f"an answer did not come whole: {problem}")
    tokens = (reader.usage or {}).get("completion_tokens", output)
    return _Answer(reader.first_s, reader.finish_s, tokens)


async def measure(client: httpx.AsyncClient, plan: Plan) -> tuple[list[PrefillTime], list[DecodeTime]]:
    """Runs the plan's measurements one after the other and returns them."""
    rng = random.Random(plan.seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(1, plan.vocabulary) for _ in range(tokens)]

    # The first transfer also sets up connections, so it is not measured.
    await _ask(client, prompt(plan.prompts[0]), 2)
    prefills = []
    for length in plan.prompts:
        times = []
        for _ in range(plan.repeats):
            started = time.perf_counter()
            times.append((await _ask(client, prompt(length), 1)).first_s - started)
        prefills.append(PrefillTime(length, statistics.median(times)))
    decodes = []
    for length in plan.decode_prompts:
        for n in plan.concurrency:
            asked = [_ask(client, prompt(length), plan.output_tokens) for _ in range(n)]
            answers = await asyncio.gather(*asked)
            steps = [(a.last_s - a.first_s) / max(1, a.tokens - 1) for a in answers]
            kv_tokens = n * (length + plan.output_tokens / 2)
            decodes.append(DecodeTime(n, kv_tokens, statistics.median(steps)))
    return prefills, decodes


async def calibrate(client: httpx.AsyncClient, plan: Plan, like: str | Path, url: str, out: Path) -> None:
    """Measures, fits and writes `out`. Raises RuntimeError, CalibrationError, ProfileError."""
    prefills, decodes = await measure(client, plan)
    write_profile(out, like, f"benchmarks.live.calibrate on {url}, {plan}", prefills, decodes)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status (module docstring)."""
    defaults = Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live.calibrate", description=__doc__)
    parser.add_argument("--url", required=True, help="of the server, http://127.0.0.1:8000 say")
    parser.add_argument("--out", type=Path, required=True, help="the profile file to write, *.yaml")
    parser.add_argument(
        "--like", default="cpu_smollm2", help="profile whose KV size and transfer are taken over"
    )
    parser.add_argument("--prompts", type=_lengths, default=defaults.prompts)
    parser.add_argument("--decode-prompts", type=_lengths, default=defaults.decode_prompts)
    parser.add_argument("--concurrency", type=_lengths, default=defaults.concurrency)
    parser.add_argument("--output-tokens", type=int, default=defaults.output_tokens)
    parser.add_argument("--repeats", type=int, default=defaults.repeats)
    args = parser.parse_args(argv)
    plan = Plan(args.prompts, args.repeats, args.concurrency, args.decode_prompts, args.output_tokens)

    async def run() -> None:
        limits = httpx.Limits(max_connections=max(plan.concurrency) + 1)
        async with httpx.AsyncClient(base_url=args.url, timeout=600.0, limits=limits) as client:
            await calibrate(client, plan, args.like, args.url, args.out)

    asyncio.run(run())
    profile = profiles.load(args.out)
    for name in profiles.FIELDS:
        print(f"{name:32} {getattr(profile, name):.6g}")
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
