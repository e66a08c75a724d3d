"""The windows at many engines begin when the dashboard's memory is full."""

from app.dashboard.rings import KEEP
from benchmarks.watching.cost import Setup, quick


def test_the_dashboard_is_observed_with_a_full_memory() -> None:
    # a ring gets a value a second
    assert Setup().history_s >= KEEP
    assert quick(Setup()).history_s == 0.0
