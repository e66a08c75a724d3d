"""Harmed lenders: the order of faults, verdicts, figures, and what the harness itself decides."""

import asyncio
import json
import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.registry import engine_config
from benchmarks.chaos import lenders
from benchmarks.chaos.answers import Answer
from benchmarks.chaos.lenders import IN_THE_LEASE, KINDS, first_prompt, judged, schedule
from benchmarks.chaos.lenders_report import UNDISTURBED, counted_once, rows
from benchmarks.chaos.lending_hosts import BORROWER, ENGINES, LENDER, SIZES, SentTo, borrowing, received
from benchmarks.mfs.engines import engine_options
from policies.request.stage import Stage

AGENT = "unix:/tmp/agent.sock"


def test_every_round_has_all_faults_in_an_order_by_the_seed() -> None:
    rounds = [schedule(1, number) for number in range(4)]
    assert all(sorted(kinds) == sorted(KINDS) for kinds in rounds)
    assert len({tuple(kinds) for kinds in rounds}) > 1
    assert rounds[0] == schedule(1, 0)
    assert sorted(schedule(1, 0, ("killed", "cut"))) == ["cut", "killed"]


def test_no_two_rounds_share_a_prompt() -> None:
    firsts = sorted(first_prompt(seed, number) for seed in (1, 2) for number in range(20))
    assert all(after - before >= 10_000 for before, after in pairwise(firsts))


def fault(kind: str, **more: Any) -> dict[str, Any]:
    plain = {
        "kind": kind, "moved": None if kind == IN_THE_LEASE else 0.3, "moved_in_all": 0.4,
        "loans": {"failed" if kind == IN_THE_LEASE else "recomputed": 1}, "attempts": 0, "right": True, "wrong": "",
        "prompt_s": 7.0, "recovery_s": 9.0, "left": "", "useless": 0, "strayed": 0,
        "undisturbed_s": 2.0,
    }  # fmt: skip
    return plain | more


def test_rows_judge_answers_loans_and_what_is_left() -> None:
    good = {
        "faults": [
            fault("killed", moved=0.27, recovery_s=11.0, useless=2, strayed=1),
            fault("killed"),
            fault("cut", loans={"used": 1}, moved=0.5, moved_in_all=1.02, undisturbed_s=2.5),
            fault(IN_THE_LEASE),
        ]
    }
    found = {row.name: row for row in rows(good)}
    aims = [row for row in found.values() if row.aim]
    assert len(aims) == 3
    assert all(row.met for row in aims)
    expected = {
        "loans harmed": 4,
        "of them while the prefix was read": 3,
        "share of the prefix that had come at the fault: least": 27,
        "share of the prefix that had come at the fault: most": 50,
        "killed: loans recomputed": 2,
        "killed: share of the prefix that came in all, most": 40,
        "killed: longest from the fault to the whole prompt's KV": 7,
        "killed: longest from the fault to the first token": 11,
        "killed: later loans of no use": 2,
        "killed: later prompts of the lender that another engine computed": 1,
        "cut: loans used": 1,
        "cut: share of the prefix that came in all, most": 102,
        "lending: loans failed": 1,
        UNDISTURBED: 2.5,
    }
    assert {name: found[name].ours for name in expected} == pytest.approx(expected)
    assert "lending: share of the prefix that came in all, most" not in found


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"right": False}, "of them without a right answer"),
        ({"left": "prefill-1 blocks: 3"}, "of them after which something was left"),
        ({"attempts": 1}, "of them that were tried again or counted otherwise than once"),
        ({"loans": {}}, "of them that were tried again or counted otherwise than once"),
        (
            {"loans": {"used": 1, "failed": 1}},
            "of them that were tried again or counted otherwise than once",
        ),
    ],
)
def test_each_aim_is_missed_by_one_fault(more: dict[str, Any], name: str) -> None:
    made = {"faults": [fault("killed"), fault("killed", **more)]}
    missed = [row.name for row in rows(made) if row.aim and not row.met]
    assert missed == [name]
    assert counted_once(made["faults"][0])


def streamed(*texts: str, margin: float = 1.0, done: bool = True) -> Answer:
    """An answer in which the second best of each token is `margin` nats behind."""
    answer = Answer(stream=True)
    answer.head(200)
    for text in texts:
        tops = {text: -0.1, "other": -0.1 - margin}
        logprobs = {"tokens": [text], "token_logprobs": [-0.1], "top_logprobs": [tops]}
        piece = {"choices": [{"index": 0, "text": text, "logprobs": logprobs}]}
        answer.feed(f"data: {json.dumps(piece)}\n\n".encode())
    if done:
        answer.feed(b"data: [DONE]\n\n")
    return answer


def test_an_answer_is_judged_by_the_undisturbed_one() -> None:
    expected = streamed(" a", " b")
    assert judged(streamed(" a", " b"), expected) is None
    assert (judged(streamed(" a", " c"), expected) or ("", ""))[0] == "wrong"
    tied = judged(streamed(" a", " c"), streamed(" a", " b", margin=0.001))
    assert tied is not None and tied[0] == "near tie"
    cut = judged(streamed(" a", " b", done=False), expected)
    assert cut is not None and cut[0] == "wrong"


def test_an_answer_that_ends_with_an_error_is_wrong() -> None:
    answer = streamed(" a")
    answer.feed(b'data: {"error": {"code": "engine_lost", "message": "gone"}}\n\n')
    assert judged(answer, streamed(" a")) == ("wrong", "200 engine_lost: gone")


class Unanswered:
    """Hosts whose borrower gives no answer once the lender is harmed."""

    def __init__(self) -> None:
        self.killed, self.begun = asyncio.Event(), list[str]()

    def tree(self, name: str) -> list[Any]:
        return []

    def loans(self) -> dict[str, int]:
        return {}

    def received_bytes(self) -> int:
        return 0

    def request(self) -> Any:
        return SimpleNamespace(stage=Stage.LENDING)

    async def until(self, holds: Callable[[], object], what: str) -> None:
        while not holds():
            await asyncio.sleep(0)

    async def ask(self, tokens: list[int], engine: str) -> Any:
        await self.killed.wait()
        raise TimeoutError

    async def kill(self, name: str, tree: list[Any]) -> None:
        self.killed.set()

    def begin(self, name: str) -> None:
        self.begun.append(name)

    async def ready(self, name: str) -> None:
        pass


async def test_a_lender_is_not_started_again_behind_a_round_that_has_ended() -> None:
    hosts: Any = Unanswered()
    with pytest.raises(TimeoutError):
        await lenders.Round(hosts, 0, print)._borrowed([1], IN_THE_LEASE)
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)
    assert hosts.killed.is_set() and hosts.begun == []


NET_DEV = """Inter-|   Receive           |  Transmit
 face |bytes    packets errs|bytes    packets errs
    lo: 9999    1    0        9999    1    0
  eth0:  123456    7    0          77    5    0
"""


def test_the_bytes_of_the_link_are_those_that_its_device_has_received() -> None:
    assert received(NET_DEV) == 123456
    with pytest.raises(ValueError, match="no device eth0"):
        received("Inter-|\n    lo: 1 2\n")


def test_the_borrower_is_a_prefill_engine_on_the_other_host_that_asks_for_permits() -> None:
    options = engine_options("prefill", "10.79.0.1", "/models/m", SIZES, (0,), AGENT)
    made = borrowing(options, "10.79.0.2", AGENT)
    config = engine_config("vllm", {"engine_id": BORROWER, "role": "prefill"}, made)
    assert (config.side_channel_host, config.flow_node, config.flow_agent) == ("10.79.0.2", "decode", AGENT)
    assert config.engine_args == {"enable_prefix_caching": True}
    assert options["flow_agent"] == ""
    assert ENGINES[:2] == (LENDER, BORROWER)


def test_a_prompt_goes_to_the_engine_that_is_named() -> None:
    workers: Any = [SimpleNamespace(id=LENDER), SimpleNamespace(id=BORROWER)]
    nothing: Any = None
    policy = SentTo(BORROWER)
    chosen = policy.choose_prefill(nothing, workers, nothing, random.Random(1))
    assert (chosen.worker, [one.worker for one in chosen.ranking]) == (BORROWER, [BORROWER])
    assert not policy.strayed
    assert policy.choose_prefill(nothing, workers[:1], nothing, random.Random(1)).worker == LENDER
    assert policy.strayed == 1
