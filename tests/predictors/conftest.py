"""Synthetic traffic with known answers, and one small fitted model that many tests share."""

from __future__ import annotations

import numpy as np
import pytest

from predictors.features import replay
from predictors.lgbm import LgbmPredictor
from predictors.lgbm_fit import LgbmConfig, fit_lgbm
from predictors.protocol import Arrival, Features, Outcome, WindowRange

CONFIG = LgbmConfig(
    windows=WindowRange(1, 96),
    max_rows=8_000,
    blocks=2,
    max_trees=12,
    regressor_max_trees=6,
    quantile_max_trees=24,
)


def two_kinds(requests: int, seed: int, informative: bool = True) -> list[Outcome]:
    """Requests of two templates: "short" ones of 20-60 tokens and "long" ones of 300-500. Without
    `informative` the template says nothing about the length.
    """
    rng = np.random.default_rng(seed)
    made = []
    for i in range(requests):
        short = bool(rng.random() < 0.5)
        output = int(rng.integers(20, 61)) if short else int(rng.integers(300, 501))
        shown = short if informative else bool(rng.random() < 0.5)
        arrival = Arrival(
            f"r{i}",
            float(i),
            int(rng.integers(50, 2_000)),
            template_key="short" if shown else "long",
            session=f"s{i // 3}",
        )
        made.append(Outcome(arrival, output, float(i) + 1.0 + 0.01 * output))
    return made


@pytest.fixture(scope="session")
def traffic() -> list[Outcome]:
    return two_kinds(900, seed=3)


@pytest.fixture(scope="session")
def traffic_features(traffic: list[Outcome]) -> list[Features]:
    return replay(traffic)


@pytest.fixture(scope="session")
def fitted(traffic: list[Outcome], traffic_features: list[Features]) -> LgbmPredictor:
    return fit_lgbm(traffic[:700], traffic_features[:700], CONFIG)
