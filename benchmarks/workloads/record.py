"""One request of a workload, and the error of a workload that cannot be built."""

from dataclasses import dataclass


class WorkloadError(Exception):
    """The error of a workload that cannot be built as described; the message says what to change."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request that is sent at `at_s` (seconds from the workload's start) and generates `output_tokens` tokens.

    `block_hashes` name the full blocks of `block_tokens` tokens at the beginning of the prompt. A hash covers all
    blocks before it, so equal hashes are equal prefixes. Where there are no hashes, nothing is known to be shared.
    `max_tokens` is None where the client allows the longest output. `prompt_key` names the exact prompt, for predictors
    that remember the output length of a prompt. `client` is the tenant whose request it is, of this `weight`.
    """

    request_id: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    block_tokens: int = 0
    client: str = ""
    session: str = ""
    prompt_key: str = ""
    priority: int = 0
    request_class: str = "standard"
    max_tokens: int | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    weight: float = 1.0
