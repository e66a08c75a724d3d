"""The operator's static network file, in YAML. The file is checked, and each refusal names the key and the values
allowed.

tiers:                       # 0 node, 1 rack, 2 pod, 3 beyond; a tier left out counts as the next farther one
  1: {bandwidth_bytes_per_s: 1.25e+10, latency_s: 2.0e-5}
  3: {bandwidth_bytes_per_s: 3.0e+9, latency_s: 2.0e-4, uplinks: 8}
nodes:                       # optional: rack and pod of a node
  host-a: {rack: r1, pod: p1}
pairs:                       # optional: the tier of a pair of nodes in one direction (give both directions if needed)
  - {from: host-a, to: host-b, tier: 3}
congestion: {3: 0.25}        # optional: share of a tier's bandwidth that others use, measured when the file was written

`uplinks` (default 1, as in NetKV's formula) is the number of transfers, each of this tier's bandwidth, that may leave a
sender at once before they slow each other down. If a sender has one NIC, it is that NIC's bandwidth divided by the
tier's. If the fabric spreads transfers over all NICs and uplinks (ECMP), it is their total bandwidth divided by the
tier's, at the narrowest of node, rack (from tier 2 on) and pod (tier 3). Each of our transfers in flight then slows the
next one down by 1 / uplinks of a share.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policies.network.oracle import NodePlace, Oracle, OracleError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Tier(_Strict):
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    uplinks: Annotated[int, Field(ge=1, le=1_000_000)] = 1


class _Place(_Strict):
    rack: str = ""
    pod: str = ""


class _Pair(_Strict):
    source: Annotated[str, Field(alias="from")]
    to: str
    tier: Annotated[int, Field(ge=0, le=3)]


class _File(_Strict):
    tiers: dict[Annotated[int, Field(ge=0, le=3)], _Tier]
    nodes: dict[str, _Place] = {}
    pairs: list[_Pair] = []
    congestion: dict[Annotated[int, Field(ge=0, le=3)], Annotated[float, Field(ge=0, lt=1)]] = {}


@dataclass(frozen=True, slots=True)
class NetworkFile:
    """The content of a network file in the oracle's terms. Nodes are named as in the file. `uplinks` holds only tiers
    with more than one uplink.
    """

    bandwidth_bytes_per_s: dict[int, float] = field(default_factory=dict)
    latency_s: dict[int, float] = field(default_factory=dict)
    nodes: dict[str, NodePlace] = field(default_factory=dict)
    pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    congestion: dict[int, float] = field(default_factory=dict)
    uplinks: dict[int, int] = field(default_factory=dict)


def read_network_file(path: str) -> NetworkFile:
    """Returns the content of a network file. Raises OracleError that names the file, the key and the values allowed."""
    try:
        raw = yaml.safe_load(Path(path).read_text())
        parsed = _File.model_validate({} if raw is None else raw)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']} (got {str(problem['input'])[:60]})"
            for problem in error.errors()
        ]
        raise OracleError(f"network file {path}:\n" + "\n".join(lines)) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise OracleError(f"network file {path} cannot be read: {error}") from None
    file = NetworkFile(
        {tier: item.bandwidth_bytes_per_s for tier, item in parsed.tiers.items()},
        {tier: item.latency_s for tier, item in parsed.tiers.items()},
        {name: NodePlace(place.rack, place.pod) for name, place in parsed.nodes.items()},
        {(pair.source, pair.to): pair.tier for pair in parsed.pairs},
        dict(parsed.congestion),
        {tier: item.uplinks for tier, item in parsed.tiers.items() if item.uplinks > 1},
    )
    try:
        Oracle(file.bandwidth_bytes_per_s, file.latency_s, file.pairs, congestion=file.congestion)
    except OracleError as error:
        raise OracleError(f"network file {path}: {error}") from None
    unknown = sorted(set(file.congestion) - set(file.bandwidth_bytes_per_s))
    if unknown:
        raise OracleError(f"network file {path}: congestion names tier {unknown[0]}, which has no bandwidth")
    return file
