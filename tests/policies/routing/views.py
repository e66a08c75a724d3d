"""Builders of views for the tests of policies."""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.network.oracle import Oracle
from policies.request.terms import Terms
from policies.state.views import Health, KnownHits, PoolEntry, Request, Role, Snapshot, Worker


def worker(name: str, role: Role = Role.DECODE, node: str = "n", group: str = "g", **kw: Any) -> Worker:
    facts: dict[str, Any] = {"slots": 8, "kv_capacity_tokens": 1_000_000} | kw
    return Worker(name, role, group, node, Health.READY, **facts)


def entry(
    attempt_id: str,
    prompt_tokens: int,
    kv_bytes: int = 1,
    sender: str = "p",
    entered_s: float = 0.0,
    lease_s: float = 30.0,
    **kw: Any,
) -> PoolEntry:
    terms = Terms(**{name: kw.pop(name) for name in Terms._fields if name in kw})
    request = Request(attempt_id, 0.0, prompt_tokens, 64, terms=terms, **kw)
    return PoolEntry(request, sender, "g", entered_s, entered_s + lease_s, kv_bytes, 0)


def snapshot(
    workers: Sequence[Worker],
    pool: Sequence[PoolEntry] = (),
    oracle: Oracle | None = None,
    hits: Mapping[str, Mapping[str, int]] | None = None,
    now_s: float = 1.0,
) -> Snapshot:
    return Snapshot(now_s, {w.id: w for w in workers}, tuple(pool), {}, oracle, KnownHits(hits or {}))
