"""The registry maps the name of each policy to its class. The class is a dataclass, whose fields are the policy's
parameters.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from policies.routing.balance.balance_route_0 import BalanceRoute0
from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.routing.base import DecodePolicy, EntryPolicy, PrefillPolicy, RoundPolicy
from policies.routing.composition.composition import Composition
from policies.routing.composition.static_stack import StaticStack
from policies.routing.deepflow.locality import Locality
from policies.routing.deepflow.pd_heatmap import Combined, PdHeatmap
from policies.routing.flowkv.predicted_ttft import PredictedTTFT
from policies.routing.netkv.netkv import NetKV
from policies.routing.simple.cache_aware import CacheAware
from policies.routing.simple.cache_load_aware import CacheLoadAware
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.routing.simple.load_aware import LoadAware
from policies.routing.simple.power_of_two import PowerOfTwo
from policies.routing.simple.random_choice import RandomChoice
from policies.routing.simple.round_robin import RoundRobin

PREFILL: dict[str, type[PrefillPolicy]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "join_shortest_queue": JoinShortestQueue,
    "load_aware": LoadAware,
    "cache_aware": CacheAware,
    "cache_load_aware": CacheLoadAware,
    "predicted_ttft": PredictedTTFT,
    "locality": Locality,
    "pd_heatmap": PdHeatmap,
    "combined": Combined,
}

DECODE: dict[str, type[EntryPolicy] | type[RoundPolicy]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "join_shortest_queue": JoinShortestQueue,
    "load_aware": LoadAware,
    "cache_aware": CacheAware,
    "cache_load_aware": CacheLoadAware,
    "netkv": NetKV,
    "balance_route_0": BalanceRoute0,
    "balance_route_h": BalanceRouteH,
    "static_stack": StaticStack,
    "composition": Composition,
}


def prepare() -> None:
    """Loads the compiled code that policies would otherwise load at their first decision.

    This takes about 2 s of CPU if the code is cached, half of it numba's own start, and about 24 s otherwise. It
    takes 140 MB of memory, most of it LLVM's. A process that serves requests calls it at its start, so that no
    change of policy stalls the service.
    """
    for room in ("balance", "composition"):
        importlib.import_module(f"policies.routing.{room}.round")


class UnknownPolicy(ValueError):
    """The policy's name or a parameter is unknown. The message lists the known ones."""


def prefill_policy(name: str, params: Mapping[str, Any] | None = None) -> PrefillPolicy:
    """Builds the named prefill policy. Raises UnknownPolicy for an unknown name or parameter."""
    return _build("prefill", PREFILL, name, params or {})  # type: ignore[no-any-return]


def decode_policy(name: str, params: Mapping[str, Any] | None = None) -> DecodePolicy:
    """Builds the named decode policy. Raises UnknownPolicy for an unknown name or parameter."""
    return _build("decode", DECODE, name, params or {})  # type: ignore[no-any-return]


def _build(stage: str, table: Mapping[str, type[Any]], name: str, params: Mapping[str, Any]) -> Any:
    if name not in table:
        raise UnknownPolicy(f"{stage} policy {name!r} is not known: choose one of {', '.join(sorted(table))}")
    kind = table[name]
    allowed = {f.name for f in dataclasses.fields(kind) if f.name != "name"}
    unknown = sorted(set(params) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed)) or "none"
        raise UnknownPolicy(f"{stage} policy {name!r} has no parameter {unknown[0]!r}: it takes {known}")
    return kind(**params)
