"""Frames of peers that have passed the handshake: messages of right shape with any values, wrong shapes, and bytes.

A finding is a handler that fails at a message of right shape (other than by a ValueError that says what is wrong with
it), a process that no longer serves, or memory that grows. A message that the receiver does not accept ends its
connection by design.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from msgspec import inspect

from actors.engine.server import EngineServer
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.frames import ENCODER, HEADER
from actors.wire.messages import PROTOCOL_VERSION, Hello, Message
from tests.app.ingress.rig import Rig, make_router, pair, rig
from tests.fuzz import mutate
from tests.fuzz.talk import unread
from tests.fuzz.watch import Watch

AT_ONCE = 8
SAMPLE = 64
IDS = ("a", "b", "0123456789ab00000001", "0123456789ab00000001.1", "p", "d", "", "é" * 40)
LIVE: list[str] = []
"""Attempts that run at the ingress, so that messages are about them."""
INTEGERS = (0, 1, 2, -1, 3, 16, 63, 64, 255, 4096, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, 0.1, 1.0, 30.0, -1.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))


def drawn(rng: Random, kind: inspect.Type, depth: int = 0) -> Any:
    """Returns any value of a type, as plain arrays, numbers and texts."""
    match kind:
        case inspect.UnionType(types=types):
            return drawn(rng, rng.choice(types), depth + 1)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType(ge=least, le=most):
            # numbers beyond the bounds of a type end the connection, so most are within
            within = [n for n in INTEGERS if (least is None or n >= least) and (most is None or n <= most)]
            return rng.choice(within if rng.random() < 0.95 else INTEGERS)
        case inspect.FloatType():
            return rng.choice(FLOATS)
        case inspect.StrType():
            if LIVE and rng.random() < 0.4:
                return rng.choice(LIVE)
            return rng.choice(IDS) if rng.random() < 0.8 else rng.choice(mutate.TEXTS[:5] + mutate.TEXTS[6:])
        case inspect.BytesType():
            return rng.randbytes(rng.choice((0, 1, 8, 16, 100)))
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.EnumType(cls=cls):
            return rng.choice(list(cls)).value
        case (
            inspect.ListType(item_type=item)
            | inspect.VarTupleType(item_type=item)
            | inspect.SetType(item_type=item)
        ):
            return [
                drawn(rng, item, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 5)) if depth < 6 else 0)
            ]
        case inspect.TupleType(item_types=items):
            return [drawn(rng, item, depth + 1) for item in items]
        case inspect.NamedTupleType(fields=fields):
            return [drawn(rng, field.type, depth + 1) for field in fields]
        case inspect.DictType(key_type=key, value_type=value):
            return {
                _name(drawn(rng, key, depth + 1)): drawn(rng, value, depth + 1)
                for _ in range(rng.randrange(3))
            }
        case inspect.StructType(fields=fields, tag=tag):
            made = [] if tag is None else [tag]
            # fields at the end that have defaults may be missing
            needed = sum(field.required for field in fields)
            count = len(fields) if rng.random() < 0.7 else rng.randint(needed, len(fields))
            return made + [drawn(rng, field.type, depth + 1) for field in fields[:count]]
        case inspect.DataclassType(fields=fields):
            return {
                field.encode_name: drawn(rng, field.type, depth + 1)
                for field in fields
                if field.required or rng.random() < 0.7
            }
        case inspect.AnyType() | inspect.RawType():
            return mutate.value(rng, 1)
    return mutate.value(rng, 1)


def _name(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


TYPES: tuple[Any, ...] = inspect.type_info(Message).types  # type: ignore[attr-defined]


def frame(rng: Random, types: tuple[Any, ...]) -> bytes:
    """Returns one frame. Four of five hold messages of right shape, most of them of these `types`."""
    of = types if rng.random() < 0.9 else TYPES
    batch = [drawn(rng, rng.choice(of)) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    kind = rng.random()
    if kind > 0.9:
        batch = mutate.of_value(rng, batch)
    try:
        data = msgspec.msgpack.encode(batch)
    except (OverflowError, UnicodeEncodeError, TypeError, ValueError):
        data = b"\x90"
    if 0.8 < kind <= 0.9:
        data = mutate.of_bytes(rng, data)
    size = len(data) if kind < 0.98 else rng.choice((0, len(data) + 1, 2**32 - 1))
    return HEADER.pack(size) + data


class Frames:
    """Sends frames to one target. `factory` makes the receiving end of a connection, and `taken` has the kinds of its
    peers with the messages that it takes from each.
    """

    def __init__(
        self, watch: Watch, factory: Callable[[], Channel], taken: dict[str, tuple[type[Any], ...]]
    ) -> None:
        self._watch, self._factory = watch, factory
        self._taken = {kind: tuple(inspect.type_info(one) for one in types) for kind, types in taken.items()}

    async def talk(self, rng: Random, most: int) -> int:
        """Opens a connection and sends up to `most` frames, until the other end closes it. Returns their number."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, channel = await asyncio.get_running_loop().connect_accepted_socket(self._factory, theirs)
        kind = rng.choice(list(self._taken))
        hello = ENCODER.encode([Hello(PROTOCOL_VERSION, kind, rng.choice(IDS) or "x")])  # type: ignore[arg-type]
        await deliver(channel, ours, HEADER.pack(len(hello)) + hello)
        sent = 0
        while sent < most and not channel._closed:
            data = frame(rng, self._taken[kind])
            await deliver(channel, ours, data)
            sent += 1
            self._watch.count("ended" if channel._closed else "taken")
        ours.close()
        return sent


async def deliver(channel: Channel, ours: socket.socket, data: bytes) -> None:
    """Sends bytes to the receiving end `channel` of `ours`, and waits until it has read them or has closed."""
    try:
        while data and not channel._closed:
            try:
                data = data[ours.send(data) :]
            except BlockingIOError:
                await asyncio.sleep(0)
            _drop(ours)
        while unread(ours) and not channel._closed:
            _drop(ours)
            await asyncio.sleep(0)
    except OSError:
        # the other end has closed the connection
        while not channel._closed:
            await asyncio.sleep(0)


def _drop(ours: socket.socket) -> None:
    try:
        while ours.recv(1 << 18):
            pass
    except OSError:
        pass


TO_ROUTER: dict[str, tuple[type[Any], ...]] = {
    "ingress": (
        wire.Submit, wire.PrefillReported, wire.LeaseRenewed, wire.Progress, wire.Transferred, wire.TimesTold,
        wire.Adopt, wire.Closed, wire.Admin,
    ),
    "engine": (wire.Announce, wire.Status, wire.KvEvents, wire.KvState, wire.FindWeights),
    "autoscaler": (wire.Assign, wire.ScaleAnswered, wire.Standby, wire.LeadsTold),
    "agent": (wire.FlowReport,), "observer": (wire.Observing, wire.Admin), "router": (wire.Fleet,),
}  # fmt: skip
TO_ENGINE: dict[str, tuple[type[Any], ...]] = {
    "ingress": (wire.Prefill, wire.Decode, wire.Cancel, wire.ReleaseKV, wire.RenewKV),
    "engine": (wire.Pull, wire.PullChunk, wire.Pulled, wire.PullGrant, wire.Sent),
}
FROM_ENGINE: tuple[type[Any], ...] = (
    wire.PrefillDone, wire.KVRenewed, wire.Reading, wire.Admitted, wire.Timed, wire.Tokens, wire.Failed,
)  # fmt: skip
# without SetLogs, which would hide findings
FROM_ROUTER: tuple[type[Any], ...] = (
    wire.RoutePrefill, wire.RouteDecode, wire.Reject, wire.Unknown, wire.Fleet, wire.FleetStatus, wire.AdminAnswer,
)  # fmt: skip


async def _load(made: Rig) -> None:
    """Keeps requests under way at the ingress. What comes of them does not matter here: their engines lie."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            await asyncio.gather(
                *(
                    made.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100})
                    for _ in range(4)
                )
            )


async def run(watch: Watch, seed: int, frames: int, folder: Path) -> None:
    """Sends this number of frames, in turn to a router, to a sim engine, and to an ingress."""
    router = make_router(folder / "router", product=True)
    await router.start([f"unix:{folder}/router/r.sock"])
    sim = SimEngine(SimEngineConfig("e", "colocated", slots=8, kv_blocks=256, max_model_len=256))
    engine = EngineServer(sim, Identity("engine", "e"), [f"unix:{folder}/engine/e.sock"])
    await engine.start()
    # connections that end are no news here
    for name in ("actors.router", "actors.engine", "actors.wire", "app.ingress"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        async with rig(folder, pair(folder, step_s=0.05), product=True) as made:
            link = made.connections._engines.get("p")
            assert link is not None
            me = Identity("ingress", "i")
            targets = [
                Frames(watch, router._new_channel, TO_ROUTER),
                Frames(watch, engine._new_channel, TO_ENGINE),
                Frames(
                    watch,
                    lambda: Channel(me, lambda _, m: link._on_message(link, m)),
                    {"engine": FROM_ENGINE},
                ),
                Frames(watch, lambda: Channel(me, made.connections._from_router), {"router": FROM_ROUTER}),
            ]
            load = asyncio.create_task(_load(made))
            left, every = frames, max(1, frames // SAMPLE)
            next_sample = frames

            async def client(number: int) -> None:
                nonlocal left, next_sample
                rng = Random(f"{seed}/{number}")
                while left > 0 and not watch.over:
                    LIVE[:] = list(made.connections.live)[:4]
                    try:
                        sent = await rng.choice(targets).talk(rng, 20)
                    except Exception as error:
                        watch.fail(error)
                        return
                    left -= sent
                    if left <= next_sample:
                        next_sample = left - every
                        watch.sample()

            try:
                await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
            finally:
                load.cancel()
    finally:
        await engine.stop()
        await router.stop()
