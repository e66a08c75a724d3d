"""The load of all sides: requests of mixed lengths and classes, from four tenants of whom one is greedy.

Classes and their objectives are those of the experiment `overload`, tenants, weights and what each offers those of the
experiment `fairness` in its mix "greedy": three tenants offer half of their weighted share of the capacity each, and
the fourth offers all the rest, far more than its share. Classes, tenants and lengths are drawn independently.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.fairness import GREEDY, MODEST, WEIGHTS, offers
from benchmarks.experiments.overload import CLASSES, OUTPUT_CV, PROMPT_CV
from benchmarks.workloads.lengths import Lognormal
from policies.engine_model.text import WORDS

__all__ = [
    "CLASSES",
    "GREEDY",
    "MODEST",
    "PRIORITY",
    "SLO_S",
    "TIGHTEST_S",
    "WEIGHTS",
    "Mix",
    "Times",
    "Work",
    "works",
]

SLO_S: Mapping[str, float] = {name: slo_s for name, (_, _, slo_s) in CLASSES.items()}
"""The TTFT objective of each class in seconds."""
PRIORITY: Mapping[str, int] = {name: priority for name, (_, priority, _) in CLASSES.items()}
"""The priority of each class; lower is served earlier, in Sluice as in vLLM."""
TIGHTEST_S = min(SLO_S.values())
"""The tightest TTFT objective of all classes in seconds."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The lengths of requests in tokens: means of lognormal distributions, and the longest that there are."""

    prompt_tokens: float
    output_tokens: float
    longest_prompt: int
    longest_output: int


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one load in seconds. Queues fill up in `ramp_s`, what comes in the `window_s` after it is measured,
    and the load goes on for `after_s`, so that what came last does not find an emptying fleet.

    Answers have `patience_s` from the end of the window on, after which what has not ended is cut.
    """

    ramp_s: float
    window_s: float
    after_s: float
    patience_s: float = max(SLO_S.values())

    @property
    def until_s(self) -> float:
        """The end of the window."""
        return self.ramp_s + self.window_s

    @property
    def sending_s(self) -> float:
        """The time for which requests are sent."""
        return self.until_s + self.after_s

    @property
    def cut_s(self) -> float:
        """The time at which what has not ended is cut."""
        return self.until_s + max(self.after_s, self.patience_s)

    def holds(self, at_s: float) -> bool:
        """Returns whether a time is in the window."""
        return self.ramp_s <= at_s < self.until_s


@dataclass(frozen=True, slots=True)
class Work:
    """One request: when it is to be sent, whose it is, and how long its prompt and answer are.

    A word of the `text` is about a token; `prompt_tokens` counts its words.
    """

    at_s: float
    request_class: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    text: str


def works(mix: Mix, load: float, capacity_per_s: float, seconds: float, seed: int) -> list[Work]:
    """Returns the requests of `load` times the capacity, in order of time; the same arguments give the same ones.

    No two prompts have a beginning in common, so that no cache helps any side.
    """
    rng, uniform = random.Random(seed), np.random.default_rng((seed, 17))
    prompt = Lognormal.of_mean(mix.prompt_tokens, PROMPT_CV, mix.longest_prompt)
    output = Lognormal.of_mean(mix.output_tokens, OUTPUT_CV, mix.longest_output)
    classes, shares = list(CLASSES), [share for share, _, _ in CLASSES.values()]
    offered = offers({"mix": "greedy", "load": load})
    times = list[float]()
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(load * capacity_per_s)) < seconds:
        times.append(at_s)
    prompts, outputs = (of.quantile(uniform.random(len(times))) for of in (prompt, output))
    return [
        Work(
            at_s,
            rng.choices(classes, shares)[0],
            rng.choices(list(offered), list(offered.values()))[0],
            int(words),
            int(tokens),
            f"{index}" + "".join(rng.choices(WORDS, k=int(words) - 1)),
        )
        for index, (at_s, words, tokens) in enumerate(zip(times, prompts, outputs, strict=True))
    ]
