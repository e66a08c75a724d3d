"""Measures a running server under a load, with the CPU time that each of its processes spends.

A `Measurement` is a row of a report. All its times are in milliseconds, and all memory is in bytes.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from benchmarks.live import load as client
from benchmarks.live import proctree, stats, wrk
from benchmarks.live.servers import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The number of distinct prompts of a run, and of words in all of them; longer runs repeat them.
BODIES = 512
BODY_WORDS = 320_000
_WORDS = (
    "river",
    "stone",
    "cloud",
    "paper",
    "garden",
    "winter",
    "silver",
    "mountain",
    "letter",
    "music",
    "bridge",
    "ocean",
)


ADDED = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_mean")


class MeasureError(RuntimeError):
    """The error of a server whose answers are wrong, so that nothing can be measured; the message says what it did."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load of one measurement. `requests` limits the Python client, and `max_s` limits both clients.

    Each prompt is a number and `prompt_words` words.
    """

    concurrency: int
    requests: int
    tokens: int
    max_s: float
    path: str = CHAT
    prompt_words: int = 8


@dataclass(slots=True)
class Measurement:
    """One row of a report. CPU times are by role of the process; `ttft`, `tpot` and `e2e` are each a Summary as dict.

    `added` is what the row took beyond `base`, both in milliseconds by the names in `ADDED`. `other_cores` is the
    number of cores that other programs kept busy during the measurement (0 on a quiet machine).
    """

    target: str
    client: str
    path: str
    concurrency: int
    tokens: int
    requests: int
    wall_s: float
    requests_per_s: float
    tokens_per_s: float
    e2e_ms: dict[str, float] | None
    ttft_ms: dict[str, float] | None
    tpot_ms: dict[str, float] | None
    cpu_ms_per_request: dict[str, float]
    cpu_ms_per_token: dict[str, float]
    client_cpu_ms_per_request: float
    failures: dict[str, int]
    other_cores: float
    events_per_request: float | None = None
    base: dict[str, float] = field(default_factory=dict)
    added: dict[str, float] = field(default_factory=dict)

    @property
    def server_cpu_ms_per_token(self) -> float:
        return sum(self.cpu_ms_per_token.values())

    @property
    def server_cpu_ms_per_request(self) -> float:
        return sum(self.cpu_ms_per_request.values())


def prompts(seed: int, count: int = BODIES, words: int = 8) -> list[str]:
    """Returns `count` prompts that all differ, each a number and `words` words; a seed always gives the same ones."""
    rng = random.Random(seed)
    return [f"{index} " + " ".join(rng.choice(_WORDS) for _ in range(words)) for index in range(count)]


def bodies(model: str, texts: Sequence[str], tokens: int, path: str) -> list[bytes]:
    """Returns a request body for each prompt."""
    return [client.body_of(model, text, tokens, chat=path == CHAT) for text in texts]


def probe(server: Server, model: str, tokens: int, path: str = CHAT) -> dict[str, Any]:
    """Sends one request and returns its usage.

    Raises MeasureError unless the server generates exactly `tokens` tokens.
    """
    text = f"probe {tokens} {path}"
    body = client.body_of(
        model, text, tokens, chat=path == CHAT, extra={"stream_options": {"include_usage": True}}
    )
    command = server.command
    result = client.drive(client.Load(command.port, path, [body], 1, 1, 120.0, heads=[command.head]))
    if result.failures or result.usage is None:
        raise MeasureError(
            f"{server.command.name}: a first request failed: {dict(result.failures) or 'no usage'}"
        )
    if result.usage.get("completion_tokens") != tokens:
        raise MeasureError(f"{server.command.name}: asked for {tokens} tokens, usage says {result.usage}")
    return result.usage


def first_answer(
    server: Server, model: str, tokens: int, within_s: float = 15.0
) -> tuple[dict[str, Any], str | None]:
    """Sends requests until one succeeds; returns (its usage, the error of those before it or None).

    A server that reports itself ready should answer at once. One that does not is still measured, and the report says
    so.
    """
    end_s, problem = time.monotonic() + within_s, None
    while True:
        try:
            return probe(server, model, tokens), problem
        except MeasureError as error:
            if time.monotonic() > end_s:
                raise
            problem = problem or f"said it was ready, and then: {error}"
            time.sleep(0.5)


def warm_up(server: Server, model: str, plan: Plan, seed: int) -> None:
    """Sends a little of the same load, so that imports, caches and connections of first requests are not measured."""
    count = min(4 * plan.concurrency, 64, plan.requests)
    # The prompts differ from the measured ones, so that the measured ones have no prefix hits.
    texts = prompts(seed + 1, count, words=plan.prompt_words + 1)
    sent, command = bodies(model, texts, min(plan.tokens, 16), plan.path), server.command
    heads = [command.head] * len(sent)
    client.drive(client.Load(command.port, plan.path, sent, plan.concurrency, count, 60.0, heads=heads))


def with_python(server: Server, model: str, plan: Plan, seed: int) -> Measurement:
    """Measures the server with the Python client."""

    def run(sent: Sequence[bytes]) -> client.LoadResult:
        port, heads = server.command.port, [server.command.head] * len(sent)
        load = client.Load(port, plan.path, sent, plan.concurrency, plan.requests, plan.max_s, heads=heads)
        return client.drive(load)

    result, common = _loaded(server, model, plan, seed, run, lambda result: result.client_cpu_s)
    gaps = [seconds / max(1, plan.tokens - 1) for seconds in result.stream_s]
    return Measurement(
        client="python",
        e2e_ms=_summary(result.e2e_s),
        ttft_ms=_summary(result.ttft_s),
        tpot_ms=_summary(gaps),
        events_per_request=result.events / result.served,
        **common,
    )


def with_wrk(server: Server, model: str, plan: Plan, seed: int, executable: str) -> Measurement:
    """Measures the server with wrk, for `max_s` whole seconds."""

    def run(sent: Sequence[bytes]) -> wrk.WrkResult:
        seconds, command = max(1, int(plan.max_s)), server.command
        return wrk.run(executable, command.port, plan.path, sent, plan.concurrency, seconds, command.head)

    result, common = _loaded(server, model, plan, seed, run, lambda result: result.cpu_s)
    quantiles = {"p50": result.p50_s * 1e3, "p95": result.p95_s * 1e3, "p99": result.p99_s * 1e3}
    return Measurement(client="wrk", e2e_ms=quantiles, ttft_ms=None, tpot_ms=None, **common)


class _Served(Protocol):
    """The interface of the part of a result that every load client has."""

    @property
    def wall_s(self) -> float: ...

    @property
    def served(self) -> int: ...

    @property
    def failures(self) -> Mapping[str, int]: ...


_Result = TypeVar("_Result", bound=_Served)


def _loaded(
    server: Server,
    model: str,
    plan: Plan,
    seed: int,
    run: Callable[[Sequence[bytes]], _Result],
    cpu_s_of: Callable[[_Result], float],
) -> tuple[_Result, dict[str, Any]]:
    """Warms up and calls `run`; returns (its result, the fields of a `Measurement` that no client measures).

    These fields are CPU times by role, and rates. Raises MeasureError where nothing was served.
    """
    count = max(1, min(BODIES, BODY_WORDS // plan.prompt_words))
    texts = prompts(seed, count, plan.prompt_words)
    sent = bodies(model, texts, plan.tokens, plan.path)
    warm_up(server, model, plan, seed)
    before, machine = proctree.snapshot(server.pid), proctree.machine_busy_s()
    result = run(sent)
    machine = proctree.machine_busy_s() - machine
    cpu = proctree.cpu_by_role(before, proctree.snapshot(server.pid))
    if result.served <= 0:
        raise MeasureError(f"{server.command.name}: no request was served: {dict(result.failures)}")
    client_cpu_s, tokens = cpu_s_of(result), result.served * plan.tokens
    return result, {
        "target": server.command.name,
        "path": plan.path,
        "concurrency": plan.concurrency,
        "tokens": plan.tokens,
        "requests": result.served,
        "wall_s": result.wall_s,
        "requests_per_s": result.served / result.wall_s,
        "tokens_per_s": tokens / result.wall_s,
        "cpu_ms_per_request": stats.per(cpu, result.served, 1e3),
        "cpu_ms_per_token": stats.per(cpu, tokens, 1e3),
        "client_cpu_ms_per_request": client_cpu_s * 1e3 / result.served,
        "failures": dict(result.failures),
        "other_cores": max(0.0, machine - sum(cpu.values()) - client_cpu_s) / result.wall_s,
    }


def add_modelled(case: Measurement, ttft_s: float, step_s: float) -> None:
    """Adds to `case` the milliseconds that it took beyond the modelled engine.

    They are for TTFT p50 and p95, and for the time per token p50 and mean.
    """
    if case.ttft_ms is None or case.tpot_ms is None:
        return
    _add(case, (ttft_s * 1e3, ttft_s * 1e3, step_s * 1e3, step_s * 1e3))


def add_difference(case: Measurement, base: Measurement) -> None:
    """Adds to `case` the milliseconds that it took beyond another server's case at the same concurrency."""
    if case.ttft_ms is None or case.tpot_ms is None or base.ttft_ms is None or base.tpot_ms is None:
        return
    _add(case, (base.ttft_ms["p50"], base.ttft_ms["p95"], base.tpot_ms["p50"], base.tpot_ms["mean"]))


def _add(case: Measurement, base_ms: Sequence[float]) -> None:
    """Adds to `case` what it took beyond TTFT p50 and p95, and time per token p50 and mean, of its base."""
    assert case.ttft_ms is not None
    assert case.tpot_ms is not None
    own_ms = (case.ttft_ms["p50"], case.ttft_ms["p95"], case.tpot_ms["p50"], case.tpot_ms["mean"])
    case.base = dict(zip(ADDED, base_ms, strict=True))
    case.added = {name: own - base for name, own, base in zip(ADDED, own_ms, base_ms, strict=True)}


@dataclass(slots=True)
class TreeState:
    """An idle server's process tree: memory by role (as dicts, largest first), its sum, and busy cores by role."""

    target: str
    started_s: float
    memory: Mapping[str, dict[str, int]]
    total: dict[str, int]
    idle_cpu: dict[str, float]


def tree_state(server: Server, idle_s: float) -> TreeState:
    """Observes a server without load for `idle_s` seconds and returns the state of its process tree."""
    before, start_s = proctree.snapshot(server.pid), time.monotonic()
    time.sleep(idle_s)
    after = proctree.snapshot(server.pid)
    spent = stats.per(proctree.cpu_by_role(before, after), time.monotonic() - start_s)
    table = proctree.memory_by_role(after)
    return TreeState(
        target=server.command.name,
        started_s=server.started_s,
        memory={role: asdict(memory) for role, memory in table.items()},
        total=asdict(proctree.total(table)),
        idle_cpu={role: value for role, value in spent.items() if value >= 0.001},
    )


def _summary(seconds: Sequence[float]) -> dict[str, float] | None:
    summary = stats.summarise(seconds, 1e3)
    return None if summary is None else asdict(summary)
