"""The engines' block hashes of a workload's prompt."""

from collections.abc import Sequence

from benchmarks.sim.config import EngineSpec
from benchmarks.workloads.record import WorkloadRequest

MASK64 = 2**64 - 1


def hashes_of(work: WorkloadRequest, engines: Sequence[EngineSpec]) -> tuple[int, ...]:
    """Hashes of the prompt's full blocks in the engines' block size, from the workload's larger ones. Empty where no
    engine caches prefixes. Raises ValueError where the sizes do not divide, or engines that cache differ in theirs.
    """
    if not work.block_hashes:
        return ()
    sizes = {spec.block_size_tokens for spec in engines if spec.prefix_cache}
    if not sizes:
        return ()
    if len(sizes) > 1:
        raise ValueError(
            f"engines cache prefixes in blocks of {sorted(sizes)} tokens: give them one block size"
        )
    size = sizes.pop()
    ratio, rest = divmod(work.block_tokens, size)
    if rest or not ratio:
        raise ValueError(
            f"request {work.request_id} has hashes of {work.block_tokens} tokens, the engines blocks of {size}: "
            f"set block_size_tokens to a divisor of {work.block_tokens}"
        )
    full = work.prompt_tokens // size
    if ratio == 1:
        return work.block_hashes[:full]
    fine = [(block * ratio + i) & MASK64 for block in work.block_hashes for i in range(ratio)]
    return tuple(fine[:full])
