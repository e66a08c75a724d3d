"""One vLLM engine in a process of its own, driven over stdin and stdout: `python vllm_host.py CONFIG_JSON`.

Frames (4 bytes length, msgpack) in: wire messages, or a string: "status", "metrics", "info", "weights", "stop". Out:
wire messages, or {name, value} for a question. vLLM's own output goes to stderr.
"""

import asyncio
import dataclasses
import json
import os
import struct
import sys
from typing import Any

import msgspec

from actors.engine.vllm.config import VllmEngineConfig
from actors.engine.vllm.engine import VllmEngine
from actors.options import from_options
from actors.wire.messages import Cancel, Decode, Message, Out, Peers, Prefill, ReleaseKV, RenewKV, Tokens

ENCODER = msgspec.msgpack.Encoder()
MESSAGES = msgspec.msgpack.Decoder(Message | str)


class Pipe:
    """The engine's sink: frames on a file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, message: Any) -> None:
        body = ENCODER.encode(message)
        os.write(self._fd, struct.pack(">I", len(body)) + body)

    prefill_done = reading = admitted = renewed = failed = write

    def tokens(self, items: list[Out]) -> None:
        self.write(Tokens(items))


def fields(record: Any) -> dict[str, Any]:
    """Field names and values of a struct or dataclass."""
    kind = msgspec.structs.asdict if isinstance(record, msgspec.Struct) else dataclasses.asdict
    return dict(kind(record))


async def serve(engine: VllmEngine, pipe: Pipe, reader: asyncio.StreamReader) -> None:
    while True:
        try:
            (length,) = struct.unpack(">I", await reader.readexactly(4))
        except asyncio.IncompleteReadError:
            return
        message = MESSAGES.decode(await reader.readexactly(length))
        match message:
            case Prefill():
                engine.prefill(message)
            case Decode():
                engine.decode(message)
            case Cancel():
                engine.cancel(message.attempt_id)
            case ReleaseKV():
                engine.release(message.attempt_id)
            case RenewKV():
                engine.renew(message.attempt_id, engine.info().lease_s)
            case Peers():
                engine.meet(message.peers)
            case "stop":
                return
            case "status":
                pipe.write({"name": "status", "value": fields(engine.status())})
            case "kv_events":
                pipe.write(
                    {
                        "name": "kv_events",
                        "value": [[type(e).__name__, fields(e)] for e in engine.kv_events()],
                    }
                )
            case "metrics":
                pipe.write({"name": "metrics", "value": fields(engine.metrics())})
            case "weights":
                read = engine.weights
                pipe.write({"name": "weights", "value": None if read is None else fields(read)})
            case "info":
                pipe.write({"name": "info", "value": fields(engine.info())})
            case _:
                raise ValueError(f"unexpected {message!r}")


async def main() -> None:
    out = os.dup(1)
    # vLLM's own prints go elsewhere, so that none ends up between the frames.
    os.dup2(2, 1)
    pipe = Pipe(out)
    engine = VllmEngine(from_options(VllmEngineConfig, json.loads(sys.argv[1]), "config"))
    await engine.start(pipe)
    pipe.write({"name": "ready", "value": engine.phases})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await serve(engine, pipe, reader)
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
