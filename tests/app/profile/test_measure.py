"""The budget of a measurement: what it ends is left, what fails for another reason is given."""

from typing import Any

import pytest

from app.profile.measure import measure


class Unreachable:
    """A runner whose target's network gives up."""

    async def warm_up(self, point: Any) -> None:
        raise TimeoutError("connection timed out")


@pytest.mark.parametrize("budget_s", [None, 3600.0])
async def test_a_connection_that_times_out_is_not_the_budget(budget_s: float | None) -> None:
    with pytest.raises(TimeoutError, match="connection timed out"):
        await measure(Unreachable(), [object()], budget_s, lambda pair, s: None)  # type: ignore[arg-type, list-item]
