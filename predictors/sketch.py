"""A group's recent lengths as 17 quantiles, and survival read off them.

A request carries the sketches of its groups (client, template, ...) from its arrival on, so that a batch of
predictions needs no table look-ups: F is linear between neighbouring knots, and jumps where knots coincide (a
length limit that many requests hit). With few lengths the knots are those lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictors.protocol import FloatArray, IntArray

KNOTS = 17
_STEP = 1.0 / (KNOTS - 1)


def knots(ascending: Sequence[int]) -> list[float]:
    """The nearest order statistics at 0, 1/16, ..., 1 of at least one length."""
    top = len(ascending) - 1
    return [float(ascending[int(k * _STEP * top + 0.5)]) for k in range(KNOTS)]


def share_and_moment(sketch: FloatArray, at: FloatArray) -> tuple[FloatArray, FloatArray]:
    """F(at) and the integral of t dF(t) up to `at`, each (n,), for sketches (n, KNOTS) without NaN."""
    below = np.sum(sketch <= at[:, None], axis=1)
    left = np.clip(below - 1, 0, KNOTS - 2)
    rows = np.arange(at.size)
    a, b = sketch[rows, left], sketch[rows, left + 1]
    part = np.clip(np.divide(at - a, b - a, out=np.ones_like(at), where=b > a), 0.0, 1.0)
    part = np.where(below == 0, 0.0, np.where(below == KNOTS, 1.0, part))
    segments = _STEP * (sketch[:, :-1] + sketch[:, 1:]) / 2.0
    moments = np.concatenate((np.zeros((at.size, 1)), np.cumsum(segments, axis=1)), axis=1)
    inner = part * _STEP * (a + (a + part * (b - a))) / 2.0
    return (left + part) * _STEP * (below > 0), np.where(below > 0, moments[rows, left] + inner, 0.0)


def window(
    sketch: FloatArray, counts: FloatArray, ages: IntArray, windows: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """How many of the group's lengths lie beyond the age, how many of them within the window, and the sum of
    what those had left: (alive, inside, remainders), each (n,). A group that is absent (NaN) has 0 of
    each.
    """
    alive, inside, remainders = (np.zeros(ages.size) for _ in range(3))
    there = np.flatnonzero(np.isfinite(sketch[:, 0]) & (counts > 0))
    if there.size:
        q, n = sketch[there], counts[there]
        start, end = ages[there].astype(np.float64), (ages + windows)[there].astype(np.float64)
        f_start, m_start = share_and_moment(q, start)
        f_end, m_end = share_and_moment(q, end)
        alive[there] = n * (1.0 - f_start)
        inside[there] = n * (f_end - f_start)
        remainders[there] = np.maximum(n * (m_end - m_start) - inside[there] * start, 0.0)
    return alive, inside, remainders


def blend(
    p: FloatArray,
    mu: FloatArray,
    group: tuple[FloatArray, FloatArray, FloatArray],
    shrink: float,
) -> tuple[FloatArray, FloatArray]:
    """(p', mu') after the group is heard, with the broader answer's weight `shrink`: the formula of
    `memorise.py`.
    """
    alive, inside, remainders = group
    mass = inside + shrink * p
    new_mu = np.divide(remainders + shrink * p * mu, mass, out=mu.copy(), where=mass > 1e-9)
    return mass / (alive + shrink), new_mu
