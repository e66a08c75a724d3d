"""The sources of what is known of the network without measuring: the operator's file, the engines' announcements, and
Ray's node labels.

If several sources state the same fact, the first in this list counts, for rack and pod separately:

    rack and pod of a node   the file's `nodes`; what engines there announce (`actors.engine.topology`); the labels of
                             the Ray node
    tier of a pair           the file's `pairs`, else from rack and pod (`oracle.Oracle.tier`)
    tiers, congestion        the file

The file names nodes as Ray does (node id, node name, host name, address) or as an engine's topology does. It is read
again when it changes. A faulty file raises an error once for each change, and the last good content stays in use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.router.network.file import NetworkFile, read_network_file
from actors.wire.messages import EngineInfo
from policies.network.oracle import NodePlace, OracleError

_NODE_NAMES = ("NodeName", "NodeManagerHostname", "NodeManagerAddress")
_NEVER = (-1, -1)

Stamp = tuple[int, int]  # modification time in ns, bytes


@dataclass(frozen=True, slots=True)
class LabelNames:
    """The names of the labels that hold rack and pod. The first name that a node has a label for counts."""

    rack: tuple[str, ...]
    pod: tuple[str, ...]

    def place(self, labels: Mapping[str, str]) -> NodePlace:
        rack = next((labels[name] for name in self.rack if labels.get(name)), "")
        return NodePlace(rack, next((labels[name] for name in self.pod if labels.get(name)), ""))


class NetworkSources:
    """All sources together. `read_file` reads the file if it changed; `places` and `pairs` return the present facts."""

    def __init__(self, file: str | None, labels: LabelNames) -> None:
        self.file = NetworkFile()
        # Unix time at which the file's content was written
        self.file_at_s = 0.0
        self.engines: dict[str, EngineInfo] = {}
        self._path = None if file is None else Path(file)
        self._stamp: Stamp | None = _NEVER
        self._labels = labels
        self._node_labels: dict[str, Mapping[str, str]] = {}
        # a name of a Ray node -> its id, which its engines announce
        self._ids: dict[str, str] = {}

    def read_file(self) -> None:
        """Reads the file if it changed since the last call. Raises OracleError, once for each change, if it is missing
        or faulty.
        """
        if self._path is None:
            return
        try:
            stat = self._path.stat()
            stamp: Stamp | None = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            stamp = None
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            raise OracleError(
                f"router.network.file: {self._path} does not exist or may not be read; create it on the router's node, "
                "or leave the option out"
            )
        self.file = read_network_file(str(self._path))
        self.file_at_s = stamp[0] / 1e9

    def set_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Takes in the cluster's nodes as `ray.nodes()` lists them. Dead nodes are left out."""
        alive = [node for node in nodes if node.get("Alive")]
        self._node_labels = {node["NodeID"]: node.get("Labels") or {} for node in alive}
        self._ids = {}
        for key in _NODE_NAMES:
            for node in alive:
                if node.get(key):
                    self._ids.setdefault(node[key], node["NodeID"])

    def pairs(self) -> dict[tuple[str, str], int]:
        """Returns the tier of each pair (from node, to node) that the file names."""
        ids = self._ids
        return {(ids.get(a, a), ids.get(b, b)): tier for (a, b), tier in self.file.pairs.items()}

    def places(self) -> dict[str, NodePlace]:
        """Returns the rack and the pod of every node for which at least one of them is known."""
        places = {self._ids.get(name, name): place for name, place in self.file.nodes.items()}
        announced = [(info.node, info.labels) for _, info in sorted(self.engines.items())]
        for node, labels in [*announced, *sorted(self._node_labels.items())]:
            known, found = places.get(node, NodePlace()), self._labels.place(labels)
            places[node] = NodePlace(known.rack or found.rack, known.pod or found.pod)
        return {node: place for node, place in places.items() if place.rack or place.pod}
