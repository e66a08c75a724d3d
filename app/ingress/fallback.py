"""The ingress's own policy while there is no router: the engine with the fewest attempts of this replica is chosen.

An engine that is not connected, not ready, or to be avoided is never chosen.
"""

from collections.abc import Sequence

from app.ingress.links import EngineLink
from policies.request.events import RouteDecode, RoutePrefill
from policies.request.life import Life
from policies.request.terms import Mode


def choose_prefill(links: Sequence[EngineLink], life: Life) -> RoutePrefill | None:
    """Chooses a prefill engine whose KV group has a decode engine, or an engine that serves the whole request.

    Returns None if no engine is usable.
    """
    usable = [link for link in links if _usable(link, life)]
    groups = {link.info.group for link in usable if link.info.role == "decode"}
    whole = [link for link in usable if link.info.role == "colocated"]
    split = [link for link in usable if link.info.role == "prefill" and link.info.group in groups]
    mode = life.terms.mode
    if mode is not None:
        whole, split = (whole, []) if mode is Mode.COLOCATED else ([], split)
    elif life.terms.local or not (whole or split):
        whole, split = whole or [link for link in usable if link.info.role == "decode"], []
    best = _least_used(whole + split)
    return None if best is None else RoutePrefill(best.info.id, colocated=best not in split)


def choose_decode(links: Sequence[EngineLink], life: Life, group: str) -> RouteDecode | None:
    """Chooses a decode engine of `group`, the KV group of the prefill engine. Returns None if none is usable."""
    usable = [link for link in links if _usable(link, life)]
    best = _least_used([link for link in usable if link.info.role == "decode" and link.info.group == group])
    return None if best is None else RouteDecode(best.info.id)


def _least_used(links: Sequence[EngineLink]) -> EngineLink | None:
    return min(links, key=lambda link: len(link.live), default=None)


def _usable(link: EngineLink, life: Life) -> bool:
    return link.connected and link.info.state == "ready" and link.info.id not in life.avoid
