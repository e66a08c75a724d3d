"""Where the agents of other nodes are found."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol


class Directory(Protocol):
    """The nodes that exist and the addresses of their agents. Its methods may fail with any exception: nothing is known
    then.
    """

    async def exists(self, node: str) -> bool:
        """Returns whether there is a node of this name."""

    async def addresses(self, node: str) -> tuple[str, ...]:
        """Returns where the agent that owns this node's ports listens; empty if none does."""

    async def publish(self, node: str, addresses: tuple[str, ...]) -> None:
        """Says that the agent at these addresses owns the node's ports."""

    async def withdraw(self, node: str, addresses: tuple[str, ...]) -> None:
        """Takes that back, unless another agent owns the node's ports now."""


@dataclass(slots=True)
class FixedDirectory:
    """A directory for nodes that are known beforehand, with the addresses of their agents where they have one."""

    agents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nodes: Set[str] = frozenset()

    async def exists(self, node: str) -> bool:
        """Returns whether the node was named."""
        return node in self.nodes or node in self.agents

    async def addresses(self, node: str) -> tuple[str, ...]:
        """Returns the addresses that were given for the node."""
        return self.agents.get(node, ())

    async def publish(self, node: str, addresses: tuple[str, ...]) -> None:
        """Does nothing: the addresses are fixed."""

    async def withdraw(self, node: str, addresses: tuple[str, ...]) -> None:
        """Does nothing: the addresses are fixed."""
