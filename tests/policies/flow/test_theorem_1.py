"""Theorem 1 by brute force: serving the flow of smallest RLI first gives the least prefill makespan on one link.

A prefill has layers 1..N. Layer l computes when layer l-1 has and all flows with target l have arrived. Prefix reuse is
there from the start; a layer's collective starts when the layer before it has computed. Time runs in units of a chunk.
"""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.flow.arbiter import Arbiter
from policies.flow.base import Stage
from policies.flow.config import ArbiterConfig
from policies.flow.events import Advanced, Done, Permit, Submitted
from policies.flow.registry import flow_policy
from tests.policies.flow.link import flow

CHUNK = ArbiterConfig(
    window=1, chunk_s=1.0, least_chunk_bytes=1, whole_read_when_alone=False, port_bytes_per_s=1.0, learn=False
)
Layers = list[tuple[int, int, int]]
"""Of each layer: chunks of reuse, chunks of its collective, units of computation."""


def least_makespan(layers: Layers) -> int:
    """Tries every order of chunks; waiting on purpose is tried as well."""
    count = len(layers)

    @cache
    def best(reuse: tuple[int, ...], layer: int, collective: int, computing: int) -> int:
        # `layer` waits for its data (computing 0) or has `computing` units left
        if not computing and not collective and not reuse[layer]:
            computing = layers[layer][2]
        ended = computing == 1
        choices: list[tuple[tuple[int, ...], int]] = [(reuse, collective)]
        if collective:
            choices.append((reuse, collective - 1))
        for i in range(layer, count):
            if reuse[i]:
                choices.append((*[(*reuse[:i], reuse[i] - 1, *reuse[i + 1 :])], collective))
        if len(choices) > 1:
            choices = choices[1:] if not computing else choices
        least = None
        for left, own in choices:
            if ended:
                rest = 0 if layer + 1 == count else best(left, layer + 1, layers[layer + 1][1], 0)
            else:
                rest = best(left, layer, own, max(computing - 1, 0))
            least = 1 + rest if least is None else min(least, 1 + rest)
        assert least is not None
        return least

    return best(tuple(each[0] for each in layers), 0, layers[0][1], 0)


def by_arbiter(layers: Layers) -> int:
    """Lets the arbiter order the same prefill's chunks by MFS."""
    made = Arbiter(flow_policy("mfs", {"levels": 3}), CHUNK)
    left: dict[str, int] = {}
    target: dict[str, int] = {}
    posted: list[Permit] = []

    def submit(name: str, stage: Stage, size: int, at: int, layer: int, now: int) -> None:
        if size:
            left[name], target[name] = size, at
            posted.extend(made.apply(Submitted(flow(name, size, stage=stage, rli=at - layer)), float(now)))

    now, layer, computing = 0, 0, 0
    submit("collective0", Stage.COLLECTIVE, layers[0][1], 0, 0, 0)
    for i, (reuse, _, _) in enumerate(layers):
        submit(f"reuse{i}", Stage.REUSE, reuse, i, 0, 0)
    while True:
        if not computing and not any(size for name, size in left.items() if target[name] <= layer):
            computing = layers[layer][2]
        now += 1
        moving = posted.pop(0) if posted else None
        assert not posted, "one chunk at a time"
        computing_before = computing
        computing = max(computing - 1, 0)
        if computing_before and not computing:
            layer += 1
            if layer == len(layers):
                return now
            for name in [name for name in left if left[name]]:
                posted.extend(made.apply(Advanced(name, max(target[name] - layer, 0)), float(now)))
            submit(f"collective{layer}", Stage.COLLECTIVE, layers[layer][1], layer, layer, now)
        if moving is not None:
            left[moving.flow_id] -= 1
            last = not left[moving.flow_id]
            posted.extend(made.apply(Done(moving.flow_id, 1, 1.0, last), float(now)))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4))
def test_smallest_rli_first_has_the_least_makespan(layers: Layers) -> None:
    assert by_arbiter(layers) == least_makespan(layers)
