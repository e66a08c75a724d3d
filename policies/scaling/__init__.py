"""Policies that decide how many engines of each role serve, wait warm, or start (DeepFlow 3 and 6, FlowKV 3.4 and B).

A policy is pure: `step(observation, state)` returns a plan, the next state and its reasons (`base`). The rooms:

    observation   what a policy sees: windows per request class, and every engine
    timing_fit    an engine's timing profile from its own totals
    capacity      requests/s that a number of engines of one role carries within TTFT, TPOT and KV
    forecast      arrivals ahead: level, damped trend, season, quantiles of the residuals
    joint         Sluice's own policy: roles enumerated together, the cheapest change wins
    warm_pool     how many engines wait warm, and which goes first
    sleep        scale to zero: any policy, and no engines where nothing comes
    moves         from wanted counts to single engines, within bounds and steps
    rivals        published rules behind the same interface
    journal       lines of observations and plans; `replay` decides them again
"""
