"""How long a stream stands still after its decode engine was killed, by the tokens that are computed again.

    python -m benchmarks.chaos.recompute                               half an hour
    python -m benchmarks.chaos.recompute --tokens 50 300 --repeats 1   a short form

One prefill and two decode engines of vLLM with nothing else to do. A stream goes on until it has a given number of
tokens, and then the decode engine that writes it is killed (SIGKILL). The stream goes on at the other one, for which
the prefill engine computes prompt and output again. Before that, a fresh prompt of about as many tokens tells how long
the same computation takes when no engine was killed: the time to its first token. The next stream waits until all
engines are back. Lengths are in an order by the seed. The exit status is 1 if a stream was not whole.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos.processes import members
from benchmarks.chaos.recompute_report import draw, rows
from benchmarks.chaos.results import CODE
from benchmarks.chaos.setups import vllm_setup
from benchmarks.live.fleet import COMPLETIONS
from benchmarks.live.machine import command, facts, save
from benchmarks.live.measure import prompts
from benchmarks.live.servers import ROOT, Server, ServerError, administrator, running
from benchmarks.progress import teller

OUT = ROOT / "benchmarks" / "results" / "recompute"
MODULE = "benchmarks.chaos.recompute"

PATIENCE_S = 300.0
REST_S = 5.0
"""Seconds after which the start of an engine no longer takes part in what is measured."""
PROMPT_WORDS = 12
AFTER = 40
"""Tokens of a stream after its engine was killed."""
DECODE_ENGINES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens that streams have when their engine is killed, streams of each, and the seed of order and prompts."""

    tokens: tuple[int, ...] = (50, 300, 700, 1200)
    repeats: int = 4
    seed: int = 0

    def streams(self) -> list[int]:
        """Returns the tokens of each stream in order: each round has all lengths."""
        rng, found = random.Random(self.seed), []
        for _ in range(self.repeats):
            found += rng.sample(self.tokens, len(self.tokens))
        return found


@dataclass(slots=True)
class Seen:
    """One stream: seconds and completion tokens of each event with text, and tokens of the prompt."""

    sent_s: float
    at_s: list[float]
    tokens: list[int]
    prompt_tokens: int = 0
    finish: str | None = None

    def longest_gap_s(self, after_s: float) -> float:
        """Returns the longest time between two events of which the later one came after `after_s`."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return max(later - earlier for earlier, later in pairs if later > after_s)


def stream(
    http: httpx.Client, prompt: str, tokens: int, at: int | None = None, do: Callable[[], None] = lambda: None
) -> Seen:
    """Streams a completion of `tokens` tokens to its end, and calls `do` once `at` of them have come."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    seen = Seen(time.perf_counter(), [], [])
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        if answer.status_code != 200:
            raise ServerError(f"a stream was refused: {answer.read().decode()[:300]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(f"a stream failed: {event['error']}")
            for choice in event["choices"]:
                seen.finish = choice["finish_reason"] or seen.finish
                seen.at_s.append(time.perf_counter())
                seen.tokens.append(event["usage"]["completion_tokens"])
            seen.prompt_tokens = event["usage"]["prompt_tokens"]
            if at is not None and seen.tokens and seen.tokens[-1] >= at:
                at = None
                do()
    return seen


class Bench:
    """The running application, whose engines are killed."""

    def __init__(self, server: Server, http: httpx.Client, seed: int) -> None:
        self._server, self._http, self._rng = server, http, random.Random(seed)

    def engines(self, role: str) -> dict[str, int]:
        """Returns the requests that run on each ready engine of a role."""
        found = self._http.get("/sluice/status").raise_for_status().json()["engines"]
        return {one["id"]: one["running"] for one in found if one["role"] == role and one["state"] == "ready"}

    def wait_whole(self) -> None:
        """Waits until all engines are ready and have had a rest. Raises ServerError if they do not come."""
        end_s = time.monotonic() + PATIENCE_S
        while len(self.engines("decode")) < DECODE_ENGINES or not self.engines("prefill"):
            if time.monotonic() > end_s:
                raise ServerError(f"an engine did not come back within {PATIENCE_S:.0f} s")
            time.sleep(0.5)
        time.sleep(REST_S)

    def undisturbed(self, tokens: int) -> dict[str, Any]:
        """Returns the tokens of a fresh prompt of about `tokens` tokens, and the seconds to its first token."""
        (text,) = prompts(self._rng.getrandbits(32), 1, words=tokens)
        seen = stream(self._http, text, 4)
        return {"tokens": seen.prompt_tokens, "ttft_s": round(seen.at_s[0] - seen.sent_s, 4)}

    def killed(self, tokens: int) -> dict[str, Any]:
        """Returns what befell a stream whose engine was killed at `tokens` tokens: the tokens computed again, the
        seconds for which it stood still, and whether it was whole.
        """
        before = members(self._server.pid)
        killed_s = 0.0

        def kill() -> None:
            nonlocal killed_s
            (busy,) = [name for name, running in self.engines("decode").items() if running]
            (victim,) = [m for m in before.values() if m.engine_id == busy and m.part == "decode"]
            killed_s = time.perf_counter()
            victim.signal(signal.SIGKILL)

        (text,) = prompts(self._rng.getrandbits(32), 1, words=PROMPT_WORDS)
        seen = stream(self._http, text, tokens + AFTER, tokens, kill)
        had = max(n for at, n in zip(seen.at_s, seen.tokens, strict=True) if at <= killed_s)
        return {
            "tokens": seen.prompt_tokens + had,
            "gap_s": round(seen.longest_gap_s(killed_s), 4),
            "whole": seen.finish == "length" and seen.tokens[-1] == tokens + AFTER,
        }


def measured(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what was found, as the result keeps it. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="sluice-recompute-") as folder:
        served = vllm_setup(clients=1, ingresses=1).command(Path(folder))
        with running(served, say) as server, administrator(served.port, PATIENCE_S) as http:
            bench = Bench(server, http, plan.seed)
            plain, after = [], []
            for number, tokens in enumerate(plan.streams()):
                bench.wait_whole()
                plain.append(bench.undisturbed(tokens))
                after.append(bench.killed(tokens))
                say(f"stream {number + 1}: {after[-1]}; undisturbed {plain[-1]}")
    return {"undisturbed": plain, "killed": after}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if all streams were whole, else 1."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=Plan().tokens, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=Plan().repeats, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the prompts")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result")
    args = parser.parse_args(argv)
    plan = Plan(tuple(args.tokens), args.repeats, args.seed)
    machine, say = facts(MODULE, CODE), teller()

    found = measured(plan, say)
    result = {"command": command(MODULE, argv), "config": asdict(plan), "machine": machine, **found}
    for row in rows(result):
        print(f"{row.name}: {row.ours:.4g} {row.unit}")
    if not save(args.out / "recompute.json", result, levels=2):
        return 1
    draw(result, args.out)
    return 0 if all(one["whole"] for one in found["killed"]) else 1


if __name__ == "__main__":
    sys.exit(main())
