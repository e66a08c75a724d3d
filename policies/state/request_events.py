"""Handlers of the events of a request's life. An event that does not fit raises StaleEvent and changes nothing."""

import math

from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.charges import Growth, LiveRequest
from policies.state.ledger import Handlers, Ledger
from policies.state.views import WorkerId


def _arrived(ledger: Ledger, event: ev.Arrived) -> None:
    request = event.request
    known = ledger.live.get(request.attempt_id)
    if known is not None:
        ledger.move(known, Stage.QUEUED)
        ledger.hit_memo.pop(request.attempt_id, None)  # its prompt may have grown
    ledger.live[request.attempt_id] = LiveRequest(request, prefills=known.prefills if known else 0)


def _prefill_routed(ledger: Ledger, event: ev.PrefillRouted) -> None:
    live, load = ledger.need(event.attempt_id, Stage.QUEUED, Stage.POOLED), ledger.need_worker(event.worker)
    decode_worker = event.worker if event.colocated else None
    ledger.move(live, Stage.PREFILLING, prefill_worker=event.worker, decode_worker=decode_worker)
    live.prefills += 1
    load.unreported += 1
    ledger.last_chosen["prefill"] = event.worker


def _prefill_done(ledger: Ledger, event: ev.PrefillDone) -> None:
    live = ledger.need(event.attempt_id, Stage.PREFILLING)
    if live.colocated or live.prefill_worker is None:
        raise ev.StaleEvent(f"request {event.attempt_id} is colocated or its worker is gone: no hand-over")
    ledger.move(live, Stage.POOLED, prefill_worker=live.prefill_worker)
    ledger.enter_pool(live, event.now_s, event.lease_until_s, event.kv_bytes, event.cached_tokens)


def _decode_routed(ledger: Ledger, event: ev.DecodeRouted) -> None:
    live, load = ledger.need(event.attempt_id, Stage.POOLED), ledger.need_worker(event.worker)
    ledger.move(live, Stage.TRANSFERRING, prefill_worker=live.prefill_worker, decode_worker=event.worker)
    load.unreported += 1
    ledger.last_chosen["decode"] = event.worker


def _admitted(ledger: Ledger, event: ev.Admitted | ev.Progressed) -> None:
    attempt_id = event.attempt_id
    live = ledger.need(attempt_id, Stage.PREFILLING, Stage.TRANSFERRING, Stage.DECODING)
    if live.stage is Stage.PREFILLING and not live.colocated:
        raise ev.StaleEvent(f"request {attempt_id} still computes its prefill: it cannot be admitted")
    # an admission may be reported twice: by its own message and by progress
    if live.stage is not Stage.DECODING:
        ledger.move(live, Stage.DECODING, decode_worker=live.decode_worker)


def _progressed(ledger: Ledger, event: ev.Progressed) -> None:
    _admitted(ledger, event)
    live = ledger.need(event.attempt_id)
    if event.tokens < live.tokens:
        raise ev.StaleEvent(f"request {event.attempt_id}: {event.tokens} tokens after {live.tokens}")
    _grow(ledger, live, event.tokens)


def _progressed_many(ledger: Ledger, event: ev.ProgressedMany) -> None:
    lives, loads, decode = ledger.live, ledger.loads, Stage.DECODING
    grown: dict[WorkerId, list[Growth]] = {}  # requests with a forecast
    for attempt_id, tokens in event.items:
        live = lives.get(attempt_id)
        if live is None or live.stage is not decode or tokens < live.tokens:
            # the first progress of a request also admits it; progress that does not fit raises StaleEvent
            try:
                _progressed(ledger, ev.Progressed(event.now_s, attempt_id, tokens))
            except ev.StaleEvent:
                ledger.refused_items += 1
            continue
        before, worker = live.tokens, live.decode_worker
        live.tokens = tokens
        if worker is not None:
            loads[worker].kv_tokens += tokens - before
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
    # None: the worker died, and the request's last progress may still come
    if live.decode_worker is not None:
        load = ledger.loads[live.decode_worker]
        load.kv_tokens += tokens - before
        if live.finishes_at_tokens is not None:
            load.departures.grew([(live, before, tokens)])
        ledger.dirty.add(live.decode_worker)


def _forecast_made(ledger: Ledger, event: ev.ForecastMade) -> None:
    live = ledger.need(event.attempt_id)
    finishes_in = event.finishes_in_tokens
    if finishes_in is not None and not (math.isfinite(finishes_in) and finishes_in >= 0):
        raise ValueError(
            f"request {event.attempt_id}: forecast of {finishes_in} tokens; must be finite, >= 0, or None"
        )
    at_tokens = event.tokens / live.request.slots
    ledger.forecast(live, None if finishes_in is None else at_tokens + finishes_in)


def _closed(ledger: Ledger, event: ev.Closed) -> None:
    ledger.move(ledger.need(event.attempt_id), Stage.QUEUED)
    del ledger.live[event.attempt_id]
    ledger.hit_memo.pop(event.attempt_id, None)


def _adopted(ledger: Ledger, event: ev.Adopted) -> None:
    attempt_id = event.request.attempt_id
    if attempt_id in ledger.live:
        raise ev.StaleEvent(f"request {attempt_id} is known already")
    live = LiveRequest(event.request, tokens=event.tokens, prefills=1)
    prefill = event.prefill_worker if event.prefill_worker in ledger.loads else None
    decode = event.decode_worker if event.decode_worker in ledger.loads else None
    ledger.live[attempt_id] = live
    if event.stage == "decoding":
        ledger.move(live, Stage.DECODING, decode_worker=decode)
    elif event.stage == "pooled" and prefill is not None:
        ledger.move(live, Stage.POOLED, prefill_worker=prefill)
        ledger.enter_pool(live, event.now_s, event.lease_until_s, event.kv_bytes, 0)
    else:
        ledger.move(live, Stage.PREFILLING, prefill_worker=prefill, decode_worker=decode)


HANDLERS: Handlers = {
    ev.Arrived: _arrived,
    ev.PrefillRouted: _prefill_routed,
    ev.PrefillDone: _prefill_done,
    ev.DecodeRouted: _decode_routed,
    ev.Admitted: _admitted,
    ev.Progressed: _progressed,
    ev.ProgressedMany: _progressed_many,
    ev.ForecastMade: _forecast_made,
    ev.Closed: _closed,
    ev.Adopted: _adopted,
}
