"""The requests of one run: which prompt, on which decode engine, at what time. Pure; all draws come from the seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["tight", "loose"]
KINDS: tuple[Kind, ...] = ("tight", "loose")
VOCABULARY = 49_152
"""Token ids of SmolLM2's tokeniser; the first few hundred are special or single bytes."""
FIRST_ID = 1_000
BLOCK_TOKENS = 32
"""Tokens of a KV block: vLLM's CPU attention wants a multiple of 32, and a block that is not full is computed again."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens. `requests` a run, of which `tight_share` are tight. A request is due `slo_factor` times its
    class's lone TTFT after its arrival.

    Prompts are drawn from a pool, all of which fits into the prefill engine's cache. With `fresh` each request has a
    prompt that came never before: a decode engine that cannot forget then has nothing of it.

    The lengths are one token above a multiple of a block, because an engine always computes the last token of a prompt
    and never reuses a block that is not full: of a cached prompt exactly one token is computed.

    The first prefill engine holds the head of every prompt, `prefix_share` of it. `cold_share` of the requests go to
    other prefill engines, which lack that prefix.
    """

    requests: int = 240
    tight_share: float = 0.77
    tight_tokens: int = 257
    loose_tokens: int = 1_985
    tight_prompts: int = 8
    loose_prompts: int = 4
    slo_factor: float = 3.0
    fresh: bool = False
    prefix_share: float = 0.875
    cold_share: float = 0.0

    def tokens(self, kind: Kind) -> int:
        """Returns the length of a prompt of this class."""
        return self.tight_tokens if kind == "tight" else self.loose_tokens

    def prefix_tokens(self, kind: Kind) -> int:
        """Returns the length of the head of a prompt that the first prefill engine has cached: whole blocks."""
        return int(self.prefix_share * self.tokens(kind)) // BLOCK_TOKENS * BLOCK_TOKENS

    def mean_bytes(self, kind_bytes: Mapping[Kind, float]) -> float:
        """Returns the mean over all requests of a number of bytes for each class."""
        return self.tight_share * kind_bytes["tight"] + (1 - self.tight_share) * kind_bytes["loose"]

    def prompt(self, kind: Kind, number: int) -> list[int]:
        """Returns a prompt of a class as token ids. No two prompts share a prefix of a block."""
        return random.Random(f"{kind} {number}").choices(range(FIRST_ID, VOCABULARY), k=self.tokens(kind))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: its time in seconds after the run's beginning, its class, its prompt's place in the pool, and the
    numbers of its decode engine and of its prefill engine.
    """

    at_s: float
    kind: Kind
    prompt: int
    decode: int
    prefill: int = 0


def arrivals(
    workload: Workload, rate_per_s: float, decodes: int, seed: int, first_fresh: int = 0, others: int = 0
) -> list[Arrival]:
    """Returns the requests of a run in order of time: Poisson at `rate_per_s`, spread over `decodes` engines, and their
    cold ones over `others` prefill engines beside the first one. Fresh prompts are numbered from `first_fresh`.

    The number of tight requests is the same in each run, so that runs differ in order and timing only. The same seed
    gives the same requests at each rate, only closer together.
    """
    if rate_per_s <= 0:
        raise ValueError(f"the rate must be above 0, got {rate_per_s}")
    rng = random.Random(seed)
    tight = round(workload.tight_share * workload.requests)
    kinds: list[Kind] = ["tight" if place < tight else "loose" for place in range(workload.requests)]
    rng.shuffle(kinds)
    pool = {"tight": workload.tight_prompts, "loose": workload.loose_prompts}
    at_s, made = 0.0, []
    for number, kind in enumerate(kinds):
        at_s += rng.expovariate(1.0) / rate_per_s
        prompt = rng.randrange(pool[kind])
        decode = rng.randrange(decodes)
        cold = workload.cold_share > 0 and rng.random() < workload.cold_share
        prefill = rng.randrange(1, 1 + others) if cold else 0
        made.append(Arrival(at_s, kind, first_fresh + number if workload.fresh else prompt, decode, prefill))
    return made


def rate(workload: Workload, load: float, bytes_per_s: float, kind_bytes: Mapping[Kind, float]) -> float:
    """Returns the requests/s whose bytes, on average, are `load` of what the link carries. `kind_bytes` are those that
    a request of each class takes from the link.
    """
    return load * bytes_per_s / workload.mean_bytes(kind_bytes)
