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
        HELLO: [["hash", 4096, 1.0, 2.0, 3.0]],
        "num_kv_expired_reqs": [1, 1],
    }
    book.scheduler(0, scheduler(0, 0, 0, 0.0, connector))
    assert calls == [Transfer("a", True, 1000, 0.5, 30, 0.0), Transfer("b", False, 0, 0.0, 0, 1.5), "c"]
    assert book.hellos == [Hello("hash", 4096, 1.0, 2.0, 3.0)]
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
