"""One prefill and one decode engine of vLLM, each in its own process on its own core, started once for this folder.

The decode engine holds every read for a moment, so that requests can be met in their transfer.
"""

import math
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from actors.wire.messages import Out
from app.models import resolve
from tests.live.vllm_app import MODEL, NEAR_TIE, engine
from tests.live.vllm_client import Engine

START_S = 500.0
GREEDY = {"temperature": 0.0}


class Pair:
    """Prefill engine `p` and decode engine `d`."""

    def __init__(self, directory: Path) -> None:
        self.expiring = 0  # leases that this test lets expire
        self.tokenizer = Tokenizer.from_file(str(resolve(MODEL) / "tokenizer.json"))
        self.p = Engine(engine(0, engine_id="p", role="prefill"), directory / "p.log")
        decode: dict[str, Any] = {
            "role": "decode", "tool_parser": "hermes", "connector_args": {"hold_reads_s": 0.3}, "kv_events": True,
            "overlap_imports": True,
        }  # fmt: skip
        self.d = Engine(engine(1, engine_id="d", **decode), directory / "d.log")

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def both(self, attempt_id: str, tokens: list[int], params: dict[str, Any], **more: Any) -> list[Out]:
        """Prefill on one engine, decode on the other."""
        done = self.p.prefill(attempt_id, tokens)
        return self.d.decode(attempt_id, tokens, params, done.handle, **more)

    def idle(self) -> None:
        self.p.until_idle(0)
        self.d.until_idle(0)


_fresh_from = iter(range(2000, 40000, 7))


def fresh(count: int) -> list[int]:
    """`count` tokens that no other test has used, so that nothing of them is cached."""
    first = next(_fresh_from)
    return [(first * 31 + i * 17) % 48000 + 100 for i in range(count)]


def text(pieces: list[Out], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)


def shared_tokens(left: list[Out], right: list[Out]) -> int:
    """Tokens that two greedy answers, both with `logprobs` 2, have in common from the beginning.

    Fails where they part at anything but a near tie: in each answer the other's token must be nearly as likely.
    """
    mine, theirs = ([entry for piece in pieces for entry in piece.logprobs or []] for pieces in (left, right))
    for n, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one[1] != other[1]:
            for (_, _, logprob, top), wanted in ((one, other[1]), (other, one[1])):
                gap = min(
                    (logprob - candidate[2] for candidate in top if candidate[1] == wanted), default=math.inf
                )
                assert abs(gap) <= NEAR_TIE, f"token {n}: {one} and {other} are no near tie"
            return n
    return len(mine)
