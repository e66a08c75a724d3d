"""Configurations, key files and vLLM's KV events. A finding is any error but the one that says what is wrong."""

from random import Random
from typing import Any

import yaml

from actors.engine.vllm.kv_events import Translator
from actors.options import ConfigError
from app.config import parse
from app.ingress.tenants.keys import BadKeyFile, KeyBook
from app.ingress.tenants.keys import parse as parse_keys
from tests.fuzz import mutate
from tests.fuzz.corpus import CONFIGS
from tests.fuzz.watch import Watch


def configs(watch: Watch, seed: int, count: int) -> None:
    """Reads configurations that are changed in a few places."""
    rng = Random(f"{seed}/configs")
    for _ in range(count):
        given: Any = rng.choice(CONFIGS)
        for _ in range(rng.choice((1, 1, 2, 4))):
            given = mutate.of_value(rng, given)
        text = yaml.safe_dump(given, allow_unicode=True) if rng.random() < 0.2 else None
        try:
            if text is not None:
                given = yaml.safe_load(
                    mutate.of_bytes(rng, text.encode("utf-8", "replace")).decode("utf-8", "replace")
                )
        except yaml.YAMLError:
            watch.count("no yaml")
            continue
        except (ValueError, OverflowError):
            # a date that is none; PyYAML says so itself
            watch.count("no yaml")
            continue
        try:
            parse(given if isinstance(given, dict) else {"model": given})
            watch.count("taken")
        except (ConfigError, UnicodeEncodeError):
            # half a surrogate pair, which no YAML has, cannot even be shown
            watch.count("refused")
        except Exception as error:
            watch.count("failed")
            watch.note(f"configuration {given!r}: {error!r}")


def keys(watch: Watch, seed: int, count: int) -> None:
    """Reads key files that are changed in a few places, and looks keys up in those that are taken."""
    rng = Random(f"{seed}/keys")
    base: Any = {
        "version": 1, "salt_secret": "0" * 64,
        "keys": [{
            "id": "k1", "tenant": "t", "secrets": [{"sha256": "0" * 64, "created": "2026-01-01T00:00:00Z"}],
            "created": "2026-01-01T00:00:00Z", "requests_per_min": 5, "ceiling": -5, "weight": 2,
        }],
    }  # fmt: skip
    for _ in range(count):
        given = mutate.as_json(rng, mutate.of_value(rng, base) if rng.random() < 0.9 else base)
        if rng.random() < 0.3:
            given = mutate.of_bytes(rng, given)
        try:
            KeyBook(parse_keys(given)).find(rng.randbytes(8).decode("latin-1"))
            watch.count("taken")
        except BadKeyFile:
            watch.count("refused")
        except Exception as error:
            watch.count("failed")
            watch.note(f"key file {given!r}: {error!r}")


def events(watch: Watch, seed: int, count: int) -> None:
    """Translates vLLM's events with any values. The feed survives what is of another shape: it starts anew."""
    rng = Random(f"{seed}/events")
    translator = Translator()
    for _ in range(count):
        event = _Event(rng)
        try:
            match rng.randrange(8):
                case 0:
                    translator.cleared()
                case 1 | 2:
                    translator.removed(event)
                case _:
                    translator.stored(event)
            watch.count("taken")
        except Exception:
            # the feed itself takes any error for a surprise
            watch.count("refused")
            translator.cleared()
        if rng.random() < 0.05:
            translator.drain()
        if translator.blocks > 2000:
            translator.cleared()


class _Event:
    """An event whose fields are those of vLLM's, with right types most of the time."""

    def __init__(self, rng: Random) -> None:
        hashes = (b"a" * 32, b"b" * 32, 1, 2, -1, 2**70)
        size = rng.choice((1, 4, 16, 0, -1))
        blocks = rng.randrange(4)
        self.block_hashes: Any = [rng.choice(hashes) for _ in range(blocks)]
        self.parent_block_hash: Any = rng.choice((None, None, *hashes))
        self.token_ids: Any = [rng.choice((0, 1, 5, -1, 2**40)) for _ in range(max(0, blocks * size))]
        self.block_size: Any = size
        self.lora_id = None
        self.lora_name: Any = rng.choice((None, None, "l"))
        self.medium: Any = rng.choice((None, "GPU", "CPU", 5))
        self.extra_keys: Any = rng.choice((None, None, [None], [("salt",)], [5], [[("a", "b")]]))
        self.group_idx = None
        if rng.random() < 0.1:
            setattr(self, rng.choice(list(vars(self))), mutate.value(rng))
