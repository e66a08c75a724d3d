"""Leases in the two halves of the connector: a renewal moves the end that vLLM's worker itself enforces."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

from actors.engine.vllm.connector import RENEW, RENEWED
from actors.engine.vllm.connector.messages import SluiceStats
from actors.engine.vllm.connector.scheduler import SluiceScheduler
from actors.engine.vllm.connector.worker import SluiceWorker


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
