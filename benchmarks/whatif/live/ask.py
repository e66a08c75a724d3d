"""Asks a running application for what a simulation needs to know, by the endpoints of administrators: facts, policies,
scaling and journal.

Timing is `policies.scaling.timing_fit` over the totals of engines' steps: their whole life as one row each, and a row
for each second that was watched (`scaled` is its prior).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from benchmarks import certificates
from benchmarks.whatif.live import requests as live_requests
from benchmarks.whatif.live.errors import FromLiveError
from benchmarks.whatif.live.requests import Seen
from policies.engine_model.timing import CPU_SMOLLM2, TimingProfile
from policies.journal.codec import CodecError, loads
from policies.scaling.timing_fit import Fit, Totals
from sluice import NotFoundError, Sluice, Timeouts
from sluice._admin_key import key_of_this_machine

WATCH_S, MINUTES = 10.0, 5.0
_TOTALS = (
    "step_s", "prefill_steps", "prefill_step_tokens", "decode_steps", "decode_step_seqs", "decode_step_kv_tokens",
)  # fmt: skip


@dataclass(slots=True)
class Live:
    """The facts that were learnt of an application. `kv_bytes` are (bytes, tokens) of finished prefills."""

    engines: list[dict[str, Any]]
    network: dict[str, Any]
    policies: dict[str, Any]
    scaling: dict[str, Any] | None
    fits: dict[tuple[Any, ...], Fit]
    requests: list[Seen]
    source: str
    kv_bytes: tuple[float, float] = (0.0, 0.0)
    transfers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    learns: bool = False
    problems: list[str] = field(default_factory=list)


def collect(
    url: str | None,
    key: str | None = None,
    watch_s: float = WATCH_S,
    minutes: float = MINUTES,
    say: Callable[[float, str], None] = lambda share, what: None,
) -> Live:
    """Asks the application for `watch_s` seconds. Raises FromLiveError or SluiceError.

    `say` gets the share of the time that has passed and what is being done.
    """
    with _connected(url, key) as (client, http):
        policies = client.policies()
        try:
            scaling: dict[str, Any] | None = client.scaling().model_dump()
        except NotFoundError:
            scaling = None
        watched = _watch(http, watch_s, say)
        transfers = tuple(
            _total(client, f"sluice_kv_transfer{name}_total") for name in ("s", "_bytes", "_seconds")
        )
        learns = _total(client, "sluice_router_predictor_outcomes_total") > 0
    requests, kv_bytes, source, problems = live_requests.latest(watched.journal, watched.events, minutes)
    facts = watched.facts
    return Live(
        facts["engines"],
        facts["network"],
        policies.model_dump(exclude={"available"}),
        scaling,
        watched.fits,
        requests,
        source,
        kv_bytes,
        (transfers[0], transfers[1], transfers[2]),
        learns,
        problems,
    )


@contextlib.contextmanager
def _connected(url: str | None, key: str | None) -> Iterator[tuple[Sluice, httpx.Client]]:
    """A context with the SDK's client, and with one for endpoints that the SDK does not have."""
    limits, trust = Timeouts(3.0, 15.0, 30.0), certificates.pinned(url)
    with (
        certificates.client(url) or contextlib.nullcontext() as told,
        Sluice(url, admin_key=key, timeouts=limits, http_client=told) as client,
    ):
        given = key or os.environ.get("SLUICE_ADMIN_KEY") or key_of_this_machine(client.base_url)
        headers = {} if given is None else {"authorization": f"Bearer {given}"}
        with httpx.Client(
            base_url=client.base_url, headers=headers, verify=trust or True, timeout=15.0, trust_env=False
        ) as http:
            yield client, http


def _total(client: Sluice, name: str) -> float:
    return sum(sample.value for sample in client.metrics().select(name))


@dataclass(slots=True)
class _Watched:
    facts: dict[str, Any]
    fits: dict[tuple[Any, ...], Fit]
    journal: dict[str, Any]
    events: dict[int, dict[str, Any]]


def _watch(http: httpx.Client, watch_s: float, say: Callable[[float, str], None]) -> _Watched:
    """Asks for facts and events once a second, at least twice, for `watch_s` seconds."""
    fits: dict[tuple[Any, ...], Fit] = {}
    before: dict[str, Totals] = {}
    events: dict[int, dict[str, Any]] = {}
    began_s = time.monotonic()
    while True:
        facts = _get(http, "/sluice/admin/facts")
        if facts is None:
            raise FromLiveError(
                "the server does not tell facts about its engines: it is older than this command"
            )
        counted = [(engine, _totals(engine)) for engine in facts["engines"]]
        for engine, now in counted:
            if now is None:
                continue
            kind = kind_of(engine)
            if kind not in fits:
                fits[kind] = Fit(scaled([t for one, t in counted if t is not None and kind_of(one) == kind]))
            fits[kind] = fits[kind].added(before.get(engine["id"], Totals()), now)
            before[engine["id"]] = now
        journal = _get(http, "/sluice/admin/journal/1000") or {}
        for line in journal.get("tail", []):
            if isinstance(line, dict) and line.get("event") in ("Arrived", "Closed", "PrefillDone"):
                events[int(line["n"])] = line
        passed_s = time.monotonic() - began_s
        if passed_s >= watch_s:
            return _Watched(facts, fits, journal, events)
        say(passed_s / watch_s, "watching the engines")
        time.sleep(min(1.0, max(0.05, watch_s - passed_s)))


def _totals(engine: Mapping[str, Any]) -> Totals | None:
    """Returns the totals of an engine's steps; None for an engine that counts none."""
    if not all(name in engine["totals"] for name in _TOTALS):
        return None
    return Totals(*(float(engine["totals"][name]) for name in _TOTALS))


def scaled(totals: Sequence[Totals]) -> TimingProfile:
    """Returns a profile that is CPU_SMOLLM2 times a factor for prefills and one for decodes, by least squares.

    It takes the place of the fit's prior: what the traffic does not tell apart (a step's cost from a token's) keeps the
    proportions of that profile, and not its seconds, which may be hundreds of times those of the engines here.
    """
    p = CPU_SMOLLM2
    rows = np.array(
        [
            (
                p.prefill_base_s * t.prefill_steps + p.prefill_per_token_s * t.prefill_tokens,
                p.decode_base_s * t.decode_steps
                + p.decode_per_seq_s * t.decode_seqs
                + p.decode_per_kv_token_s * t.decode_kv_tokens,
                t.busy_s,
            )
            for t in totals
            if t.busy_s > 0
        ]
    ).reshape(-1, 3)
    factors = np.ones(2)
    used = rows[:, :2].sum(axis=0) > 0
    if used.any():
        factors[used] = np.linalg.lstsq(rows[:, :2][:, used], rows[:, 2], rcond=None)[0]
    # engines of one kind that do both may not be told apart: the least is a thousandth
    prefill, decode = np.maximum(factors, 1e-3).tolist()
    return replace(
        p,
        source="CPU_SMOLLM2, scaled to the totals of engines",
        prefill_base_s=p.prefill_base_s * prefill,
        prefill_per_token_s=p.prefill_per_token_s * prefill,
        decode_base_s=p.decode_base_s * decode,
        decode_per_seq_s=p.decode_per_seq_s * decode,
        decode_per_kv_token_s=p.decode_per_kv_token_s * decode,
    )


def _get(http: httpx.Client, path: str) -> dict[str, Any] | None:
    """Returns an answer; None where the server has no such thing. Raises FromLiveError for a refusal."""
    try:
        answer = http.get(path)
    except httpx.HTTPError as error:
        raise FromLiveError(f"{http.base_url} cannot be reached: {error}") from error
    if answer.status_code == 404:
        return None
    try:
        found: dict[str, Any] = loads(answer.text)
        if answer.status_code != 200:
            raise FromLiveError(f"{path}: {found['error']['message']}")
    except (CodecError, KeyError, TypeError) as error:
        raise FromLiveError(f"{path}: status {answer.status_code}, and no answer of Sluice's") from error
    return found


def kind_of(engine: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what engines of equal speed have in common, as the router has it (`actors.router.observing.Kind`)."""
    return (
        engine["kind"],
        engine["group"],
        engine["slots"],
        engine["kv_blocks"] * engine["block_size_tokens"],
    )
