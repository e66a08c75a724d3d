"""The latest requests of a running application, read from events, and what is measured of them."""

import pytest

from benchmarks.whatif.live.requests import measured, requests_of
from policies.request.terms import Mode, Terms
from policies.state import events as ev
from tests.benchmarks.whatif.live.made import arrived, closed, seen


def test_requests_are_read_from_events() -> None:
    events = [
        arrived("a-1", 10.0),
        arrived("b-1", 11.0, slots=2),
        # a goes on in another attempt, and ends with it
        closed("a-1", 12.0, "failed", told=False),
        # whose prefill computes the 20 tokens of the answer that its client has already, too
        arrived("a-2", 12.0, 120),
        ev.PrefillDone(12.5, "a-2", 40.0, 2_400, 0),
        closed("a-2", 13.0),
        closed("b-1", 14.0),
        closed("unknown-1", 15.0),
        arrived("c-1", 16.0),
        closed("c-1", 17.0, "rejected", 0),
        arrived("d-1", 18.0),
        closed("d-1", 19.0, "cancelled"),
        arrived("open-1", 20.0),
    ]
    found, kv_bytes, left_out = requests_of(events)
    assert [(one.at_s, one.ended_s, one.outcome, one.output_tokens) for one in found] == [
        (10.0, 13.0, "finished", 11),
        # what was refused would have had up to its limit
        (16.0, 17.0, "rejected", 50),
    ]
    assert kv_bytes == (2_400.0, 120.0)
    # two choices, and a client that left
    assert left_out == 2


def test_what_clients_asked_for_is_read_and_what_the_simulation_lacks_is_marked() -> None:
    asked = [
        Terms(-1, "interactive", tenant="a key", weight=4.0, timeout_s=600.0),
        Terms(timeout_s=None),
        Terms(timeout_s=5.0),
        Terms(local=True),
        Terms(mode=Mode.COLOCATED),
    ]
    events: list[ev.Event] = []
    for number, terms in enumerate(asked):
        events += [arrived(f"r{number}-1", float(number), terms=terms), closed(f"r{number}-1", 100.0)]
    found, _, _ = requests_of(events)
    first, second, *others = found
    assert (first.priority, first.request_class, first.tenant, first.weight) == (
        -1,
        "interactive",
        "a key",
        4.0,
    )
    assert (second.priority, second.request_class, second.tenant, second.weight) == (0, "standard", "", 1.0)
    assert [first.lost, second.lost] == [False, False]
    assert [one.lost for one in others] == [True] * 3


def test_blocks_of_512_tokens_are_named_by_the_last_small_block_in_them() -> None:
    hashes = tuple(range(1, 69))
    [one], _, _ = requests_of(
        [arrived("a-1", 1.0, 1_100, block_hashes=hashes, block_tokens=16), closed("a-1", 2.0)]
    )
    # 1,100 tokens have two full blocks, of 32 small ones each
    assert one.hash_ids == (32, 64)
    [odd], _, _ = requests_of(
        [arrived("a-1", 1.0, 1_100, block_hashes=hashes, block_tokens=48), closed("a-1", 2.0)]
    )
    assert odd.hash_ids == ()


def test_what_was_measured_is_judged_by_one_pair_of_objectives() -> None:
    requests = [seen(float(i)) for i in range(8)] + [seen(8.0, 0.5), seen(9.0, None, "rejected")]
    found = measured(requests, (0.2, None))
    # from the first arrival to the last end there are ten seconds
    assert found["slo_share"] == pytest.approx(0.8)
    assert found["goodput_per_s"] == pytest.approx(0.8)
    assert found["throughput_tok_s"] == pytest.approx(9 * 11 / 10)
    assert found["ttft_mean_s"] == pytest.approx((8 * 0.1 + 0.5) / 9)
    assert found["tpot_p95_s"] == pytest.approx(0.01)
    assert measured(requests, (None, None))["slo_share"] is None
