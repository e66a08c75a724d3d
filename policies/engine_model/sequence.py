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
    """The prefill is done, and the blocks now belong to the caller, which gives the allocation back."""
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. The caller sets the fields up to `owner`; the model sets the other fields.

    A sequence finishes after `output_tokens` tokens at the latest (0 for `prefill_only`). The caller may also set
    `generated` before it adds the sequence: output that another engine has generated, whose KV is computed here but for
    that of the first `remote_output` tokens of a remote sequence.
    `hashes` are the hashes of the prompt's full blocks, or empty to keep the prompt out of the prefix cache. A `remote`
    sequence gets its prompt's KV from another engine. `lent_tokens` of a prefill, whole blocks from the prompt's
    start, are read from another engine while the rest is computed, into the sequence's own blocks; it ends no step
    before they have arrived, which is the caller's part. `owner` is for the caller's own use.
    """

    prompt_tokens: int
    output_tokens: int
    hashes: tuple[BlockHash, ...] = ()
    priority: int = 0
    prefill_only: bool = False
    remote: bool = False
    owner: object = None
    lent_tokens: int = 0
    remote_output: int = 0

    stage: SequenceStage = SequenceStage.DONE
    allocation: Allocation | None = None
    cached_tokens: int = 0
    """Prompt tokens that were cached, or lent, at the last admission."""
    computed: int = 0
    """Number of tokens whose KV exists; valid while PREFILLING."""
    offset: int = 0
    """Offset to the model's step counter: generated = steps - offset; valid while DECODING."""
    generated: int = 0
    """Number of tokens generated; valid while not DECODING."""
    due: int = -1
    """The step at which the sequence finishes; valid while DECODING."""
    order: int = 0
    """The sequence's number in order of arrival."""
    preemptions: int = 0


@dataclass(slots=True)
class StepResult:
    """The result of a step. Each sequence in `decoded` gained one token. For those in `finished` it was the last, and
    for those in `started` the first since their prompt was computed. The prompts of those in `prefilled`, which do not
    decode, are done. Those in `preempted` lost their blocks and wait again.
    """

    decoded: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
