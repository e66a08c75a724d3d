"""The log of the router's decisions: a ring of the latest ones, counters, and a histogram of the time that they took.

The ring keeps the decisions about all attempts of a request together, under the request's id. It keeps them packed,
because a ring of Python objects would be most of what a router's memory grows by. Decisions are packed some at a time,
because a loop over many is cheaper for each than packing one between other work.
"""

import bisect
import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from actors.telemetry.times import Hop
from actors.wire.messages import FlowRecord, Transfer
from policies.admission.base import AdmissionPolicy
from policies.dispatch.dispatcher import Action, Reject, RouteDecode, RoutePrefill
from policies.fairness.base import FairnessPolicy
from policies.journal.lines import choice_of
from policies.request.attempts import request_id_of
from policies.routing.base import DecodePolicy, PrefillPolicy, Reason
from policies.state.views import RequestId, WorkerId

DECISION_BOUNDS_S = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
PREFIXES = ("chatcmpl-", "cmpl-", "req-")
"""Prefixes that the API puts before a request's id in its answers."""
RESCUE = {"name": "lease rescue (dispatcher)", "params": {}, "formula": "cost = slot_usage"}

PROBE = {"name": "probe of a quarantined worker (dispatcher)", "params": {}, "formula": "cost = 0"}

# 11 MB at 0.17 kB a packed candidate with the 15 terms of `composition`; a test bounds the bytes of full rings
MOST_CANDIDATES = 65_536
"""Most ranked candidates in the ring, over all decisions. A decision without a ranking counts as one."""
PACKED_TOGETHER = 64
"""Number of decisions that are packed together. ASSUMPTION: few enough that no decision waits noticeably for it."""
MOST_DECISIONS = 256
"""Most decisions about one request that the ring holds; a request that is retried without end drops its oldest."""

Policy = PrefillPolicy | DecodePolicy

Quarantined = tuple[tuple[WorkerId, str], ...]
"""The workers that were quarantined at some time, each with the reason."""


_ALL_FIELDS = {
    kind.__name__: tuple(f.name for f in fields(kind)) for kind in (RoutePrefill, RouteDecode, Reject)
}
_FIELDS = {kind: tuple(name for name in names if name != "decision") for kind, names in _ALL_FIELDS.items()}
"""The fields of each kind of action, all of them and without its decision."""
_REST = {kind: attrgetter(*names) for kind, names in _FIELDS.items()}


@dataclass(slots=True, eq=False)
class Made:
    """One decision, its number of ranked candidates, the policy then in use, and the workers that were then kept from
    the policy. Its action is None once it is packed.
    """

    at_s: float
    action: Action | None
    candidates: int
    policy: Policy
    quarantined: Quarantined
    packed: bytes = b""


class Packer:
    """Packs actions as msgpack and shows them again. The names of the terms, which are the same in most rankings, are
    kept once, and a packed candidate has their number. ASSUMPTION: policies name their terms in few different ways.
    """

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=float)
        # bytes that the encoder makes itself keep the room into which they grew
        self._buffer = bytearray()
        self._numbers: dict[tuple[str, ...], int] = {}
        self._names: list[tuple[str, ...]] = []

    def pack(self, now_s: float, action: Action) -> bytes:
        """Returns an action with its time, packed."""
        kind = type(action).__name__
        made = None
        if not isinstance(action, Reject):
            decision = action.decision
            ranking = [(*self._numbered(one.terms), one.worker, one.cost) for one in decision.ranking]
            made = decision.worker, ranking, decision.reason
        whole = now_s, kind, _REST[kind](action), made
        try:
            self._encoder.encode_into(whole, self._buffer)
        except OverflowError:
            # Sums of what a lying peer has told. Decisions of several peers are packed together, so none may fail.
            self._encoder.encode_into(_storable(msgspec.to_builtins(whole, enc_hook=float)), self._buffer)
        return bytes(self._buffer)

    def _numbered(self, terms: Mapping[str, float]) -> tuple[int, list[float]]:
        names = tuple(terms)
        number = self._numbers.get(names)
        if number is None:
            number = self._numbers[names] = len(self._names)
            self._names.append(names)
        return number, list(terms.values())

    def shown(self, packed: bytes) -> dict[str, Any]:
        """Returns what was packed for people, with the names of all fields, in their order."""
        now_s, kind, rest, decided = msgspec.msgpack.decode(packed)
        values = dict(zip(_FIELDS[kind], rest, strict=True))
        if decided is not None:
            worker, ranking, reason = decided
            candidates = [
                {"worker": name, "cost": cost, "terms": dict(zip(self._names[number], terms, strict=True))}
                for number, terms, name, cost in ranking
            ]
            values["decision"] = {"worker": worker, "ranking": candidates, "reason": reason}
        return {"at_s": now_s, "action": kind, **{name: values[name] for name in _ALL_FIELDS[kind]}}


def _storable(value: Any) -> Any:
    """Returns plain values with floats in place of the integers that msgpack does not hold."""
    if isinstance(value, list | tuple):
        return [_storable(one) for one in value]
    if isinstance(value, dict):
        return {name: _storable(one) for name, one in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)
    return value


class Moved(NamedTuple):
    """One KV transfer as its decode engine measured it, and when it ended, on the router's clock."""

    ended_s: float
    transfer: Transfer


COUNTED_FROM_0 = ("reject_queue_full",)
"""Totals that are there before the first such decision. An alert asks how much one of them has grown, and Prometheus
sees no growth in a series that begins with its first decisions.
"""


@dataclass(slots=True)
class DecisionLog:
    """Keeps the decisions about the last `capacity` requests, and totals since the start. The oldest request is dropped
    first, earlier if the decisions rank more than `MOST_CANDIDATES` candidates.
    """

    capacity: int = 4096
    totals: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED_FROM_0, 0)))
    buckets: list[int] = field(default_factory=lambda: [0] * (len(DECISION_BOUNDS_S) + 1))
    sum_s: float = 0.0
    candidates: int = 0
    """Number of ranked candidates in the ring."""
    _packer: Packer = field(default_factory=Packer)
    _fresh: list[Made] = field(default_factory=list)
    """The latest decisions, which are not packed yet."""
    _ring: OrderedDict[str, list[Made]] = field(default_factory=OrderedDict)
    # the flows of the requests in the ring, as agents reported them, by request
    _flowed: dict[str, list[FlowRecord]] = field(default_factory=dict)
    # the transfers of the requests in the ring, by request
    _moved: dict[str, list[Moved]] = field(default_factory=dict)
    # the ways of the requests in the ring whose times somebody wanted, by request: each with its attempt
    # and the time of the request's arrival
    _ways: dict[str, list[tuple[str, float, list[Hop]]]] = field(default_factory=dict)
    # a client's own x-request-id -> the request's id
    _named: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def record(
        self,
        now_s: float,
        actions: Sequence[Action],
        took_s: float,
        prefill: PrefillPolicy,
        decode: DecodePolicy,
        quarantined: Quarantined = (),
    ) -> None:
        """Logs the actions that one event led to, the policies then in use, and the workers that were `quarantined`.
        The actions share `took_s` evenly.
        """
        each_s = took_s / len(actions)
        for action in actions:
            self.totals[_label(action)] += 1
            self.sum_s += each_s
            self.buckets[bisect.bisect_left(DECISION_BOUNDS_S, each_s)] += 1
            policy = prefill if isinstance(action, RoutePrefill) else decode
            candidates = 1 if isinstance(action, Reject) else len(action.decision.ranking) or 1
            made = Made(now_s, action, candidates, policy, quarantined)
            self._fresh.append(made)
            self._keep(request_id_of(action.attempt_id), made)
        if len(self._fresh) >= PACKED_TOGETHER:
            self._pack()

    def _pack(self) -> None:
        fresh, self._fresh = self._fresh, []
        for made in fresh:
            if made.action is not None:
                made.packed, made.action = self._packer.pack(made.at_s, made.action), None

    def _keep(self, request_id: str, made: Made) -> None:
        decisions = self._ring.setdefault(request_id, [])
        decisions.append(made)
        self.candidates += made.candidates
        if len(decisions) > MOST_DECISIONS:
            self.candidates -= decisions.pop(0).candidates
        while len(self._ring) > self.capacity or self.candidates > MOST_CANDIDATES:
            request_id, dropped = self._ring.popitem(last=False)
            self._moved.pop(request_id, None)
            self._ways.pop(request_id, None)
            self._flowed.pop(request_id, None)
            self.candidates -= sum(one.candidates for one in dropped)

    def transferred(self, transfers: Sequence[Transfer], now_s: float) -> None:
        """Logs KV transfers that have ended, beside the decisions about their requests. One of a request that the ring
        does not hold is dropped.
        """
        for transfer in transfers:
            request_id = request_id_of(transfer.attempt_id)
            if request_id in self._ring:
                moved = self._moved.setdefault(request_id, [])
                moved.append(Moved(now_s - transfer.ended_ago_s, transfer))
                del moved[:-MOST_DECISIONS]

    def timed(self, attempt_id: str, arrived_s: float, way: list[Hop]) -> None:
        """Logs the way of an attempt that has ended, hop by hop, and when its request arrived. That of a request that
        the ring does not hold is dropped.
        """
        request_id = request_id_of(attempt_id)
        if way and request_id in self._ring:
            ways = self._ways.setdefault(request_id, [])
            ways.append((attempt_id, arrived_s, way))
            del ways[:-MOST_DECISIONS]

    def times(self, request_id: str) -> list[dict[str, Any]]:
        """Returns the ways of a request's attempts, hop by hop, oldest first; empty if nobody wanted its times.
        `request_id` is any id that `explain` takes.
        """
        return [
            {"attempt_id": attempt_id, "at_s": arrived_s, "hops": [hop._asdict() for hop in way]}
            for attempt_id, arrived_s, way in self._ways.get(self._held_as(request_id), ())
        ]

    def name(self, attempt_id: RequestId, client_request_id: str) -> None:
        """Stores the id by which the client calls this request. If a client uses an id twice, it names the later
        request.
        """
        self._named[client_request_id] = request_id_of(attempt_id)
        self._named.move_to_end(client_request_id)
        if len(self._named) > self.capacity:
            self._named.popitem(last=False)

    def cumulative(self) -> tuple[int, ...]:
        """Returns the cumulative counts of decisions for Prometheus: those at or below each bound of DECISION_BOUNDS_S,
        +Inf last.
        """
        total, result = 0, []
        for count in self.buckets:
            total += count
            result.append(total)
        return tuple(result)

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Returns the decisions made for a request, oldest first. The list is empty if the ring does not hold the
        request.

        `request_id` is the id in the answer (chatcmpl-...), the client's x-request-id, or an attempt's id.
        """
        self._pack()
        return [self._shown(made) for made in self._ring.get(self._held_as(request_id), ())]

    def _shown(self, made: Made) -> dict[str, Any]:
        shown = self._packer.shown(made.packed)
        if "decision" in shown:
            shown["policy"] = _OWN_RULES.get(shown["decision"]["reason"]) or described(made.policy)
        if made.quarantined:
            shown["quarantined"] = dict(made.quarantined)
        return shown

    def flowed(self, records: Sequence[FlowRecord]) -> None:
        """Logs flows that have ended, as their agents saw them. One of a request that the ring does not hold is
        dropped.
        """
        for record in records:
            request_id = request_id_of(record.request_id)
            if request_id in self._ring:
                flowed = self._flowed.setdefault(request_id, [])
                flowed.append(record)
                del flowed[:-MOST_DECISIONS]

    def flows(self, request_id: str) -> list[dict[str, Any]]:
        """Returns the flows of a request, as far as agents reported them, oldest first, each with its levels, its MLU
        and the time for which it was held. `request_id` is any id that `explain` takes.
        """
        return [msgspec.structs.asdict(one) for one in self._flowed.get(self._held_as(request_id), ())]

    def transfers(self, request_id: str) -> list[dict[str, Any]]:
        """Returns the KV transfers of a request, as far as ingresses reported them, oldest first, each with the time
        for which a flow scheduler held it back. `request_id` is any id that `explain` takes.
        """
        return [_moved(one) for one in self._moved.get(self._held_as(request_id), ())]

    def _held_as(self, request_id: str) -> str:
        """Returns the id under which the ring holds a request, or "" if it does not."""
        prefix = next((p for p in PREFIXES if request_id.startswith(p)), "")
        plain = request_id.removeprefix(prefix)
        candidates = (self._named.get(request_id, plain), plain, request_id_of(plain))
        return next((candidate for candidate in candidates if candidate in self._ring), "")

    def newest(self, most: int) -> list[str]:
        """Returns the ids of the last `most` requests for which a decision was made, newest first."""
        return list(itertools.islice(reversed(self._ring), most))

    @property
    def requests(self) -> int:
        """Number of requests whose decisions the ring holds."""
        return len(self._ring)


def described(policy: Policy | AdmissionPolicy | FairnessPolicy) -> dict[str, Any]:
    """Returns a description of a policy for people: its name, all its parameters, and its formula in terms of them."""
    choice = choice_of(policy)
    return {"name": choice.name, "params": dict(choice.params), "formula": policy.formula}


def _moved(moved: Moved) -> dict[str, Any]:
    transfer = moved.transfer
    return {
        "at_s": moved.ended_s,
        "attempt_id": transfer.attempt_id,
        "n_bytes": transfer.n_bytes,
        "seconds": transfer.seconds,
        "held_s": transfer.held_s,
        "descriptors": transfer.descriptors,
    }


_OWN_RULES: dict[str, dict[str, Any]] = {Reason.LEASE_RESCUE: RESCUE, Reason.PROBE: PROBE}
"""Descriptions of the decisions that the dispatcher makes without a policy, by their reason."""


_DECODE_LABELS = {reason: f"decode_{reason.value}" for reason in Reason}


def _label(action: Action) -> str:
    if isinstance(action, RouteDecode):
        return _DECODE_LABELS[action.decision.reason]
    if isinstance(action, Reject):
        return f"reject_{action.reason}"
    if action.degraded:
        return "prefill_degraded"
    return "prefill_colocated" if action.colocated else "prefill"
