"""A vLLM engine takes its weights from one that runs and serves, and from disk where its lender dies."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.engine.cores import divide_cores, usable_cores
from actors.wire.messages import Cancel, Decode, Out
from app.models import resolve
from tests.actors.engine.weights import rig
from tests.live.serving import PATIENCE_S, ROOT, still_running
from tests.live.test_vllm_engines import LEASE_S, START_S, fresh, text
from tests.live.vllm_app import DTYPE
from tests.live.vllm_client import Engine

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = Path(resolve("smollm2-135m-instruct"))
PROMPT = fresh(30)
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
STREAM_TOKENS = 1400
MOST_GAP_S = 4.0
"""Longest pause between two pieces of a stream while another engine starts beside it, on two cores that both compute.
ASSUMPTION: a lender that was blocked would stand still for as long as the weights are read, and for its imports."""
PIECES = 10
"""Pieces of 16 MiB that the lender lends which dies; the model has 34 or 17."""


def config(name: str, core: int, folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "engine_id": name, "role": "colocated", "model": str(folder), "served_name": "small",
        "device": "cpu", "dtype": DTYPE, "kv_space_gib": 0.25, "slots": 4, "max_model_len": 1536,
        "lease_s": LEASE_S, "cores": divide_cores(usable_cores(), 2)[core], "weights_from": "peer", **options,
    }  # fmt: skip


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


def wait_lent(lender: Engine, lent_bytes: int) -> None:
    """Waits until a lender has lent this much since its start."""
    until_s = time.monotonic() + START_S
    while lender.ask("metrics")["weights_lent_bytes"] < lent_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.1)


class Watched:
    """The pauses between the pieces of one stream."""

    def __init__(self, engine: Engine, attempt_id: str) -> None:
        self.longest_s = 0.0
        self._engine, self._attempt_id = engine, attempt_id
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        seen, since_s = 0, time.monotonic()
        while not self._ends.wait(0.02):
            pieces = self._engine.seen(self._attempt_id)
            number = len(pieces)
            if any(isinstance(piece, Out) and piece.finish for piece in pieces[-1:]):
                return
            if number != seen:
                seen, since_s = number, time.monotonic()
            self.longest_s = max(self.longest_s, time.monotonic() - since_s)

    def end(self) -> float:
        self._ends.set()
        self._thread.join()
        return self.longest_s


def test_the_rest_comes_from_disk_when_the_lender_dies_in_the_middle(lender: Engine, folder: Path) -> None:
    read = lender.ask("weights")
    print(f"\n{read}; {lender.phases}")
    assert read["source"] == "disk"
    assert 0 < read["bytes"] < size()
    assert "come from disk, but for" in (folder / "lender.log").read_text()


def test_what_a_running_engine_lends_is_on_disk_tensor_by_tensor(lender: Engine, tmp_path: Path) -> None:
    bare = without_weights(tmp_path)
    before = lender.ask("metrics")["weights_lent_bytes"]
    reader = rig.exchange("reader", bare, f"unix:{tmp_path}/r.sock", addresses(lender))
    assert rig.landed(reader, PATIENCE_S) == (on_disk(), True)
    rig.wait(lambda: reader.read.source == "peer", "the read has ended")
    print(f"\n{reader.read.bytes / 1e6:.0f} MB in {reader.read.seconds:.2f} s")
    reader.stop()
    assert lender.ask("metrics")["weights_lent_bytes"] - before == size()


def test_an_engine_without_files_takes_its_weights_from_one_that_serves(
    lender: Engine, tmp_path: Path
) -> None:
    """Nothing can come from the reader's disk. The lender's stream does not stand still meanwhile. Both give the same
    text, though the lender has a part of its weights from another engine and a part from its disk.
    """
    bare = without_weights(tmp_path)
    known = text(lender.decode("known", PROMPT, GREEDY, None))
    before = lender.ask("metrics")["weights_lent_bytes"]
    lender.send(Decode("stream", PROMPT, {**GREEDY, "max_tokens": STREAM_TOKENS}, None, START_S))
    watched = Watched(lender, "stream")
    reader = Engine(
        config(
            "reader", 1, bare,
            weights_listen=[f"unix:{tmp_path}/w.sock"], weights_sources=[list(addresses(lender))],
        ),
        tmp_path / "reader.log",
    )  # fmt: skip
    try:
        wait_lent(lender, before + size())
        assert not any(isinstance(one, Out) and one.finish for one in lender.seen("stream"))
        phases = reader.wait_ready(START_S)
        longest_s = watched.end()
        read = reader.ask("weights")
        print(f"\n{read}; {phases}; the stream's longest pause {longest_s:.2f} s")
        assert (read["source"], read["bytes"], read["peer"]) == ("peer", size(), "lender")
        assert "Weights come from disk" not in (tmp_path / "reader.log").read_text()
        assert text(reader.decode("same", PROMPT, GREEDY, None)) == known
        assert longest_s < MOST_GAP_S
        stream = text([one for one in lender.seen("stream") if isinstance(one, Out)])
        assert stream.startswith(known)
    finally:
        watched.end()
        lender.send(Cancel("stream"))
        reader.stop()
    lender.until_idle(0)
