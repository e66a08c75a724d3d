"""Three vLLM engines on the two hosts of a link, one of which lends prefixes to another, behind router and ingress.

    host "prefill"    prefill-0, the lender
    host "decode"     prefill-1, the borrower; decode-0, which decodes; the flow agent

Router and ingress are the product's own, in this process. The caller names the engine that computes each prompt; the
router decides by its prefix index, as ever, whether that engine borrows what the other one has cached. All that moves
over the link for a prompt of the borrower is the prefix that it reads.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.router.server import RouterServer
from actors.wire.channel import Identity
from actors.wire.link import at
from app.ingress.asgi import IngressApp
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.http.listener import Listener, ListenerConfig
from app.ingress.metrics import IngressMetrics
from app.ingress.tokenizer import HfCodec
from benchmarks.chaos.answers import Answer
from benchmarks.chaos.hosted import AGENT, START_S, Hosted
from benchmarks.chaos.http import connect, post_bytes
from benchmarks.chaos.loans import COUNTER, RESULTS
from benchmarks.chaos.setups import NETWORK
from benchmarks.mfs.engines import SECRET, Sizes
from benchmarks.mfs.link import DEVICE, Pair
from benchmarks.mfs.workload import BLOCK_TOKENS
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.engine_model.blocks import block_hashes
from policies.request.life import Life
from policies.routing.base import Decision, Needs, Ranked, Reason
from policies.routing.simple.round_robin import RoundRobin
from policies.state.views import Request, Snapshot, Worker

LEASE_S = 12
READ_TIMEOUT_S = 10.0
"""Seconds that a read may take beside the time for its bytes: the default of vLLM engines."""

SIZES = Sizes(
    decodes=1,
    others=1,
    slots=4,
    lease_s=LEASE_S,
    prefill_kv_gib=1.0,
    decode_kv_gib=1.0,
    read_timeout_s=READ_TIMEOUT_S,
)
LENDER, BORROWER = SIZES.prefills
ENGINES = SIZES.names
LEASE_MARGIN_S = 4.0
STATUS_STALE_S = 30.0
"""Age of an engine's report from which it gets no work. ASSUMPTION: engines that share two cores report late."""

CONNECT_S = 30.0
PATIENCE_S = 300.0
"""Seconds within which every answer, and every state that is awaited, must come. ASSUMPTION: all engines of a machine
of two cores compute a prompt in less."""

LOOK_S = 0.005
"""Seconds between two looks at what is awaited; a prefix takes two seconds over the link."""

PARAMS: Mapping[str, Any] = {
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 2,
    "stream": True,
}


@dataclass(slots=True)
class SentTo:
    """A prefill policy that sends every prompt to one worker, and to another one where that may not take it: after a
    read of its KV failed, the prompt is tried again elsewhere. `strayed` counts those.
    """

    needs: ClassVar[Needs] = Needs.NONE
    paper: ClassVar[str] = "none (the harness chooses)"
    formula: ClassVar[str] = "cost = 0"
    worker: str
    name: str = "sent_to"
    strayed: int = 0

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        chosen = self.worker
        if all(worker.id != chosen for worker in workers):
            chosen = workers[0].id
            self.strayed += 1
        return Decision(chosen, (Ranked(chosen, 0.0, {}),), Reason.ONLY_CANDIDATE)


class LendingHosts(Hosted):
    """The application. `begin` starts a process, and `ready` waits for an engine."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        super().__init__(pair, folder, SIZES, ("--router", f"unix:{folder}/router.sock"))
        network = folder / "network.yaml"
        network.write_text(NETWORK)
        self._sent = SentTo(LENDER)
        dispatch = DispatchConfig(
            lend_prefixes=True, lease_margin_s=LEASE_MARGIN_S, status_stale_s=STATUS_STALE_S
        )
        self.router = RouterServer(
            Identity("router", "router-lenders", SECRET.encode()),
            Dispatcher(dispatch, self._sent, RoundRobin()),
            # what is learnt of the link would contradict the file
            network=RouterNetwork(NetworkConfig(str(network), estimate=False)),
        )
        model = self._place.model
        config = IngressConfig((model,), replica_id="ingress-lenders", expects_prefill=True)
        self._metrics = IngressMetrics(model)
        me = Identity("ingress", config.replica_id, SECRET.encode())
        self.connections = IngressConnections(config, me, at(self.address("router")), self._metrics)
        app = IngressApp(config, self.connections, HfCodec(model), self._metrics, {"version": "0"})
        self._listener = Listener(app, ListenerConfig(port=0))

    # ------------------------------------------------------------------------------------------------ processes

    async def start(self) -> None:
        """Starts everything, and waits until it serves. Raises StartError."""
        await self.router.start([self.address("router")])
        await self.connections.start()
        await self._listener.start()
        for name in (AGENT, *ENGINES):
            self.begin(name)
        for name in ENGINES:
            await self.ready(name)
        await self.until(lambda: self.connections.ready() is None, "a ready ingress")

    async def stop(self) -> None:
        """Ends everything."""
        await self._listener.stop()
        await self.connections.stop()
        await self.router.stop()
        await self.end()

    def options(self, name: str) -> dict[str, Any]:
        options = super().options(name)
        if name == BORROWER:
            return borrowing(options, str(self.pair.decode.address), self.address(AGENT))
        return options

    def side_of(self, name: str) -> str:
        return "decode" if name == BORROWER else super().side_of(name)

    async def ready(self, name: str) -> None:
        """Waits until an engine serves and the ingress knows it. Raises StartError."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.runs(name):
            # an earlier life of the engine has been forgotten by then
            if "\nready " in f"\n{self.log(name)}" and name in self._known():
                return
            await asyncio.sleep(0.3)
        raise self.no_start(name)

    def _known(self) -> set[str]:
        return {info.id for info in self.connections.engines() if info.state == "ready"}

    async def until(self, holds: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Waits until something holds. Raises TimeoutError."""
        end_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{what} did not come about in {timeout_s:g} s")
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------------------------------------------- requests

    async def ask(self, tokens: Sequence[int], engine: str) -> tuple[Answer, float | None]:
        """Has an engine compute a prompt, and returns the answer with the time of its first token. `strayed` then says
        whether another one computed it, too.
        """
        self._sent = self.router.dispatcher.prefill = SentTo(engine)
        answer, first_s = Answer(stream=True), list[float]()

        def piece(data: bytes) -> None:
            if answer.feed(data) and not first_s:
                first_s.append(time.monotonic())

        connection = await connect(self._listener.port, CONNECT_S)
        try:
            async with asyncio.timeout(PATIENCE_S):
                request = post_bytes("/v1/completions", {"prompt": list(tokens), **PARAMS})
                await connection.ask(request, piece, answer.head)
        finally:
            connection.drop()
        answer.end()
        return answer, first_s[0] if first_s else None

    @property
    def strayed(self) -> bool:
        """Whether the last prompt was sent to another engine than the one that was asked for."""
        return bool(self._sent.strayed)

    def request(self) -> Life | None:
        """Returns the request that is open; None if none is."""
        return next(iter(self.connections.live.values()), None)

    async def cached(self, tokens: Sequence[int], engine: str) -> None:
        """Waits until the router knows that an engine has cached a prompt. Raises TimeoutError."""
        state, hashes = self.router.dispatcher.state, block_hashes(tokens[:-1], BLOCK_TOKENS)

        def known() -> bool:
            index = state.prefix_index_of(engine)
            return index is not None and index.blocks_held(engine, hashes) == len(hashes)

        await self.until(known, f"the prompt in the router's index of {engine}")

    async def speed_known(self, engine: str) -> None:
        """Waits until the router knows how fast an engine computes prompts. Raises TimeoutError."""
        state = self.router.dispatcher.state
        await self.until(lambda: state.prefill_s_per_token(engine) is not None, f"the speed of {engine}")

    # --------------------------------------------------------------------------------------------------- counts

    def loans(self) -> dict[str, int]:
        """Returns how many loans have ended, by how they did."""
        registry = self._metrics.registry
        return {how: int(registry.get_sample_value(COUNTER, {"result": how}) or 0) for how in RESULTS}

    def received_bytes(self) -> int:
        """Returns how many bytes the borrower's host has received over the link so far, with all headers."""
        return received(Path(f"/proc/{self.pair.decode.pid}/net/dev").read_text())

    def held(self) -> list[str]:
        """Returns what is held or open at ingress, router, flow agent and engines; nothing if no request is open."""
        status = self.router.status()
        counts = {
            "requests at the ingress": len(self.connections.live),
            "requests at the router": status.in_flight,
            "leases at the router": status.leases,
            "quarantined workers": len(status.quarantined),
            "reads at the flow agent": sum(agent.open for agent in status.flows),
            "flow agents missing": 1 - len(status.flows),
        }
        found = {one.engine_id: one for one in status.statuses if one.engine_id in self._known()}
        for name in ENGINES:
            if (one := found.get(name)) is None:
                counts[f"{name} missing"] = 1
                continue
            counts |= {
                f"{name} running": one.running,
                f"{name} waiting": one.waiting,
                f"{name} leases": one.leases,
                f"{name} blocks": one.kv_blocks_used,
            }
        return [f"{what}: {number}" for what, number in counts.items() if number]


def borrowing(options: Mapping[str, Any], address: str, agent: str) -> dict[str, Any]:
    """Returns the options of the borrower, from those of a prefill engine on the other host: it lies on the decode
    engine's host, of this address, and asks the agent for permits.
    """
    return {**options, "side_channel_host": address, "flow_node": "decode", "flow_agent": agent}


def received(table: str) -> int:
    """Returns the bytes that the link's device has received, from the text of /proc/PID/net/dev."""
    for line in table.splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == DEVICE:
            return int(figures.split()[0])
    raise ValueError(f"there is no device {DEVICE} in {table!r}")
