"""Parameters of the scaling policies, from single tries on the seeds of `scaling_tuning`, which is to search evenly.

The loads are compressed and change fast, so `joint` forgets fast: with a drift of 1 its level follows by `level_gain`.
"""

from collections.abc import Mapping
from typing import Any

TUNED: Mapping[str, Mapping[str, Any]] = {
    "joint": {
        "calm_s": 30.0,
        "cool_down_s": 15.0,
        "band": 0.0,
        "headroom_most": 0.0,
        "quantile": 0.5,
        "warm_quantile": 0.6,
        "forecast": {"level_gain": 0.15, "drift": 1.0, "trend_gain": 0.1, "damping": 0.9},
        "margins": {"share": 0.95, "deviations": 1.0},
    },
    "ongoing": {
        "target_ongoing": 0.7,
        "decode_target": 8.0,
        "upscale_delay_s": 10.0,
        "downscale_delay_s": 60.0,
    },
    "latency_ratio": {"stabilise_s": 120.0, "tolerance": 0.3},
    "demand_rate": {"interval_s": 30.0},
    "regime_rule": {
        "thresholds": {
            "prefill_low": 0.01,
            "prefill_high": 0.02,
            "decode_low": 0.3,
            "decode_high": 0.5,
            "idle": 0.05,
        },
        "low_load": 0.1,
        "low_after_s": 60.0,
        "change_s": 20.0,
    },
}

SHIFT: Mapping[str, Mapping[str, Any]] = {
    "joint": {
        "band": 0.0,
        "headroom_most": 0.0,
        "quantile": 0.5,
        "forecast": {"drift": 1.0},
        "gain": 0.3,
        "switch_pause_s": 10.0,
        "margins": {"share": 0.95, "deviations": 1.0},
    },
    "ongoing": {"target_ongoing": 0.7, "decode_target": 8.0, "upscale_delay_s": 10.0},
    "latency_ratio": {"tolerance": 0.3},
    "demand_rate": {},
    "regime_rule": {
        "thresholds": {
            "prefill_low": 0.02,
            "prefill_high": 0.6,
            "decode_low": 0.3,
            "decode_high": 0.9,
            "idle": 0.12,
        }
    },
}
"""Parameters for the load whose ratio shifts, with each policy's own delays before it shrinks: there an engine that
stops is missed. Not searched: those above, and for the regime rule the thresholds of `flowkv_roles`.
"""

FORESEEN_HEADROOM = -0.08
"""Share above the mean rate that the foreseeing plan's engines carry; `capacity` has margins of its own."""
