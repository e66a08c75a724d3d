"""Measures what float32, the default of CPU engines, costs against bfloat16 on this machine.

    python -m benchmarks.live.dtype                  ten rounds (some five minutes)

Two applications with one colocated vLLM engine each, equal but for `dtype`, are served at the same time, one idle while
the other is asked. Every round asks both, in an order that changes, for one answer to a short prompt and for one token
after a long prompt. The measures are the seconds per output token, the seconds to the first token, and the CPU seconds
of the engine's processes for both, which other programs on the machine disturb less. The results are the ratios float32
/ bfloat16, paired by round: their geometric mean and 95 % interval. Each prompt is used once, so that no prefix cache
serves it. A machine with instructions for bfloat16 and one without give different ratios; `bf16_instructions` of
the result says which kind was measured.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.live import load, proctree, targets
from benchmarks.live.kept import Parts
from benchmarks.live.machine import command, facts, save
from benchmarks.live.measure import CHAT, MeasureError, first_answer, prompts
from benchmarks.live.servers import ROOT, Server, running
from benchmarks.live.versus import ratio_of

TOKENS = 64
LONG_WORDS = 600
SIDES = ("bfloat16", "float32")
STEP, PREFILL = "time per output token, s", "TTFT of a long prompt, s"
STEP_CPU, PREFILL_CPU = "CPU of the engine per output token, s", "CPU of the engine for a long prompt, s"
MEASURES = (STEP, PREFILL, STEP_CPU, PREFILL_CPU)


def asked(server: Server, text: str, tokens: int) -> load.LoadResult:
    """Returns the result of one request for `tokens` tokens. Raises MeasureError if it fails."""
    # the text of an end-of-text token counts, too: with bfloat16 the model may begin with one
    extra = {"skip_special_tokens": False}
    body = load.body_of(targets.MODEL, text, tokens, chat=True, extra=extra)
    result = load.drive(load.Load(server.command.port, CHAT, [body], 1, 1, 120.0))
    if result.failures:
        raise MeasureError(f"{server.command.name}: {dict(result.failures)}")
    return result


def measured(server: Server, short: str, long: str) -> dict[str, float]:
    """Returns the measures of one side in one round, in seconds."""
    before = engine_cpu_s(server)
    step_s = asked(server, short, TOKENS).stream_s[0] / (TOKENS - 1)
    between = engine_cpu_s(server)
    ttft_s = asked(server, long, 1).ttft_s[0]
    prefill_cpu_s = engine_cpu_s(server) - between
    return {
        STEP: step_s,
        PREFILL: ttft_s,
        STEP_CPU: (between - before) / TOKENS,
        PREFILL_CPU: prefill_cpu_s,
    }


def engine_cpu_s(server: Server) -> float:
    """Returns the CPU seconds that all processes of the server's engine have spent until now."""
    return sum(usage.cpu_s for usage in proctree.snapshot(server.pid) if usage.role.startswith("colocated"))


def bf16_instructions() -> list[str]:
    """Returns the instruction sets of this CPU that compute with bfloat16; an empty list if it has none."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return sorted(words & {"avx512_bf16", "amx_bf16", "bf16"})


def rounds_of(rounds: int, seed: int, kept: Parts) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of every round, by measure and side. A round is a part of the measurement. Raises ServerError
    and MeasureError.
    """
    found: dict[str, dict[str, list[float]]] = {m: {side: [] for side in SIDES} for m in MEASURES}
    short, long = prompts(seed, rounds + 1), prompts(seed + 1, rounds + 1, LONG_WORDS)
    with tempfile.TemporaryDirectory(prefix="sluice-dtype-") as folder, ExitStack() as stack:
        servers: dict[str, Server] = {}
        for side in SIDES:
            (Path(folder) / side).mkdir()
            options = targets.EngineOptions(dtype=side)
            app = targets.sluice_vllm(Path(folder) / side, options, disaggregated=False)
            servers[side] = stack.enter_context(running(app, lambda text: print(text, flush=True)))
            first_answer(servers[side], targets.MODEL, TOKENS)
            measured(servers[side], short[rounds], long[rounds])
        for number in range(rounds):
            order = SIDES if number % 2 else SIDES[::-1]
            texts = short[number], long[number]
            seen = kept.once(
                f"round {number + 1} of {rounds}",
                lambda order=order, texts=texts: {side: measured(servers[side], *texts) for side in order},  # type: ignore[misc]
                print,
            )
            for side in SIDES:
                for name, seconds in seen[side].items():
                    found[name][side].append(seconds)
            print(f"round {number + 1} of {rounds} is done", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if the code changed meanwhile."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.dtype",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10, help="alternations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "dtype" / "dtype.json")
    args = parser.parse_args(argv)
    started_s, machine = time.time(), facts("benchmarks.live.dtype")
    kept = Parts("dtype", machine, {"rounds": args.rounds, "seed": args.seed})
    found = rounds_of(args.rounds, args.seed, kept)
    ratios = [ratio_of("float32 / bfloat16", name, *found[name].values()) for name in found]
    result = {
        "command": command("benchmarks.live.dtype", argv),
        "machine": machine,
        "commit": machine["commit"],
        "bf16_instructions": bf16_instructions(),
        "config": asdict(targets.EngineOptions()) | {"dtype": list(SIDES), "model": targets.MODEL},
        "tokens": TOKENS,
        "long_words": LONG_WORDS,
        "rounds": args.rounds,
        "seed": args.seed,
        "took_s": round(time.time() - started_s),
        "seconds": found,
        "ratios": [asdict(ratio) for ratio in ratios],
        "parts": kept.ends(),
    }
    unchanged = save(args.out, result)
    if unchanged:
        kept.forget()
    for ratio in ratios:
        interval = f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        print(f"{ratio.measure}: bfloat16 {ratio.base:.4f}, float32 {ratio.ours:.4f}, ratio {interval}")
    return 0 if unchanged else 1


if __name__ == "__main__":
    sys.exit(main())
