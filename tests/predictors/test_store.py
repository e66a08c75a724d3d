"""Model files: what is stored comes back; what is damaged or foreign is refused, and the old model stays."""

import json
from dataclasses import replace

import numpy as np
import pytest

from predictors import store
from predictors.live import LivePredictor
from predictors.protocol import Arrival, PredictorError
from predictors.store import (
    ModelRefused,
    Pointer,
    load,
    load_current,
    promote,
    prune,
    read_metadata,
    read_pointer,
    save,
)
from predictors.train import metadata_of

from .conftest import CONFIG


@pytest.fixture
def metadata(fitted, traffic):
    return metadata_of(fitted.model, traffic[:700], "test", CONFIG, [])


def test_round_trip(tmp_path, fitted, metadata, traffic_features):
    path = save(tmp_path / "models", fitted.model, metadata)
    loaded, read = load(path)
    rows, ages = traffic_features[700:], np.arange(200)
    for window in (1, 24, 96):
        before, after = fitted.predict(rows, ages, window, True), loaded.predict(rows, ages, window, True)
        assert np.array_equal(before.p_finish, after.p_finish)
        assert np.array_equal(before.mean_remaining_tokens, after.mean_remaining_tokens)
        assert np.array_equal(before.total.quantiles_tokens, after.total.quantiles_tokens)
    assert read.version == metadata.version
    assert read.windows == (1, 96)
    assert (read.requests, read.first_arrival_s, read.last_arrival_s) == (700, 0.0, 699.0)
    assert list(tmp_path.glob("**/.*.tmp")) == []


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_file_cut_short_is_refused_and_the_old_model_stays(
    tmp_path, fitted, metadata, traffic_features, share
):
    live = LivePredictor()
    save(tmp_path, fitted.model, replace(metadata, version="old"))
    promote(tmp_path, "old")
    assert live.adopt_promoted(tmp_path)
    before = live.predict(traffic_features[:5], np.zeros(5, dtype=np.int64), 24).p_finish
    path = save(tmp_path, fitted.model, replace(metadata, version="new"))
    promote(tmp_path, "new")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert not live.adopt_promoted(tmp_path)
    stats = live.stats()
    assert (stats.model_version, stats.refused_models) == ("old", 1)
    assert "fit a new one" in stats.last_refusal
    assert np.array_equal(
        live.predict(traffic_features[:5], np.zeros(5, dtype=np.int64), 24).p_finish, before
    )


def test_a_flipped_bit_is_refused(tmp_path, fitted, metadata):
    path = save(tmp_path, fitted.model, metadata)
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(ModelRefused, match="checksum"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features_version": 99}, "features version 99"),
        ({"features_digest": "0"}, "fit it again with this code"),
        ({"versions": {"lightgbm": "3.3.5"}}, "lightgbm 3.3.5"),
        ({"format_version": 7}, "file format 7"),
    ],
)
def test_models_of_other_features_and_versions_are_refused(tmp_path, fitted, metadata, change, message):
    path = save(tmp_path, fitted.model, replace(metadata, **change))
    with pytest.raises(ModelRefused, match=message):
        load(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.sluicemodel").write_bytes(b"something else")
    with pytest.raises(ModelRefused, match="not a Sluice predictor"):
        load(tmp_path / "x.sluicemodel")
    with pytest.raises(ModelRefused, match="cannot be read"):
        load(tmp_path / "none.sluicemodel")


def test_metadata_of_an_unknown_field_is_refused(tmp_path, fitted, metadata):
    path = save(tmp_path, fitted.model, metadata)
    raw = path.read_bytes()
    start = len(b"SLUICE-PREDICTOR\n")
    size = int.from_bytes(raw[start : start + 8], "big")
    header = json.dumps({**json.loads(raw[start + 8 : start + 8 + size]), "colour": 1}).encode()
    path.write_bytes(raw[:start] + len(header).to_bytes(8, "big") + header + raw[start + 8 + size :])
    with pytest.raises(ModelRefused, match="colour"):
        read_metadata(path)


def test_promotion_keeps_the_previous_and_refuses_what_does_not_load(tmp_path, fitted, metadata):
    assert read_pointer(tmp_path) == Pointer(None, None)
    assert load_current(tmp_path) is None
    for version in ("a", "b", "c"):
        save(tmp_path, fitted.model, replace(metadata, version=version))
    promote(tmp_path, "a")
    assert promote(tmp_path, "b") == Pointer("b", "a")
    assert promote(tmp_path, "b") == Pointer("b", "a")
    (tmp_path / "c.sluicemodel").write_bytes(b"")
    with pytest.raises(ModelRefused):
        promote(tmp_path, "c")
    assert read_pointer(tmp_path) == Pointer("b", "a")
    assert load_current(tmp_path)[1].version == "b"
    with pytest.raises(PredictorError, match="there already"):
        save(tmp_path, fitted.model, replace(metadata, version="a"))


def test_pruning_spares_current_and_previous(tmp_path, fitted, metadata):
    for version in ("a", "b", "c", "d"):
        save(tmp_path, fitted.model, replace(metadata, version=version))
    promote(tmp_path, "a")
    promote(tmp_path, "b")
    assert prune(tmp_path, keep=1) == ["c"]
    assert sorted(p.stem for p in tmp_path.glob("*.sluicemodel")) == ["a", "b", "d"]


def test_a_damaged_pointer_is_refused(tmp_path):
    (tmp_path / "current.json").write_text("{")
    with pytest.raises(ModelRefused, match="delete it"):
        read_pointer(tmp_path)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, fitted, metadata, monkeypatch):
    def refuse(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(store.os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, fitted.model, metadata)
    assert list(tmp_path.iterdir()) == []


def test_live_serves_survival_first_then_the_model_then_back(tmp_path, fitted, metadata):
    live = LivePredictor()
    features = live.arrive(Arrival("r", 0.0, 100, template_key="short"))
    assert live.predict([features], np.array([0]), 24).valid.all()
    assert live.stats().model_version is None
    live.adopt(fitted, metadata)
    assert live.predict([features], np.array([0]), 24).p_finish[0] == pytest.approx(
        fitted.predict([features], np.array([0]), 24).p_finish[0]
    )
    assert live.predict([features], np.array([0]), 400).valid.all()  # survival: the model does not cover 400
    assert live.revert()
    assert live.stats().model_version is None
    assert not live.revert()
