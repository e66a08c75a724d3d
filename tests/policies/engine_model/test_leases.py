"""Tests that each lease ends exactly once, and never while somebody reads it."""

from hypothesis import given
from hypothesis import strategies as st

from policies.engine_model.blocks import Allocation
from policies.engine_model.leases import LeaseTable


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
