"""Tests that each lease ends exactly once, and never while somebody reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.engine_model.blocks import Allocation
from policies.engine_model.leases import FULL_KV, LeaseTable, renewal_s, tokens_too_many


def alloc() -> Allocation:
    return Allocation([], 1)


def test_expires_in_order_of_grant() -> None:
    table = LeaseTable(10.0)
    table.grant("a", alloc(), 5, now_s=0.0)
    table.grant("b", alloc(), 5, now_s=1.0)
    assert table.next_expiry_s() == 10.0
    assert [lease.key for lease in table.expire(10.5)] == ["a"]
    assert [lease.key for lease in table.expire(10.5)] == []
    assert [lease.key for lease in table.expire(11.0)] == ["b"]
    assert len(table) == 0


def test_no_end_under_a_reader() -> None:
    table = LeaseTable(10.0)
    table.grant("a", alloc(), 5, now_s=0.0)
    assert table.begin_read("a") is not None
    assert table.expire(99.0) == []
    assert table.release("a") is None  # doomed, but still read
    assert table.begin_read("a") is None  # nobody else may start
    ended = table.end_read("a")
    assert ended is not None
    assert ended.key == "a"
    assert table.end_read("a") is None


def test_a_lost_reader_gives_the_lease_back() -> None:
    table = LeaseTable(10.0)
    table.grant("a", alloc(), 5, now_s=0.0)
    table.begin_read("a")
    assert table.reader_lost("a", now_s=5.0) is None
    assert table.begin_read("a") is not None  # another decode engine may read it
    assert table.reader_lost("a", now_s=10.0) is not None  # its time is over


def test_two_readers_the_last_one_ends_it() -> None:
    table = LeaseTable(10.0)
    table.grant("a", alloc(), 5, now_s=0.0)
    table.begin_read("a")
    table.begin_read("a")
    assert table.end_read("a") is None
    assert table.end_read("a") is not None


def test_unknown_keys_are_no_error() -> None:
    table = LeaseTable(10.0)
    assert table.begin_read("x") is None
    assert table.end_read("x") is None
    assert table.release("x") is None
    assert table.reader_lost("x", 0.0) is None
    assert table.next_expiry_s() is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["read", "end", "release", "lost", "tick"]), st.integers(0, 3)), max_size=40
    )
)
def test_each_lease_ends_exactly_once(ops: list[tuple[str, int]]) -> None:
    table = LeaseTable(5.0)
    readers = dict.fromkeys("abcd", 0)
    for key in readers:
        table.grant(key, alloc(), 1, now_s=0.0)
    ended: list[str] = []
    now_s = 0.0
    for op, pick in ops:
        key = "abcd"[pick]
        result = None
        if op == "read" and table.begin_read(key) is not None:
            readers[key] += 1
        elif op == "end" and readers[key]:
            readers[key] -= 1
            result = table.end_read(key)
        elif op == "lost" and readers[key]:
            readers[key] -= 1
            result = table.reader_lost(key, now_s)
        elif op == "release":
            result = table.release(key)
        elif op == "tick":
            now_s += 2.0
            expired = table.expire(now_s)
            assert all(readers[lease.key] == 0 for lease in expired)
            ended += [lease.key for lease in expired]
        if result is not None:
            assert readers[result.key] == 0
            ended.append(result.key)
        assert len(ended) == len(set(ended))
        assert len(table) == 4 - len(ended)


def test_a_renewed_lease_ends_later_than_one_that_was_granted_after_it() -> None:
    table = LeaseTable(10.0)
    table.grant("a", alloc(), 5, now_s=0.0)
    table.grant("b", alloc(), 5, now_s=1.0)
    assert table.renew("a", 10.0, now_s=8.0) == 10.0
    assert [lease.key for lease in table.expire(17.9)] == ["b"]
    assert table.next_expiry_s() == 18.0
    assert [lease.key for lease in table.expire(18.0)] == ["a"]


def test_a_renewal_never_shortens_a_lease_and_never_revives_one() -> None:
    table = LeaseTable(10.0)
    table.grant("a", alloc(), 5, now_s=0.0)
    assert table.renew("a", 2.0, now_s=1.0) == 9.0
    # its time is over, though nobody has noticed
    assert table.renew("a", 5.0, now_s=10.0) is None
    assert [lease.key for lease in table.expire(10.0)] == ["a"]
    assert table.renew("a", 5.0, now_s=10.0) is None
    table.grant("b", alloc(), 5, now_s=0.0)
    table.begin_read("b")
    table.release("b")
    assert table.renew("b", 5.0, now_s=1.0) is None  # doomed


def test_a_lost_reader_leaves_a_renewed_lease_its_time() -> None:
    table = LeaseTable(10.0)
    table.grant("a", alloc(), 5, now_s=0.0)
    table.begin_read("a")
    assert table.renew("a", 10.0, now_s=5.0) == 10.0
    assert table.next_expiry_s() is None
    assert table.reader_lost("a", now_s=11.0) is None
    assert table.next_expiry_s() == 15.0


def test_the_last_renewal_covers_all_that_is_left() -> None:
    assert renewal_s(30.0, 600.0, 390.0) == 30.0
    assert renewal_s(30.0, 600.0, 400.0) == 200.0
    assert renewal_s(30.0, 600.0, 599.0) == 1.0
    assert renewal_s(30.0, 600.0, 600.0) is None
    # never longer than it would have lasted: nothing is renewed
    assert renewal_s(30.0, 30.0, 10.0) == 20.0


def test_leases_give_back_what_is_too_much_while_prompts_wait() -> None:
    assert tokens_too_many(kv_usage=0.97, kv_tokens=10_000, waiting=1) == pytest.approx(200.0)
    assert tokens_too_many(kv_usage=0.97, kv_tokens=10_000, waiting=0) == 0.0
    assert tokens_too_many(kv_usage=FULL_KV, kv_tokens=10_000, waiting=1) == 0.0
    assert renewal_s(30.0, 600.0, 10.0, is_to_end=True) is None


def test_the_leases_that_were_granted_before_one_are_older() -> None:
    table = LeaseTable(30.0)
    for n, key in enumerate("abc"):
        table.grant(key, alloc(), 10 * (n + 1), now_s=0.0)
    table.renew("a", 90.0, now_s=5.0)
    assert [table.older_tokens(key) for key in "abc"] == [0, 10, 30]
    table.release("a")
    assert table.older_tokens("c") == 20


@given(
    st.floats(0.1, 100),
    st.floats(0.1, 1000),
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60),
)
def test_no_lease_lasts_longer_than_its_bound_however_it_is_renewed(
    lease_s: float, max_lease_s: float, asks: list[tuple[float, bool]]
) -> None:
    table = LeaseTable(lease_s)
    table.grant("a", alloc(), 5, now_s=0.0)
    now_s, end_s = 0.0, lease_s
    for part, pressed in asks:
        now_s += part * lease_s
        if table.expire(now_s):
            break
        granted_s = renewal_s(lease_s, max_lease_s, table.age_s("a", now_s), pressed)
        assert (granted_s is None) == (pressed or now_s >= max_lease_s)
        if granted_s is not None:
            left_s = table.renew("a", granted_s, now_s)
            assert left_s is not None
            assert now_s + left_s >= end_s - 1e-9
            end_s = now_s + left_s
        assert end_s <= max(lease_s, max_lease_s) * (1 + 1e-9)
    assert not table.expire(end_s - 1e-6) or end_s <= now_s
    table.expire(max(lease_s, max_lease_s) * (1 + 1e-9))
    assert "a" not in table


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 9)), max_size=30))
def test_leases_end_in_the_order_of_their_ends(renewals: list[tuple[str, float]]) -> None:
    table = LeaseTable(10.0)
    for n, key in enumerate("abcdef"):
        table.grant(key, alloc(), 1, now_s=n / 10)
    ends = {key: 10.0 + n / 10 for n, key in enumerate("abcdef")}
    for key, now_s in sorted(renewals, key=lambda item: item[1]):
        left_s = table.renew(key, 10.0, now_s)
        assert left_s is not None
        ends[key] = now_s + left_s
    assert table.next_expiry_s() == min(ends.values())
    ended = [lease.key for lease in table.expire(100.0)]
    assert [ends[key] for key in ended] == sorted(ends.values())
