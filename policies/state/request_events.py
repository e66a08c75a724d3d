"""Handlers of the events of a request's life. An event that does not fit raises StaleEvent and changes nothing."""

import math

from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.charges import Growth, Held, LiveRequest
from policies.state.ledger import Handlers, Ledger
from policies.state.outliers import BLAMELESS, OF_BOTH_ENDS, OF_WAITING, SHARED
from policies.state.standing import PROMPT_TOKENS
from policies.state.views import Role, WorkerId


def _arrived(ledger: Ledger, event: ev.Arrived) -> None:
    request = event.request
    known = ledger.live.get(request.attempt_id)
    if known is not None:
        ledger.move(known, Stage.QUEUED)
        ledger.hit_memo.pop(request.attempt_id, None)  # its prompt may have grown
        ledger.queued.count(known.request, -1)
    ledger.live[request.attempt_id] = LiveRequest(request, prefills=known.prefills if known else 0)
    ledger.queued.count(request, +1)


def _prefill_routed(ledger: Ledger, event: ev.PrefillRouted) -> None:
    live, load = ledger.need(event.attempt_id, Stage.QUEUED, Stage.POOLED), ledger.need_worker(event.worker)
    decode_worker = event.worker if event.colocated else None
    live.fetches = event.fetches
    ledger.move(live, Stage.PREFILLING, prefill_worker=event.worker, decode_worker=decode_worker)
    live.prefills += 1
    live.first_from_s = event.now_s if event.colocated else None
    load.unreported += 1
    load.unreported_prefills += 1
    ledger.outliers.probe(event.worker, event.attempt_id, event.now_s)
    ledger.last_chosen["prefill"] = event.worker


def _prefill_done(ledger: Ledger, event: ev.PrefillDone) -> None:
    live = ledger.need(event.attempt_id, Stage.PREFILLING)
    worker = event.worker or live.prefill_worker
    if live.colocated or worker is None:
        raise ev.StaleEvent(f"request {event.attempt_id} is colocated or has no prefill worker: no hand-over")
    load = ledger.loads.get(worker)
    if load is not None and worker == live.prefill_worker and (event.compute_s or not live.fetches):
        tokens = live.request.prompt_tokens - event.cached_tokens + PROMPT_TOKENS
        load.standing.computed_tokens += tokens
        if live.fetches:
            load.standing.computed(event.compute_s, event.now_s)
        load.standing.prompt_done(live.request.prompt_tokens + PROMPT_TOKENS, event.now_s)
    ledger.move(live, Stage.POOLED, prefill_worker=worker)
    if live.request.block_hashes:
        ledger.shared(live, worker, event.cached_tokens // live.request.block_tokens)
    lease_s = event.lease_until_s - event.now_s
    held = Held(event.now_s, event.lease_until_s, event.kv_bytes, event.cached_tokens, lease_s=lease_s)
    ledger.hold(live, held)


def _lease_renewed(ledger: Ledger, event: ev.LeaseRenewed) -> None:
    # the renewal of an entry that was sent on meanwhile is late, and no fault
    live = ledger.need(event.attempt_id, Stage.POOLED, Stage.TRANSFERRING)
    if live.held is not None and live.stage is Stage.POOLED:
        ledger.renew(live, event.lease_until_s, event.now_s)


def _decode_routed(ledger: Ledger, event: ev.DecodeRouted) -> None:
    live, load = ledger.need(event.attempt_id, Stage.POOLED), ledger.need_worker(event.worker)
    ledger.move(live, Stage.TRANSFERRING, prefill_worker=live.prefill_worker, decode_worker=event.worker)
    load.unreported += 1
    # None: without room the request waits inside the engine, as rescued entries do
    live.decode_routed_s = event.now_s if load.has_room else None
    ledger.outliers.probe(event.worker, event.attempt_id, event.now_s)
    ledger.last_chosen["decode"] = event.worker


def _aged(ledger: Ledger, event: ev.Aged) -> None:
    ledger.serve_as(ledger.need(event.attempt_id, Stage.QUEUED, Stage.POOLED), event.priority)


def _admitted(ledger: Ledger, event: ev.Admitted | ev.Progressed) -> None:
    attempt_id = event.attempt_id
    live = ledger.need(attempt_id, Stage.PREFILLING, Stage.TRANSFERRING, Stage.DECODING)
    if live.stage is Stage.PREFILLING and not live.colocated:
        raise ev.StaleEvent(f"request {attempt_id} still computes its prefill: it cannot be admitted")
    # an admission may be reported twice: by its own message and by progress
    if live.stage is not Stage.DECODING:
        sender, receiver = live.prefill_worker, live.decode_worker
        if live.stage is Stage.TRANSFERRING and live.decode_routed_s is not None:
            load = ledger.loads.get(receiver) if receiver is not None else None
            if load is not None:
                load.standing.admitted(event.now_s - live.decode_routed_s)
        if live.stage is Stage.TRANSFERRING:
            live.first_from_s = event.now_s
        ledger.move(live, Stage.DECODING, decode_worker=receiver)
        if sender != receiver:
            ledger.outliers.succeeded(sender, attempt_id, event.now_s)
            ledger.outliers.probe_ended(sender, attempt_id)


def _progressed(ledger: Ledger, event: ev.Progressed) -> None:
    _admitted(ledger, event)
    live = ledger.need(event.attempt_id)
    if event.tokens < live.tokens:
        raise ev.StaleEvent(f"request {event.attempt_id}: {event.tokens} tokens after {live.tokens}")
    _grow(ledger, live, event.tokens)


def _progressed_many(ledger: Ledger, event: ev.ProgressedMany) -> None:
    lives, loads, decode = ledger.live, ledger.loads, Stage.DECODING
    grown: dict[WorkerId, list[Growth]] = {}  # requests with a forecast
    ledger.refused = []
    for attempt_id, tokens in event.items:
        live = lives.get(attempt_id)
        if live is None or live.stage is not decode or tokens < live.tokens:
            # the first progress of a request also admits it; progress that does not fit raises StaleEvent
            try:
                _progressed(ledger, ev.Progressed(event.now_s, attempt_id, tokens))
            except ev.StaleEvent:
                ledger.refused_items += 1
                ledger.refused.append(attempt_id)
            continue
        before, worker = live.tokens, live.decode_worker or ""
        live.tokens = tokens
        if not before and tokens:
            _first_token(ledger, live)
        load = loads.get(worker)
        # a worker may be away while its requests go on
        if load is not None:
            load.kv_tokens += tokens - before
            if worker not in grown:
                grown[worker] = []
            if live.finishes_at_tokens is not None:
                grown[worker].append((live, before, tokens))
    ledger.dirty.update(grown)
    for worker, growths in grown.items():
        if growths:
            loads[worker].departures.grew(growths)


def _grow(ledger: Ledger, live: LiveRequest, tokens: int) -> None:
    """Sets the generated tokens of a decoding request; of its charges only the worker's KV and the departure change."""
    before, live.tokens = live.tokens, tokens
    if not before and tokens:
        _first_token(ledger, live)
    # a worker may be away while its requests go on
    load = ledger.loads.get(live.decode_worker) if live.decode_worker is not None else None
    if load is not None:
        load.kv_tokens += tokens - before
        if live.finishes_at_tokens is not None:
            load.departures.grew([(live, before, tokens)])
        ledger.dirty.add(load.up.worker)


def _first_token(ledger: Ledger, live: LiveRequest) -> None:
    """Counts the time to a first token for the speed of its worker."""
    load = ledger.loads.get(live.decode_worker) if live.decode_worker is not None else None
    since_s, live.first_from_s = live.first_from_s, None
    if load is not None and since_s is not None:
        colocated = load.up.role is not Role.DECODE
        work = live.request.prompt_tokens + PROMPT_TOKENS if colocated else 1.0
        load.standing.first_token(ledger.now_s - since_s, work)


def _forecast_made(ledger: Ledger, event: ev.ForecastMade) -> None:
    live = ledger.need(event.attempt_id)
    finishes_in = event.finishes_in_tokens
    if finishes_in is not None and not (math.isfinite(finishes_in) and finishes_in >= 0):
        raise ValueError(
            f"request {event.attempt_id}: forecast of {finishes_in} tokens; must be finite, >= 0, or None"
        )
    at_tokens = event.tokens / live.request.slots
    ledger.forecast(live, None if finishes_in is None else at_tokens + finishes_in)


def _attempt_failed(ledger: Ledger, event: ev.AttemptFailed) -> None:
    live, outliers = ledger.need(event.attempt_id), ledger.outliers
    if event.code in BLAMELESS:
        return
    without_room = live.stage is Stage.TRANSFERRING and live.decode_routed_s is None
    if without_room and event.code in OF_WAITING:
        return
    named = [worker for worker in (live.prefill_worker, live.decode_worker) if worker is not None]
    if event.code in OF_BOTH_ENDS:
        for worker in dict.fromkeys(named):
            outliers.failed(worker, event.attempt_id, SHARED, event.now_s)
        return
    # of an engine with several workers only the one that had the request is to blame
    at_fault = [worker for worker in dict.fromkeys(named) if worker in event.workers]
    for worker in at_fault or (event.workers if len(event.workers) == 1 else ()):
        outliers.failed(worker, event.attempt_id, 1.0, event.now_s)


def _closed(ledger: Ledger, event: ev.Closed) -> None:
    live, outliers = ledger.need(event.attempt_id), ledger.outliers
    sender, receiver = live.prefill_worker, live.decode_worker
    if live.stage is Stage.DECODING:
        generated = sum([load.generated_tokens for load in ledger.loads.values()])
        ledger.departures.departed(live.request.slots, generated)
    if event.outcome == "finished":
        outliers.succeeded(receiver, event.attempt_id, event.now_s)
    ledger.move(live, Stage.QUEUED)
    ledger.queued.count(live.request, -1)
    del ledger.live[event.attempt_id]
    ledger.hit_memo.pop(event.attempt_id, None)
    if outliers.quarantined:
        outliers.probe_ended(sender, event.attempt_id)
        outliers.probe_ended(receiver, event.attempt_id)


def _adopted(ledger: Ledger, event: ev.Adopted) -> None:
    known = ledger.live.get(event.request.attempt_id)
    if known is not None:
        ledger.move(known, Stage.QUEUED)
        ledger.queued.count(known.request, -1)
    ledger.queued.count(event.request, +1)
    live = LiveRequest(event.request, tokens=event.tokens, prefills=known.prefills if known else 1)
    ledger.live[event.request.attempt_id] = live
    prefill, decode = event.prefill_worker, event.decode_worker
    if event.stage == "decoding":
        ledger.move(live, Stage.DECODING, decode_worker=decode)
    elif event.stage == "transferring":
        ledger.move(live, Stage.TRANSFERRING, prefill_worker=prefill, decode_worker=decode)
    elif event.stage == "pooled":
        ledger.move(live, Stage.POOLED, prefill_worker=prefill)
        entered_s = event.now_s if event.entered_s is None else event.entered_s
        held = Held(entered_s, event.lease_until_s, event.kv_bytes, 0, event.renewed_s, event.lease_s)
        ledger.hold(live, held)
    else:
        ledger.move(live, Stage.PREFILLING, prefill_worker=prefill, decode_worker=decode)


def _tick(ledger: Ledger, event: ev.Tick) -> None:
    outliers = ledger.outliers
    for worker, standing in sorted(outliers.quarantined.items()):
        if standing.probe is None:
            continue
        live = ledger.live.get(standing.probe)
        if live is None or worker not in (live.prefill_worker, live.decode_worker):
            # it was sent elsewhere meanwhile
            standing.probe = None
        elif live.decode_worker == worker and live.tokens:
            # a stream may last for minutes: its first tokens show that the worker works
            outliers.works(worker, event.now_s)
    outliers.compare(event.now_s)
    for index in ledger.prefix.values():
        index.sweep()


HANDLERS: Handlers = {
    ev.Arrived: _arrived,
    ev.PrefillRouted: _prefill_routed,
    ev.PrefillDone: _prefill_done,
    ev.LeaseRenewed: _lease_renewed,
    ev.DecodeRouted: _decode_routed,
    ev.Aged: _aged,
    ev.Admitted: _admitted,
    ev.Progressed: _progressed,
    ev.ProgressedMany: _progressed_many,
    ev.ForecastMade: _forecast_made,
    ev.AttemptFailed: _attempt_failed,
    ev.Closed: _closed,
    ev.Adopted: _adopted,
    ev.Tick: _tick,
}
