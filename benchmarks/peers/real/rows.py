"""The rows of the comparisons on real engines, and the aims that stood here before they ran.

For one prefill and one decode engine the issue has no aim, so these are: nowhere slower than either of the others, in
requests/s and in the time to the first token. For one engine the aim is the issue's: Sluice serves at least 98 % of the
requests/s of vLLM's own server beside which an idle Ray runs. TPOT, CPU and memory are reported without an aim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.live.measure import Measurement, Plan
from benchmarks.peers.rows import ENDLESS, RATE, TTFT_P50, Aim, times_of

TPOT_P50, CPU, IDLE, MEMORY = "tpot_p50_ms", "cpu_ms_per_token", "idle_cores", "memory_gib"


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `clients` that each send the next request when the last one has ended. `words` are those of a prompt;
    a word is about a token. The row ends after `requests` or `seconds`.
    """

    clients: int
    tokens: int
    words: int
    seconds: float = 20.0
    requests: int = ENDLESS

    @property
    def name(self) -> str:
        """The row's name, which is unique."""
        return f"c = {self.clients}, prompts of {self.words} words, {self.tokens} tokens"

    def plan(self, quick: bool) -> Plan:
        """Returns the load; a `quick` one lasts for 5 seconds."""
        seconds = min(self.seconds, 5.0) if quick else self.seconds
        return Plan(self.clients, self.requests, self.tokens, seconds, prompt_words=self.words - 1)


_CASES = (
    Case(1, 64, 50),
    Case(8, 64, 50, 30.0),
    Case(16, 64, 50, 30.0),
    Case(8, 16, 400, 30.0),
)
CASES: Mapping[str, Case] = {case.name: case for case in _CASES}
"""The rows of the sides with two engines by name, in the order in which each side is measured."""

_ONE_CASES = (
    Case(1, 64, 50),
    Case(8, 64, 50, 30.0),
    # as many clients as the issue has, and its short answers
    Case(32, 16, 50, 30.0),
)
ONE_CASES: Mapping[str, Case] = {case.name: case for case in _ONE_CASES}
"""The rows of the sides with one engine by name, in the order in which each side is measured."""


def aim(case: Case, measure: str) -> Aim | None:
    """Returns the aim of a ratio Sluice / peer in a row, or None."""
    if measure == RATE and case.clients > 1:
        return Aim(least=1.0)
    if measure == TTFT_P50:
        return Aim(most=1.0)
    return None


def aim_one(_case: Case, measure: str) -> Aim | None:
    """Returns the aim of a ratio Sluice / vLLM's own server in a row, or None. With one client at a time the rate is
    the time of an answer, of which the issue's figures are, too.
    """
    return Aim(least=0.98) if measure == RATE else None


def sample_of(found: Measurement, row: str) -> dict[str, Any]:
    """Returns one row of one side and round, as the result keeps it. CPU times are milliseconds a token."""
    return {
        "row": row,
        "requests": found.requests,
        "requests_per_s": found.requests_per_s,
        "cpu_ms_per_token": found.server_cpu_ms_per_token,
        "cpu_ms": found.cpu_ms_per_token,
        "other_cores": found.other_cores,
        "failures": found.failures,
        **times_of(found),
    }
