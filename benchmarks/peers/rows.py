"""The rows of the comparison, and the aims that stood here before it ran.

The aims are those of issue 16 that concern a router between two engines: requests/s and TTFT against vllm-router in the
same run, and the CPU time of ingress and router. They stand against vllm-router on uvicorn sources, as the issue has
it; against bare sources the same figures are reported without an aim. Of many engines, of a colocated engine of vLLM
and of 10,000 streams the issue has aims too, which are no matter of this benchmark.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.live.measure import Measurement, Plan
from benchmarks.peers.sides import ROUTER

PYTHON, WRK = "python", "wrk"

ENDLESS = 10**7
"""A number of requests that no row comes to: rows end after their seconds."""

SHORT_WORDS = 5
"""The words of a short prompt, its number included; a word is about a token."""

STEP_S = 1e-3
FAST_STEP_S = 1e-4

CLIENTS = (1, 8, 32, 128, 512)


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a load by one client on engines with a step of `step_s`. `words` are those of a prompt.

    A `quick` row is measured in the short form too.
    """

    client: str
    clients: int
    tokens: int = 16
    words: int = SHORT_WORDS
    step_s: float = STEP_S
    seconds: float = 2.0
    quick: bool = False

    @property
    def name(self) -> str:
        """The row's name, which is unique."""
        tokens = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        prompt = "" if self.words == SHORT_WORDS else f", prompts of {self.words:,} words"
        step = "" if self.step_s == STEP_S else f", steps of {1e3 * self.step_s:g} ms"
        return f"{self.client}, c = {self.clients}, {tokens}{prompt}{step}"

    def plan(self, quick: bool) -> Plan:
        """Returns the load; a `quick` one lasts for a second."""
        seconds = min(self.seconds, 1.0) if quick else self.seconds
        return Plan(self.clients, ENDLESS, self.tokens, seconds, prompt_words=self.words - 1)


def _cases() -> Iterator[Case]:
    """Yields all rows: by clients, then what the router alone bounds, then long answers and long prompts."""
    for client in (WRK, PYTHON):
        for clients in CLIENTS:
            # one client sends some 50 requests a second, too few for a p99 in 2 s
            seconds = 4.0 if clients == 1 else 2.0
            yield Case(client, clients, seconds=seconds, quick=clients in (8, 128))
        for clients in CLIENTS[1:]:
            yield Case(client, clients, tokens=1, quick=client == WRK and clients == 32)
        for clients in (8, 32, 128):
            yield Case(client, clients, step_s=FAST_STEP_S, quick=client == PYTHON and clients == 32)
    # wrk leaves out what is under way at its end, a good part of a row of long answers that end together
    yield Case(PYTHON, 8, tokens=500, seconds=4.0, quick=True)
    yield Case(PYTHON, 32, tokens=500, seconds=4.0)
    yield Case(PYTHON, 128, tokens=500, seconds=6.0)
    yield Case(PYTHON, 8, tokens=500, step_s=FAST_STEP_S)
    yield Case(PYTHON, 32, words=500, quick=True)
    yield Case(WRK, 128, words=500)
    yield Case(PYTHON, 8, words=5000)
    yield Case(WRK, 32, words=5000)


CASES: Mapping[str, Case] = {case.name: case for case in _cases()}
"""All rows by name, in the order in which each side is measured."""

PROMPTS = (SHORT_WORDS, 500, 5000)
"""The words of the prompts whose tokenising is measured apart."""


def chosen(quick: bool, programs: Sequence[str], clients: Sequence[int] = CLIENTS) -> list[Case]:
    """Returns the rows of a run that has these load programs, with these numbers of clients."""
    return [
        case
        for case in CASES.values()
        if case.client in programs and case.clients in clients and (case.quick or not quick)
    ]


# ----------------------------------------------------------------------------------------------------------------- aims


@dataclass(frozen=True, slots=True)
class Aim:
    """A limit of a figure: `least` or `most`, of which one is None."""

    least: float | None = None
    most: float | None = None

    @property
    def text(self) -> str:
        """The aim as reports show it."""
        return f"at least {self.least:g}" if self.most is None else f"at most {self.most:g}"


RATE, TTFT_P50, TTFT_P99, HOT_CPU, HOT_CPU_TOKEN = (
    "requests_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "hot_cpu_ms",
    "hot_cpu_ms_per_token",
)
"""The names of the measures that are compared or have an aim."""


def ratio_aim(case: Case, measure: str, peer: str) -> Aim | None:
    """Returns the aim of a ratio Sluice / peer in a row, or None."""
    if peer != ROUTER:
        return None
    if measure in (TTFT_P50, TTFT_P99):
        return Aim(most=1.0)
    if measure != RATE or case.words != SHORT_WORDS or case.clients == 1:
        return None
    if case.tokens == 1:
        return Aim(least=1.5)
    if case.tokens == 16:
        return Aim(least=1.05) if case.clients <= 32 else Aim(least=1.5)
    return None


def own_aim(case: Case, measure: str) -> Aim | None:
    """Returns the aim of a figure of Sluice alone, in CPU milliseconds of ingress and router, or None."""
    plain = case.words == SHORT_WORDS and case.step_s == STEP_S
    if measure == HOT_CPU and plain and (case.clients, case.tokens) == (128, 16):
        return Aim(most=0.2)
    if measure == HOT_CPU_TOKEN and case.tokens == 500:
        return Aim(most=0.02)
    return None


def times_of(found: Measurement) -> dict[str, float]:
    """Returns the percentiles of a row's TTFT, whole answers and TPOT in milliseconds, as results keep them."""
    return {
        f"{name}_{quantile}_ms": times[quantile]
        for name, times in (("ttft", found.ttft_ms), ("e2e", found.e2e_ms), ("tpot", found.tpot_ms))
        if times is not None
        for quantile in ("p50", "p99")
    }
