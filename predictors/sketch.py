"""A sketch holds the recent lengths of a group of requests as 17 quantiles (knots), from which survival is
computed.

A request carries the sketches of its groups (client, template, ...) from its arrival on, so that a batch of
predictions needs no table look-ups. The distribution function F is linear between neighbouring knots, and jumps
where knots coincide (a length limit that many requests hit). With few lengths the knots are those lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictors.protocol import FeatureArray, FloatArray, IntArray

KNOTS = 17
_STEP = 1.0 / (KNOTS - 1)


def knots(ascending: Sequence[int]) -> list[float]:
    """Returns the order statistics of `ascending` that are nearest to the quantiles 0, 1/16, ..., 1. At least one
    length is needed.
    """
    top = len(ascending) - 1
    return [float(ascending[int(k * _STEP * top + 0.5)]) for k in range(KNOTS)]


def share_and_moment(sketch: FeatureArray, prefix: FloatArray, at: IntArray) -> tuple[FloatArray, FloatArray]:
    """Returns F(at) and the integral of t dF(t) up to `at`, each (n,), for sketches (n, KNOTS) without NaN and
    their prefix sums (n, KNOTS).
    """
    rows = np.arange(at.size)
    # The comparison is in the sketch's own type, because widening the sketch would cost more than all the rest.
    below = np.count_nonzero(sketch <= at.astype(sketch.dtype)[:, None], axis=1)
    left = np.clip(below - 1, 0, KNOTS - 2)
    a = sketch[rows, left].astype(np.float64)
    b = sketch[rows, left + 1].astype(np.float64)
    part = np.clip((at - a) / np.maximum(b - a, 1e-9), 0.0, 1.0)
    part[below == KNOTS] = 1.0  # Also if the last knots coincide.
    # The sum of the trapezoids below `left`, in which every knot but the two ends counts twice.
    done = prefix[rows, left] - (sketch[:, 0] + a) / 2.0
    inside = below > 0
    moment = _STEP * (done + part * (a + part * (b - a) / 2.0))
    return np.where(inside, (left + part) * _STEP, 0.0), np.where(inside, moment, 0.0)


def window(
    sketch: FeatureArray, counts: FloatArray, ages: IntArray, windows: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns (alive, inside, remainders), each (n,): how many of the group's lengths lie beyond the age, how many
    of those lie within the window, and the sum of what the latter have left beyond the age. All three are 0 where
    the group is absent (count 0, knots NaN).
    """
    n = ages.size
    there = np.flatnonzero(counts > 0)
    everywhere = there.size == n
    if not everywhere:
        sketch, counts, ages, windows = sketch[there], counts[there], ages[there], windows[there]
    prefix = np.cumsum(sketch, axis=1, dtype=np.float64)
    f_start, m_start = share_and_moment(sketch, prefix, ages)
    f_end, m_end = share_and_moment(sketch, prefix, ages + windows)
    alive = counts * (1.0 - f_start)
    inside = counts * (f_end - f_start)
    remainders = np.maximum(counts * (m_end - m_start) - inside * ages, 0.0)
    if everywhere:
        return alive, inside, remainders
    return _spread(alive, there, n), _spread(inside, there, n), _spread(remainders, there, n)


def _spread(values: FloatArray, rows: IntArray, n: int) -> FloatArray:
    made = np.zeros(n)
    made[rows] = values
    return made


def blend(
    p: FloatArray,
    mu: FloatArray,
    group: tuple[FloatArray, FloatArray, FloatArray],
    shrink: float,
) -> tuple[FloatArray, FloatArray]:
    """Returns (p', mu'), the broader answer (p, mu) corrected by a group's (alive, inside, remainders). `shrink` is
    the broader answer's weight in requests. The formula is in `memorise.py`.
    """
    alive, inside, remainders = group
    prior = shrink * p
    mass = inside + prior
    new_mu = np.where(mass > 1e-9, (remainders + prior * mu) / np.maximum(mass, 1e-9), mu)
    return mass / (alive + shrink), new_mu
