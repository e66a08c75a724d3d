"""Leases in the two halves of the connector: a renewal moves the end that vLLM's worker itself enforces."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

from actors.engine.vllm.connector import BATCH, DUE, ENDS, LEASE, RENEW, RENEWED
from actors.engine.vllm.connector.lease_table import Source
from actors.engine.vllm.connector.messages import SluiceStats
from actors.engine.vllm.connector.scheduler import SluiceScheduler, flow_terms, terms_later
from actors.engine.vllm.connector.worker import SluiceWorker
from actors.engine.vllm.resume import OUTPUT


def lender(**left_s: float) -> Any:
    """Returns a worker half that lends the KV of these requests for the given seconds."""
    worker: Any = object.__new__(SluiceWorker)
    now_s = time.perf_counter()
    worker._reqs_to_send = {name: now_s + s for name, s in left_s.items()}
    worker._reqs_to_process = set(left_s)
    worker.consumer_notification_counts_by_req, worker.expected_consumer_notifications_by_req = {}, {}
    worker.xfer_stats = SluiceStats()
    return worker


def expired(worker: Any) -> set[str]:
    """Returns the leases that vLLM ends now."""
    done: set[str] = set()
    worker._reap_expired_send_leases(done)
    return done


def test_a_renewed_lease_outlives_its_first_end() -> None:
    worker = lender(a=-1.0, b=-1.0, c=500.0)
    for name in ("a", "c", "unknown"):
        worker._renew(name, 60.0)
    assert expired(worker) == {"b"}
    # c would have lasted longer anyway
    assert worker._reqs_to_send["c"] - time.perf_counter() > 400.0
    assert 0.0 < worker._reqs_to_send["a"] - time.perf_counter() <= 60.0
    assert worker.xfer_stats.data[RENEWED] == ["a", "c"]
    assert not worker.xfer_stats.is_empty()


def test_a_lease_that_has_ended_is_not_renewed() -> None:
    worker = lender(a=-1.0)
    assert expired(worker) == {"a"}
    worker._renew("a", 60.0)
    assert not worker._reqs_to_send
    assert worker.xfer_stats.data[RENEWED] == []


def test_the_scheduler_half_passes_on_what_it_has_lent() -> None:
    scheduler: Any = object.__new__(SluiceScheduler)
    scheduler._leased, scheduler._renewals = {"a", "b"}, {}
    wish = SimpleNamespace(kv_transfer_params={RENEW: {"a": 30.0, "gone": 30.0}}, request_id="renewal-1")
    assert scheduler.request_finished(wish, ()) == (False, None)
    assert scheduler._renewals == {"a": 30.0}


def test_a_flow_scheduler_hears_of_a_read_what_its_request_brings() -> None:
    handle = {LEASE: {"node": "n1"}, BATCH: "p@7", "remote_host": "10.0.0.1"}
    decode = flow_terms({**handle, DUE: 102.0}, now_s=100.5, before=3)
    assert decode == {"source": "n1", "batch": "p@7", "due_s": 1.5}
    without = {"remote_host": "10.0.0.1", LEASE: None, DUE: None}
    assert flow_terms(without, 100.0, 0) == {"source": "10.0.0.1", "batch": ""}


@pytest.mark.parametrize(("left_s", "held_s"), [(2.0, 2.0), (-1.0, 0.0), (500.0, 20.0)])
def test_no_read_is_held_for_longer_than_its_request_may_last(left_s: float, held_s: float) -> None:
    """A lease of 30 s bounds a hold by two thirds of that."""
    worker: Any = object.__new__(SluiceWorker)
    worker._leases, worker._node, worker._lease_s = {}, "n1", 30.0
    for role in ({}, {"do_remote_decode": True}):
        told = flow_terms({"remote_host": "a", ENDS: 100.0 + left_s, **role}, 100.0, 0)
        worker._flows = {"r": (told, time.monotonic())}
        terms = worker._terms("r", Source("agent", (0, 0))).flow
        assert (terms.target, terms.source) == ("n1", "a")
        assert terms.hold_s == pytest.approx(held_s, abs=0.5)


def test_a_read_that_waited_for_a_handshake_has_less_time_left() -> None:
    terms = flow_terms({"remote_host": "a", DUE: 101.0, ENDS: 105.0}, 100.0, 0)
    assert terms_later(terms, 2.0) == {**terms, "due_s": -1.0, "hold_s": 3.0}
    assert terms_later(terms, 9.0)["hold_s"] == 0.0
    assert terms_later({"source": "a"}, 9.0) == {"source": "a"}
    worker: Any = object.__new__(SluiceWorker)
    worker._leases, worker._node, worker._lease_s = {}, "n1", 30.0
    worker._flows = {"r": (terms, time.monotonic() - 2.0)}
    told = worker._terms("r", Source("agent", (0, 0))).flow
    assert (told.due_s, told.hold_s) == (pytest.approx(-1.0, abs=0.5), pytest.approx(3.0, abs=0.5))


def test_a_prefix_that_a_prefill_fetches_is_a_reuse_flow_of_its_place_in_the_queue() -> None:
    terms = flow_terms({"do_remote_decode": True, "remote_host": "a", DUE: 2.0}, now_s=0.0, before=3)
    assert (terms["stage"], terms["rli"]) == (1, 3)
    assert "due_s" not in terms


def test_a_read_that_waits_for_a_handshake_hears_that_it_is_needed_sooner() -> None:
    told: list[tuple[str, int]] = []
    worker: Any = object.__new__(SluiceWorker)
    worker._leases, worker._node, worker._lease_s = {}, "n1", 30.0
    worker._reads = SimpleNamespace(advance=lambda *read: told.append(read))
    terms = flow_terms({"do_remote_decode": True, "remote_host": "a"}, now_s=0.0, before=3)
    worker._flows = {"r": (terms, time.monotonic())}
    worker._advance("r", 1)
    worker._advance("ended", 0)
    assert worker._terms("r", Source("agent", (0, 0))).flow.rli == 1
    assert told == [("r", 1)]


def resumed(computed: int, remote: int, k: int = 150) -> tuple[int, bool, bool]:
    """Returns (matched tokens, whether they are waited for, whether vLLM counts cached tokens) of a request of 20
    prompt tokens and `k` of output, whose handle is for `remote` tokens.
    """
    scheduler: Any = object.__new__(SluiceScheduler)
    scheduler.kv_recompute_threshold = 0
    scheduler._prefill_backoff = lambda: 0
    handle = {"do_remote_prefill": True, "remote_num_tokens": remote}
    request: Any = SimpleNamespace(
        kv_transfer_params=handle, prompt_token_ids=[1] * 20, num_prompt_tokens=20, num_tokens=20 + k,
        sampling_params=SimpleNamespace(extra_args={OUTPUT: [2] * k} if k else {}), prefill_stats=object(),
    )  # fmt: skip
    matched, waits = scheduler.get_num_new_matched_tokens(request, computed)
    return matched, waits, request.prefill_stats is not None


def test_a_resumed_request_reads_the_kv_of_its_output_too() -> None:
    assert resumed(0, 170) == (170, True, False)
    assert resumed(128, 170) == (42, True, False)
    assert resumed(170, 170) == (0, False, False)
    # the lender has computed one token more than there are
    assert resumed(0, 171) == (170, True, False)


def test_without_output_in_the_handle_only_the_prompt_is_read() -> None:
    assert resumed(0, 20) == (20, True, True)
    assert resumed(0, 0) == (20, True, True)
    assert resumed(0, 20, k=0) == (20, True, True)
