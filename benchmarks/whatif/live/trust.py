"""Whether a simulated base is near enough to what was measured of the same requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TRUSTED = 0.15
"""Largest relative difference between a simulated and a measured figure with which the simulation is to be trusted."""
JUDGED = ("ttft_mean_s", "tpot_mean_s", "goodput_per_s", "slo_share")
"""The figures by which a simulation is judged; the difference of a share is taken in points."""


def trust(
    found: Mapping[str, float | None],
    simulated: Mapping[str, float | None],
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns whether a simulated base is near enough to what was measured, and the reason in words."""
    worst: tuple[float, str] | None = None
    compared = 0
    for name in JUDGED:
        ours, live = simulated.get(name), found.get(name)
        if ours is None or live is None:
            continue
        compared += 1
        share = name.endswith("_share")
        off = (
            abs(ours - live) if share else abs(ours - live) / abs(live) if live else math.inf if ours else 0.0
        )
        text = f"{(labels or {}).get(name, name)}: simulated {ours:.4g}, measured {live:.4g}"
        if worst is None or off > worst[0]:
            worst = (off, text)
    if worst is None:
        return {"ok": False, "text": "nothing was measured with which the simulation could be compared"}
    if worst[0] > TRUSTED:
        return {
            "ok": False,
            "text": f"{worst[1]}. They differ by more than {TRUSTED:.0%}: do not trust the other columns",
        }
    return {"ok": True, "text": f"{compared} figures agree within {TRUSTED:.0%}; the worst is {worst[1]}"}
