"""The engines that lend their weights to one that starts: those of its model that are ready, the nearest first."""

from collections.abc import Callable, Sequence

from actors.wire.messages import EngineInfo, FindWeights, WeightsAt
from policies.weights.sources import Source, nearest

Tier = Callable[[EngineInfo, str], int | None]
"""A function that returns how far an engine's node is from another node; None where that is not known."""


class WeightSources:
    """The answers to engines that start, which take turns among equally near sources."""

    def __init__(self) -> None:
        self._asked = 0

    def answer(self, message: FindWeights, infos: Sequence[EngineInfo], tier: Tier) -> WeightsAt:
        """Returns the sources for one engine that starts. One that stands still can lend, too: its weights are no
        business of its core.
        """
        sources = [
            Source(info.id, tier(info, message.node), info.weights)
            for info in infos
            if info.weights and info.model == message.model and info.state in ("ready", "stalled")
        ]
        found = nearest(sources, self._asked)
        self._asked += 1
        return WeightsAt(tuple(source.addresses for source in found))
