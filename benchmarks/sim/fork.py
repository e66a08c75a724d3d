"""Weights from a running engine to many new ones over the simulated network (DeepFlow's NPU-fork, Figure 10).

The source's weights are divided into chunks of `chunk_bytes`. As a *star* the source sends all to every new engine. As
a *tree* each engine sends to at most `fan_out` others, which it feeds as chunks arrive: the engine i gets its chunks
from engine (i - 1) // fan_out, where 0 is the source. A sender has one chunk at a time on its way to each child.

    star of n, ports alone     n * bytes / rate
    tree of n, ports alone     (bytes + (depth - 1) * chunk) * fan_out / rate, where every parent has all its children

Flows have a priority of the network (0 is the most urgent), so that a fork can run behind KV transfers. Not claimed:
the load of memory and PCIe at an engine, engines that fail on the way.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.links import KvNetwork

Shape = Literal["tree", "star"]


class Fork:
    """One fork from `nodes[0]` to all other `nodes`, which begins now. `done_s` has each node's end by its index."""

    def __init__(
        self,
        kernel: Kernel,
        network: KvNetwork,
        nodes: Sequence[str],
        weights_bytes: int,
        chunk_bytes: int,
        shape: Shape,
        fan_out: int = 2,
        priority: int = 0,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        if len(nodes) < 2 or len(set(nodes)) != len(nodes):
            raise ValueError(
                f"a fork of {len(nodes)} nodes: give a source and at least one other, all different"
            )
        if weights_bytes < 1 or chunk_bytes < 1 or fan_out < 1:
            raise ValueError(
                f"a fork of {weights_bytes} bytes in chunks of {chunk_bytes}, fan-out {fan_out}: all must be >= 1"
            )
        self._kernel, self._network, self._nodes = kernel, network, tuple(nodes)
        self._chunks = math.ceil(weights_bytes / chunk_bytes)
        self._chunk_bytes, self._last_bytes = chunk_bytes, weights_bytes - (self._chunks - 1) * chunk_bytes
        self._priority, self._on_done, self._began_s = priority, on_done, kernel.now_s
        self.done_s: dict[int, float] = {}
        self._children: dict[int, list[int]] = {i: [] for i in range(len(nodes))}
        for i in range(1, len(nodes)):
            self._children[0 if shape == "star" else (i - 1) // fan_out].append(i)
        # The number of chunks that each engine has, and of those that are sent to it or have arrived.
        self._has = [self._chunks] + [0] * (len(nodes) - 1)
        self._sent = [0] * len(nodes)
        self._sending = [False] * len(nodes)
        self._feed(0)

    @property
    def ended(self) -> bool:
        return len(self.done_s) == len(self._nodes) - 1

    @property
    def seconds(self) -> float:
        """The seconds until the last engine had all weights. Raises ValueError while the fork runs."""
        if not self.ended:
            raise ValueError(
                f"{len(self.done_s)} of {len(self._nodes) - 1} engines have their weights: run on"
            )
        return max(self.done_s.values()) - self._began_s

    def _feed(self, parent: int) -> None:
        """Sends each idle child of `parent` its next chunk, where the parent has it."""
        for child in self._children[parent]:
            if self._sending[child] or self._sent[child] >= min(self._has[parent], self._chunks):
                continue
            n_bytes = self._last_bytes if self._sent[child] == self._chunks - 1 else self._chunk_bytes
            self._sent[child] += 1
            self._sending[child] = True
            self._network.start(
                self._nodes[parent],
                self._nodes[child],
                n_bytes,
                self._priority,
                partial(self._arrived, parent, child),
            )

    def _arrived(self, parent: int, child: int, _: object) -> None:
        self._sending[child] = False
        self._has[child] += 1
        if self._has[child] == self._chunks:
            self.done_s[child] = self._kernel.now_s
            if self.ended and self._on_done is not None:
                self._on_done()
        self._feed(parent)
        self._feed(child)
