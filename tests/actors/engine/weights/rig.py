"""Small checkpoints, exchanges in this process, and lenders in processes of their own.

python rig.py FOLDER ADDRESS            lends all; prints "lends"
python rig.py FOLDER ADDRESS PIECES     lends this many pieces of the usual size; prints "lends", and then "lent"
"""

import asyncio
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from actors.engine.weights.checkpoint import Checkpoint
from actors.engine.weights.exchange import ExchangeConfig, WeightsExchange
from actors.engine.weights.landing import Landed
from actors.engine.weights.lender import Lender, Lot
from actors.engine.weights.reader import FlowSettings
from actors.wire.channel import Identity

PIECE_BYTES = 100_000
PATIENCE_S = 60.0

Hashes = dict[str, str]


def model(folder: Path, seed: int = 0, rows: int = 300) -> Path:
    """Writes a checkpoint of two files, together `rows` * 8 kB and a little; returns its folder."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    for number in (1, 2):
        save_file(
            {
                f"{number}.weight": random.random((rows, 1000), dtype=np.float32),
                f"{number}.bias": random.integers(0, 99, 7),
                f"{number}.empty": np.zeros((0, 3), np.float16),
            },
            folder / f"model-{number}.safetensors",
        )
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "rows": rows}))
    return folder


def on_disk(folder: Path) -> Hashes:
    """Returns a hash of each tensor of a folder, as the safetensors library reads it."""
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in found.items()}


def landed(exchange: WeightsExchange, wait_s: float = PATIENCE_S) -> tuple[Hashes, bool]:
    """Returns a hash of each tensor that has come, and whether all have, as a loader sees it."""
    loader = Landed(exchange.landing.path, wait_s)
    hashes = {one.name: hashlib.sha256(memory.tobytes()).hexdigest() for one, memory in loader.tensors()}
    return hashes, loader.whole


def exchange(
    name: str,
    folder: Path,
    address: str | tuple[str, ...],
    *sources: tuple[str, ...],
    secret: bytes | None = None,
    flow: FlowSettings | None = None,
    **options: Any,
) -> WeightsExchange:
    """Returns the started exchange of an engine, whose imports are done."""
    config = ExchangeConfig(
        folder=folder,
        listen=(address,) if isinstance(address, str) else address,
        sources=sources,
        flow=flow or FlowSettings(),
        piece_bytes=PIECE_BYTES,
    )
    made = WeightsExchange(Identity("engine", name, secret), config, **options)
    made.start()
    made.imported()
    return made


def wait(holds: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.01)


def descriptors() -> int:
    """Returns how many files without a name this process has open."""
    found = 0
    for one in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:sluice-weights" in os.readlink(f"/proc/self/fd/{one}")
        except FileNotFoundError:
            continue
    return found


async def lend_part(folder: Path, address: str, pieces: int) -> None:
    """Lends as much as a lender that still reads itself, and does not get more."""
    checkpoint = Checkpoint(folder)
    lender = Lender(Identity("engine", "dying"), "")
    await lender.start((address,))
    lender.lend(Lot(checkpoint, checkpoint.fingerprint, checkpoint.config), pieces)
    print("lends", flush=True)
    while lender.lent_pieces < pieces:
        await asyncio.sleep(0.01)
    print("lent", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await lender.stop()


def main() -> None:
    # an engine that lends has imported PyTorch by then, which may take longer than a reader waits
    importlib.import_module("nixl._api")
    folder, address = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        asyncio.run(lend_part(folder, address, int(sys.argv[3])))
        return
    lender = exchange("lender", folder, address)
    print("lends", flush=True)
    sys.stdin.read()
    lender.stop()


if __name__ == "__main__":
    main()
