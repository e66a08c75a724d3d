"""Scale to zero over real sockets: ingress, router, autoscaler and sim engines; only Serve is in memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.router import observing
from actors.scaling.control import Controller
from actors.scaling.fleet import Deployed, Fleet, Group, Replica
from actors.scaling.server import Autoscaler
from actors.wire.channel import Identity
from app.ingress.asgi import IngressApp
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.metrics import IngressMetrics
from app.ingress.status import status_of
from app.ingress.tokenizer import WordCodec
from policies.scaling.registry import make
from policies.state.standby import Phase
from policies.state.views import Role
from tests.app.ingress.rig import MODEL, VOCAB, Rig, make_router, rig, until
from tests.app.ingress.test_with_sim import Sim

GROUPS = {"p": Group("p", Role.PREFILL, 0, 2, 1), "d": Group("d", Role.DECODE, 0, 2, 1)}
# without slots that are free a queue lasts; the router's timeout is far shorter than a wake
QUEUE_TIMEOUT_S = 1.0


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a second, of which the first begins soon: idle time is known only after the first one."""
    monkeypatch.setattr(observing, "Observer", partial(observing.Observer, length_s=1.0))
    monkeypatch.setattr(observing, "HANDOVER_S", 0.5)


@dataclass
class Serve:
    """A Serve and a store in memory: replicas are sim engines, which start and stop by the numbers that are set. With
    `broken` none ever starts. `options` are those of the engines.
    """

    made: Rig
    directory: Path
    start_s: float = 0.0
    broken: bool = False
    groups: Mapping[str, Group] = field(default_factory=lambda: GROUPS)
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: dict[str, int] = field(init=False)
    sims: dict[str, Sim] = field(default_factory=dict)
    saved: str | None = None
    born: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    deployed_s: float = 1.0
    """The time of the last deploy."""

    def __post_init__(self) -> None:
        self.targets = {name: group.first for name, group in self.groups.items()}

    async def load(self) -> str | None:
        return self.saved

    async def save(self, memory: str) -> None:
        self.saved = memory

    async def read(self) -> Fleet:
        groups = {
            name: Deployed(
                self.targets[name],
                tuple(
                    Replica(engine.partition("-")[2], "n", 0.0)
                    for engine in self.sims
                    if engine.startswith(name)
                ),
                "no node has the resources" if self.broken else "",
            )
            for name in self.groups
        }
        return Fleet(groups, deployed_s=self.deployed_s)

    async def set(self, targets: Mapping[str, int]) -> None:
        self.targets |= targets
        task = asyncio.create_task(self.follow())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def follow(self) -> None:
        for name, number in self.targets.items():
            own = [engine for engine in self.sims if engine.startswith(name)]
            for engine in own[number:]:
                await self.sims.pop(engine).stop()
            for _ in range(number - len(own) if not self.broken else 0):
                self.born += 1
                await asyncio.sleep(self.start_s)
                engine = f"{name}-{self.born}"
                role = self.groups[name].role.value
                self.sims[engine] = await Sim.start(
                    self.made, self.directory, engine, role, max_model_len=512, **self.options
                )


@dataclass
class Asleep:
    """An application without engines, whose autoscaler waits for a request."""

    made: Rig
    serve: Serve
    scaler: Autoscaler
    generation: int = 1

    @property
    def phase(self) -> Phase:
        return self.scaler.controller.standby.phase

    def told(self) -> str | None:
        """Returns the phase that the ingress knows."""
        standby = self.made.connections.standby()
        return None if standby is None else standby.phase

    async def new_autoscaler(self) -> None:
        """Ends the autoscaler and starts another one with its memory."""
        await self.scaler.stop()
        self.generation += 1
        self.scaler = await autoscaler(self.made, self.serve, self.generation)

    async def new_router(self) -> None:
        """Ends the router and starts another one, which knows nothing."""
        await self.made.router.stop()
        await until(lambda: not self.made.connections.router_connected(), "the loss of the router")
        self.made.router = make_router(self.serve.directory, queue_timeout_s=QUEUE_TIMEOUT_S)
        await self.made.router.start([f"unix:{self.serve.directory}/router.sock"])


async def autoscaler(made: Rig, serve: Serve, generation: int = 1, wake_limit_s: float = 30.0) -> Autoscaler:
    async def find() -> tuple[str, ...]:
        return made.router.addresses

    limits = {"prefill_min": 0, "decode_min": 0, "prefill_max": 2, "decode_max": 2, "budget": 4}
    sleep = {"idle_s": 0.5, "wake_limit_s": wake_limit_s}
    policy = make("fixed", {"limits": limits, "sleep": sleep})
    me = Identity("autoscaler", f"a{generation}", None, generation)
    scaler = Autoscaler(
        me, find, Controller(lambda groups: policy, GROUPS, "test", serve.saved), serve, serve
    )
    scaler.start()
    return scaler


@asynccontextmanager
async def asleep(directory: Path, wake_limit_s: float = 30.0) -> AsyncIterator[Asleep]:
    """An application that has served with two engines and fallen asleep by itself."""
    config = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, fallback_wait_s=QUEUE_TIMEOUT_S)
    async with rig(directory, [], config, queue_timeout_s=QUEUE_TIMEOUT_S) as made:
        serve = Serve(made, directory)
        await serve.follow()
        await until(lambda: made.connections.ready() is None, "a ready ingress")
        scaler = await autoscaler(made, serve, wake_limit_s=wake_limit_s)
        app = Asleep(made, serve, scaler)
        # windows count from some seconds after the ingress has come
        await until(lambda: app.told() == "asleep" and not serve.sims, "sleep")
        await until(lambda: not made.connections.engines(), "a fleet without engines")
        yield app
        await app.scaler.stop()
        for sim in serve.sims.values():
            await sim.stop()
        await made.idle()


def ask(app: Asleep, tokens: int = 5, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body: dict[str, Any] = {"prompt": [1] * 40, "max_tokens": tokens} | more
    return asyncio.create_task(app.made.client.post("/v1/completions", json=body, headers=headers))


async def test_an_application_that_sleeps_is_ready_and_a_request_wakes_it(tmp_path: Path) -> None:
    async with asleep(tmp_path) as app:
        made = app.made
        assert (await made.client.get("/health/ready")).status_code == 200
        models = (await made.client.get("/v1/models")).json()["data"]
        assert [(m["id"], m["max_model_len"]) for m in models] == [(MODEL, 512)]
        status = status_of(made.connections, made.app.requests, "fast", None, None)
        assert (status["ready"], status["sleep"]) == (
            True, {"phase": "asleep", "wake_limit_s": 30.0, "reason": None},
        )  # fmt: skip
        # what no engine could serve is refused at once, and wakes nothing
        too_long = await ask(app, prompt=[1] * 600)
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
        unknown = await ask(app, model="another")
        assert unknown.status_code == 404
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        chat = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
        refused = await made.client.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        mode = await ask(app, headers={"x-sluice-mode": "colocated"})
        assert (mode.status_code, mode.json()["error"]["code"]) == (503, "no_colocated_engine")
        assert app.phase is Phase.ASLEEP
        # a wake lasts longer than the queue's timeout
        app.serve.start_s = 0.8
        tasks = [ask(app) for _ in range(5)]
        await until(lambda: app.told() == "waking", "a wake")
        assert (await made.client.get("/health/ready")).status_code == 200
        assert [task.result().status_code for task in tasks if (await task)] == [200] * 5
        assert sorted(app.serve.sims) == ["d-4", "p-3"]
        await until(lambda: app.told() == "awake", "awake")
        # and it sleeps again
        await until(lambda: app.told() == "asleep" and not app.serve.sims, "sleep")


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(one, marks=pytest.mark.nightly)
        for one in ("router", "autoscaler", "router and autoscaler")
    ]
    + ["ingress", "all"],
)
async def test_processes_that_restart_while_everything_sleeps_still_wake_it(tmp_path: Path, who: str) -> None:
    async with asleep(tmp_path) as app:
        made = app.made
        if who in ("autoscaler", "all"):
            await app.new_autoscaler()
        if who in ("router and autoscaler",):
            await app.scaler.stop()
        if who != "autoscaler" and who != "ingress":
            await app.new_router()
        client, connections = made.client, made.connections
        if who in ("ingress", "all"):
            # another ingress, which has never seen an engine
            config = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, expects_prefill=True)
            metrics = IngressMetrics(MODEL)

            async def find() -> tuple[str, ...]:
                return made.router.addresses

            connections = IngressConnections(config, Identity("ingress", "new"), find, metrics)
            other = IngressApp(config, connections, WordCodec(VOCAB), metrics, {"version": "0.0"})
            await connections.start()
            client = httpx.AsyncClient(transport=httpx.ASGITransport(other), base_url="http://x", timeout=100)
            await until(lambda: connections.ready() is None, "the new ingress is ready")
        assert (await client.get("/health/ready")).status_code == 200
        body = {"prompt": [1] * 40, "max_tokens": 5}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        if who == "router and autoscaler":
            # the request waits here for a router that has heard of the sleep
            await until(lambda: connections.router_connected() and connections.fleet is not None, "a router")
            await asyncio.sleep(0.5)
            assert not task.done() and connections.decides_here()
            app.scaler = await autoscaler(made, app.serve, 2)
        answer = await task
        assert answer.status_code == 200, answer.text
        if connections is not made.connections:
            await client.aclose()
            await connections.stop()


async def test_a_request_without_a_router_waits_for_one_and_wakes(tmp_path: Path) -> None:
    async with asleep(tmp_path) as app:
        made = app.made
        await made.router.stop()
        await until(lambda: made.connections.decides_here(), "the ingress alone")
        assert (await made.client.get("/health/ready")).status_code == 200
        task = ask(app)
        # longer than the ingress waits for engines that were lost
        await asyncio.sleep(3.5)
        assert not task.done()
        await app.new_router()
        assert (await task).status_code == 200


async def test_a_wake_that_fails_is_503_with_its_reason_and_a_later_one_succeeds(tmp_path: Path) -> None:
    async with asleep(tmp_path, wake_limit_s=2.0) as app:
        made = app.made
        app.serve.broken = True
        answer = await ask(app)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "wake_failed")
        said = "d: 0 of 1 replicas run: no node has the resources"
        assert "none could be started" in error["message"] and said in error["message"]
        assert int(answer.headers["retry-after"]) >= 1
        ready = await made.client.get("/health/ready")
        assert ready.status_code == 503 and said in ready.json()["error"]["message"]
        # at once
        assert (await ask(app)).json()["error"]["code"] == "wake_failed"
        app.serve.broken = False
        await app.serve.follow()
        await until(lambda: app.told() == "awake", "an engine after all")
        assert (await ask(app)).status_code == 200


async def test_a_wake_that_fails_while_there_is_no_router_is_503_with_its_reason_and_a_later_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router dies when the engines have been asked for. Only the autoscaler knows why none starts, and it has
    nobody to tell; the next router hears of it.
    """
    monkeypatch.setattr("policies.dispatch.dispatcher.WAKE_MARGIN_S", 1.0)
    async with asleep(tmp_path, wake_limit_s=2.0) as app:
        made = app.made
        app.serve.broken = True
        first = ask(app)
        await until(lambda: app.told() == "waking", "a wake")
        await made.router.stop()
        await until(lambda: made.connections.decides_here(), "the ingress alone")
        for answer in await asyncio.gather(first, ask(app)):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "wake_timeout")
            assert "All engines were asleep, and none was ready in time" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        await app.new_router()
        error = (await ask(app)).json()["error"]
        assert error["code"] == "wake_failed"
        assert "d: 0 of 1 replicas run: no node has the resources" in error["message"]
        # what was wanted is given up, and then a request wakes again
        app.serve.broken = False
        await until(lambda: app.told() == "asleep" and not any(app.serve.targets.values()), "sleep")
        assert (await ask(app)).status_code == 200
        await until(lambda: app.told() == "awake", "awake")


async def test_a_wake_without_a_router_that_fails_once_there_is_one_is_503_with_its_reason(
    tmp_path: Path,
) -> None:
    """The request came while there was no router, and has waited for one to hear of it."""
    async with asleep(tmp_path, wake_limit_s=2.0) as app:
        made = app.made
        app.serve.broken = True
        await made.router.stop()
        await until(lambda: made.connections.decides_here(), "the ingress alone")
        task = ask(app)
        await until(lambda: made.connections.live, "a request that waits")
        await app.new_router()
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "wake_failed")
        assert "d: 0 of 1 replicas run: no node has the resources" in answer.json()["error"]["message"]
        app.serve.broken = False
        await app.serve.follow()
        await until(lambda: app.told() == "awake", "an engine after all")
        assert (await ask(app)).status_code == 200


@pytest.mark.parametrize(
    "numbers",
    [{"d": 1}, *(pytest.param(n, marks=pytest.mark.nightly) for n in ({"p": 1}, {"p": 1, "d": 2}))],
    ids=str,
)
async def test_numbers_that_somebody_sets_while_everything_sleeps_are_adopted_and_said_and_it_wakes_as_before(
    tmp_path: Path, numbers: dict[str, int]
) -> None:
    async with asleep(tmp_path) as app:
        await app.serve.set(numbers)
        await until(lambda: app.told() == "awake", "engines that nobody has asked for")
        wanted = {"p": 1, "d": 1} | numbers
        await until(lambda: len(app.serve.sims) == sum(wanted.values()), "engines of both groups")
        controller = app.scaler.controller
        assert controller.manual is not None
        assert (controller.manual.by, controller.manual.counts) == ("somebody else", wanted)
        assert controller.last is not None and controller.last.reasons[0].startswith("somebody else set ")
        assert (await ask(app)).status_code == 200
        # they rule until they are given back: nothing sleeps while they do
        rounds = app.scaler.rounds
        await until(lambda: app.scaler.rounds > rounds + 1, "further rounds")
        assert app.serve.targets == wanted
        controller.release()
        await until(lambda: app.told() == "asleep" and not app.serve.sims, "sleep")
        await until(lambda: not app.made.connections.engines(), "a fleet without engines")
        assert (await ask(app)).status_code == 200


async def test_a_deploy_while_everything_sleeps_sets_its_numbers_for_a_moment_and_it_wakes_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with asleep(tmp_path) as app:
        app.serve.deployed_s += 1.0
        with caplog.at_level("INFO", "ray.serve.autoscaler"):
            await app.serve.set({"p": 1, "d": 1})
            await until(lambda: not any(app.serve.targets.values()), "no number is left")
            await until(lambda: not app.serve.sims and app.told() == "asleep", "sleep")
        assert "a deploy has set p=1 d=1 replicas; what is wanted is set again" in caplog.text
        assert app.scaler.controller.manual is None
        await until(lambda: not app.made.connections.engines(), "a fleet without engines")
        assert (await ask(app)).status_code == 200


async def test_a_wake_is_asked_for_at_once_and_not_at_the_next_observation(tmp_path: Path) -> None:
    """The observations that are due once a second are held back until Serve has its order."""
    async with asleep(tmp_path) as app:
        told = app.made.router._autoscaler
        ring, observe, rings = told.ring, told.observe, list[bool]()

        def rung() -> None:
            rings.append(True)
            ring()
            rings.pop()

        told.ring = rung  # type: ignore[method-assign]
        told.observe = lambda: observe() if rings else None  # type: ignore[method-assign]
        task = ask(app)
        await until(lambda: any(app.serve.targets.values()), "an order to Serve")
        told.observe = observe  # type: ignore[method-assign]
        assert (await task).status_code == 200
