"""The ledger: what an engine core's reports become."""

from types import SimpleNamespace
from typing import Any

from actors.engine.vllm.connector import ENDED, HELLO, READING, RENEWED, TRANSFERS
from actors.engine.vllm.stats import Hello, Ledger, Transfer


def ledger() -> tuple[Ledger, list[Any]]:
    calls: list[Any] = []
    return Ledger(calls.append, calls.append), calls


def scheduler(
    running: int, waiting: int, skipped: int, usage: float, connector: Any = None
) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=usage,
        kv_connector_stats=connector,
    )


def test_counts_of_all_cores_are_added() -> None:
    book, _ = ledger()
    book.scheduler(0, scheduler(3, 1, 2, 0.1))
    book.scheduler(1, scheduler(1, 0, 0, 1 - 70 / 90))
    book.scheduler(0, scheduler(2, 0, 1, 5 / 90))
    assert book.requests() == (3, 1)
    assert book.used_blocks(90) == 5 + 20


def test_transfers_are_totalled_and_handed_on_with_ended_leases() -> None:
    book, calls = ledger()
    connector = {
        TRANSFERS: [["a", True, 1000, 0.5, 30, 0.0], ["b", False, 0, 0.0, 0, 1.5]],
        ENDED: ["c"],
        HELLO: [["hash", 4096, 1.0, 2.0, 3.0, 4.0]],
        "num_kv_expired_reqs": [1, 1],
    }
    book.scheduler(0, scheduler(0, 0, 0, 0.0, connector))
    assert calls == [Transfer("a", True, 1000, 0.5, 30, 0.0), Transfer("b", False, 0, 0.0, 0, 1.5), "c"]
    assert book.hellos == [Hello("hash", 4096, 1.0, 2.0, 3.0, 4.0)]
    totals = book.totals
    assert (totals.transfers, totals.transfer_bytes, totals.transfer_s, totals.transfer_descriptors) == (
        1,
        1000,
        0.5,
        30,
    )
    assert (totals.transfer_failures, totals.leases_expired) == (1, 2)


def test_renewed_leases_are_handed_on() -> None:
    renewed: list[str] = []
    book = Ledger(renewed.append, renewed.append, on_lease_renewed=renewed.append)
    book.scheduler(0, scheduler(0, 0, 0, 0.0, {RENEWED: ["a", "b"]}))
    assert renewed == ["a", "b"]


def test_tokens_are_those_that_this_engine_computed() -> None:
    book, _ = ledger()
    prompt = SimpleNamespace(computed=10, external_kv_transfer=500)
    for _ in range(2):
        book.iteration(
            SimpleNamespace(prompt_token_stats=prompt, num_generation_tokens=3, num_preempted_reqs=1)
        )
    assert (book.totals.prefill_tokens, book.totals.decode_tokens, book.totals.preemptions) == (20, 6, 2)


def test_reads_that_begin_are_handed_on_before_the_transfers_of_the_step() -> None:
    calls: list[object] = []
    book = Ledger(calls.append, calls.append, on_reading=calls.append)
    book.scheduler(0, scheduler(0, 0, 0, 0.0, {READING: ["a"], TRANSFERS: [["b", True, 1, 0.5, 3, 0.0]]}))
    assert calls == ["a", Transfer("b", True, 1, 0.5, 3, 0.0)]


def iteration(
    at_s: float, computed: int = 0, tokens: int = 0, firsts: int = 0, prompts: list[float] | None = None
) -> SimpleNamespace:
    """A step's IterationStats: `prompts` are the prefill times of requests for one token that finished in it."""
    finished = [SimpleNamespace(prefill_time=s, num_generation_tokens=1) for s in prompts or []]
    return SimpleNamespace(
        iteration_timestamp=at_s,
        prompt_token_stats=SimpleNamespace(computed=computed),
        num_generation_tokens=tokens,
        time_to_first_tokens_iter=[0.1] * firsts,
        finished_requests=finished,
    )


def timed(book: Ledger, stats: SimpleNamespace, running: int, usage: float = 0.0, waiting: int = 0) -> None:
    book.scheduler(0, scheduler(running, waiting, 0, usage))
    book.step(0, stats)


def test_a_step_that_follows_another_took_the_time_between_them() -> None:
    book, _ = ledger()
    # nobody knows when this step began; two requests run on
    timed(book, iteration(10.0, computed=30, tokens=2, firsts=2), running=2, usage=0.1)
    assert book.totals.step_s == 0.0
    timed(book, iteration(10.5, tokens=2), running=2, usage=0.2)
    # a third prompt is computed beside both, of which one ends
    timed(book, iteration(11.25, computed=20, tokens=3, firsts=1), running=2, usage=0.3)
    # the rest ends here
    timed(book, iteration(11.5, tokens=2), running=0, usage=0.3)
    # an idle core has begun at an unknown time
    timed(book, iteration(60.0, computed=5, tokens=1, firsts=1), running=1)
    metrics = book.metrics(blocks=100, used=0, block_tokens=16)
    assert metrics.step_s == 0.5 + 0.75 + 0.25
    assert (metrics.prefill_steps, metrics.prefill_step_tokens) == (1, 20)
    assert (metrics.decode_steps, metrics.decode_step_seqs) == (3, 2 + 2 + 2)
    # shares 0.2, 0.3 and 0.3 of 1,600 tokens
    assert metrics.decode_step_kv_tokens == 1280


def test_a_core_that_an_abort_left_idle_is_not_timed_through_its_rest() -> None:
    book, _ = ledger()
    timed(book, iteration(10.0, computed=30, tokens=1, firsts=1), running=1)
    # its only client leaves, and the core reports a step without outputs
    book.scheduler(0, scheduler(0, 0, 0, 0.0))
    timed(book, iteration(610.0, computed=5, tokens=1, firsts=1), running=1)
    assert book.totals.step_s == 0.0
    timed(book, iteration(610.5, tokens=1), running=1)
    assert book.totals.step_s == 0.5


def test_lone_prompts_of_a_prefill_engine_are_timed_by_vllm() -> None:
    book, _ = ledger()
    for at_s, seconds in ((10.0, [0.5]), (20.0, [0.25, 0.75])):
        timed(
            book, iteration(at_s, computed=100, tokens=len(seconds), firsts=len(seconds), prompts=seconds), 0
        )
    # one that waits follows at once
    timed(book, iteration(30.0, computed=100, tokens=1, firsts=1, prompts=[0.5]), 0, waiting=1)
    timed(book, iteration(30.5, computed=100, tokens=1, firsts=1, prompts=[0.6]), 0)
    totals = book.totals
    assert totals.step_s == 0.5 + 0.75 + 0.5 + 0.5
    assert (totals.prefill_steps, totals.prefill_step_tokens, totals.decode_steps) == (4, 400, 0)
