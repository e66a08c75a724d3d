"""Requests to an ingress with a key file: keys of every kind, wrong ones, and a file that changes meanwhile.

A finding is what it is without keys (`requests`), and that a key which may be used is refused at the end, or that
something of a key's limits stays held when nothing runs.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from app.ingress.tenants import key_file
from app.ingress.tenants.keys import Key, Keys, dump, empty, new_secret, now
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig
from tests.fuzz import mutate
from tests.fuzz.requests import drive, opened
from tests.fuzz.watch import Watch

CHANGES = 0.2
"""Share of the first client's connections after which the file is another one."""
LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "small": {
        "requests_per_min": 60,
        "tokens_per_min": 2000,
        "parallel": 2,
        "ceiling": "batch",
        "weight": 0.5,
    },
    "expired": {"expires": timedelta(hours=-1)},
    "shared": {"shares_cache": True, "ceiling": "interactive", "parallel": 8},
}
"""Keys by their names, with what they may do. Each change of the file but `free` may take some away."""


def keys_of(names: dict[str, str], given: dict[str, Any]) -> Keys:
    """Returns a file with the keys of `given`, and notes the secret of each in `names`."""
    at, made = now(), []
    for name, limits in given.items():
        names[name], held = new_secret(name, at)
        more = limits | ({"expires": at + limits["expires"]} if "expires" in limits else {})
        made.append(Key(id=name, tenant=f"t-{name}", created=at, secrets=(held,), **more))
    return empty().model_copy(update={"keys": tuple(made)})


def headers_of(rng: Random, names: dict[str, str]) -> tuple[str, ...]:
    """Returns the key with which a client comes: mostly one of the file, else a wrong one or none."""
    kind = rng.random()
    if kind < 0.7:
        return (f"authorization: Bearer {rng.choice(list(names.values()))}",)
    if kind < 0.9:
        key = mutate.of_bytes(rng, names["free"].encode()).decode("latin-1")
        # a line of its own, or another header, is what other parts send
        return ("authorization: Bearer " + "".join(one for one in key if one.isprintable() and one < "\x7f"),)
    return () if kind < 0.95 else (f"authorization: Bearer {ADMIN_KEY}",)


def changing(path: Path, right: Keys, made: Rig) -> Callable[[Random], Awaitable[None]]:
    """Returns what replaces the file now and then: by fewer keys, or by bytes that are no key file."""

    async def change(rng: Random) -> None:
        if rng.random() > CHANGES:
            return
        kept = tuple(key for key in right.keys if key.id == "free" or rng.random() < 0.7)
        data = dump(right.model_copy(update={"keys": kept}))
        if rng.random() < 0.3:
            data = mutate.of_bytes(rng, data)
        write(path, data)
        assert made.app._gate is not None
        await made.app._gate._watch.look()

    return change


def write(path: Path, data: bytes) -> None:
    """Replaces the file, as `sluice key` does."""
    beside = path.with_suffix(f".{secrets.token_hex(4)}")
    beside.touch(0o600)
    beside.write_bytes(data)
    beside.replace(path)


async def run(watch: Watch, seed: int, requests: int, folder: Path) -> None:
    """Sends about this number of requests."""
    path, names = folder / "keys.json", dict[str, str]()
    right = keys_of(names, LIMITS)
    write(path, dump(right))
    # it says that a file is none, which is no finding here
    told = logging.getLogger(key_file.__name__)
    before = told.level
    told.setLevel(logging.CRITICAL)
    try:
        async with opened(folder, key_file=str(path)) as made:
            await drive(
                watch, made, seed, requests, lambda rng: headers_of(rng, names), changing(path, right, made)
            )
            write(path, dump(right))
            gate = made.app._gate
            assert gate is not None
            await gate._watch.look()
            ask = {"model": MODEL, "prompt": "a", "max_tokens": 2}
            for name, status in (("free", 200), ("expired", 401)):
                key = {"authorization": f"Bearer {names[name]}"}
                answer = await made.client.post("/v1/completions", json=ask, headers=key)
                if answer.status_code != status:
                    watch.note(f"the key {name!r} gets {answer.status_code} afterwards: {answer.text}")
            await made.idle()
            for name, account in gate._ledger._accounts.items():
                if account.running or account.held:
                    watch.note(f"{account.running} sequences and {account.held} tokens of {name} are held")
    finally:
        told.setLevel(before)
