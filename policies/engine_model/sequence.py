"""One sequence in an engine, and what a step brought: the values that `scheduler` and `batch` share."""

from dataclasses import dataclass, field
from enum import Enum

from policies.engine_model.blocks import Allocation, BlockHash


class SequenceStage(Enum):
    """Where a sequence is. QUEUED and DONE hold neither slot nor blocks; LEASED holds blocks only."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    LEASED = "leased"  # a prefill is done: its blocks now belong to whoever took the allocation
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. The first block is given by the caller, the second belongs to the model.

    `output_tokens`: after how many it finishes at the latest (0 for `prefill_only`). `hashes`: of the full blocks of
    the prompt, or none to keep it out of the prefix cache. `owner` is the caller's own.
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
    cached_tokens: int = 0  # of the prompt, when last admitted
    computed: int = 0  # tokens whose KV exists, while PREFILLING
    offset: int = 0  # of the model's step counter: generated = steps - offset while DECODING
    generated: int = 0  # while not DECODING
    due: int = -1  # the step at which it finishes, while DECODING
    order: int = 0  # of arrival
    preemptions: int = 0


@dataclass(slots=True)
class StepResult:
    """What a step brought. Each member of `decoded` gained one token; `finished` is those for which it was the last,
    `started` those whose prompt was computed in it.
    """

    decoded: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
