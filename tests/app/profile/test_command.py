"""The command against a whole ingress and router on loopback, whose engines follow a script."""

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.wire import messages as wire
from app.admin_key import key_path
from app.ingress.config import IngressConfig
from app.profile.command import COMPLETE, INCOMPLETE, UNUSABLE, WRONG, command
from app.profile.file import load_heatmap
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig, ScriptedEngine, pair, rig, until

STALE_S = 600.0
"""Age from which a status is stale: the engines here report once, and a slow test must not make them stale."""


@pytest.fixture(autouse=True)
def may_administer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Rig]:
    """A prefill, a decode and a colocated engine; the colocated one takes 100 ms a token, the other pair none."""
    engines = [*pair(tmp_path), ScriptedEngine("c", "colocated", tmp_path, step_s=0.1)]
    async with rig(tmp_path, engines, status_stale_s=STALE_S) as running:
        yield running


async def profile(out: Path, url: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    given = ["heatmap", "--url", url, "--out", str(out), "--prefill-tokens", "4,8", "--ratios", "0.5,1"]
    given += ["--rates", "200", "--requests", "2", "--vocabulary", "900", *words]
    return await asyncio.to_thread(command.run, parser.parse_args(given))


def data(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def asked(engine: ScriptedEngine) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of the requests that it computed."""
    return [(len(m.tokens), m.params["max_tokens"]) for m in engine.received if isinstance(m, wire.Decode)]


async def test_every_cell_is_measured_in_both_modes(made: Rig, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    # far more than a busy machine adds to the requests of the other pair
    made.engines["c"].step_s = 0.5
    assert await profile(out, made.url) == COMPLETE
    # Warm-up: the first point once in each mode. Then 2 requests an engine: 2 colocated, 4 disaggregated.
    points = [(4, 2), (4, 4), (8, 4), (8, 8)]
    assert sorted(asked(made.engines["c"])) == sorted([points[0], *points * 2])
    assert sorted(asked(made.engines["d"])) == sorted([points[0], *points * 4])
    assert len(made.engines["p"].of(wire.Prefill)) == 17
    prompts = [tuple(m.tokens) for e in made.engines.values() for m in e.of(wire.Decode)]
    assert len(set(prompts)) == len(prompts)
    found = data(out)
    assert found["provenance"]["engines_per_mode"] == {"colocated": 1, "disaggregated": 2}
    # 500 ms a token against none.
    assert all(cell > 0 for row in found["heatmap"]["cells"] for cell in row)
    assert load_heatmap(str(out), Path("/"))["prefill_tokens"] == [4, 8]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


async def test_a_second_run_measures_only_what_is_missing(made: Rig, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    assert await profile(out, made.url) == COMPLETE
    first, found = len(asked(made.engines["d"])), data(out)
    found["pairs"].pop()
    out.write_text(json.dumps(found))
    assert await profile(out, made.url) == COMPLETE
    assert len(asked(made.engines["d"])) - first == 1 + 4  # the warm-up, and one point
    assert len(data(out)["provenance"]["runs"]) == 2
    assert await profile(out, made.url, "--seed", "5") == WRONG
    assert await profile(out, made.url, "--seed", "5", "--fresh") == COMPLETE


async def test_a_budget_ends_it_and_says_what_is_missing(
    made: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "map.json"
    made.engines["c"].step_s = 60.0
    assert await profile(out, made.url, "--budget-s", "0.3") == UNUSABLE
    assert data(out)["heatmap"] is None
    assert "the budget left out: 4->2 at 200/s, 4->4" in capsys.readouterr().err
    made.engines["c"].step_s = 0.0
    assert await profile(out, made.url) == COMPLETE
    found = data(out)
    found["pairs"] = found["pairs"][:2]
    out.write_text(json.dumps(found))
    made.engines["c"].step_s = 60.0
    assert await profile(out, made.url, "--budget-s", "0.3") == INCOMPLETE
    assert data(out)["marks"] == [["measured", "measured"], ["interpolated", "interpolated"]]
    assert len(data(out)["pairs"]) == 2
    said = capsys.readouterr()
    assert "2 of 4 cells measured" in said.out
    assert "the budget left out: 8->4 at 200/s, 8->8 at 200/s" in said.err


async def test_what_does_not_fit_is_told_and_a_role_that_went_is_missed(
    made: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "map.json"
    words = ["--prefill-tokens", "8,900", "--ratios", "0.02,0.5"]  # the context is 1024 tokens
    assert await profile(out, made.url, *words) == INCOMPLETE
    assert data(out)["marks"] == [["measured", "measured"], ["measured", "interpolated"]]
    assert "longer than the context: 900->450 at 200/s" in capsys.readouterr().err
    await made.engines["d"].stop()
    await until(lambda: made.connections.ready() is not None or len(made.connections.engines()) == 2)
    assert await profile(out, made.url, *words) == WRONG
    assert "no ready decode engine" in capsys.readouterr().err


async def test_what_cannot_be_measured_is_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "map.json"
    async with rig(tmp_path, pair(tmp_path)) as made:
        assert await profile(out, made.url) == WRONG
        assert "no ready colocated engine" in capsys.readouterr().err
        assert await profile(out, "http://127.0.0.1:1") == WRONG
        assert "cannot be reached" in capsys.readouterr().err
        assert await profile(out, made.url, "--colocated-url", made.url) == WRONG
        assert "belong together" in capsys.readouterr().err
    assert not out.exists()


async def test_with_admin_keys_it_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [*pair(tmp_path), ScriptedEngine("c", "colocated", tmp_path)]
    keyed = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, admin_keys=("an admin key",))
    monkeypatch.delenv("SLUICE_ADMIN_KEY")
    async with rig(tmp_path, engines, keyed, status_stale_s=STALE_S) as made:
        assert await profile(tmp_path / "map.json", made.url) == WRONG
        assert "401: Administration needs one of the admin keys" in capsys.readouterr().err
        # the key of a server of this machine is read from its file
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        port = made.listener.port
        key_path(port).parent.mkdir(mode=0o700)
        key_path(port).touch(mode=0o600)
        key_path(port).write_text("an admin key")
        assert await profile(tmp_path / "of-file.json", made.url) == COMPLETE
        key_path(port).unlink()
        monkeypatch.setenv("SLUICE_ADMIN_KEY", "an admin key")
        assert await profile(tmp_path / "map.json", made.url) == COMPLETE


async def test_two_deployments_need_no_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folders = tmp_path / "map.json", [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    whole, split = [ScriptedEngine("c", "colocated", folders[0])], pair(folders[1])
    async with (
        rig(folders[0], whole, status_stale_s=STALE_S) as left,
        rig(folders[1], split, status_stale_s=STALE_S) as right,
    ):
        words = ["--colocated-url", left.url, "--disaggregated-url"]
        assert await profile(out, "http://unused", *words, right.url) == COMPLETE
        assert len(asked(whole[0])) == 1 + 4 * 2
        assert len(asked(right.engines["d"])) == 1 + 4 * 4
        swapped = ["--colocated-url", right.url, "--disaggregated-url", left.url]
        assert await profile(out, "http://unused", *swapped) == WRONG
        assert "no ready colocated engine" in capsys.readouterr().err
