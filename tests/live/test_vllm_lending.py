"""A prefix that one vLLM engine lends another: read over NIXL, with the answer of an engine that computed it itself.

Engine `a` computes prompts and lends their prefixes; engine `b` borrows. Roles are routing, so both also decode.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.cores import divide_cores, usable_cores
from actors.wire.messages import Failed, Out, Prefill, PrefillDone
from app.models import resolve
from tests.live.serving import PATIENCE_S
from tests.live.vllm_client import Engine

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(900)]

START_S = 500.0
BLOCK = 128
PREFIX = 4 * BLOCK
ANSWER = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


class Two:
    def __init__(self, directory: Path) -> None:
        cores = divide_cores(usable_cores(), 2)
        common: dict[str, Any] = {
            "model": str(resolve("smollm2-135m-instruct")), "served_name": "small", "device": "cpu", "role": "prefill",
            "kv_space_gib": 0.25, "slots": 4, "max_model_len": 1536, "lease_s": 12,
        }  # fmt: skip
        self.a, self.b = (
            Engine({**common, "engine_id": name, "cores": own}, directory / f"{name}.log", UCX_TLS="tcp,self")
            for name, own in zip("ab", cores, strict=True)
        )

    def borrow(self, attempt_id: str, tokens: list[int], prefix: bytes) -> PrefillDone:
        self.b.send(Prefill(attempt_id, tokens, {}, PATIENCE_S, prefix=prefix))
        done = self.b.wait_for(attempt_id, (PrefillDone, Failed))
        assert isinstance(done, PrefillDone), done
        return done


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    two = Two(tmp_path_factory.mktemp("lending"))
    try:
        two.a.wait_ready(START_S)
        two.b.wait_ready(START_S)
        yield two
    finally:
        two.a.stop()
        two.b.stop()


def prompt(seed: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 48000 + 100 for i in range(PREFIX + 60)]


def token_ids(pieces: list[Out]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids or []]


def answer(engine: Engine, attempt_id: str, tokens: list[int]) -> list[int]:
    """The answer of an engine by itself, from what it has of the prompt in its prefix cache."""
    return token_ids(engine.decode(attempt_id, tokens, ANSWER, None))


def test_a_prefix_is_lent_or_computed_and_the_answer_is_the_same(two: Two) -> None:
    tokens = prompt(1)
    undisturbed = answer(two.a, "alone", tokens)
    lend = two.a.prefill("lend", tokens[: PREFIX + 1])
    assert lend.cached_tokens == PREFIX
    assert two.a.status().leases == 1
    done = two.borrow("borrow", tokens, lend.handle)
    assert done.cached_tokens == PREFIX + 1, "read from the lender, not computed"
    # the borrower's message has freed the lender's copy
    two.a.until_idle(0)
    # what was read is in the borrower's prefix cache now, and its answer rests on it
    pieces = two.b.decode("on-b", tokens, ANSWER, None)
    assert token_ids(pieces) == undisturbed
    assert two.b.admitted("on-b").cached_tokens >= PREFIX

    # A handle that is none: the prompt is computed.
    strange = two.borrow("strange", prompt(2), b"nobody's handle")
    assert strange.cached_tokens == 0

    # The lender dies before its blocks are read: the prompt is computed, and answered the same.
    tokens = prompt(3)
    undisturbed = answer(two.a, "alone-3", tokens)
    lend = two.a.prefill("lend-3", tokens[: PREFIX + 1])
    for child in two.a.children():
        child.kill()
    done = two.borrow("borrow-3", tokens, lend.handle)
    assert done.cached_tokens == 0
    assert answer(two.b, "on-b-3", tokens) == undisturbed
    # its own leases end by themselves, since nobody decodes from them
    two.b.until_idle(0)
