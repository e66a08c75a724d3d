"""Changes of bytes and of JSON values, drawn from a random generator."""

import json
from random import Random
from typing import Any

BYTES = (
    b"",
    b"\0",
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b" ",
    b"\t",
    b":",
    b"\xff",
    b"\xc3\x28",
    b"0",
    b"-1",
    b"9" * 30,
)
NUMBERS = (
    0, 1, -1, 2, 20, 21, 128, 129, 1000, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30,
    0.0, -0.0, 0.5, 1.0, 2.0, 1e308, 1e-308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "",
    "a",
    "\0",
    "é",
    "\U0001f600",
    "\ud800",
    "a" * 600,
    "interactive",
    "NaN",
    "{{ 7 * 7 }}",
    "{% raise %}",
    "\r\nx: y",
)


def of_bytes(rng: Random, data: bytes) -> bytes:
    """Returns `data` with one to four changes."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(6):
            case 0 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 1:
                made[at:at] = rng.choice(BYTES)
            case 2:
                del made[at : at + rng.randint(1, 16)]
            case 3:
                made[at:at] = made[at : at + rng.randint(1, 64)]
            case 4:
                made[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                made[at : at + 2] = rng.choice(BYTES)
    return bytes(made)


def value(rng: Random, depth: int = 0) -> Any:
    """Returns any JSON value."""
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(TEXTS)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS) or "k": value(rng, depth + 1) for _ in range(rng.randrange(4))}


def of_value(rng: Random, given: Any) -> Any:
    """Returns a JSON value like `given`, changed at one place."""
    if rng.random() < 0.15:
        return value(rng)
    if isinstance(given, dict) and given:
        made = dict(given)
        name = rng.choice(list(made))
        match rng.randrange(8):
            case 0:
                del made[name]
            case 1:
                made[rng.choice(TEXTS) or "k"] = value(rng)
            case 2:
                made[name] = [made[name]]
            case _:
                made[name] = of_value(rng, made[name])
        return made
    if isinstance(given, list) and given:
        made_list = list(given)
        at = rng.randrange(len(made_list))
        match rng.randrange(5):
            case 0:
                del made_list[at]
            case 1:
                made_list = made_list * rng.choice((2, 3, 40))
            case _:
                made_list[at] = of_value(rng, made_list[at])
        return made_list
    return value(rng)


def deep(rng: Random) -> bytes:
    """Returns JSON, or nearly, that is nested deeply."""
    opening = rng.choice((b"[", b'{"a":', b'[{"a":'))
    times = rng.choice((10, 127, 129, 1000, 20_000))
    return opening * times + rng.choice((b"", b"1", b"]" * times))


def as_json(rng: Random, given: Any) -> bytes:
    """Returns the JSON of a value, as some client or other would write it."""
    text = json.dumps(given, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
    return text.encode("utf-8", "surrogatepass")
