"""A whole ingress on loopback for the tests: real router, real sockets, real HTTP; engines that the test
scripts.

`ScriptedEngine` speaks the engine's wire protocol and does nothing by itself unless told (`auto`): a test
decides when a prefill ends, when KV is admitted and which tokens come, and sees every message that the
ingress sent it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from actors.router.network.feed import RouterNetwork
from actors.router.server import RouterServer
from actors.telemetry.decisions import DecisionTraces
from actors.telemetry.traces import Traces
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.sockets import connect, listen
from actors.wire.tls import WireTls
from app.admin_key import KeyFile
from app.ingress.asgi import IngressApp
from app.ingress.audit import audit_of
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.http.listener import Listener, ListenerConfig
from app.ingress.metrics import IngressMetrics
from app.ingress.tenants.gate import Gate
from app.ingress.tokenizer import TextCodec, WordCodec
from policies.admission.registry import DEFAULT as ADMIT
from policies.admission.registry import admission_policy
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.fairness.registry import DEFAULT as FAIR
from policies.fairness.registry import fairness_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue

MODEL = "tiny"
ADMIN_KEY = "the key of the rig"
"""The admin key of a rig whose configuration has none; its client sends it with every request."""
VOCAB = 1000
SECRET = b"the secret of the rig"


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Waits for `condition`; fails after 60 s."""
    try:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"{what} did not come about") from None


@dataclass
class ScriptedEngine:
    """One engine under the test's control. `auto`: it answers by itself, one word per token, `step_s` apart."""

    name: str
    role: str
    directory: Path
    auto: bool = True
    step_s: float = 0.0
    slots: int = 64
    lease_s: float = 30.0
    max_model_len: int = 1024
    features: tuple[str, ...] = ()
    state: wire.EngineState = "ready"
    duty: wire.Duty = "active"
    node: str = "n"
    received: list[wire.Message] = field(default_factory=list)
    told: list[wire.Message] = field(default_factory=list)
    """The messages that the router sent."""
    channels: list[Channel] = field(default_factory=list)
    live: dict[str, str] = field(default_factory=dict)
    """Attempt id -> "prefill", "lease" or "decode"."""
    server: asyncio.Server | None = None
    link: Channel | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    peers: "list[ScriptedEngine]" = field(default_factory=list)

    def info(self) -> wire.EngineInfo:
        return wire.EngineInfo(
            id=self.name,
            role=self.role,  # type: ignore[arg-type]
            kind="sim",
            model=MODEL,
            group="g",
            addresses=(self.address,),
            slots=self.slots,
            kv_blocks=4096,
            block_size_tokens=16,
            max_model_len=self.max_model_len,
            node=self.node,
            pid=1,
            lease_s=self.lease_s,
            features=self.features,
            state=self.state,
            duty=self.duty,
            started=wire.Started(1.0, 0.5, 0.0, 0.25, weights=wire.WeightsRead("peer", 9, 0.5, "other")),
        )

    @property
    def address(self) -> str:
        return f"unix:{self.directory}/{self.name}.sock"

    async def start(self, router: RouterServer) -> None:
        self.server, _ = await listen(self.address, self._channel)
        await self.announce(router)

    async def announce(self, router: RouterServer) -> None:
        self.link = await connect(
            router.addresses, lambda: Channel(Identity("engine", self.name), lambda c, m: self.told.append(m))
        )
        self.link.send(wire.Announce(self.info()))
        self.report()

    def report(self) -> None:
        assert self.link is not None
        self.link.send(wire.Status(self.name, len(self.live), 0, 0, 0, 0.0, totals={"prefill_tokens": 7.0}))

    def _channel(self) -> Channel:
        return Channel(Identity("engine", self.name), self.on_message, self.channels.append, self._closed)

    def _closed(self, channel: Channel, reason: str) -> None:
        if channel in self.channels:
            self.channels.remove(channel)
            self.live.clear()

    def kill(self) -> None:
        """Ends every connection and the listening, as the ingress sees it of a dead process."""
        for task in self.tasks:
            task.cancel()
        if self.server is not None:
            self.server.close()
        for channel in [*self.channels, *([self.link] if self.link else [])]:
            channel.abort("killed")

    async def stop(self) -> None:
        self.kill()
        await asyncio.sleep(0)

    def send(self, message: wire.Message) -> None:
        self.channels[-1].send(message)

    def on_message(self, channel: Channel, message: wire.Message) -> None:
        self.received.append(message)
        match message:
            case wire.Prefill():
                self.live[message.attempt_id] = "prefill"
                if self.auto:
                    self.finish_prefill(message.attempt_id)
            case wire.Decode():
                self.live[message.attempt_id] = "decode"
                if self.auto:
                    task = asyncio.get_running_loop().create_task(self._generate(message))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
            case wire.Cancel() | wire.ReleaseKV():
                if self.live.pop(message.attempt_id, None) == "decode":
                    self._free_copy(message.attempt_id)

    def finish_prefill(self, attempt_id: str) -> None:
        self.live[attempt_id] = "lease"
        self.send(wire.PrefillDone(attempt_id, b"h", 3, 0, self.lease_s, 0.001, 0.002, 4096))

    def _free_copy(self, attempt_id: str) -> None:
        """A decode engine gives the prefill engine's copy back, by itself."""
        for peer in self.peers:
            if peer.live.get(attempt_id) == "lease":
                del peer.live[attempt_id]

    def admit(self, attempt_id: str) -> None:
        self._free_copy(attempt_id)
        self.send(wire.Admitted(attempt_id, 4096, 0.003, 30))

    def token(self, attempt_id: str, text: str = "a ", finish: str | None = None, **more: Any) -> None:
        self.send(wire.Tokens([wire.Out(attempt_id, text, 1, finish=finish, **more)]))
        if finish is not None:
            self.live.pop(attempt_id, None)

    async def _generate(self, message: wire.Decode) -> None:
        self.admit(message.attempt_id)
        n, count = message.params.get("n", 1), message.params["max_tokens"]
        for step in range(count):
            if self.step_s:
                await asyncio.sleep(self.step_s)
            if message.attempt_id not in self.live:
                return
            finish = "length" if step == count - 1 else None
            items = [wire.Out(message.attempt_id, f"w{step} ", 1, index=i, finish=finish) for i in range(n)]
            self.send(wire.Tokens(items))
        self.live.pop(message.attempt_id, None)

    def of(self, kind: type) -> list[Any]:
        """The messages of a kind that have arrived."""
        return [message for message in self.received if isinstance(message, kind)]


def _nothing_at(engine: ScriptedEngine) -> bool:
    return not engine.live


@dataclass
class Rig:
    """The parts of a running ingress that a test works with. `client` talks to the fast listener."""

    router: RouterServer
    connections: IngressConnections
    app: IngressApp
    listener: Listener
    client: httpx.AsyncClient
    engines: dict[str, ScriptedEngine]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}"

    def chat(self, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4} | more

    async def idle(self) -> None:
        """Waits until nothing is held anywhere: ingress, router and engines."""
        await until(lambda: not self.connections.live and not self.app.in_flight, "an idle ingress")
        await until(lambda: self.router.status().in_flight == 0, "an idle router")
        for engine in self.engines.values():
            await until(partial(_nothing_at, engine), f"an idle engine {engine.name}")

    def metric(self, name: str, **labels: str) -> float:
        return self.app.metrics.registry.get_sample_value(name, labels) or 0.0


def member(kind: Any, name: str, tls: WireTls | None) -> Identity:
    """A process of the rig. Those with certificates have a secret, too, as over TCP they must."""
    return Identity(kind, name, None if tls is None else SECRET, tls=tls)


def make_router(
    directory: Path,
    network: RouterNetwork | None = None,
    decisions: DecisionTraces | None = None,
    tls: WireTls | None = None,
    product: bool = False,
    **dispatch: Any,
) -> RouterServer:
    """Returns a router that is not started. With `product` it has the admission and fairness of an application without
    a choice; else it takes every request, in the order in which they come.
    """
    policy = JoinShortestQueue()
    shipped = (admission_policy(ADMIT), fairness_policy(FAIR)) if product else ()
    dispatcher = Dispatcher(DispatchConfig(**{"status_stale_s": 3600.0} | dispatch), policy, policy, *shipped)
    return RouterServer(
        member("router", "r", tls), dispatcher, engine_grace_s=0.2, network=network, traces=decisions
    )


@asynccontextmanager
async def rig(
    directory: Path,
    engines: list[ScriptedEngine],
    config: IngressConfig | None = None,
    listener: ListenerConfig | None = None,
    network: RouterNetwork | None = None,
    key_file: KeyFile | None = None,
    codec: TextCodec | None = None,
    traces: Traces | None = None,
    decisions: DecisionTraces | None = None,
    tls: WireTls | None = None,
    salt: bytes | None = None,
    status_max_age_s: float = 0.0,
    product: bool = False,
    **dispatch: Any,
) -> AsyncIterator[Rig]:
    """Everything up and ready; all of it stopped at the end. With `tls`, router and ingress talk over TCP with it. The
    pages for observers are made for each request, unless `status_max_age_s` says otherwise; `product` is that of
    `make_router`.
    """
    for engine in engines:
        engine.peers = [other for other in engines if other is not engine]
    router = make_router(directory, network, decisions, tls, product, **dispatch)
    await router.start([f"unix:{directory}/router.sock" if tls is None else "tcp:127.0.0.1:0"])
    config = config or IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02)
    if key_file is None and not config.admin_keys:
        config = replace(config, admin_keys=(ADMIN_KEY,))
    config = replace(config, status_max_age_s=status_max_age_s)
    metrics = IngressMetrics(MODEL)

    async def find() -> tuple[str, ...]:
        return router.addresses

    connections = IngressConnections(config, member("ingress", config.replica_id, tls), find, metrics, salt)
    words = codec or WordCodec(VOCAB)
    gate = Gate(config, metrics, connections.ingresses) if config.key_file else None
    audit = audit_of(config, metrics)
    app = IngressApp(config, connections, words, metrics, {"version": "0.0"}, key_file, traces, gate, audit)
    http = Listener(app, listener or ListenerConfig(port=0))
    client = httpx.AsyncClient(timeout=100, headers={"authorization": f"Bearer {ADMIN_KEY}"})
    made = Rig(router, connections, app, http, client, {engine.name: engine for engine in engines})
    try:
        await http.start()
        client.base_url = httpx.URL(made.url)
        await connections.start()
        for engine in engines:
            await engine.start(router)
        if engines:
            await until(
                lambda: len(connections.engines()) == len(engines) and connections.ready() is None,
                "a ready ingress",
            )
        yield made
    finally:
        await client.aclose()
        await http.stop()
        await connections.stop()
        for engine in engines:
            await engine.stop()
        await router.stop()
        if gate is not None:
            await gate.stop()
        if audit is not None:
            await audit.stop()


COSTLY: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 50}], "max_tokens": 1}
"""A request for `Rig.chat` whose cost is nearly all its prompt's, so shares do not depend on when answers end."""


async def users_served(made: Rig, count: int) -> list[str]:
    """Returns the users of the next `count` prompts that the engine "p", which has one slot, gets to compute."""
    p = made.engines["p"]
    served: list[str] = []
    for _ in range(count):
        await until(lambda: p.of(wire.Prefill), "a prompt to compute")
        (prefill,) = p.of(wire.Prefill)
        p.received.clear()
        served.append(made.connections.live[prefill.attempt_id].spec.user)  # type: ignore[attr-defined]
        p.finish_prefill(prefill.attempt_id)
    return served


def raw(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """The bytes of one HTTP request."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers]
    if body:
        lines.append("content-type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def pair(directory: Path, **more: Any) -> list[ScriptedEngine]:
    """One prefill and one decode engine."""
    return [
        ScriptedEngine("p", "prefill", directory, **more),
        ScriptedEngine("d", "decode", directory, **more),
    ]


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Returns the status and the code of a refusal, which names a wait of a second to a minute and a quarter."""
    assert 1 <= int(answer.headers["retry-after"]) <= 75
    return answer.status_code, answer.json()["error"]["code"]


def one_slot_each(directory: Path) -> list[ScriptedEngine]:
    """Two prefill engines of one slot, of which the test decides when they end a prompt, and a decode engine."""
    return [
        ScriptedEngine("p", "prefill", directory, auto=False, slots=1),
        ScriptedEngine("q", "prefill", directory, auto=False, slots=1),
        ScriptedEngine("d", "decode", directory),
    ]


async def retried_in_a_full_queue(made: Rig, dispatcher: Dispatcher, now_s: Callable[[], float]) -> None:
    """Has one of the engines of `one_slot_each` die when the objective of its request has passed and the queue of
    `dispatcher`, which has one place, is full. The request must be neither late nor refused. `now_s` is the
    dispatcher's clock.
    """

    def post(**more: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat(**more)))

    p, q = made.engines["p"], made.engines["q"]
    hurried = post(slo={"ttft_ms": 1000})
    await until(lambda: p.of(wire.Prefill) or q.of(wire.Prefill), "a prompt to compute")
    dies, lives = (p, q) if p.of(wire.Prefill) else (q, p)
    other = post()
    await until(lambda: lives.of(wire.Prefill), "a second prompt to compute")
    queued = post()
    await until(lambda: dispatcher.queue_size == 1, "a request in the queue")
    # the objective passes while the prompt is computed, where nothing is shed
    (prefill,) = dies.of(wire.Prefill)
    request = dispatcher.state.request(prefill.attempt_id)
    assert request is not None
    await until(lambda: now_s() > request.ttft_from_s + 1.0, "the objective to pass")
    dies.kill()
    dies.live.clear()
    # the retry needs the only place in the queue
    assert refusal(await queued) == (429, "queue_full")
    lives.auto = True
    (prefill,) = lives.of(wire.Prefill)
    lives.finish_prefill(prefill.attempt_id)
    assert [(await one).status_code for one in (other, hurried)] == [200, 200]
    assert made.metric("sluice_retries_total", task="prefill", reason="engine_lost") == 1
