"""One request of a workload, and what is wrong with one that cannot be built."""

from dataclasses import dataclass


class WorkloadError(Exception):
    """A workload that cannot be built as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request to be sent at `at_s` (seconds from the workload's start); `output_tokens` is what it will generate.

    `block_hashes` name the full blocks of `block_tokens` tokens at the head of the prompt; equal hashes are equal
    prefixes (a hash covers all blocks before it). Empty: nothing is known to be shared. `max_tokens` None: the client
    asked for the longest output that is allowed. `prompt_key` names the exact prompt, for memorising predictors.
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
