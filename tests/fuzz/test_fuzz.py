"""The short form of the fuzzer: a few thousand cases of each part, by a fixed seed (`make fuzz` is the long form)."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from benchmarks.document import OTHERS, RESULTS
from tests.fuzz import __main__ as fuzz
from tests.fuzz.__main__ import PARTS, part
from tests.fuzz.watch import GROWTH_BYTES, Watch

SHORT = {
    "requests": 1500, "keyed": 500, "board": 500, "frames": 1500, "agent": 80, "events": 5000, "configs": 300,
    "keys": 1000,
}  # fmt: skip
EXPECTED = {
    "requests": {"200", "400", "401", "404", "405", "415"}, "frames": {"taken", "ended"},
    "keyed": {"200", "400", "401", "429"}, "board": {"200", "400", "401", "403", "404"},
    "agent": {"taken", "ended", "flood"},
    "events": {"taken", "refused"}, "configs": {"taken", "refused"}, "keys": {"taken", "refused"},
}  # fmt: skip
"""Outcomes that each part has for certain, or it would not reach what it is about."""


@pytest.mark.parametrize("name", SHORT)
async def test_nothing_breaks(name: str) -> None:
    watch = await part(name, 1, SHORT[name])
    report = watch.report()
    assert watch.findings == [], json.dumps(report) + "\n" + "\n".join(watch.findings[:3])
    assert watch.cases >= SHORT[name]
    assert set(watch.kinds) >= EXPECTED[name]


def test_the_command_keeps_what_it_saw_where_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz.OUT == RESULTS / "fuzz"
    monkeypatch.setattr(fuzz, "OUT", tmp_path / "fuzz")
    monkeypatch.setattr(fuzz, "facts", lambda module, folders: {"code": "x"})
    monkeypatch.setattr("benchmarks.live.machine.at_the_end", lambda machine: machine)
    none = [word for name in PARTS if name != "keys" for word in (f"--{name}", "0")]
    assert fuzz.main([*none, "--keys", "20"]) == 0
    whole = json.loads((tmp_path / "fuzz/fuzz.json").read_text())
    rows = {row.name: row for row in OTHERS["fuzz/fuzz.json"].read(whole)}
    assert rows["keys: cases"].ours == 20 and rows["keys: findings"].met
    whole["parts"]["keys"]["findings"].append("broken")
    assert not {row.name: row for row in OTHERS["fuzz/fuzz.json"].read(whole)}["keys: findings"].met


async def test_what_goes_wrong_is_a_finding() -> None:
    with Watch() as watch:
        logging.getLogger("app").error("broken")
        logging.getLogger("app").warning("odd")
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)
    assert watch.findings[0] == "broken"
    assert "ZeroDivisionError" in watch.findings[1]
    assert len(watch.findings) == 2
    watch.rss = [10**8] * 10 + [10**8 + GROWTH_BYTES + 1] * 10
    assert "memory grew" in (watch.report() and watch.findings[-1])
