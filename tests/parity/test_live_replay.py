"""One brain, two bodies: what the live router decided under load, the pure code decides again, byte for byte.

A whole application on sim engines logs its events while clients stream, leave early and crowd, policies are switched
from one to the next without a restart, forecasts are made, a decode engine is killed, and then the router itself, whose
successor takes the running requests over. Then both routers' logs are replayed by `journal.replay`, in this process,
which has neither their clock nor their hash seed.
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.admin_key import authorize
from app.replay import logs
from policies.journal.replay import Step, replay
from policies.routing.registry import DECODE, PREFILL
from policies.state import events as ev
from tests.live.serving import PATIENCE_S, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

CLIENTS = 24
PHASE_S = 1.2
PHASE_REQUESTS = 12
PREFILLS = ["random", "power_of_two", *sorted(set(PREFILL) - {"random", "power_of_two"})]
DECODES = ["random", "power_of_two", *sorted(set(DECODE) - {"random", "power_of_two"})]


@dataclass
class Load:
    """Clients that ask without a pause until told to stop; every fourth answer is left before its end."""

    url: str
    codes: Counter[int] = field(default_factory=Counter)
    left: int = 0
    broken: int = 0
    ids: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Load":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, limits=limits) as http:
            await asyncio.gather(*(self._client(http, random.Random(i)) for i in range(CLIENTS)))

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._stop.is_set():
            # half of the prompts share their beginning
            words = ["word"] * rng.choice([8, 40, 200])
            words.insert(rng.choice([0, len(words)]), str(rng.random()))
            body = {
                "messages": [{"role": "user", "content": " ".join(words)}],
                "max_tokens": rng.choice([8, 60, 200]),
                "stream": True,
                "n": rng.choice([1, 1, 1, 2]),
            }
            leaves = rng.random() < 1 / 4
            try:
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    self.codes[answer.status_code] += 1
                    self.ids.append(answer.headers["x-request-id"])
                    async for _ in answer.aiter_lines():
                        if leaves:
                            self.left += 1
                            break
            except httpx.HTTPError:
                self.broken += 1


def configure(folder: Path) -> Any:
    def change(args: dict[str, Any]) -> None:
        slow = {"timing": {"decode_base_s": 0.03}, "slots": 4, "mean_output_tokens": 40}
        args["engines"] = [
            {"name": "prefill", "role": "prefill", "kind": "sim", "replicas": 1},
            {"name": "both", "role": "colocated", "kind": "sim", "replicas": 1, "options": slow},
            {"name": "decode", "role": "decode", "kind": "sim", "replicas": 2, "options": slow},
            {"name": "decode-a", "role": "decode", "kind": "sim", "replicas": 1, "options": slow},
        ]
        args["router"] = {
            "prefill": {"name": PREFILLS[0]},
            "decode": {"name": DECODES[0]},
            "dispatch": {"seed": 20, "max_queue": 16},
            "predictor": {"enabled": True, "refresh_tokens": 4, "total_at_arrival": True},
            "journal": {"folder": str(folder), "max_bytes": 1 << 19, "files": 1000},
        }

    return change


def switch(app: App, prefill: str, decode: str) -> httpx.Response:
    answer: httpx.Response = httpx.put(
        f"{app.url}/sluice/admin/policy",
        json={"prefill": prefill, "decode": decode},
        timeout=PATIENCE_S,
        auth=authorize,
    )
    return answer


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The lines of each router of a live run; what needs the running application is checked on the way."""
    folder = tmp_path_factory.mktemp("journal")
    with serving(config_file(tmp_path_factory.mktemp("app"), "sim.yaml", configure(folder))) as app:
        with Load(app.url) as load:
            drive(app, load)
            kill_router(app, load)
        app.wait_idle()
        assert load.left > 10 and load.codes[200] > 60
        assert set(load.codes) <= {200, 429, 503}
        # streams that were decoding on the killed engine end with an error event; connections do not break
        assert load.broken == 0
        status = httpx.get(f"{app.url}/sluice/admin/journal", timeout=PATIENCE_S, auth=authorize).json()
        assert status["write_errors"] == status["records_dropped"] == status["encode_errors"] == 0
        assert app.metric("sluice_router_policy_errors_total") == 0
    return [[line for path in files for line in path.read_text().splitlines()] for _, files in logs([folder])]


def drive(app: App, load: Load) -> None:
    """Every policy for a while, a refused change between, one engine killed."""
    for i in range(max(len(PREFILLS), len(DECODES))):
        prefill, decode = PREFILLS[i % len(PREFILLS)], DECODES[i % len(DECODES)]
        assert switch(app, prefill, decode).status_code == 200
        phase(app, load)
        refused = switch(app, prefill, "no_such_policy")
        assert refused.status_code == 400
        shown = app.status()["router"]["policy"]
        assert shown == {"prefill": prefill, "decode": decode}
        told = httpx.get(
            f"{app.url}/sluice/admin/explain/{load.ids[len(load.ids) // 2]}",
            timeout=PATIENCE_S,
            auth=authorize,
        )
        assert told.status_code == 200 and told.json()["decisions"]
        if i == 3:
            os.kill(app.replica_pid("DecodeAEngine"), signal.SIGKILL)


def phase(app: App, load: Load) -> None:
    """A while, in which some requests at least were answered."""
    goal = len(load.ids) + PHASE_REQUESTS
    time.sleep(PHASE_S)
    app.wait(lambda _: len(load.ids) >= goal, "answers")


def kill_router(app: App, load: Load) -> None:
    """Serving goes on without it; the next one adopts what runs, and starts from the configured policies again."""
    os.kill(app.replica_pid("Router"), signal.SIGKILL)
    app.wait(lambda s: not s["router"]["connected"], "the loss of the router")
    app.wait(lambda s: s["router"]["connected"] and len(s["engines"]) == 5, "the next router")
    assert app.metric("sluice_fallback_decisions_total") > 0
    assert app.status()["router"]["policy"] == {"prefill": PREFILLS[0], "decode": DECODES[0]}
    assert switch(app, "locality", "composition").status_code == 200
    phase(app, load)


def steps_of(journals: list[list[str]]) -> Iterator[Step]:
    for lines in journals:
        yield from replay(lines)


def test_every_decision_replays_byte_for_byte(journals: list[list[str]]) -> None:
    assert len(journals) == 2
    steps = decisions = 0
    for step in steps_of(journals):
        assert step.replayed == step.recorded, f"event {step.n}: {step.event}"
        steps += 1
        decisions += len(step.recorded)
    print(f"{steps} events, {decisions} decisions and failures, all equal")
    assert steps > 2000 and decisions > 150


def test_the_run_had_in_it_what_makes_replay_hard(journals: list[list[str]]) -> None:
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    policies: set[str] = set()
    forecasts = predicted = 0
    for step in steps_of(journals):
        kinds[type(step.event).__name__] += 1
        for line in step.recorded:
            for word in ("tie_drawn", "StaleEvent", "UnknownPolicy", '"action":"RouteDecode"'):
                reasons[word] += word in line
        match step.event:
            case ev.PoliciesChanged(prefill=ev.PolicyChoice() as prefill, decode=ev.PolicyChoice() as decode):
                policies |= {prefill.name, decode.name}
            case ev.ForecastMade(finishes_in_tokens=tokens):
                forecasts += tokens is not None
            case ev.Arrived(request=request):
                predicted += request.predicted_tokens is not None
    assert set(PREFILL) | set(DECODE) <= policies
    for kind in (
        "Arrived",
        "PrefillDone",
        "ProgressedMany",
        "Closed",
        "EngineDown",
        "KvBatch",
        "Adopted",
        "Tick",
    ):
        assert kinds[kind] > 0, kinds
    assert all(reasons[word] > 0 for word in ("tie_drawn", "UnknownPolicy", '"action":"RouteDecode"')), (
        reasons
    )
    assert kinds["ForecastMade"] > 0 and forecasts > 0 and predicted > 0


def test_the_first_log_went_through_several_files(journals: list[list[str]]) -> None:
    assert sum(line.startswith('{"journal"') for line in journals[0]) > 1
