"""Spans of a request that has ended, as its ingress knows it.

    POST /v1/chat/completions       the whole request, at the ingress; it names the GenAI conventions' attributes
      prefill                       one span for each task at an engine, of each attempt
      transfer                      from the decision for the decode engine to the first token of the attempt
      decode                        from that token to the last one, or to the failure
      migration | retry             from the failure of an attempt to the first token of the next, with a link to the
                                    span of the task that failed
      engine NAME                   the parts of a task that the engine itself told: wait for a slot, prefill, report,
                                    transfer, wait for a step, step

The events `prepare`, `queue`, `pool` and `finish` of the whole span have the time until the first attempt was submitted
(the body is parsed, the template is filled and the text is tokenised), in the router's queue, in the pool, and from the
last token to the end of the answer. With the tasks, and with what lies between an attempt that failed and the next one,
they sum up to the request's time. A colocated attempt has no transfer: its prefill ends with the first token. Of a
sampled request the router's decisions (`decisions`) and vLLM's own spans stand below the whole span, too.

Source: OpenTelemetry semantic conventions for HTTP and for generative AI (v1.37, where `gen_ai.*` is experimental).
"""

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context

from actors.telemetry.export import Scribe
from actors.telemetry.facts import Answered, Attempt
from actors.telemetry.parts import Attributes, Part, parts_of
from actors.telemetry.times import at_ingress, hops


def write(answered: Answered, scribe: Scribe) -> None:
    """Starts and ends all spans of a request, the whole span last."""
    place = answered.kept.place
    assert place is not None
    whole = scribe.at(
        place,
        f"POST {answered.path}",
        SpanKind.SERVER,
        _attributes(answered),
        answered.started_s,
    )
    inside = set_span_in_context(whole)
    ended: list[tuple[Attempt, Span]] = []
    attempts = sorted(answered.kept.attempts, key=lambda one: one.times.submitted_s)
    if attempts:
        submitted_s = attempts[0].times.submitted_s
        whole.add_event("prepare", {"seconds": submitted_s - answered.started_s}, scribe.wall_ns(submitted_s))
    for attempt in attempts:
        _waits(whole, attempt, scribe)
        before = [
            one
            for one in ended
            if one[0].prompt == attempt.prompt and one[0].ended_s <= attempt.times.submitted_s
        ]
        if before:
            _goes_on(scribe, *before[-1], attempt, inside)
        last = whole
        for part in parts_of(attempt):
            last = _write_part(scribe, part, attempt, inside)
        _at_engines(scribe, answered, attempt, inside)
        if attempt.goes_on:
            ended.append((attempt, last))
    if attempts:
        _finishes(whole, answered, scribe)
    if answered.status >= 500:
        whole.set_status(Status(StatusCode.ERROR))
    whole.end(scribe.wall_ns(answered.ended_s))


def _attributes(answered: Answered) -> Attributes:
    chat = answered.path.endswith("chat/completions")
    found: Attributes = {
        "http.request.method": "POST",
        "url.path": answered.path,
        "http.response.status_code": answered.status,
        "gen_ai.operation.name": "chat" if chat else "text_completion",
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": answered.model,
        "gen_ai.response.id": answered.request_id,
        "gen_ai.usage.input_tokens": answered.input_tokens,
        "gen_ai.usage.output_tokens": answered.output_tokens,
        "sluice.request_class": answered.request_class,
        "sluice.stream": answered.stream,
        "sluice.attempts": len(answered.kept.attempts),
    }
    if answered.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = answered.max_tokens
    if answered.first_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = answered.first_s - answered.started_s
    if answered.status >= 500:
        found["error.type"] = str(answered.status)
    missed = [result for result in answered.kept.results if result not in (None, "met")]
    if missed:
        found["sluice.objective_missed"] = str(missed[0])
    return found


def _waits(whole: Span, attempt: Attempt, scribe: Scribe) -> None:
    """Adds the waits of an attempt, of which the last one may have lasted until its end."""
    times = attempt.times
    waits = [("queue", times.submitted_s, times.routed_s)]
    if times.pooled_s is not None:
        waits.append(("pool", times.pooled_s, times.decode_routed_s))
    for name, since_s, routed_s in waits:
        until_s = attempt.ended_s if routed_s is None else routed_s
        waited: Attributes = {"seconds": until_s - since_s, "attempt": attempt.attempt_id}
        whole.add_event(name, waited, scribe.wall_ns(until_s))


def _finishes(whole: Span, answered: Answered, scribe: Scribe) -> None:
    """Adds the time between the end of all attempts and that of the request. A finished attempt ends with its last
    token, as its decode span does; the ingress completes the answer after it, and may be kept from that by other work.
    The attempts of a client that left end after the request.
    """
    done_s = max(
        one.ended_s if one.outcome != "finished" or one.times.last_s is None else one.times.last_s
        for one in answered.kept.attempts
    )
    if answered.ended_s > done_s:
        seconds: Attributes = {"seconds": answered.ended_s - done_s}
        whole.add_event("finish", seconds, scribe.wall_ns(answered.ended_s))


def _write_part(scribe: Scribe, part: Part, attempt: Attempt, inside: Context) -> Span:
    attributes: Attributes = {
        "sluice.engine": part.engine,
        "sluice.attempt": attempt.attempt_id,
        **part.attributes,
    }
    start_ns = scribe.wall_ns(part.start_s)
    span = scribe.tracer.start_span(part.name, inside, SpanKind.CLIENT, attributes, start_time=start_ns)
    if part.failed and attempt.code is not None:
        span.set_attribute("error.type", attempt.code)
        span.set_status(Status(StatusCode.ERROR, attempt.code))
    span.end(scribe.wall_ns(part.end_s))
    return span


def _at_engines(scribe: Scribe, answered: Answered, attempt: Attempt, inside: Context) -> None:
    """Writes a span for each part of the attempt's tasks that engines told."""
    told = answered.kept.engines.get(attempt.attempt_id, [])
    engines = {one.process for one in told}
    own = at_ingress("", answered.started_s, {}, attempt.times)
    for hop in hops((own, *told)) if told else ():
        if hop.process in engines and hop.kind != "wire":
            attributes: Attributes = {"sluice.engine": hop.process, "sluice.attempt": attempt.attempt_id}
            start_ns = scribe.wall_ns(answered.started_s + hop.since_s)
            span = scribe.tracer.start_span(
                f"engine {hop.name}", inside, SpanKind.INTERNAL, attributes, start_time=start_ns
            )
            span.end(scribe.wall_ns(answered.started_s + hop.until_s))


def _goes_on(scribe: Scribe, before: Attempt, at: Span, attempt: Attempt, inside: Context) -> None:
    """Writes the span from the end of an attempt, `at` one of its tasks, to the first token of the next."""
    first_s = attempt.times.attempt_first_s
    engine = attempt.decode_engine or attempt.prefill_engine
    attributes: Attributes = {
        "sluice.code": before.code or before.outcome,
        "sluice.carried_tokens": attempt.carried_tokens,
        "sluice.attempt": attempt.attempt_id,
    }
    if before.failed is not None:
        attributes["sluice.from_engine"] = before.failed
    if engine is not None:
        attributes["sluice.to_engine"] = engine
    span = scribe.tracer.start_span(
        "migration" if attempt.carried_tokens else "retry", inside, SpanKind.INTERNAL, attributes,
        [Link(at.get_span_context())], start_time=scribe.wall_ns(before.ended_s),
    )  # fmt: skip
    span.end(scribe.wall_ns(attempt.ended_s if first_s is None else first_s))
