"""A sequence in an engine and the result of a step: the values that `scheduler` and `batch` share."""

from dataclasses import dataclass, field
from enum import Enum

from policies.engine_model.blocks import Allocation, BlockHash


class SequenceStage(Enum):
    """The stage of a sequence. QUEUED and DONE hold neither slot nor blocks; LEASED holds blocks only."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    LEASED = "leased"
    """The prefill is done; the blocks belong to the taker of the allocation."""
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. The caller sets the first group of fields, the model the second.

    A sequence finishes after `output_tokens` at the latest (0 for `prefill_only`). `hashes` are those of the prompt's
    full blocks, or none to keep it out of the prefix cache. `owner` is for the caller's own use.
    """

    prompt_tokens: int
    output_tokens: int
    hashes: tuple[BlockHash, ...] = ()
    priority: int = 0
    prefill_only: bool = False
    remote: bool = False
    owner: object = None

    stage: SequenceStage = SequenceStage.DONE
    allocation: Allocation | None = None
    cached_tokens: int = 0
    """Prompt tokens that were cached at the last admission."""
    computed: int = 0
    """Tokens whose KV exists, while PREFILLING."""
    offset: int = 0
    """Offset to the model's step counter while DECODING: generated = steps - offset."""
    generated: int = 0
    """Tokens generated, while not DECODING."""
    due: int = -1
    """The step at which the sequence finishes, while DECODING."""
    order: int = 0
    """Number of the arrival."""
    preemptions: int = 0


@dataclass(slots=True)
class StepResult:
    """The result of a step. Each member of `decoded` gained one token; for those in `finished` it was the last, and
    the prompts of those in `started` were computed in this step.
    """

    decoded: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
