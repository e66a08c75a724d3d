"""A decode decision announces the transfer that it causes."""

from policies.dispatch.dispatcher import DispatchConfig, Dispatcher, RouteDecode
from policies.network.oracle import Oracle, TransferIntent
from policies.request.terms import Terms
from policies.routing.netkv.network_term import transfer_intent
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import (
    Health,
    KnownHits,
    PoolEntry,
    Request,
    Role,
    Snapshot,
    Transfers,
    Worker,
)


def worker(name: str, role: Role, node: str, transfers: tuple[Transfers, ...] = ()) -> Worker:
    return Worker(name, role, "g", node, Health.READY, 8, 10_000, transfers=transfers)


def snapshot(oracle: Oracle | None, flows: int = 0) -> Snapshot:
    own = (Transfers("d", 0, flows),) if flows else ()
    workers = {"p": worker("p", Role.PREFILL, "n1", own), "d": worker("d", Role.DECODE, "n2")}
    return Snapshot(0.0, workers, (), {}, oracle, KnownHits({"r": {"d": 25}}))


def entry() -> PoolEntry:
    return PoolEntry(Request("r", 0.0, 100, 8, terms=Terms(priority=3)), "p", "g", 0.0, 30.0, 4000, 0)


def test_bytes_tier_and_seconds_of_the_chosen_path() -> None:
    """75 of 100 tokens move: 3000 B at 1000 B/s, shared with one own flow, + 0.5 s."""
    seen = snapshot(Oracle({1: 1000.0}, latency_s={1: 0.5}), flows=1)
    intent = transfer_intent(entry(), seen.workers["d"], seen)
    assert intent == TransferIntent("r", "p", "d", 3000, 3, tier=1, predicted_s=6.5)


def test_without_an_oracle_only_the_bytes_are_known() -> None:
    seen = snapshot(None)
    assert transfer_intent(entry(), seen.workers["d"], seen) == TransferIntent("r", "p", "d", 3000, 3)


def test_the_dispatchers_decision_carries_it() -> None:
    policy = JoinShortestQueue()
    dispatcher = Dispatcher(DispatchConfig(), policy, policy)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        dispatcher.handle(ev.EngineUp(0.0, name, role, "g", f"n-{name}", slots=8, kv_capacity_tokens=10_000))
        dispatcher.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    dispatcher.handle(ev.OracleRefreshed(0.0, Oracle({1: 1000.0})))
    dispatcher.handle(ev.Arrived(0.0, Request("r", 0.0, 100, 8)))
    (action,) = dispatcher.handle(ev.PrefillDone(0.0, "r", 30.0, 4000, 0))
    assert isinstance(action, RouteDecode)
    assert action.intent == TransferIntent("r", "p", "d", 4000, 0, tier=1, predicted_s=4.0)
