"""The standing of one worker: its failure rate, the figures of its speed, and its quarantine.

Outlier detection (`outliers`) judges workers by these. All sums are kept for each request, never for each token.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from policies.state.views import Quarantine, RequestId, WorkerId

WEIGHT = 0.3
"""Weight a of the newest outcome in the failure rate, and of the newest sample in a figure's mean."""


class Figure(StrEnum):
    """A figure by which the workers of a tier are compared, in seconds for each unit of work.

    Its value is the reason of a quarantine because of it.
    """

    PREFILL = "slow_prefill"
    """Seconds with a prompt in work, for each prompt token computed; each prompt counts PROMPT_TOKENS more.
    A prompt that fetches its prefix from another worker is in work only for the time in which its engine computed it.
    """
    ADMISSION = "slow_admission"
    """Seconds from the decision for a decode worker until it has a slot and the KV, for each request that it had room
    for.
    """
    DECODE = "slow_decode"
    """Seconds that a sequence decodes, for each of its tokens."""


PROMPT_TOKENS = 128  # ASSUMPTION: a prompt costs an engine as much as this many tokens, however short it is

LEAST_S = {Figure.PREFILL: 20e-6, Figure.ADMISSION: 0.25, Figure.DECODE: 5e-3}
"""Samples below this count as this. ASSUMPTION: nobody notices a worker before it is `slow_factor` times slower than
this (with the default factor of 4: 80 us a prompt token, 1 s to admit, 20 ms a token).
"""

LEAST_WORK = {Figure.PREFILL: 1024, Figure.DECODE: 32}
"""Fewest tokens in one sample of a figure that is measured over many requests."""

LEAST_WORK_OF_PROBE = 4
"""Fewest tokens by which a probe is judged."""


class Work(NamedTuple):
    """The work that a worker has done since it came. All are sums: seconds with some prompt in work until the last one
    was computed, and the tokens of the prompts that were (each with PROMPT_TOKENS more, cached ones included); the
    seconds for which its sequences decoded and the tokens that they generated; the seconds from the choice of the
    worker to its slot and KV, and the number of sequences that got them; the seconds to the first token, and for how
    much: sequences, or on a colocated worker tokens of prompts.
    """

    prompt_s: float = 0.0
    prompt_tokens: float = 0.0
    decoding_s: float = 0.0
    generated_tokens: int = 0
    start_s: float = 0.0
    starts: int = 0
    first_s: float = 0.0
    firsts: float = 0.0

    def since(self, before: "Work") -> "Work":
        """Returns what was done since `before`."""
        return Work(*[now - then for now, then in zip(self, before, strict=True)])  # type: ignore[arg-type]


@dataclass(slots=True)
class Speed:
    """The samples of one figure of one worker. `work` and `spent_s` are summed until they are enough for a sample."""

    samples: int = 0
    mean_log: float = 0.0
    work: float = 0.0
    spent_s: float = 0.0

    def add(self, figure: Figure, seconds: float) -> None:
        """Adds one sample, in seconds for each unit of work."""
        value = math.log(max(seconds, LEAST_S[figure]))
        self.samples += 1
        self.mean_log += (value - self.mean_log) * max(WEIGHT, 1 / self.samples)


def _no_samples() -> dict[Figure, Speed]:
    return {figure: Speed() for figure in Figure}


@dataclass(slots=True)
class Standing:
    """The facts for and against one worker. `quarantine` is None while the worker gets work as any other does.

    `times` counts its quarantines in a row, failed probes included; `probe` is the request by which it is tried.

    `decoding` sequences have decoded for `decoding_s` sequence-seconds until `decoding_at_s`. Some prompt was in work
    for `busy_s` seconds, and since `busy_from_s` if any is now. `computed_tokens` are the prompt tokens of that time.
    The latest time with no prompt in work began at `idle_from_s`, and ended at `idle_until_s` if one is in work now.
    """

    worker: WorkerId
    failure_rate: float = 0.0
    quarantine: Quarantine | None = None
    probe: RequestId | None = None
    times: int = 0
    released_at_s: float = -math.inf
    speeds: dict[Figure, Speed] = field(default_factory=_no_samples)
    decoding: int = 0
    decoding_s: float = 0.0
    decoding_at_s: float = 0.0
    busy_s: float = 0.0
    busy_from_s: float | None = None
    idle_from_s: float = -math.inf
    idle_until_s: float = -math.inf
    computed_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens of all prompts computed, PROMPT_TOKENS more for each, cached ones included."""
    prompt_s: float = 0.0
    """Seconds with a prompt in work until the last prompt was computed."""
    computed_at_s: float = -math.inf
    """When the worker has finished a prompt, the latest time that this happened."""
    start_s: float = 0.0
    starts: int = 0
    first_s: float = 0.0
    firsts: float = 0.0
    seen: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """decoding_s, generated tokens, busy_s and computed_tokens at the last `look`."""

    def decodes(self, sequences: int, now_s: float) -> None:
        """Notes that `sequences` more decode from now on (fewer, if negative)."""
        self.decoding_s += self.decoding * (now_s - self.decoding_at_s)
        self.decoding_at_s = now_s
        self.decoding += sequences

    def prefills(self, prefilling: int, now_s: float) -> None:
        """Notes that `prefilling` prompts are in work from now on."""
        if self.busy_from_s is not None:
            self.busy_s += now_s - self.busy_from_s
            if not prefilling:
                self.idle_from_s = now_s
        elif prefilling:
            self.idle_until_s = now_s
        self.busy_from_s = now_s if prefilling else None

    def computed(self, compute_s: float, now_s: float) -> None:
        """Notes that the engine computed a prompt for the last `compute_s` that did not count as in work, because it
        fetched its prefix before. What of that time no other prompt was in work is added to the busy time.
        """
        until_s = now_s if self.busy_from_s is None else self.idle_until_s
        self.busy_s += max(0.0, until_s - max(self.idle_from_s, now_s - compute_s))
        self.idle_from_s = max(self.idle_from_s, until_s)

    def prompt_done(self, tokens: int, now_s: float) -> None:
        """Notes that a prompt of `tokens` tokens, PROMPT_TOKENS and cached ones included, has been computed now."""
        self.prompt_tokens += tokens
        self.computed_at_s = now_s
        self.prompt_s = self.busy_s + (0.0 if self.busy_from_s is None else now_s - self.busy_from_s)

    def admitted(self, seconds: float) -> None:
        """Notes that the worker took `seconds` to admit a request."""
        self.speeds[Figure.ADMISSION].add(Figure.ADMISSION, seconds)
        self.start_s += seconds
        self.starts += 1

    def first_token(self, seconds: float, work: float) -> None:
        """Notes that `work` sequences, or on a colocated worker tokens of a prompt, took `seconds` to a first token."""
        self.first_s += seconds
        self.firsts += work

    def work(self, generated_tokens: int, now_s: float) -> Work:
        """Returns what the worker has done until now. `generated_tokens` is its output since the start."""
        return Work(
            self.prompt_s,
            self.prompt_tokens,
            self.decoding_s + self.decoding * (now_s - self.decoding_at_s),
            generated_tokens,
            self.start_s,
            self.starts,
            self.first_s,
            self.firsts,
        )

    def look(self, generated_tokens: int, prefilling: int, now_s: float, of_probe: bool = False) -> None:
        """Makes samples of what was done since the last look, where that is work enough for one.

        `generated_tokens` is the worker's output since the start, and `prefilling` the number of prompts in work.
        """
        self.decodes(0, now_s)
        self.prefills(prefilling, now_s)
        decoding_s, generated, busy_s, computed = self.seen
        self.seen = (self.decoding_s, generated_tokens, self.busy_s, self.computed_tokens)
        self._sample(Figure.DECODE, self.decoding_s - decoding_s, generated_tokens - generated, of_probe)
        self._sample(Figure.PREFILL, self.busy_s - busy_s, self.computed_tokens - computed, of_probe)

    def _sample(self, figure: Figure, spent_s: float, work: float, of_probe: bool) -> None:
        speed = self.speeds[figure]
        speed.work += work
        speed.spent_s += spent_s
        if speed.work >= (LEAST_WORK_OF_PROBE if of_probe else LEAST_WORK[figure]):
            speed.add(figure, speed.spent_s / speed.work)
            speed.work = speed.spent_s = 0.0

    def restart(self) -> None:
        """Drops all samples, so that only later work counts."""
        self.speeds = _no_samples()
