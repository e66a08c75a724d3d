"""When the dispatcher has a prefix lent. Times are in seconds; p0 and p1 prefill, d decodes, all in one group."""

from dataclasses import replace
from typing import Any

import pytest

from policies.dispatch.actions import PrefixFetch, RoutePrefill
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.engine_model.blocks import Stored
from policies.flow.fetch_or_recompute import FetchReason
from policies.journal.lines import action_line, header_line, parse_action, record_text
from policies.journal.replay import replay
from policies.network.oracle import Oracle
from policies.request.terms import Terms
from policies.routing.base import Needs
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Request, Role

TOKENS, BLOCK = 1600, 16
HASHES = tuple(range(1000, 1000 + TOKENS // BLOCK))
# 1 kB a token and 10 MB/s: the KV of 1,600 tokens moves in 0.16 s
KV_BYTES_PER_TOKEN = 1000


class Cluster:
    """A dispatcher whose prefill workers have computed prompts at `s_per_token`; `held` caches the first half of the
    prompt of `request()`.
    """

    def __init__(self, s_per_token: float = 0.001, bytes_per_s: float | None = 10e6, **config: Any) -> None:
        limits = DispatchConfig(**({"lend_prefixes": True} | config))
        self.d = Dispatcher(limits, prefill_policy("round_robin"), decode_policy("round_robin"))
        self.lines = [header_line(self.d, "test")]
        self.now_s, self.n = 0.0, 0
        for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d", Role.DECODE)):
            self.feed(ev.EngineUp(0.0, name, role, "g", "n", 8, 100_000))
            self.report(name)
        if bytes_per_s is not None:
            self.feed(ev.OracleRefreshed(0.0, Oracle({3: bytes_per_s}, {3: 0.0})))
        # every prompt costs as much as 128 tokens more
        for i in range(4):
            for name in ("p0", "p1", "d"):
                self.report(name)
            routed = self.arrives(Request(f"warm{i}", self.now_s, 2000, 1))
            self.now_s += (2000 + 128) * s_per_token
            self.feed(
                ev.PrefillDone(self.now_s, routed.attempt_id, self.now_s + 30, 2000 * KV_BYTES_PER_TOKEN, 0)
            )
            self.feed(ev.Closed(self.now_s, f"warm{i}", "finished"))
            self.now_s += 2.0
            self.feed(ev.Tick(self.now_s))
        for name in ("p0", "p1", "d"):
            self.report(name)

    def feed(self, event: ev.Event) -> list[Any]:
        actions = self.d.handle(event)
        outcome = [action_line(action) for action in actions]
        self.lines.append(record_text(self.n, event, outcome).rstrip("\n"))
        self.n += 1
        return actions

    def report(self, worker: str, kv_tokens: int = 0) -> None:
        self.feed(ev.EngineStatus(self.now_s, worker, 0, 0, kv_tokens))

    def arrives(self, request: Request) -> RoutePrefill:
        (routed,) = self.feed(ev.Arrived(self.now_s, request))
        assert isinstance(routed, RoutePrefill)
        return routed

    def caches(self, worker: str, blocks: int) -> None:
        self.feed(ev.KvBatch(self.now_s, worker, "e", 0, (Stored(HASHES[:blocks], None),)))

    def decides(self, avoid: tuple[str, ...] = (), slo_s: float | None = None) -> PrefixFetch | None:
        """The decision about the prefix for a prompt on p0, whose turn it is."""
        terms = Terms(ttft_slo_s=slo_s)
        request = Request(
            "r", self.now_s, TOKENS + 1, 10, terms=terms, avoid=avoid, block_hashes=HASHES, block_tokens=BLOCK
        )
        routed = self.arrives(request)
        assert routed.decision.worker == "p0"
        return routed.prefix


def test_a_long_prefix_that_moves_faster_than_it_is_computed_is_fetched() -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    cluster.caches("d", 50)
    fetched = cluster.decides()
    assert fetched is not None and fetched.fetch and fetched.reason is FetchReason.FASTER
    # p1 holds more than d; it computes 128 tokens' worth for the lease: 0.128 s, and 1.6 MB move in 0.16 s
    assert (fetched.lender, fetched.tokens) == ("p1", 1600)
    assert fetched.fetch_s == pytest.approx(0.288, rel=0.02)
    assert fetched.recompute_s == pytest.approx(1.6, rel=0.02)
    # 1.6 s less 0.16 s to move
    assert fetched.patience_s == pytest.approx(1.44, rel=0.02)


@pytest.mark.parametrize(("slo_s", "patience_s"), [(2.5, 0.771), (1.8, 0.16), (0.1, 0.16), (60.0, 1.44)])
def test_the_wait_for_a_lender_leaves_time_to_compute(slo_s: float, patience_s: float) -> None:
    """1,601 tokens and the 128 of a prompt take 1.729 s; the loan is expected to take 0.128 s, and a quarter more."""
    cluster = Cluster()
    cluster.caches("p1", 100)
    fetched = cluster.decides(slo_s=slo_s)
    assert fetched is not None and fetched.fetch
    assert fetched.patience_s == pytest.approx(patience_s, rel=0.03)


def test_a_decode_worker_lends_as_well() -> None:
    cluster = Cluster()
    cluster.caches("d", 100)
    fetched = cluster.decides()
    assert fetched is not None and (fetched.lender, fetched.fetch) == ("d", True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        # 1.6 MB at 1 MB/s are 1.6 s, and more with the loan
        ({"bytes_per_s": 1e6}, FetchReason.SLOWER),
        # 0.288 s is not faster than 1.6 s by 500 %
        ({"lend_margin": 5.0}, FetchReason.SLOWER),
        ({"lend_least_tokens": 1601}, FetchReason.TOO_SHORT),
        ({"lend_most_kv_used": 0.0}, FetchReason.LENDER_FULL),
    ],
)
def test_what_is_not_worth_it_is_computed_and_the_numbers_are_told(
    options: dict[str, Any], reason: FetchReason
) -> None:
    cluster = Cluster(**options)
    cluster.caches("p1", 100)
    fetched = cluster.decides()
    assert fetched is not None and not fetched.fetch and fetched.reason is reason
    assert fetched.recompute_s == pytest.approx(1.6, rel=0.02)


@pytest.mark.parametrize(
    "options", [{"lend_prefixes": False}, {"bytes_per_s": None}], ids=["off", "network not known"]
)
def test_nothing_is_decided_where_lending_is_off_or_too_little_is_known(options: dict[str, Any]) -> None:
    cluster = Cluster(**options)
    cluster.caches("p1", 100)
    assert cluster.decides() is None


def test_a_prefix_that_the_worker_has_itself_is_not_fetched() -> None:
    cluster = Cluster()
    cluster.caches("p1", 50)
    cluster.caches("p0", 50)
    assert cluster.decides() is None


def test_a_request_that_failed_before_is_given_to_no_lender() -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    assert cluster.decides(avoid=("elsewhere",)) is None


def test_only_fresh_workers_of_the_same_group_lend() -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    cluster.now_s += 10.0
    cluster.report("p0")
    cluster.report("d")
    assert cluster.decides() is None


def test_lending_needs_hits_and_the_network() -> None:
    policies = prefill_policy("round_robin"), decode_policy("round_robin")
    assert Dispatcher(DispatchConfig(), *policies).needs == Needs.NONE
    assert Dispatcher(DispatchConfig(lend_prefixes=True), *policies).needs == Needs.HITS | Needs.NETWORK


def test_the_decision_is_in_the_journal_and_is_made_again_from_it() -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    request = Request("r", cluster.now_s, TOKENS + 1, 10, block_hashes=HASHES, block_tokens=BLOCK)
    routed = cluster.arrives(request)
    assert parse_action(action_line(routed)) == routed
    assert parse_action(action_line(replace(routed, prefix=None))) != routed
    steps = list(replay("\n".join(cluster.lines).splitlines()))
    assert len(steps) == cluster.n and all(step.equal for step in steps)
