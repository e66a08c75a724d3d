"""A vLLM engine takes its weights from one that runs and serves, and from disk where its lender dies."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.wire.messages import Cancel, Decode, Out
from app.models import resolve
from tests.actors.engine.weights import rig
from tests.live import vllm_app
from tests.live.serving import PATIENCE_S, ROOT
from tests.live.vllm_client import Engine
from tests.live.vllm_pair.pair import START_S, fresh, text
from tests.processes import still_running

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)]

MODEL = Path(resolve(vllm_app.MODEL))
PROMPT = fresh(30)
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
STREAM_TOKENS = 1400
PIECES = 10
"""Pieces of 16 MiB that the lender lends which dies; the model has 34 or 17."""


def config(name: str, core: int, folder: Path, **options: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "engine_id": name,
        "role": "colocated",
        "model": str(folder),
        "weights_from": "peer",
    }
    return vllm_app.engine(core, **own, **options)


def on_disk() -> dict[str, str]:
    found: dict[str, torch.Tensor] = {}
    for file in MODEL.glob("*.safetensors"):
        found |= load_file(file)
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in found.items()
    }


def size() -> int:
    return sum(file.stat().st_size for file in MODEL.glob("*.safetensors"))


def wait_said(process: subprocess.Popen[str], word: str) -> None:
    """Waits until a process has written this line, among those of NIXL."""
    assert process.stdout is not None
    assert any(line == f"{word}\n" for line in process.stdout), f"it has ended without {word!r}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lender")


@pytest.fixture(scope="module")
def lender(folder: Path) -> Iterator[Engine]:
    """An engine that serves and lends. It has started from a lender that was killed meanwhile, and from its disk;
    nothing is left of it in the end.
    """
    dying_at, environment = f"unix:{folder}/d", {**os.environ, "PYTHONPATH": str(ROOT), "UCX_TLS": "tcp,self"}
    command = [sys.executable, rig.__file__, str(MODEL), dying_at, str(PIECES)]
    weights = {"weights_listen": [f"unix:{folder}/w.sock"], "weights_sources": [[dying_at]]}
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        dying = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        )
        stack.callback(dying.kill)
        wait_said(dying, "lends")
        engine = Engine(config("lender", 0, MODEL, **weights), folder / "lender.log")
        stack.callback(engine.stop)
        wait_said(dying, "lent")
        dying.kill()
        engine.wait_ready(START_S)
        yield engine
        children = engine.children()
        engine.stop()
        assert still_running(children, timeout_s=60) == []
        assert not list(folder.glob("*.sock"))


def addresses(engine: Engine) -> tuple[str, ...]:
    return tuple(engine.ask("info")["weights"])


def without_weights(folder: Path) -> Path:
    """Returns a copy of the model's folder without its weights."""
    return Path(shutil.copytree(MODEL, folder / "bare", ignore=shutil.ignore_patterns("*.safetensors")))


def lent(lender: Engine) -> int:
    """Bytes that a lender has lent since its start."""
    found: int = lender.ask("metrics")["weights_lent_bytes"]
    return found


class Streams:
    """One stream of an engine after the other, however long they are needed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.names: list[str] = []

    def outs(self, name: str) -> list[Out]:
        return [one for one in self._engine.seen(name) if isinstance(one, Out)]

    def pieces(self) -> int:
        return sum(len(self.outs(name)) for name in self.names)

    def step(self) -> None:
        """Begins the next stream where none runs."""
        if not self.names or any(one.finish for one in self.outs(self.names[-1])):
            self.names.append(f"stream-{len(self.names)}")
            params = {**GREEDY, "max_tokens": STREAM_TOKENS}
            self._engine.send(Decode(self.names[-1], PROMPT, params, None, START_S))

    def end(self) -> None:
        for name in self.names[-1:]:
            self._engine.send(Cancel(name))


def test_the_rest_comes_from_disk_when_the_lender_dies_in_the_middle(lender: Engine, folder: Path) -> None:
    read = lender.ask("weights")
    print(f"\n{read}; {lender.phases}")
    assert read["source"] == "disk"
    assert 0 < read["bytes"] < size()
    assert "come from disk, but for" in (folder / "lender.log").read_text()


def test_what_a_running_engine_lends_is_on_disk_tensor_by_tensor(lender: Engine, tmp_path: Path) -> None:
    bare = without_weights(tmp_path)
    before = lent(lender)
    reader = rig.exchange("reader", bare, f"unix:{tmp_path}/r.sock", addresses(lender))
    assert rig.landed(reader, PATIENCE_S) == (on_disk(), True)
    rig.wait(lambda: reader.read.source == "peer", "the read has ended")
    print(f"\n{reader.read.bytes / 1e6:.0f} MB in {reader.read.seconds:.2f} s")
    reader.stop()
    assert lent(lender) - before == size()


def test_an_engine_without_files_takes_its_weights_from_one_that_serves(
    lender: Engine, tmp_path: Path
) -> None:
    """Nothing can come from the reader's disk. The lender's streams do not stand still meanwhile. Both give the same
    text, though the lender has a part of its weights from another engine and a part from its disk.
    """
    bare = without_weights(tmp_path)
    known = text(lender.decode("known", PROMPT, GREEDY, None))
    before, streams = lent(lender), Streams(lender)
    reader = Engine(
        config(
            "reader", 1, bare,
            weights_listen=[f"unix:{tmp_path}/w.sock"], weights_sources=[list(addresses(lender))],
        ),
        tmp_path / "reader.log",
    )  # fmt: skip
    try:
        until_s, at_first = time.monotonic() + START_S, 0
        while (now := lent(lender)) < before + size():
            assert time.monotonic() < until_s
            if now == before:
                at_first = streams.pieces()
            streams.step()
            time.sleep(0.02)
        # while its weights were read, the lender's own work went on
        assert streams.pieces() > at_first
        phases = reader.wait_ready(START_S)
        read = reader.ask("weights")
        print(f"\n{read}; {phases}; {streams.pieces() - at_first} pieces of streams meanwhile")
        assert (read["source"], read["bytes"], read["peer"]) == ("peer", size(), "lender")
        assert "Weights come from disk" not in (tmp_path / "reader.log").read_text()
        assert text(reader.decode("same", PROMPT, GREEDY, None)) == known
        assert text(streams.outs(streams.names[0])).startswith(known)
    finally:
        streams.end()
        reader.stop()
    lender.until_idle(0)
