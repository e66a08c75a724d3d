"""The half of the KV connector in the engine core, which numbers the leases, passes releases and renewals on, and paces
idle steps.

vLLM's core steps its workers hundreds of times a second as long as a lease or a transfer is open, even when it computes
nothing. On a CPU engine that costs a whole core for the worker and a third of another for the core process. A transfer
ends within milliseconds while a lease may last for seconds, so the pauses between idle steps grow with the time in
which nothing happened.
"""

import dataclasses
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger

from actors.engine.vllm.connector import (
    BATCH,
    DUE,
    ENDED,
    ENDS,
    HELLO,
    LEASE,
    LISTENER,
    READING,
    RELEASE,
    RENEW,
)
from actors.engine.vllm.connector.handle import fault
from actors.engine.vllm.connector.lease_table import TABLE_SLOTS
from actors.engine.vllm.connector.listener import HandshakeListener, ListenerCounts
from actors.engine.vllm.connector.messages import SluiceMetadata, SluiceStats
from actors.engine.vllm.connector.prefix import borrows, decline, forget, unread
from actors.engine.vllm.resume import output_before

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

LONGEST_PAUSE_S = 0.005
"""Longest wait of a request that arrives while the core only keeps leases. ASSUMPTION: a decode step takes longer."""

PAUSE_GROWTH = 0.05
"""Pause as a share of the time without an event, so the longest pause is reached after 0.1 s."""

GIVE_BACK_S = 6.0
"""Seconds for which the core goes on to step after it has given KV back unread. The message to the lender leaves in a
step after the handshake, whose limit in vLLM is 5 s.
"""


class Pace:
    """The pauses between idle steps. Times are from any monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._quiet_since_s: float | None = None

    def event(self) -> None:
        """Resets the pauses to 0, because something was computed or a transfer or lease has ended."""
        self._quiet_since_s = None

    def pause_s(self, now_s: float) -> float:
        """Returns the pause before the next idle step, in seconds."""
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return min(LONGEST_PAUSE_S, (now_s - self._quiet_since_s) * PAUSE_GROWTH)


_Rank = tuple[int, float, str]
"""A request's place in the order of vLLM's queue: priority, arrival, id."""


class Places:
    """The requests that wait in the engine's queue, in vLLM's order, and the places of those that read a prefix: the
    number of requests before each.

    A request waits from its arrival until it is first computed or has ended, also while its KV is read. vLLM does not
    tell a connector which requests it preempts, so these are not counted when they wait again.
    """

    def __init__(self) -> None:
        self._waiting: list[_Rank] = []
        self._ranks: dict[str, _Rank] = {}
        self._told: dict[str, int] = {}

    def arrived(self, request: "Request") -> None:
        """Takes a request that has come to the queue."""
        rank = self._ranks[request.request_id] = (request.priority, request.arrival_time, request.request_id)
        insort(self._waiting, rank)

    def left(self, request_ids: Iterable[str]) -> None:
        """Notes that requests are computed or have ended. Those that have left before are ignored."""
        for request_id in request_ids:
            rank = self._ranks.pop(request_id, None)
            if rank is not None:
                del self._waiting[bisect_left(self._waiting, rank)]
                self._told.pop(request_id, None)

    def reads(self, request_id: str) -> int:
        """Returns the place of a request whose prefix is read from now on; 0 for one that has left the queue."""
        rank = self._ranks.get(request_id)
        if rank is None:
            return 0
        place = self._told[request_id] = bisect_left(self._waiting, rank)
        return place

    def advanced(self) -> dict[str, int]:
        """Returns the places of the requests that read a prefix and have fewer before them than was last said."""
        places = {name: bisect_left(self._waiting, self._ranks[name]) for name in self._told}
        fallen = {name: place for name, place in places.items() if place < self._told[name]}
        self._told.update(fallen)
        return fallen


def _brought(request: "Request") -> int:
    """Returns the number of tokens whose KV a resumed request is about to pull; 0 for any other request."""
    params = request.kv_transfer_params
    if not params or not params.get("do_remote_prefill") or not output_before(request.sampling_params):
        return 0
    return min(params.get("remote_num_tokens") or 0, request.num_tokens)


class SluiceScheduler(NixlPullConnectorScheduler):
    """vLLM's pull scheduler, which also numbers the leases and passes releases and renewals on to the
    workers."""

    def __init__(self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # It would pin every finished decode; `update_state_after_alloc` turns it on for one request at a time.
        self.is_bidirectional_kv_xfer_enabled = False
        self._free_slots = list(range(TABLE_SLOTS - 1, -1, -1))
        self._generation = time.time_ns()  # unique across restarts of the engine
        self._opened: dict[str, tuple[int, int]] = {}  # request -> slot, generation
        self._new: dict[str, tuple[int, int]] = {}
        self._leased: set[str] = set()
        self._releases: list[str] = []
        self._renewals: dict[str, float] = {}
        self._tables: list[tuple[int, int, int]] = []  # pipeline rank, tensor rank, address
        self._sums: list[tuple[int, int, tuple[int, int, int, int]]] = []
        self._lent: dict[str, tuple[int, Any]] = {}
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        self._node = str(transfer_config.get_from_extra_config("flow_node", ""))
        self._step = 0
        self._pace = Pace()
        self._places = Places()
        self._gives_back_until_s = 0.0
        self._listen_error: Exception | None = None
        self._listener: HandshakeListener | None = None
        self._reported = ListenerCounts()
        self.stats = SluiceStats()

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._tables = [(pp, tp, payload.lease_table) for (pp, tp), payload in sorted(metadata.items())]
        self._sums = [
            (pp, tp, payload.sums) for (pp, tp), payload in sorted(metadata.items()) if payload.sums
        ]
        for payload in metadata.values():
            times = [
                payload.born_at_s, payload.imported_at_s, payload.loaded_at_s, payload.registered_at_s,
            ]  # fmt: skip
            self.stats.data[HELLO].append([payload.compatibility_hash, payload.kv_block_bytes, *times])
        super().set_xfer_handshake_metadata(metadata)
        if self._listen_error is not None:
            raise RuntimeError(
                f"NIXL's side channel cannot listen on {self.side_channel_host}:{self.side_channel_port} "
                f"({self._listen_error}): free the port, or set the engine's side_channel_port to another"
            ) from self._listen_error

    def _nixl_handshake_listener(  # type: ignore[override]  # vLLM's is static; it is called through `self`
        self, encoded_data: Any, ready_event: threading.Event, *rest: Any
    ) -> None:
        """Answers handshakes in the listener's thread, in place of vLLM's listener (`listener`). Stores the error if it
        cannot start, where vLLM would wait for `ready_event` forever.
        """
        stop_event, host, port = rest
        self._listener = HandshakeListener(encoded_data, host, port)
        try:
            self._listener.serve(ready_event, stop_event)
        except Exception as error:
            self._listen_error = error
            ready_event.set()

    def _keep_listening(self) -> None:
        """Starts the listener's thread again if it has ended, and reports what the listener has counted."""
        thread: threading.Thread | None = self._nixl_handshake_listener_t  # type: ignore[has-type]
        listener = self._listener
        if thread is None or listener is None:
            return
        if not thread.is_alive() and not self._stop_event.is_set():
            listener.counts.reopened += 1
            self._nixl_handshake_listener_t = threading.Thread(
                target=listener.serve,
                args=(threading.Event(), self._stop_event),
                daemon=True,
                name=thread.name,
            )
            self._nixl_handshake_listener_t.start()
        counts, reported = listener.counts, self._reported
        if counts != reported:
            news = [counts.refused - reported.refused, counts.reopened - reported.reopened]
            self._reported = dataclasses.replace(counts)
            if any(news):
                self.stats.data[LISTENER].append(news)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        request_id = request.request_id
        if params and params.get("do_remote_decode") and request_id not in self._opened and self._free_slots:
            self._generation += 1
            self._opened[request_id] = self._new[request_id] = (self._free_slots.pop(), self._generation)
        # vLLM orders the read of a prefill only with this switch, which would also pin every finished decode.
        self.is_bidirectional_kv_xfer_enabled = borrows(params)
        try:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        finally:
            self.is_bidirectional_kv_xfer_enabled = False

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        if borrows(request.kv_transfer_params) and not unread(request.kv_transfer_params):
            # A prefix is read once at most, and vLLM would wait for another read without end: this one was preempted
            # after its read, or declined.
            return 0, False
        brought = _brought(request)
        if brought > request.num_prompt_tokens:
            # vLLM reads prompts only, counts the cached tokens of prompts only, and asserts that there are no others
            request.prefill_stats = None
            return max(0, brought - num_computed_tokens), brought > num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def on_new_request(self, request: "Request") -> None:
        super().on_new_request(request)
        self._places.arrived(request)
        params = request.kv_transfer_params
        if params is None or not unread(params):
            return
        if wrong := fault(params):
            logger.warning("Request %s computes its whole prompt: its lent prefix has no handle that can be read (%s).",
                           request.request_id, wrong)  # fmt: skip
            forget(params)
            return
        if self.use_host_buffer:
            # vLLM saves a prefill's KV to host memory or reads for it, not both: its request would wait without end.
            decline(params)
            self._reqs_need_recv[request.request_id] = (request, (), (), False)
            return
        # vLLM renews leases for decodes only. A prefill waits for its turn as a decode does.
        engine_id, lent_as = params["remote_engine_id"], params["remote_request_id"]
        beat = self._heartbeat_by_engine.setdefault(
            engine_id,
            HeartbeatInfo(
                req_ids=set(),
                host=params["remote_host"],
                port=params["remote_port"],
                tp_size=params["tp_size"],
                dcp_size=params.get("dcp_size", 1),
                pp_size=params.get("pp_size", 1),
            ),
        )
        beat.req_ids.add(lent_as)
        self._heartbeat_req_engine[request.request_id] = (engine_id, lent_as)

    def request_finished(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if params and RELEASE in params:
            self._releases.extend(attempt_id for attempt_id in params[RELEASE] if attempt_id in self._leased)
            return False, None
        if params and RENEW in params:
            wishes = params[RENEW].items()
            self._renewals.update((known, lease_s) for known, lease_s in wishes if known in self._leased)
            return False, None
        if params and unread(params):
            # It ended before its read was ordered, so the lender learns that its blocks are not needed.
            self._reqs_need_recv[request.request_id] = (request, (), (), False)
        leased, handle = super().request_finished(request, block_ids)
        opened = self._opened.get(request.request_id)
        if not leased:
            self._close(request.request_id)
        else:
            self._leased.add(request.request_id)
            if handle is not None and opened is not None:
                handle[BATCH] = f"{self.engine_id}@{self._step}"
                handle[LEASE] = {"slot": opened[0], "generation": opened[1], "tables": self._tables}
                handle[LEASE]["node"] = self._node
                if self._sums:
                    handle[LEASE]["sums"] = self._sums
                    self._lent[request.request_id] = (opened[1], handle["remote_block_ids"])
        return leased, handle

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        if connector_output.finished_sending or connector_output.finished_recving:
            self._pace.event()
        for request_id in connector_output.finished_sending or ():
            self._leased.discard(request_id)
            self._close(request_id)
            self.stats.data[ENDED].append(request_id)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> SluiceMetadata:
        self._step += 1
        ordered = self._reqs_need_recv or self._releases or self._renewals
        if scheduler_output.total_num_scheduled_tokens > 0 or ordered:
            self._pace.event()
        else:
            time.sleep(self._pace.pause_s(time.monotonic()))
        self._keep_listening()
        self._places.left(scheduler_output.num_scheduled_tokens)
        self._places.left(scheduler_output.finished_req_ids)
        ours = SluiceMetadata()
        for request_id, (request, blocks, *_) in self._reqs_need_recv.items():
            params = request.kv_transfer_params or {}
            if any(blocks):
                self.stats.data[READING].append(request_id)
                before = self._places.reads(request_id) if borrows(params) else 0
                ours.flows[request_id] = flow_terms(params, time.monotonic(), before)
                if params.get(LEASE) is not None:
                    ours.leases[request_id] = params[LEASE]
            else:
                self._gives_back_until_s = time.monotonic() + GIVE_BACK_S
        ours.__dict__.update(super().build_connector_meta(scheduler_output).__dict__)
        ours.advanced = self._places.advanced()
        ours.opened, self._new = self._new, {}
        ours.lent, self._lent = self._lent, {}
        ours.released, self._releases = self._releases, []
        ours.renewed, self._renewals = self._renewals, {}
        return ours

    def gives_back(self) -> bool:
        """Whether a message that KV stays unread may wait for a handshake with its lender."""
        return time.monotonic() < self._gives_back_until_s

    def _close(self, request_id: str) -> None:
        opened = self._opened.pop(request_id, None)
        self._new.pop(request_id, None)
        self._lent.pop(request_id, None)
        if opened is not None:
            self._free_slots.append(opened[0])


def flow_terms(params: dict[str, Any], now_s: float, before: int) -> dict[str, Any]:
    """Returns what the workers tell a flow scheduler of a read (fields of `chunked_read.FlowTerms`), from the
    kv_transfer_params of a request that has `before` others before it in its engine's queue. `now_s` is the time by the
    host's monotonic clock.

    A request whose own KV will be read is a prefill that fetches a prefix (stage 1). vLLM loads a prefix whole, before
    the first layer, so its place in the queue takes the part of MFS's relative layer index. No read is held for longer
    than its request may last.
    """
    terms: dict[str, Any] = {
        "source": (params.get(LEASE) or {}).get("node") or str(params.get("remote_host", "")),
        "batch": params.get(BATCH, ""),
    }
    if (ends_at_s := params.get(ENDS)) is not None:
        terms["hold_s"] = max(0.0, ends_at_s - now_s)
    if params.get("do_remote_decode"):
        return terms | {"stage": 1, "rli": before}
    due_at_s = params.get(DUE)
    return terms if due_at_s is None else terms | {"due_s": due_at_s - now_s}


def terms_later(terms: Mapping[str, Any], passed_s: float) -> dict[str, Any]:
    """Returns what `flow_terms` says when `passed_s` have passed since: a read may wait for vLLM's handshake with a
    lender that it does not know yet.
    """
    later = dict(terms)
    if "due_s" in later:
        later["due_s"] -= passed_s
    if "hold_s" in later:
        later["hold_s"] = max(0.0, later["hold_s"] - passed_s)
    return later
