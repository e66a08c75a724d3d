"""Rules for what follows when engines fail a request: codes of failures, bounds, and the errors that end a request.

A request whose prompt or parameters kill its engine would kill every engine that it is given to. It is suspected when
an engine dies or stalls under it soon after it took it, and refused when two engines have died in a row with the same
task, prefill or decode; two that stalled count as one that died. `ACQUITTED_TOKENS` tokens, from whichever engine,
acquit it for good. A request that came to an engine which had fallen silent before is no suspect.

Not claimed: that all engines but two are safe from a request that kills at a position far in its output. What bounds
that one is `max_migrations`.
"""

from policies.request.effects import Blame, Failure

ENGINE_LOST = "engine_lost"
"""Code of a failure that no engine told: the connection to it ended."""

STALLED = "stalled"
QUARANTINED = "quarantined"
NOT_CONNECTED = "not_connected"
NOT_RESUMABLE = "not_resumable"
KV_LOAD = "kv_load"
POOL_TIMEOUT = "pool_timeout"

IDLE = "idle"
"""Code of the end of an answer to which no token was added for too long."""

DEADLY = frozenset({ENGINE_LOST, "engine_dead", STALLED})
"""Codes that say that an engine died, or is as good as dead."""

SILENT_KILL = 0.5
"""Deaths that an engine counts as which only fell silent or stalled. It may go on, and in a cluster under stress two of
these soon after one another are chance: `make chaos` met them once in 4,491 requests.
"""

MOST_KILLS = 2.0
"""Deaths of engines under a request after which no other engine gets it."""

SUSPECT_S = 10.0
"""Seconds from the moment an engine takes a request for which its death is laid at the request's door.

ASSUMPTION: what kills an engine does so at once (an unusual prompt, a parameter, memory for its logprobs). An engine
that has served a request for longer died of something else far more often.
"""

ACQUITTED_TOKENS = 16
"""Tokens of each choice after which a request is no suspect any more.

ASSUMPTION: more than an engine can have generated and not yet sent when it dies (two steps with asynchronous
scheduling), less than it generates in a second.
"""

OFF_BUDGET = frozenset({*DEADLY, QUARANTINED, NOT_CONNECTED, POOL_TIMEOUT, "draining"})
"""Codes of failures that no engine at work has answered. Attempts after them do not count against the retry budget:
all streams of an engine that is gone must find another.
"""

BUDGET_SHARE = 0.2
"""Share of the open requests that may be retries after failures which an engine answered. Without a bound, retries
multiply the load exactly when engines fail for lack of capacity. The figure is Envoy's default (`RetryBudget`,
envoyproxy.io, config.cluster.v3.CircuitBreakers).
"""

BUDGET_LEAST = 3
"""Retries that are always allowed, however few requests are open: Envoy's default `min_retry_concurrency`."""

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0
"""The pause before the second retry after a failure that an engine answered, which doubles with each further one, and
its bound. The first retry follows at once. The same pauses follow failures of an engine that the request avoids,
whatever the failure, because the router knew no other engine: it may know one in a moment. ASSUMPTION: a process that
stood still has found more engines than the first one after a second.
"""

LOOK_AGAIN_S = 0.25
"""Seconds after which an attempt for which the retry budget had no room asks again."""

MOST_HELD_S = 10.0
"""Seconds after which it does not ask any more. A retry that waits costs no engine anything, so the wait may be as long
as a client bears; the failures that fill the budget end sooner, when the engine that answers them is quarantined.
"""

MOST_KV_FAILURES = 2
"""Failures to load its KV after which a request computes its prompt where its answer is generated, unless its client
asked for another mode. KV that could not be read twice, from different engines where there are any, probably has no
path that works, and any decode engine can compute a prompt.
"""

URGENCY = 2
"""How much lower, which is more urgent, the priority of a migrated request is: its client already sees a pause. It is
the distance from the class `batch` to `interactive`, so that no new request of a class goes before it.
"""

POISON = Failure(
    500,
    "Engines died or stalled, one after the other, when they got this request, so no other one gets it.",
    "request_kills_engines",
)

OVER_BUDGET = Failure(
    503,
    "Engines fail so many requests that there was no room to try this one again; try again later.",
    "retry_budget",
    retry_after_s=1.0,
)


def within_budget(retries: int, open_requests: int) -> bool:
    """Returns whether one more retry may begin beside `retries` others, while `open_requests` requests are open."""
    return retries < max(BUDGET_LEAST, BUDGET_SHARE * open_requests)


def pause_s(retries: int) -> float:
    """Returns for how long the retry of number `retries` waits (see `FIRST_PAUSE_S`)."""
    return 0.0 if retries < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (retries - 2))


def avoided(blame: Blame | None, prefill_engine: str | None) -> tuple[str, ...]:
    """Returns the engines that the next attempt avoids. If KV could not be read, either end may be at fault; the one
    that holds it comes first.
    """
    if blame is None:
        return ()
    if blame.code == KV_LOAD and prefill_engine not in (None, blame.engine_id):
        assert prefill_engine is not None
        return prefill_engine, blame.engine_id
    return (blame.engine_id,)
