"""The progress line: drawn on a terminal, silent elsewhere."""

import io

import pytest

from benchmarks.sim import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_drawn_on_terminals_only(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool) -> None:
    now = iter([0.0, 0.1, 10.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    line = console.ProgressLine("run", 4, stream)
    line(1, 5.0)  # too soon after the start
    line(2, 60.0)
    line.close()
    text = stream.getvalue()
    assert ("2/4 requests, 60 s simulated" in text) is shown
    assert "1/4" not in text
