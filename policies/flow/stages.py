"""The flows of stages 1 and 2 of one prefill step, for sim engines and the simulator alike (MFS 2.2, 3.1, 4.4.1).

A step computes its layers in `groups`. Group j waits for the reused KV of its layers (stage 1), computes, and exchanges
activations among the nodes of its instance (stage 2), which blocks group j + 1.

    reuse       one flow a group j, submitted when the step begins; RLI = j, and j - i - 1 after group i has ended
    collective  the bytes of all prompt tokens, evenly over the flows of its pattern; RLI = 0, as it blocks what is next

Deviation: a group's two exchanges (dispatch, combine) are one.
"""

import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from policies.flow.base import Flow, Stage

Pattern = Literal["pairs", "ring"]


def share_of(size: int, group: int, groups: int) -> int:
    """Returns the bytes of layer group `group` (from 0) of `size` bytes; all shares add up to `size`."""
    return size * (group + 1) // groups - size * group // groups


def home_of(request_id: str, span: Sequence[str]) -> str:
    """Returns the node of an instance on which a request's KV lies: its id spreads requests evenly."""
    return span[zlib.crc32(request_id.encode()) % len(span)]


def advanced_rli(group: int, done: int) -> int:
    """Returns the relative layer index of group `group` after the first `done` groups have ended (done <= group)."""
    return group - done


def reuse_flow(
    request_id: str,
    batch: str,
    lender: str,
    home: str,
    n_bytes: int,
    group: int,
    groups: int,
    compute_s: float,
    prefix: str = "",
    before: int = 0,
) -> Flow:
    """Returns the stage 1 flow of layer group `group`, of `n_bytes` that a request reuses in all. Its id begins with
    `prefix`. A share of no bytes counts as one byte. Where a prefix is read before its request is computed, the number
    of requests `before` it in the engine's queue adds to the relative layer index.
    """
    return Flow(
        flow_id=f"{prefix}{request_id}/1/{group}",
        request_id=request_id,
        batch=batch,
        stage=Stage.REUSE,
        source=lender,
        target=home,
        size=max(1, share_of(n_bytes, group, groups)),
        rli=group + before,
        compute_s=compute_s,
    )


class Exchange(NamedTuple):
    """The flows of one collective, each of which counts as `weight` flows on a network that shares fairly."""

    flows: tuple[Flow, ...]
    weight: float


def collective(
    batch: str, group: int, span: Sequence[str], n_bytes: float, compute_s: float, pattern: Pattern = "pairs"
) -> Exchange:
    """Returns the stage 2 flows of layer group `group` among the nodes `span` (two or more), `n_bytes` in all.

    `pairs` is an all-to-all: a flow from each node to each other one. `ring` has one flow from each node to the next,
    with the weight of the flows that it stands for.
    """
    n = len(span)
    if pattern == "pairs":
        ends = [(here, there) for here in span for there in span if here != there]
        weight = 1.0
    else:
        ends = [(here, span[(i + 1) % n]) for i, here in enumerate(span)]
        weight = float(n - 1)
    size = max(1, round(n_bytes / len(ends)))
    flows = tuple(
        Flow(
            flow_id=f"{batch}/2/{group}/{number}",
            request_id=batch,
            batch=batch,
            stage=Stage.COLLECTIVE,
            source=source,
            target=target,
            size=size,
            compute_s=compute_s,
        )
        for number, (source, target) in enumerate(ends)
    )
    return Exchange(flows, weight)
