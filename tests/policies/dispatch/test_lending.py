"""When the dispatcher has a prefix lent. Times are in seconds; p0 and p1 prefill, d decodes, all in one group."""

from dataclasses import replace
from typing import Any

import pytest

from policies.dispatch.actions import PrefixFetch, RouteDecode, RoutePrefill
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
from policies.state.views import NodeLoad, PortBand, PortLoad, Request, Role

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

    def agent_reports(
        self, *bands: PortBand, node: str = "n", policy: str = "mfs", bytes_per_s: float | None = 10e6
    ) -> None:
        """The flow agent of a node reports what is to move at its ingress; nothing is at its egress."""
        load = NodeLoad(node, PortLoad(bytes_per_s), PortLoad(bytes_per_s, bands))
        self.feed(ev.FlowsReported(self.now_s, ev.PolicyChoice(policy), load))

    def passes(self, seconds: float) -> None:
        """Lets time pass; all engines report."""
        self.now_s += seconds
        for name in ("p0", "p1", "d"):
            self.report(name)

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


def test_lending_needs_hits_the_network_and_what_flow_agents_report() -> None:
    policies = prefill_policy("round_robin"), decode_policy("round_robin")
    assert Dispatcher(DispatchConfig(), *policies).needs == Needs.NONE
    lends = Dispatcher(DispatchConfig(lend_prefixes=True), *policies)
    assert lends.needs == Needs.HITS | Needs.NETWORK | Needs.FLOWS


def test_the_decision_is_in_the_journal_and_is_made_again_from_it() -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    request = Request("r", cluster.now_s, TOKENS + 1, 10, block_hashes=HASHES, block_tokens=BLOCK)
    routed = cluster.arrives(request)
    assert parse_action(action_line(routed)) == routed
    assert parse_action(action_line(replace(routed, prefix=None))) != routed
    steps = list(replay("\n".join(cluster.lines).splitlines()))
    assert len(steps) == cluster.n and all(step.equal for step in steps)


# ------------------------------------------------------------------------------------------ what goes first at ports

# MFS's P_1 and P_3; a prefix read with no prompt before its own is in P_2. 20 MB take 2 s.
URGENT = PortBand(1, (1.0, 5.0, 0.0), 2, 20_000_000)
LATER = PortBand(3, (1.0, 900.0, 0.0), 2, 20_000_000)


def decided(cluster: Cluster) -> PrefixFetch:
    """The decision about the prefix, which p1 has cached."""
    fetched = cluster.decides()
    assert fetched is not None and fetched.lender == "p1"
    return fetched


@pytest.mark.parametrize(
    ("bands", "reason", "ahead_s"),
    [
        ((), FetchReason.FASTER, 0.0),
        # 0.288 s and 2 s are more than 1.6 s
        ((URGENT,), FetchReason.SLOWER, 2.0),
        ((LATER,), FetchReason.FASTER, 0.0),
        ((URGENT, LATER), FetchReason.SLOWER, 2.0),
    ],
    ids=["nothing", "urgent", "later", "both"],
)
def test_a_loan_is_refused_for_what_goes_before_it_at_the_ingress_and_not_for_what_goes_after(
    bands: tuple[PortBand, ...], reason: FetchReason, ahead_s: float
) -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    cluster.agent_reports(*bands)
    fetched = decided(cluster)
    assert (fetched.reason, fetched.fetch) == (reason, reason is FetchReason.FASTER)
    assert fetched.terms["ahead_s"] == pytest.approx(ahead_s)
    assert fetched.fetch_s == pytest.approx(0.288 + ahead_s, rel=0.02)


@pytest.mark.parametrize(
    ("policy", "ahead_s"),
    [
        ("mfs", 2.0),
        # the level is shared by two flows, and the read's 1.6 MB move in 0.16 s
        ("fair", 0.32),
        # explicit deadlines first
        ("edf", 2.0),
        # the band's flows have 5 bytes left, by its key
        ("sjf", 2.0),
    ],
)
def test_the_policy_of_the_agent_says_what_goes_first(policy: str, ahead_s: float) -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    cluster.agent_reports(PortBand(1, (5.0,), 2, 20_000_000), policy=policy)
    assert decided(cluster).terms["ahead_s"] == pytest.approx(ahead_s)


@pytest.mark.parametrize(("waiting", "ahead_s"), [(0, 0.0), (1, 2.0), (2, 2.0), (9, 2.0)])
def test_the_level_of_a_read_falls_with_the_prompts_that_wait_before_its_own(
    waiting: int, ahead_s: float
) -> None:
    """Two prompts are in work at each prefill worker. A read behind one is in P_3, after what was there before."""
    cluster = Cluster()
    cluster.caches("p1", 100)
    for n in range(4):
        cluster.arrives(Request(f"before{n}", cluster.now_s, 10, 1))
    cluster.feed(ev.EngineStatus(cluster.now_s, "p0", 2, waiting, 0))
    cluster.agent_reports(PortBand(3, (0.0, 1.0, 7.0), 1, 20_000_000))
    assert decided(cluster).terms["ahead_s"] == pytest.approx(ahead_s)


@pytest.mark.parametrize(("age_s", "ahead_s"), [(0.0, 2.0), (0.5, 1.5), (1.9, 0.1), (2.5, 0.0)])
def test_what_goes_first_has_left_in_part_since_the_report(age_s: float, ahead_s: float) -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    cluster.agent_reports(URGENT)
    cluster.passes(age_s)
    assert decided(cluster).terms["ahead_s"] == pytest.approx(ahead_s)


def test_an_agent_that_is_silent_says_nothing() -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    before = decided(cluster)
    other = Cluster()
    other.caches("p1", 100)
    other.agent_reports(URGENT)
    # statuses stay fresh meanwhile
    other.passes(2.0)
    other.passes(2.0)
    after = decided(other)
    assert "ahead_s" not in after.terms
    assert (after.fetch, after.terms) == (before.fetch, pytest.approx(before.terms))


def test_ports_are_known_only_where_the_agents_of_both_nodes_report() -> None:
    """The lender p1 is on a node of its own."""
    for nodes, known in ((("n",), False), (("m",), False), (("n", "m"), True)):
        cluster = Cluster()
        cluster.feed(ev.EngineUp(cluster.now_s, "p1", Role.PREFILL, "g", "m", 8, 100_000))
        cluster.report("p1")
        cluster.caches("p1", 100)
        for node in nodes:
            # what comes into the lender's node is in nobody's way
            cluster.agent_reports(*((URGENT,) if node == "m" else ()), node=node)
        fetched = decided(cluster)
        assert fetched.fetch
        assert fetched.terms.get("ahead_s") == (0.0 if known else None)


def test_a_port_that_nobody_has_measured_is_as_fast_as_the_path() -> None:
    cluster = Cluster(bytes_per_s=20e6)
    cluster.caches("p1", 100)
    cluster.agent_reports(URGENT, bytes_per_s=None)
    assert decided(cluster).terms["ahead_s"] == pytest.approx(1.0)


@pytest.mark.parametrize(("reports", "move_s"), [(False, 0.32), (True, 0.16)])
def test_own_transfers_share_the_path_unless_agents_say_which_of_them_go_first(
    reports: bool, move_s: float
) -> None:
    """p1 sends a prompt's KV to d."""
    cluster = Cluster()
    cluster.caches("p1", 100)
    for n in range(2):
        routed = cluster.arrives(Request(f"moves{n}", cluster.now_s, 2000, 9))
        cluster.passes(2.128)
        done = ev.PrefillDone(
            cluster.now_s, routed.attempt_id, cluster.now_s + 30, 2000 * KV_BYTES_PER_TOKEN, 0
        )
        (sent,) = cluster.feed(done)
        assert isinstance(sent, RouteDecode)
    if reports:
        cluster.agent_reports(LATER)
    assert decided(cluster).terms["move_s"] == pytest.approx(move_s)


def test_a_decision_by_what_agents_report_is_made_again_from_the_journal() -> None:
    cluster = Cluster()
    cluster.caches("p1", 100)
    cluster.agent_reports(URGENT, LATER)
    cluster.passes(0.3)
    assert decided(cluster).terms["ahead_s"] == pytest.approx(1.7)
    lines = "\n".join(cluster.lines).splitlines()
    steps = list(replay(lines))
    assert len(steps) == cluster.n and all(step.equal for step in steps)
    assert any('"event":"FlowsReported"' in line for line in lines)
