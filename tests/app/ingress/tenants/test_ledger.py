"""The arithmetic of limits: cases worked by hand, and properties over random histories."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.ingress.tenants.ledger import (
    Ledger,
    Limits,
    Meter,
    Need,
    Refusal,
    Reservation,
    never_fits,
    share_of,
)

ONE = Need(1, 1)


def reserved(found: Reservation | Refusal) -> Reservation:
    assert isinstance(found, Reservation)
    return found


def refused(found: Reservation | Refusal) -> Refusal:
    assert isinstance(found, Refusal)
    return found


def test_requests_drain_at_the_limits_rate() -> None:
    """6 a minute is one in 10 s: six at once, the seventh after 10 s, and at 4 s it has to wait for 6 s more."""
    ledger, limits = Ledger(), Limits(requests_per_min=6)
    for _ in range(6):
        reserved(ledger.reserve("k", limits, ONE, 0.0))
    assert refused(ledger.reserve("k", limits, ONE, 4.0)).wait_s == pytest.approx(6.0)
    # 6 - 4 x 6 / 60 = 5.6 are spent, which drain in 56 s
    assert ledger.meters("k", limits, 4.0).requests == Meter(6, 0, pytest.approx(56.0))
    reserved(ledger.reserve("k", limits, ONE, 10.0))
    assert refused(ledger.reserve("k", limits, ONE, 10.0)).limit == "requests"


def test_tokens_are_held_until_they_are_settled_and_only_used_ones_are_spent() -> None:
    ledger, limits = Ledger(), Limits(tokens_per_min=600)
    held = reserved(ledger.reserve("k", limits, Need(1, 500), 0.0))
    # 600 - 500 held; what is held does not drain, so the wait of a request for 200 is a guess
    assert refused(ledger.reserve("k", limits, Need(1, 200), 30.0)).used == 500
    small = reserved(ledger.reserve("k", limits, Need(1, 100), 30.0))
    ledger.settle(held, 60, 30.0)
    ledger.settle(small, 0, 30.0)
    # 60 spent at 30 s, of which 10 a second drain
    assert ledger.meters("k", limits, 33.0).tokens == Meter(600, 570, pytest.approx(3.0))
    reserved(ledger.reserve("k", limits, Need(1, 600), 36.0))


def test_what_a_request_uses_beyond_its_reservation_delays_the_next() -> None:
    ledger, limits = Ledger(), Limits(tokens_per_min=600)
    held = reserved(ledger.reserve("k", limits, Need(1, 100), 0.0))
    ledger.settle(held, 900, 0.0)
    # 900 + 100 - 600 = 400 have to drain at 10 a second
    assert refused(ledger.reserve("k", limits, Need(1, 100), 0.0)).wait_s == pytest.approx(40.0)
    reserved(ledger.reserve("k", limits, Need(1, 100), 40.0))


def test_sequences_run_in_parallel_up_to_the_limit() -> None:
    ledger, limits = Ledger(), Limits(parallel=3)
    two = reserved(ledger.reserve("k", limits, Need(2, 1), 0.0))
    assert refused(ledger.reserve("k", limits, Need(2, 1), 0.0)) == Refusal("parallel", 3, 2, 2, 1.0)
    one = reserved(ledger.reserve("k", limits, ONE, 0.0))
    ledger.settle(two, 1, 0.0)
    reserved(ledger.reserve("k", limits, Need(2, 1), 0.0))
    ledger.settle(one, 1, 0.0)


@pytest.mark.parametrize(
    ("limits", "need", "limit"),
    [(Limits(tokens_per_min=600), Need(1, 601), "tokens"), (Limits(parallel=3), Need(4, 1), "parallel")],
)
def test_what_can_never_fit_is_refused_without_a_time(limits: Limits, need: Need, limit: str) -> None:
    found = refused(Ledger().reserve("k", limits, need, 0.0))
    assert (found.limit, found.wait_s) == (limit, None)


def test_a_refused_request_costs_nothing() -> None:
    ledger, limits = Ledger(), Limits(requests_per_min=6, tokens_per_min=600, parallel=2)
    refused(ledger.reserve("k", limits, Need(1, 601), 0.0))
    assert ledger.account("k") is None


def test_keys_do_not_share_limits() -> None:
    ledger, limits = Ledger(), Limits(requests_per_min=1)
    reserved(ledger.reserve("a", limits, ONE, 0.0))
    reserved(ledger.reserve("b", limits, ONE, 0.0))
    refused(ledger.reserve("a", limits, ONE, 0.0))


def test_a_key_without_limits_is_never_refused() -> None:
    ledger = Ledger()
    for _ in range(100):
        reserved(ledger.reserve("k", Limits(), Need(1000, 10**9), 0.0))


def test_a_limit_that_is_lowered_counts_what_was_spent_before() -> None:
    ledger = Ledger()
    for _ in range(4):
        reserved(ledger.reserve("k", Limits(requests_per_min=60), ONE, 0.0))
    assert refused(ledger.reserve("k", Limits(requests_per_min=4), ONE, 0.0)).used == 4


def test_a_request_beyond_the_share_of_a_replica_waits_until_nothing_is_spent() -> None:
    """Of 600 tokens a minute a quarter is 150, which drain at 2.5 a second."""
    ledger, limits = Ledger(), Limits(tokens_per_min=600)
    held = reserved(ledger.reserve("k", limits, Need(1, 400), 0.0, 0.25))
    ledger.settle(held, 400, 0.0, 0.25)
    assert refused(ledger.reserve("k", limits, Need(1, 400), 0.0, 0.25)).wait_s == pytest.approx(160.0)
    reserved(ledger.reserve("k", limits, Need(1, 400), 160.0, 0.25))


@pytest.mark.parametrize(("limit", "replicas", "share"), [(9, 3, 3), (10, 3, 3), (1, 3, 1), (100, 7, 14)])
def test_a_share_is_whole_and_one_at_least(limit: int, replicas: int, share: int) -> None:
    assert share_of(limit, 1.0 / replicas) == share


def test_accounts_of_revoked_keys_go_once_nothing_runs() -> None:
    ledger = Ledger()
    held = reserved(ledger.reserve("gone", Limits(), ONE, 0.0))
    ledger.forget({"other"})
    assert ledger.account("gone") is not None
    ledger.settle(held, 1, 0.0)
    ledger.forget({"other"})
    assert ledger.account("gone") is None


@dataclass
class Spending:
    """Amounts of one key with their times, as the test keeps them."""

    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class LedgerMachine(RuleBasedStateMachine):
    """Random requests of two keys, which settle in any order with at most what they have reserved."""

    LIMITS = Limits(requests_per_min=7, tokens_per_min=500, parallel=4)

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now_s = 0.0
        self.open: list[Reservation] = []
        self.granted = {"a": Spending(), "b": Spending()}
        self.used = {"a": Spending(), "b": Spending()}

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(key=st.sampled_from("ab"), sequences=st.integers(1, 5), tokens=st.integers(1, 550))
    def reserve(self, key: str, sequences: int, tokens: int) -> None:
        before = self.ledger.meters(key, self.LIMITS, self.now_s)
        found = self.ledger.reserve(key, self.LIMITS, Need(sequences, tokens), self.now_s)
        if isinstance(found, Reservation):
            self.open.append(found)
            self.granted[key].at_s.append(self.now_s)
            return
        assert self.ledger.meters(key, self.LIMITS, self.now_s) == before
        if found.limit == "requests" and found.wait_s is not None:
            later_s = self.now_s + found.wait_s
            again = self.ledger.refusal(key, self.LIMITS, Need(1, 0), later_s)
            # looking ahead has drained the buckets, so time goes on from there
            self.now_s = later_s
            assert again is None or again.limit != "requests"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        held = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        used = data.draw(st.integers(0, held.need.tokens))
        self.ledger.settle(held, used, self.now_s)
        self.used[held.key_id].at_s.append(self.now_s)
        self.used[held.key_id].tokens.append(used)

    @invariant()
    def never_above_a_limit(self) -> None:
        for key in "ab":
            account = self.ledger.account(key)
            running = [held.need for held in self.open if held.key_id == key]
            if account is None:
                assert not running
                continue
            assert account.running == sum(need.sequences for need in running) <= 4
            assert account.held == sum(need.tokens for need in running)
            assert account.tokens.spent + account.held <= 500 + 1e-3
            assert account.requests.spent <= 7 + 1e-3

    @invariant()
    def no_window_has_more_than_bucket_and_rate(self) -> None:
        """From any moment on, t seconds see at most L + L t / 60 requests, and settled tokens."""
        for spending, limit in (
            *((self.granted[key], 7) for key in "ab"),
            *((self.used[key], 500) for key in "ab"),
        ):
            amounts = spending.tokens or [1] * len(spending.at_s)
            for first in range(len(amounts)):
                seconds = spending.at_s[-1] - spending.at_s[first]
                assert sum(amounts[first:]) <= limit + limit * seconds / 60 + 1e-3

    def teardown(self) -> None:
        """When all have ended, nothing is held, and after a minute nothing is spent: the whole limit is there."""
        for held in self.open:
            self.ledger.settle(held, held.need.tokens, self.now_s)
        for key in "ab":
            account = self.ledger.account(key)
            assert account is None or (account.held, account.running) == (0, 0)
            meters = self.ledger.meters(key, self.LIMITS, self.now_s + 60.001)
            assert meters == (Meter(7, 7, 0.0), Meter(500, 500, 0.0))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 7), st.floats(0, 20), st.integers(1, 600)), max_size=60),
)
@settings(deadline=None)
def test_replicas_with_their_shares_hold_the_rate_together(
    replicas: int, steps: list[tuple[int, float, int]]
) -> None:
    """In any window the sum over the replicas is the rate, the burst, and one request beyond the share of each."""
    ledgers, limits = [Ledger() for _ in range(replicas)], Limits(tokens_per_min=600)
    now_s, granted = 0.0, list[tuple[float, int]]()
    for which, wait_s, tokens in steps:
        now_s += wait_s
        ledger, share = ledgers[which % replicas], 1.0 / replicas
        found = ledger.reserve("k", limits, Need(1, tokens), now_s, share)
        if isinstance(found, Reservation):
            ledger.settle(found, tokens, now_s, share)
            granted.append((now_s, tokens))
    for first, (from_s, _) in enumerate(granted):
        for until_s, _ in granted[first:]:
            window = sum(tokens for at_s, tokens in granted[first:] if at_s <= until_s)
            beyond = (replicas - 1) * 600
            assert window <= 600 + (until_s - from_s) * 10 + beyond + 1e-3


def test_what_fits_no_account_is_known_without_one() -> None:
    limits = Limits(requests_per_min=1, tokens_per_min=100, parallel=4)
    assert never_fits(limits, Need(4, 100)) is None
    for need, limit in ((Need(5, 1), "parallel"), (Need(1, 101), "tokens")):
        refused = never_fits(limits, need)
        assert refused is not None
        assert (refused.limit, refused.wait_s) == (limit, None)
    assert never_fits(Limits(), Need(10**6, 10**9)) is None
