"""The ingress's own policy without a router: the least of our own requests in flight, among engines of one KV group.

An engine that is not connected, not ready, or to be avoided is never chosen.
"""

from collections.abc import Sequence

from actors.wire.messages import RouteDecode, RoutePrefill
from app.ingress.job import Job
from app.ingress.links import EngineLink
from policies.request.terms import Mode


def choose_prefill(links: Sequence[EngineLink], job: Job) -> RoutePrefill | None:
    """A prefill engine whose group has a decode engine, or one that computes all itself."""
    usable = [link for link in links if _usable(link, job)]
    groups = {link.info.group for link in usable if link.info.role == "decode"}
    whole = [link for link in usable if link.info.role == "colocated"]
    split = [link for link in usable if link.info.role == "prefill" and link.info.group in groups]
    mode = job.work.terms.mode
    if mode is not None:
        whole, split = (whole, []) if mode is Mode.COLOCATED else ([], split)
    elif job.work.terms.local or not (whole or split):
        whole, split = whole or [link for link in usable if link.info.role == "decode"], []
    best = _least_used(whole + split)
    if best is None:
        return None
    return RoutePrefill(job.attempt_id, best.info.id, "prefill" if best in split else "colocated")


def choose_decode(links: Sequence[EngineLink], group: str, job: Job) -> RouteDecode | None:
    """A decode engine of the group that holds the KV."""
    usable = [link for link in links if _usable(link, job)]
    best = _least_used([link for link in usable if link.info.role == "decode" and link.info.group == group])
    return None if best is None else RouteDecode(job.attempt_id, best.info.id)


def _least_used(links: Sequence[EngineLink]) -> EngineLink | None:
    return min(links, key=lambda link: len(link.jobs), default=None)


def _usable(link: EngineLink, job: Job) -> bool:
    return link.connected and link.info.state == "ready" and link.info.id not in job.avoid
