"""A prefix that one vLLM engine lends another: read over NIXL, with the answer of an engine that computed it itself;
and reads of KV by permits of a flow agent, which is killed while they wait for it.

Engine `a` computes prompts and lends their prefixes; engine `b` borrows. Roles are routing, so both also decode. Both
know the address of a flow agent that runs in one test only: without it every read is posted at once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.wire.messages import Admitted, Decode, Failed, Out, Prefill, PrefillDone, Reading
from tests.actors.flow.narrow import NarrowAgent, Occupant
from tests.live.serving import PATIENCE_S
from tests.live.vllm_app import BLOCK, TCP, engine
from tests.live.vllm_client import Engine
from tests.live.vllm_pair.pair import shared_tokens
from tests.processes import kill_all

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(900)]

START_S = 500.0
PREFIX = 4 * BLOCK
SPOKEN = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
NODE = "127.0.0.1"
"""Name of the node of both engines, by default that of their side channel's host."""


class Two:
    def __init__(self, directory: Path) -> None:
        self.socket = directory / "flow.sock"
        both: dict[str, Any] = {"role": "prefill", "flow_agent": f"unix:{self.socket}"}
        self.a, self.b = (
            Engine(engine(core, engine_id=name, **both), directory / f"{name}.log", UCX_TLS=TCP)
            for core, name in enumerate("ab")
        )

    def borrow(self, attempt_id: str, tokens: list[int], prefix: bytes) -> PrefillDone:
        self.b.send(Prefill(attempt_id, tokens, {}, PATIENCE_S, prefix=prefix))
        done = self.b.wait_for(attempt_id, (PrefillDone, Failed))
        assert isinstance(done, PrefillDone), done
        return done


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """The last act is a test, too: a lender dies before its prefix is read."""
    two = Two(tmp_path_factory.mktemp("lending"))
    try:
        two.a.wait_ready(START_S)
        two.b.wait_ready(START_S)
        yield two
        the_lender_dies(two)
    finally:
        two.a.stop()
        two.b.stop()


def prompt(seed: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 48000 + 100 for i in range(PREFIX + 60)]


def token_ids(pieces: list[Out]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids or []]


def answer(engine: Engine, attempt_id: str, tokens: list[int]) -> list[Out]:
    """The answer of an engine by itself, from what it has of the prompt in its prefix cache."""
    return engine.decode(attempt_id, tokens, SPOKEN, None)


def same(left: list[Out], right: list[Out]) -> None:
    """Fails unless both are one answer, up to near ties: sums differ by how much of the prompt was cached."""
    if shared_tokens(left, right) == SPOKEN["max_tokens"]:
        assert token_ids(left) == token_ids(right)


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
    same(answer(two.b, "on-b", tokens), undisturbed)
    assert two.b.admitted("on-b").cached_tokens >= PREFIX

    # A handle that is none: the prompt is computed.
    strange = two.borrow("strange", prompt(2), b"nobody's handle")
    assert strange.cached_tokens == 0

    lacking = {key: value for key, value in msgspec.msgpack.decode(lend.handle).items() if key != "tp_size"}
    odd = two.borrow("odd", prompt(4), msgspec.msgpack.encode(lacking))
    assert odd.cached_tokens == 0


def the_lender_dies(two: Two) -> None:
    """The prompt is computed, and answered the same."""
    tokens = prompt(3)
    undisturbed = answer(two.a, "alone-3", tokens)
    lend = two.a.prefill("lend-3", tokens[: PREFIX + 1])
    kill_all(two.a.children())
    done = two.borrow("borrow-3", tokens, lend.handle)
    assert done.cached_tokens == 0
    same(answer(two.b, "on-b-3", tokens), undisturbed)
    # its own leases end by themselves, since nobody decodes from them
    two.b.until_idle(0)


# ----------------------------------------------------------------------------------------------- reads by permit


def same_answer(two: Two, attempt_id: str, tokens: list[int], pieces: list[Out]) -> None:
    """Fails unless the answer is that of the engine that computed the prompt, up to near ties."""
    same(pieces, answer(two.a, f"alone-{attempt_id}", tokens))


def permitted(two: Two) -> tuple[str, list[int], list[Out]]:
    """Reads prompts until one is read by permits, and returns that with its answer. The engine's line to its agent may
    still be on its way up.
    """
    for number in range(20):
        attempt_id, tokens = f"permitted-{number}", prompt(100 + number)
        before = two.b.ask("metrics")
        done = two.a.prefill(attempt_id, tokens)
        pieces = two.b.decode(attempt_id, tokens, SPOKEN, done.handle)
        after = two.b.ask("metrics")
        assert after["transfers"] == before["transfers"] + 1
        if after["transfers_unscheduled"] == before["transfers_unscheduled"]:
            return attempt_id, tokens, pieces
    raise AssertionError("no read went by permits: the engine may not have found its agent")


def holding(two: Two, agent: NarrowAgent) -> tuple[dict[str, list[int]], Occupant]:
    """Returns two decodes whose reads wait for permits, because that of another worker is in flight at their ports."""
    for number in range(10):
        held = {f"held-{number}-{n}": prompt(200 + 2 * number + n) for n in range(2)}
        handles = {name: two.a.prefill(name, tokens).handle for name, tokens in held.items()}
        occupant = Occupant(agent)
        for name, tokens in held.items():
            two.b.send(Decode(name, tokens, SPOKEN, handles[name], PATIENCE_S))

        def seen(kind: Any, names: dict[str, Any] = held) -> bool:
            return all(any(isinstance(m, kind) for m in two.b.seen(name)) for name in names)

        occupant.stays(PATIENCE_S, lambda: seen(Reading))
        occupant.stays(0.3)
        if not any(isinstance(m, Admitted) for name in held for m in two.b.seen(name)):
            return held, occupant
        # On a busy machine the agent may have been silent for too long, and a read gone on without it.
        occupant.client.close()
        for name in held:
            two.b.finish(name)
    raise AssertionError("reads did not wait for permits")


def test_reads_go_by_permits_and_without_them_when_their_agent_is_killed(two: Two) -> None:
    agent = NarrowAgent(two.socket, NODE, NODE)
    try:
        same_answer(two, *permitted(two))
        held, occupant = holding(two, agent)
        before = two.b.ask("metrics")["transfers_unscheduled"]
        agent.kill()
        for name, tokens in held.items():
            same_answer(two, name, tokens, two.b.finish(name))
        assert two.b.ask("metrics")["transfers_unscheduled"] == before + len(held)
        occupant.client.close()
    finally:
        agent.kill()
    two.a.until_idle(0)
    two.b.until_idle(0)
