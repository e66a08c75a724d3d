"""A fat tree: nodes with NICs in racks, racks under aggregation switches in pods, pods under a core.

    node  --nic-->  ToR  --rack link x aggs_per_pod-->  agg  --core link x cores_per_agg-->  core

Every cable is two links, up and down (full duplex). The capacities of links are given directly, or follow from
oversubscription, the ratio of what the hosts below can send to what the links of that level carry:
    rack link = nodes_per_rack * nics_per_node * nic / rack_oversubscription
                / aggs_per_pod
    core link = racks_per_pod * nodes_per_rack * nics_per_node * nic / pod_oversubscription
                / (aggs_per_pod * cores_per_agg)
Core switch c of aggregation switch a connects to the same pair (a, c) of every other pod, as in a fat tree (Al-Fares
2008), so the two NICs, a and c determine a path. The bandwidth of a tier is that of the narrowest link on its paths.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies.network.oracle import NodePlace

NVLINK, NIC, RACK, CORE = "nvlink", "nic", "rack", "core"
LINK_CLASSES = (NVLINK, NIC, RACK, CORE)
# The classes of the links on each tier's paths.
TIER_CLASSES = {0: (NVLINK,), 1: (NIC,), 2: (NIC, RACK), 3: (NIC, RACK, CORE)}
GBIT, GBYTE = 1e9 / 8, 1e9


class TopologyError(ValueError):
    """The error of a topology that cannot be built, or of a missing node, link or path; the message names it."""


class TopologyConfig(BaseModel):
    """Sizes, bandwidths and latencies of a fat tree. A level has an oversubscription or a link bandwidth, not both.

    `missing_links` are links that do not exist (ECMP avoids them). `link_gbit_per_s` gives single links another
    capacity.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    pods: int = Field(ge=1)
    racks_per_pod: int = Field(ge=1)
    nodes_per_rack: int = Field(ge=1)
    gpus_per_node: int = Field(default=8, ge=1)
    nics_per_node: int = Field(default=1, ge=1)
    aggs_per_pod: int = Field(default=1, ge=1)
    cores_per_agg: int = Field(default=1, ge=1)
    nvlink_gbyte_per_s: float = Field(gt=0)
    nic_gbit_per_s: float = Field(gt=0)
    rack_oversubscription: float | None = Field(default=None, gt=0)
    pod_oversubscription: float | None = Field(default=None, gt=0)
    rack_link_gbit_per_s: float | None = Field(default=None, gt=0)
    core_link_gbit_per_s: float | None = Field(default=None, gt=0)
    latency_us: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # by tier
    missing_links: tuple[str, ...] = ()
    link_gbit_per_s: Mapping[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        levels = (
            ("rack", self.rack_oversubscription, self.rack_link_gbit_per_s),
            ("pod", self.pod_oversubscription, self.core_link_gbit_per_s),
        )
        for level, ratio, gbit in levels:
            if (ratio is None) == (gbit is None):
                link = "rack" if level == "rack" else "core"
                raise ValueError(f"give either {level}_oversubscription or {link}_link_gbit_per_s")
        if self.nvlink_gbyte_per_s * GBYTE < self.nic_gbit_per_s * GBIT:
            raise ValueError(
                f"nvlink_gbyte_per_s {self.nvlink_gbyte_per_s} is slower than a NIC of {self.nic_gbit_per_s} Gbit/s: "
                f"tier 0 must not be slower than tier 1 (note the units: bytes against bits)"
            )
        if any(us < 0 for us in self.latency_us) or list(self.latency_us) != sorted(self.latency_us):
            raise ValueError(f"latency_us {self.latency_us}: must be >= 0 and not fall with the tier")
        for name, gbit_per_s in self.link_gbit_per_s.items():
            if not gbit_per_s > 0:
                raise ValueError(
                    f"link_gbit_per_s[{name}] is {gbit_per_s}: must be > 0, or name it in missing_links"
                )
        return self


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one cable; `index` is its place in `Topology.links`."""

    index: int
    name: str
    kind: str  # one of LINK_CLASSES
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Node:
    """One node. Racks are numbered over the whole cluster, so `rack` also determines the pod."""

    name: str
    pod: int
    rack: int
    nvlink: int | None
    # Indices of links; None stands for a link that is missing.
    nics_up: tuple[int | None, ...]
    nics_down: tuple[int | None, ...]


@dataclass(frozen=True)
class Topology:
    """A complete fat tree: its nodes and links by name, and the routes between racks."""

    config: TopologyConfig
    nodes: Mapping[str, Node]
    links: tuple[Link, ...]
    link_index: Mapping[str, int]
    missing: frozenset[str]

    @classmethod
    def build(cls, config: TopologyConfig | Mapping[str, Any]) -> "Topology":
        """Returns the topology that `config` describes. Raises TopologyError for an invalid config."""
        if not isinstance(config, TopologyConfig):
            config = parse_topology(config)
        return _Builder(config).build()

    @classmethod
    def load(cls, path: str | Path) -> "Topology":
        """Returns the topology that a YAML file describes. Raises a TopologyError that names the file."""
        try:
            return cls.build(parse_topology(yaml.safe_load(Path(path).read_text())))
        except (TopologyError, yaml.YAMLError) as error:
            raise TopologyError(f"{path}: {error}") from error

    def node(self, name: str) -> Node:
        if name not in self.nodes:
            first = list(itertools.islice(self.nodes, 3))
            raise TopologyError(
                f"unknown node {name!r}: the topology has {len(self.nodes)}, such as {', '.join(first)}"
            )
        return self.nodes[name]

    def link(self, name: str) -> Link:
        if name in self.missing:
            raise TopologyError(f"link {name!r} is in missing_links")
        if name not in self.link_index:
            raise TopologyError(
                f"unknown link {name!r}: links are named like {self.links[0].name}, {self.links[-1].name}"
            )
        return self.links[self.link_index[name]]

    def tier(self, source: str, target: str) -> int:
        """Returns the tier of two nodes: 0 for the same node, 1 the same rack, 2 the same pod, 3 different pods."""
        here, there = self.node(source), self.node(target)
        if here.name == there.name:
            return 0
        if here.rack == there.rack:
            return 1
        return 2 if here.pod == there.pod else 3

    @cached_property
    def tiers(self) -> tuple[int, ...]:
        """The tiers that at least one pair of nodes has."""
        sizes = (1, self.config.nodes_per_rack, self.config.racks_per_pod, self.config.pods)
        return tuple(tier for tier, size in enumerate(sizes) if tier == 0 or size > 1)

    @cached_property
    def class_bytes_per_s(self) -> dict[str, float]:
        """The capacity in bytes/s of one link of each class, without the exceptions in `link_gbit_per_s`."""
        c = self.config
        rack_hosts = c.nodes_per_rack * c.nics_per_node * c.nic_gbit_per_s
        rack = c.rack_link_gbit_per_s or rack_hosts / (c.rack_oversubscription or 1.0) / c.aggs_per_pod
        core_links = c.aggs_per_pod * c.cores_per_agg
        core = (
            c.core_link_gbit_per_s
            or rack_hosts * c.racks_per_pod / (c.pod_oversubscription or 1.0) / core_links
        )
        return {
            NVLINK: c.nvlink_gbyte_per_s * GBYTE,
            NIC: c.nic_gbit_per_s * GBIT,
            RACK: rack * GBIT,
            CORE: core * GBIT,
        }

    @cached_property
    def tier_bytes_per_s(self) -> dict[int, float]:
        """B_tau by tier, the rate in bytes/s of a flow that is alone on its path."""
        return {tier: min(self.class_bytes_per_s[kind] for kind in TIER_CLASSES[tier]) for tier in self.tiers}

    @cached_property
    def tier_latency_s(self) -> dict[int, float]:
        """L_tau by tier, in seconds."""
        return {tier: self.config.latency_us[tier] * 1e-6 for tier in self.tiers}

    def tier_uplinks(self, nics: int | None = None) -> dict[int, int]:
        """Returns by tier how many flows of rate B_tau fit at once into the links by which a sender's flows leave.

        These links are `nics` NICs of its node (None: all of them) and the uplinks of its rack and pod.
        """
        c, speed = self.config, self.class_bytes_per_s
        links = {NVLINK: 1, NIC: nics or c.nics_per_node, RACK: c.aggs_per_pod}
        links[CORE] = c.aggs_per_pod * c.cores_per_agg
        fit = {
            t: min(links[k] * speed[k] for k in TIER_CLASSES[t]) / b for t, b in self.tier_bytes_per_s.items()
        }
        return {tier: max(1, int(flows + 1e-9)) for tier, flows in fit.items()}

    @cached_property
    def places(self) -> dict[str, NodePlace]:
        """Rack and pod labels by node name, in the form that an `Oracle` takes."""
        return {n.name: NodePlace(rack=f"rack{n.rack}", pod=f"pod{n.pod}") for n in self.nodes.values()}

    def fabric_routes(self, here: Node, there: Node) -> tuple[tuple[int, ...], ...]:
        """Returns the ECMP group between two racks: for each path the indices of the links between the NICs.

        Paths over missing links are left out.
        """
        key = (here.rack, there.rack)
        if key not in self._routes:
            names = self._route_names(here, there)
            self._routes[key] = tuple(
                tuple(self.link_index[name] for name in route)
                for route in names
                if all(name in self.link_index for name in route)
            )
        return self._routes[key]

    @cached_property
    def _routes(self) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
        return {}

    def _route_names(self, here: Node, there: Node) -> list[tuple[str, ...]]:
        if here.rack == there.rack:
            return [()]
        c = self.config
        routes: list[tuple[str, ...]] = []
        for agg in range(c.aggs_per_pod):
            up, down = f"rack{here.rack}/agg{agg}/up", f"rack{there.rack}/agg{agg}/down"
            if here.pod == there.pod:
                routes.append((up, down))
                continue
            for core in range(c.cores_per_agg):
                core_up, core_down = (
                    f"pod{here.pod}/agg{agg}/core{core}/up",
                    f"pod{there.pod}/agg{agg}/core{core}/down",
                )
                routes.append((up, core_up, core_down, down))
        return routes


class _Builder:
    """The builder of a topology, which names and numbers the links level by level."""

    def __init__(self, config: TopologyConfig) -> None:
        self._config = config
        self._missing = frozenset(config.missing_links)
        self._names: set[str] = set()
        self._links: list[Link] = []
        self._index: dict[str, int] = {}

    def build(self) -> Topology:
        c = self._config
        # The capacities need only the config, so a first topology without nodes gives them.
        topology = Topology(c, {}, (), {}, self._missing)
        speed = topology.class_bytes_per_s
        nodes: dict[str, Node] = {}
        for pod, in_pod in itertools.product(range(c.pods), range(c.racks_per_pod)):
            rack = pod * c.racks_per_pod + in_pod
            for slot in range(c.nodes_per_rack):
                node = self._node(f"node{rack * c.nodes_per_rack + slot}", pod, rack, speed)
                nodes[node.name] = node
            if c.racks_per_pod * c.pods > 1:
                for agg in range(c.aggs_per_pod):
                    self._both(f"rack{rack}/agg{agg}", RACK, speed[RACK])
        if c.pods > 1:
            for pod, agg, core in itertools.product(
                range(c.pods), range(c.aggs_per_pod), range(c.cores_per_agg)
            ):
                self._both(f"pod{pod}/agg{agg}/core{core}", CORE, speed[CORE])
        for option, names in (("missing_links", self._missing), ("link_gbit_per_s", c.link_gbit_per_s)):
            for name in sorted(names):
                if name not in self._names:
                    raise TopologyError(f"{option} names {name!r}, which this topology does not have; it has e.g. "
                                        f"{min(self._names)}")  # fmt: skip
        return Topology(c, nodes, tuple(self._links), self._index, self._missing)

    def _node(self, name: str, pod: int, rack: int, speed: Mapping[str, float]) -> Node:
        nvlink = self._add(f"{name}/nvlink", NVLINK, speed[NVLINK])
        nics = [self._both(f"{name}/nic{i}", NIC, speed[NIC]) for i in range(self._config.nics_per_node)]
        return Node(name, pod, rack, nvlink, tuple(up for up, _ in nics), tuple(down for _, down in nics))

    def _both(self, name: str, kind: str, bytes_per_s: float) -> tuple[int | None, int | None]:
        return self._add(f"{name}/up", kind, bytes_per_s), self._add(f"{name}/down", kind, bytes_per_s)

    def _add(self, name: str, kind: str, bytes_per_s: float) -> int | None:
        self._names.add(name)
        if name in self._missing:
            return None
        gbit_per_s = self._config.link_gbit_per_s.get(name)
        link = Link(len(self._links), name, kind, bytes_per_s if gbit_per_s is None else gbit_per_s * GBIT)
        self._links.append(link)
        self._index[name] = link.index
        return link.index


def parse_topology(raw: object) -> TopologyConfig:
    """Returns the validated config. Raises a TopologyError that lists every wrong key."""
    try:
        return TopologyConfig.model_validate(raw)
    except ValidationError as error:
        raise TopologyError(f"topology: {explain(error, 'topology')}") from error


def explain(error: ValidationError, whole: str) -> str:
    """Returns one line that lists every wrong key and its error; `whole` stands for an error without a key."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or whole}: {e['msg']}" for e in error.errors())
