"""Parameters of the scaling policies: the best of the points that `scaling_tuning` tried alike for all of them."""

from collections.abc import Mapping
from typing import Any

TUNED: Mapping[str, Mapping[str, Any]] = {
    "joint": {
        "calm_s": 15.0,
        "cool_down_s": 30.0,
        "switch_pause_s": 10.0,
        "band": 0.05,
        "headroom_most": 0.2,
        "quantile": 0.5,
        "warm_quantile": 0.6,
        "gain": 0.1,
        "forecast": {"level_gain": 0.15, "drift": 0.1, "damping": 0.9},
        "margins": {"share": 0.9, "deviations": 2.0},
    },
    "ongoing": {
        "target_ongoing": 0.5,
        "decode_target": 4.0,
        "upscale_delay_s": 5.0,
        "downscale_delay_s": 30.0,
        "look_back_s": 30.0,
    },
    "latency_ratio": {"most_ratio": 1.5, "mean_s": 15.0, "tolerance": 0.3, "stabilise_s": 300.0},
    "demand_rate": {"interval_s": 180.0, "queue_high": 2.0, "kv_high": 0.95, "kv_low": 0.1},
    "regime_rule": {},
}
"""For the day; the burst and the fleets of up to 1,024 engines have the same."""

SHIFT: Mapping[str, Mapping[str, Any]] = {
    "joint": {
        "calm_s": 120.0,
        "cool_down_s": 15.0,
        "switch_pause_s": 10.0,
        "band": 0.15,
        "headroom_most": 0.5,
        "quantile": 0.9,
        "warm_quantile": 0.95,
        "gain": 0.3,
        "forecast": {"level_gain": 0.15, "drift": 0.003, "damping": 0.8},
        "margins": {"share": 0.95, "deviations": 1.0},
    },
    "ongoing": {
        "target_ongoing": 0.5,
        "decode_target": 10.0,
        "upscale_delay_s": 5.0,
        "downscale_delay_s": 30.0,
        "look_back_s": 10.0,
    },
    "latency_ratio": {},
    "demand_rate": {"interval_s": 180.0, "queue_high": 1.0, "kv_high": 0.5, "kv_low": 0.2},
    "regime_rule": {
        "thresholds": {
            "prefill_low": 0.005,
            "prefill_high": 0.05,
            "decode_low": 0.2,
            "decode_high": 0.9,
            "idle": 0.2,
        },
        "low_load": 0.2,
        "low_after_s": 300.0,
        "switch_s": 10.0,
        "change_s": 20.0,
    },
}
"""For the load whose ratio shifts, on engines that are all that there are."""

FORESEEN_HEADROOM = -0.08
"""Share above the mean rate that the foreseeing plan's engines carry; `capacity` has margins of its own."""
