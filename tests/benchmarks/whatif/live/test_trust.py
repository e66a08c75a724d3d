"""Whether a simulated base is near enough to what was measured."""

import math
from typing import Any

import pytest

from benchmarks.whatif.live.trust import trust


@pytest.mark.parametrize(
    ("found", "simulated", "ok", "text"),
    [
        ({"ttft_mean_s": 1.0}, {"ttft_mean_s": 1.14}, True, "agree within 15%"),
        ({"ttft_mean_s": 1.0}, {"ttft_mean_s": 1.16}, False, "do not trust"),
        ({"ttft_mean_s": 1.0}, {"ttft_mean_s": 0.84}, False, "do not trust"),
        # shares differ by points: 0.05 against 0.01 is five times as much, and four points
        ({"slo_share": 0.01}, {"slo_share": 0.05}, True, "agree"),
        ({"slo_share": 0.5}, {"slo_share": 0.7}, False, "do not trust"),
        ({"ttft_mean_s": 0.0}, {"ttft_mean_s": 0.1}, False, "do not trust"),
        ({"goodput_per_s": 0.0}, {"goodput_per_s": 0.0}, True, "agree"),
        ({"ttft_p95_s": 1.0}, {"ttft_p95_s": 9.0}, False, "nothing was measured"),
        (
            {"ttft_mean_s": 1.0, "tpot_mean_s": None},
            {"ttft_mean_s": 1.0, "tpot_mean_s": 3.0},
            True,
            "1 figures",
        ),
    ],
)
def test_trust(found: Any, simulated: Any, ok: bool, text: str) -> None:
    told = trust(found, simulated)
    assert told["ok"] is ok and text in told["text"]
    assert not math.isnan(len(told["text"]))
