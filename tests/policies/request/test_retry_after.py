"""The wait that a refusal names: never too short, within its bound, and not the same for all."""

import math
from collections import Counter

import pytest

from policies.dispatch.dispatcher import MOST_RETRY_AFTER_S
from policies.request.retry_after import SPREAD, named_s
from sluice import RetryPolicy


def ids(count: int) -> list[str]:
    """Returns ids as an ingress makes them one after the other: they differ in a few digits only."""
    return [f"3f9c04d1aa-{number:x}" for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("wait_s", "least", "most"),
    # rounded up, and then at most a quarter more, in whole seconds: 1.75 of 7 is 1, 2.5 of 10 is 2, 15 of 60
    [
        (0.0, 1, 1),
        (1.0, 1, 1),
        (3.0, 3, 3),
        (3.2, 4, 5),
        (4.0, 4, 5),
        (7.0, 7, 8),
        (9.01, 10, 12),
        (60.0, 60, 75),
    ],
)
def test_a_wait_is_rounded_up_and_named_a_quarter_longer_at_most(
    wait_s: float, least: int, most: int
) -> None:
    named = {named_s(wait_s, attempt_id) for attempt_id in ids(1000)}
    assert named == set(range(least, most + 1))
    assert all(wait_s <= one <= max(1, math.ceil(wait_s)) * (1 + SPREAD) for one in named)


def test_those_who_were_refused_together_come_back_over_all_the_seconds() -> None:
    counts = Counter(named_s(20.0, attempt_id) for attempt_id in ids(3000))
    # 20 to 25: six waits, 500 each
    assert len(counts) == 6
    assert all(350 < count < 650 for count in counts.values())


def test_a_refusal_that_is_decided_again_names_the_same_wait() -> None:
    # zlib's own check value of these nine bytes: 0xcbf43926 / 2^32 is 0.797, and floor(0.797 * 6) is 4
    assert named_s(20.0, "123456789") == named_s(19.5, "123456789") == 24.0


def test_the_clients_of_the_sdk_wait_for_as_long_as_a_refusal_ever_says() -> None:
    longest_s = max(named_s(MOST_RETRY_AFTER_S, attempt_id) for attempt_id in ids(1000))
    assert longest_s <= RetryPolicy().max_retry_after_s
