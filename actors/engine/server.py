"""The socket server of an engine: it knows which connection each request belongs to, and ends all requests of a
connection with it.

Ingresses send work; the pieces of each step leave as one Tokens message per ingress. Request ids are unique per ingress
only. The engine gets an id unchanged if no other connection uses it, and with a prefix otherwise. Other engines may
connect too (for KV transfers between sim engines). Their messages are handed to the engine, which needs `attach`,
`peer_message` and `peer_closed` for them.

When an ingress connection is lost, all its work is cancelled and its leased KV is released. If a decode engine has
begun to read such KV, the engine lets the read end before it frees the blocks.

Running work never just ends. When the engine is stalled or down (`SelfWatching`), and when a drain ends before the work
does, each open task is answered with a retryable Failed, so that its ingress moves it elsewhere. A stalled engine's
leases stay, because another engine can read the KV without the core that stands still.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from actors.engine.protocol import Engine, EngineMetrics
from actors.telemetry.times import CLOCK, Side, Stamps, now_s
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import (
    Admitted,
    Cancel,
    Decode,
    Duty,
    EngineInfo,
    EngineState,
    Failed,
    KVRenewed,
    Message,
    Out,
    Prefill,
    PrefillDone,
    Reading,
    ReleaseKV,
    RenewKV,
    Role,
    Started,
    Status,
    Timed,
    Tokens,
    WeightsRead,
)
from actors.wire.sockets import listen, remove_sockets
from policies.engine_model.blocks import Change
from policies.engine_model.leases import renewal_s, tokens_too_many
from policies.request.stage import Task

log = logging.getLogger(__name__)

M = TypeVar("M", PrefillDone, KVRenewed, Reading, Admitted, Failed)

CLOSE_S = 5.0
"""Seconds that a peer gets to read its queued messages when the engine stops. ASSUMPTION: peers read at once."""

LOOK_S = 0.1
"""Seconds between two looks at the state of an engine that watches itself."""

IDLE_LOOK_S = 1.0
"""Seconds between two looks at an engine that has nothing to do, because the looks are most of what it costs then. Its
state is looked at before it takes new work, so no request finds an old one.
"""

MAX_IN_FLIGHT = 4096
"""Most requests that may be computed or queued. ASSUMPTION: far above any engine's slots and any router's need."""


@runtime_checkable
class PeerEngine(Protocol):
    """An engine to which other engines connect, at the same addresses as ingresses."""

    def attach(self, me: Identity, addresses: tuple[str, ...]) -> None: ...
    def peer_message(self, channel: Channel, message: Message) -> None: ...
    def peer_closed(self, channel: Channel) -> None: ...


@runtime_checkable
class SelfWatching(Protocol):
    """An engine that knows whether its core stands still ("stalled") or has died ("down"). An engine without a state
    counts as "ready".
    """

    @property
    def state(self) -> EngineState: ...

    @property
    def silent_s(self) -> float:
        """Seconds for which the core has given no sign of life."""
        ...


@runtime_checkable
class TimedStart(Protocol):
    """An engine that knows how its start was spent. The start of any other engine counts as the start of processes."""

    @property
    def loading_s(self) -> tuple[float, float]:
        """Seconds for which weights were loaded, and seconds from then on until the engine was ready."""
        ...


@runtime_checkable
class ReadsWeights(Protocol):
    """An engine that may read its weights from another engine when it starts."""

    @property
    def weights(self) -> WeightsRead | None:
        """Where the weights came from; None where they can only be on disk."""
        ...


@runtime_checkable
class Acquainted(Protocol):
    """An engine that can make the acquaintance of others before it reads KV from them."""

    def meet(self, peers: tuple[bytes, ...]) -> None:
        """Makes the acquaintance of engines, by their `EngineInfo.kv_peer`, in the background."""


@runtime_checkable
class Stepping(Protocol):
    """An engine that knows when the step whose tokens it hands over began."""

    @property
    def step_began_s(self) -> float:
        """The beginning of the present step, or of the last one, in seconds of the machine's monotonic clock."""
        ...


_ENDS_WORK: dict[EngineState, tuple[str, str]] = {
    "stalled": ("stalled", "the engine's core stands still"),
    "down": ("engine_dead", "the engine's core has died"),
}
"""Code and message of the failures of open and new work, by the state of the engine that causes them."""


@dataclass(slots=True, eq=False)
class _Request:
    """One request of one connection. `task` is what the engine does now; `leased_until_s` is when its lease ends, which
    was first granted at `leased_s` for `lease_s`, on the KV of `leased_tokens` tokens that rank `leased_rank` holds.
    """

    client: "_Client"
    attempt_id: str  # the ingress's name for the request
    key: str  # the engine's name for the request
    task: Task | None = None
    choices_left: int = 1
    leased_until_s: float | None = None
    leased_s: float = 0.0
    lease_s: float = 0.0
    leased_tokens: int = 0
    leased_rank: int = 0


@dataclass(slots=True, eq=False)
class _Client:
    """A connected ingress, and its requests by the names that it gave them."""

    channel: Channel
    number: int
    requests: dict[str, _Request] = field(default_factory=dict)


class EngineServer:
    """Serves `engine` at `listen_addresses`. After `start`, `info` names the addresses; `drain` and `stop` end the
    service.

    `node`, `replica` and `labels` are passed on in `info`. At most `max_in_flight` requests are computed or queued.
    With `duty` "warm" the engine gets no requests until a SetRole activates it; what comes all the same is served.
    The start of the engine counts from `began_s` (Unix time; None: from `start`).
    """

    def __init__(
        self,
        engine: Engine,
        me: Identity,
        listen_addresses: list[str],
        node: str = "",
        replica: str = "",
        labels: dict[str, str] | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        duty: Duty = "active",
        began_s: float | None = None,
    ) -> None:
        self.engine = engine
        self._began_s = began_s
        self._started: Started | None = None
        self._duty: Duty = duty
        self._ready_s = self._duty_since_s = self._active_since_s = 0.0
        self._home_role: Role | None = None  # where it was lent from
        self._peers = engine if isinstance(engine, PeerEngine) else None
        self._watching = engine if isinstance(engine, SelfWatching) else None
        self.news = asyncio.Event()
        """Is set when work comes or the state changes; whoever waits for it clears it."""
        self._stepping = engine if isinstance(engine, Stepping) else None
        # the moments of tasks that came with `trace`, by key
        self._followed: dict[str, dict[str, float]] = {}
        self._looks: asyncio.TimerHandle | None = None
        self._engine_state: EngineState = "ready"
        self.addresses: tuple[str, ...] = ()
        self._me = me
        self._listen_addresses = listen_addresses
        self._node, self._replica, self._labels = node, replica, labels or {}
        self._max_in_flight = max_in_flight
        self._servers: list[asyncio.Server] = []
        self._clients: dict[Channel, _Client] = {}
        self._others: set[Channel] = set()
        self._client_number = 0
        self._requests: dict[str, _Request] = {}  # by key
        self._working = 0
        # by key, the lease that was granted or renewed first comes first
        self._leased: dict[str, _Request] = {}
        self._draining = False
        self._stopped = False

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Starts the engine, then listens. Raises the engine's error, or OSError if an address is taken."""
        began_s = time.time() if self._began_s is None else self._began_s
        await self.engine.start(self)
        self._ready_s = self._duty_since_s = self._active_since_s = asyncio.get_running_loop().time()
        self._started = _started(self.engine, began_s, time.time() - began_s)
        for address in self._listen_addresses:
            server, bound = await listen(address, self._new_channel, self._me.tls)
            self._servers.append(server)
            self.addresses += (bound,)
        if self._peers is not None:
            self._peers.attach(self._me, self.addresses)
        if self._watching is not None:
            self._look(self._watching)

    @property
    def state(self) -> EngineState:
        """The state to announce. A dead or stalled engine says so even while it drains."""
        if self._engine_state in _ENDS_WORK:
            return self._engine_state
        return "draining" if self._draining else "ready"

    def info(self) -> EngineInfo:
        """Returns the engine's facts with its addresses and its node."""
        return msgspec.structs.replace(
            self.engine.info(),
            addresses=self.addresses,
            node=self._node,
            replica=self._replica,
            labels=self._labels,
            state=self.state,
            home_role=self._home_role,
            duty=self._duty,
            started=self._started,
        )

    def connected(self) -> None:
        """Notes that the router is about to hear of the engine; the first time ends its start."""
        if self._started is not None and self._started.announce_s is None:
            ready_for_s = asyncio.get_running_loop().time() - self._ready_s
            self._started = msgspec.structs.replace(self._started, announce_s=ready_for_s)

    def set_role(self, role: Role, duty: Duty = "active", lent: bool = False) -> None:
        """Has the engine serve `role` with this duty from now on; the caller announces it. An engine that is `lent`
        remembers the role from which it came.
        """
        home = self._home_role or self.engine.info().role
        self._home_role = home if lent and role != home else None
        now_s = asyncio.get_running_loop().time()
        if role != self.engine.info().role or (duty != self._duty and duty == "active"):
            self._active_since_s = now_s
        self.engine.set_role(role)
        if duty != self._duty:
            self._duty, self._duty_since_s = duty, now_s

    def meet(self, peers: tuple[bytes, ...]) -> None:
        """Has the engine make the acquaintance of others, if it is of a kind that does."""
        if isinstance(self.engine, Acquainted):
            self.engine.meet(peers)

    @property
    def duty_for_s(self) -> float:
        """Seconds for which the engine has had its duty."""
        return asyncio.get_running_loop().time() - self._duty_since_s

    @property
    def active_for_s(self) -> float:
        """Seconds since the engine became ready, was activated, or changed its role, whichever was last."""
        return asyncio.get_running_loop().time() - self._active_since_s

    def status(self) -> Status:
        """Returns the engine's present counts."""
        return msgspec.structs.replace(self.engine.status(), state=self.state)

    def metrics(self) -> EngineMetrics:
        """Returns the engine's totals since the start."""
        return self.engine.metrics()

    def kv_events(self, rank: int = 0) -> list[Change]:
        """Returns the changes of the prefix cache of `rank` since the last call."""
        return self.engine.kv_events(rank)

    @property
    def in_flight(self) -> int:
        """Number of requests that the engine computes or has queued, without leases."""
        return self._working

    async def check_health(self) -> None:
        """Raises the engine's error if the engine is dead."""
        await self.engine.check_health()

    def refuse_new_work(self) -> None:
        """Makes the engine "draining": it takes no new work from now on."""
        self._draining = True
        self.news.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new work, and waits for running work and for leases. Returns whether all ended within `timeout_s`;
        the tasks that did not have then failed as "draining".
        """
        self.refuse_new_work()
        ended = await self.engine.drain(timeout_s)
        self._fail_open_work("draining", "the engine is shutting down")
        return ended

    async def stop(self) -> None:
        """Closes all connections and ends the engine. Idempotent."""
        if self._stopped:
            return
        self._stopped = self._draining = True
        if self._looks is not None:
            self._looks.cancel()
        self._fail_open_work("draining", "the engine is shutting down")
        for server in self._servers:
            server.close()
        channels = [*self._clients, *self._others]
        for channel in channels:
            channel.close("engine stops")
        if channels:
            _, unread = await asyncio.wait([channel.closed for channel in channels], timeout=CLOSE_S)
            for channel in channels:
                if channel.closed in unread:
                    channel.abort("engine stops, and the peer does not read")
        await self.engine.stop()
        remove_sockets(self.addresses)

    # ------------------------------------------------------------------------------------------------ connections

    def _new_channel(self) -> Channel:
        return Channel(self._me, self._received, self._opened, self._closed)

    def _opened(self, channel: Channel) -> None:
        assert channel.peer is not None
        if self._stopped:
            channel.abort("engine stops")
        elif channel.peer.kind == "ingress":
            self._client_number += 1
            self._clients[channel] = _Client(channel, self._client_number)
        elif channel.peer.kind == "engine" and self._peers is not None:
            self._others.add(channel)
        else:
            channel.abort(f"a {channel.peer.kind} has nothing to ask of this engine")

    def _closed(self, channel: Channel, reason: str) -> None:
        if channel in self._others:
            self._others.remove(channel)
            assert self._peers is not None
            self._peers.peer_closed(channel)
            return
        client = self._clients.pop(channel, None)
        if client is None:
            log.info("connection refused or lost before its handshake: %s", reason)
            return
        if client.requests:
            log.info("%s is gone (%s): ending %d requests", channel.peer_name, reason, len(client.requests))
        for request in list(client.requests.values()):
            self._forget(request)
            self.engine.cancel(request.key)

    def _received(self, channel: Channel, message: Message) -> None:
        client = self._clients.get(channel)
        if client is None:
            if channel in self._others and self._peers is not None:
                self._peers.peer_message(channel, message)
            # Otherwise the channel has been aborted, and the messages left in its buffer are ignored.
            return
        if isinstance(message, Prefill):
            self._take(client, message, "prefill")
        elif isinstance(message, Decode):
            self._take(client, message, "decode")
        elif isinstance(message, Cancel):
            request = client.requests.get(message.attempt_id)
            if request is not None:
                self._forget(request)
                self.engine.cancel(request.key)
        elif isinstance(message, ReleaseKV):
            self._release(client, message.attempt_id)
        elif isinstance(message, RenewKV):
            self._renew(client, message.attempt_id)
        else:
            raise WireError(f"an ingress does not send {type(message).__name__}")

    # ------------------------------------------------------------------------------------------------ requests

    def _take(self, client: _Client, message: Prefill | Decode, task: Task) -> None:
        attempt_id = message.attempt_id
        request = client.requests.get(attempt_id)
        refusal: Failed | None = None
        if self._watching is not None and not self._requests:
            self._look_again(self._watching, LOOK_S)
            self._follow(self._watching)
        if self._engine_state in _ENDS_WORK:
            # What comes to a dead core has not killed it.
            silent_s = math.inf if self._engine_state == "down" else self._stood_s()
            refusal = Failed(attempt_id, task, *_ENDS_WORK[self._engine_state], True, silent_s=silent_s)
        elif self._draining:
            refusal = Failed(attempt_id, task, "draining", "the engine takes no new work", True)
        elif request is not None and request.task is not None:
            refusal = Failed(
                attempt_id, task, "bad_request", f"request {attempt_id} is at work here already", False
            )
        elif self._working >= self._max_in_flight:
            refusal = Failed(
                attempt_id, task, "overloaded", f"the engine has {self._working} requests in flight", True
            )
        if refusal is not None:
            client.channel.send(refusal)
            return
        if request is None:
            key = attempt_id
            while key in self._requests:
                key = f"{client.number}:{key}"
            request = _Request(client, attempt_id, key)
            client.requests[attempt_id] = request
            self._requests[key] = request
        request.task = task
        self._working += 1
        self.news.set()
        if message.trace is not None:
            self._followed[request.key] = {"received": now_s()}
        if request.key != attempt_id:
            message = msgspec.structs.replace(message, attempt_id=request.key)
        if isinstance(message, Prefill):
            self._drop_old_leases()
            self.engine.prefill(message)
        else:
            n = message.params.get("n", 1)
            request.choices_left = n if isinstance(n, int) else 1
            self.engine.decode(message)

    def _look(self, engine: SelfWatching) -> None:
        """Follows the state of an engine that watches itself, again and again until the server stops."""
        if not self._working:
            self._drop_old_leases()
        self._look_again(engine, LOOK_S if self._requests else IDLE_LOOK_S)
        self._follow(engine)

    def _look_again(self, engine: SelfWatching, after_s: float) -> None:
        """Has the engine looked at after this time, and not at the one before."""
        if self._looks is not None:
            self._looks.cancel()
        if not self._stopped:
            self._looks = asyncio.get_running_loop().call_later(after_s, self._look, engine)

    def _follow(self, engine: SelfWatching) -> None:
        """Takes over the engine's state. All open work ends with it if the engine can serve none."""
        state = engine.state
        if state == self._engine_state or state not in ("ready", *_ENDS_WORK):
            return
        log.log(
            logging.INFO if state == "ready" else logging.ERROR,
            "engine %s is %s, it was %s", self._me.id, state, self._engine_state,
        )  # fmt: skip
        self._engine_state = state
        self.news.set()
        if state in _ENDS_WORK:
            self._fail_open_work(*_ENDS_WORK[state])

    def _stood_s(self) -> float:
        """Returns the seconds for which the engine has stood still; 0 unless it is stalled."""
        if self._engine_state != "stalled" or self._watching is None:
            return 0.0
        return self._watching.silent_s

    def _fail_open_work(self, code: str, message: str) -> None:
        """Answers every open task with a retryable failure, and ends it in the engine. Leases of other requests
        stay.
        """
        open_work = [request for request in self._requests.values() if request.task is not None]
        if open_work:
            log.warning("engine %s fails %d open tasks as %s", self._me.id, len(open_work), code)
        for request in open_work:
            assert request.task is not None
            failure = Failed(
                request.attempt_id, request.task, code, message, retryable=True, silent_s=self._stood_s()
            )
            self._forget(request)
            self.engine.cancel(request.key)
            request.client.channel.send(failure)

    def _release(self, client: _Client, attempt_id: str) -> None:
        request = client.requests.get(attempt_id)
        if request is None or request.leased_until_s is None:
            return
        self.engine.release(request.key)
        self._unlease(request)

    def _renew(self, client: _Client, attempt_id: str) -> None:
        """Has the engine renew a lease if it may last longer (`policies.engine_model.leases`), else refuses."""
        request = client.requests.get(attempt_id)
        now_s = asyncio.get_running_loop().time()
        if request is not None and request.leased_until_s is not None and now_s < request.leased_until_s:
            most_s, age_s = self.engine.info().max_lease_s, now_s - request.leased_s
            lease_s = renewal_s(request.lease_s, most_s, age_s, self._is_to_end(request))
            if lease_s is not None:
                self.engine.renew(request.key, lease_s)
                return
        client.channel.send(KVRenewed(attempt_id, 0.0))

    def _is_to_end(self, request: _Request) -> bool:
        """Whether the request's rank is full and has prompts waiting, so that its oldest leases, of which this is one,
        must end.
        """
        status, info, rank = self.engine.status(), self.engine.info(), request.leased_rank
        counts = status.ranks[rank] if status.ranks else status
        tokens = info.kv_blocks * info.block_size_tokens // info.dp_ranks
        too_many = tokens_too_many(counts.kv_usage, tokens, counts.waiting)
        if not too_many:
            return False
        older = [
            held.leased_tokens
            for held in self._leased.values()
            if held.leased_rank == rank and (held.leased_s, held.key) < (request.leased_s, request.key)
        ]
        return sum(older) < too_many

    def _unlease(self, request: _Request) -> None:
        request.leased_until_s = None
        self._leased.pop(request.key, None)
        if request.task is None:
            self._forget(request)

    def _task_ended(self, request: _Request) -> None:
        if self._followed:
            self._followed.pop(request.key, None)
        if request.task is not None:
            request.task = None
            self._working -= 1
        if request.leased_until_s is None:
            self._forget(request)

    def _forget(self, request: _Request) -> None:
        if self._followed:
            self._followed.pop(request.key, None)
        if request.task is not None:
            request.task = None
            self._working -= 1
        request.leased_until_s = None
        self._leased.pop(request.key, None)
        request.client.requests.pop(request.attempt_id, None)
        self._requests.pop(request.key, None)

    def _drop_old_leases(self) -> None:
        """Forgets leases whose time is over, because an engine does not tell the server when it ends one."""
        now_s = asyncio.get_running_loop().time()
        while self._leased:
            request = next(iter(self._leased.values()))
            if request.leased_until_s is not None and request.leased_until_s > now_s:
                return
            self._unlease(request)

    # ------------------------------------------------------------------------------------------------ Sink

    def prefill_done(self, msg: PrefillDone) -> None:
        """Sends the ingress its finished prefill, whose KV is leased from this moment."""
        request = self._requests.get(msg.attempt_id)
        if request is None:
            return
        self._leased.pop(request.key, None)
        self._leased[request.key] = request
        request.leased_s, request.lease_s = asyncio.get_running_loop().time(), msg.lease_s
        request.leased_until_s = request.leased_s + msg.lease_s
        request.leased_tokens, request.leased_rank = msg.prompt_tokens, self.engine.lease_rank(request.key)
        if self._followed:
            self._tell_prefill(request, msg)
        self._task_ended(request)
        request.client.channel.send(self._named(msg, request))

    def renewed(self, msg: KVRenewed) -> None:
        """Sends the ingress the answer about a lease that it wants renewed."""
        request = self._requests.get(msg.attempt_id)
        if request is None:
            return
        if request.leased_until_s is not None and msg.lease_s > 0:
            request.leased_until_s = max(
                request.leased_until_s, asyncio.get_running_loop().time() + msg.lease_s
            )
            self._leased.pop(request.key, None)
            self._leased[request.key] = request
        request.client.channel.send(self._named(msg, request))

    def reading(self, msg: Reading) -> None:
        """Sends the ingress the message that its decode has a slot, and that its KV is read now."""
        request = self._requests.get(msg.attempt_id)
        if request is not None:
            if self._followed:
                self._stamp(request, "reading")
            request.client.channel.send(self._named(msg, request))

    def admitted(self, msg: Admitted) -> None:
        """Sends the ingress the message that its decode has a slot and its KV."""
        request = self._requests.get(msg.attempt_id)
        if request is not None:
            if self._followed:
                self._stamp(request, "admitted")
            request.client.channel.send(self._named(msg, request))

    def failed(self, msg: Failed) -> None:
        """Sends the ingress the failure of a task. A lease of the same request stays. The first failure of a dead core
        changes the engine's state at once, after the engine has reported all of them.
        """
        if msg.code == "engine_dead" and self._watching is not None and not self._stopped:
            asyncio.get_running_loop().call_soon(self._follow, self._watching)
        request = self._requests.get(msg.attempt_id)
        if request is not None:
            self._task_ended(request)
            request.client.channel.send(self._named(msg, request))

    def tokens(self, items: list[Out]) -> None:
        """Sends the pieces of one step, in one message for each connection."""
        requests = self._requests
        if self._followed:
            self._tell_first(items)
        batches: dict[Channel, list[Out]] = {}
        for item in items:
            request = requests.get(item.attempt_id)
            if request is None:
                continue
            if item.finish is not None:
                request.choices_left -= 1
                if request.choices_left == 0:
                    self._task_ended(request)
            if request.key is not request.attempt_id:
                item = msgspec.structs.replace(item, attempt_id=request.attempt_id)
            channel = request.client.channel
            batch = batches.get(channel)
            if batch is None:
                batches[channel] = [item]
            else:
                batch.append(item)
        for channel, batch in batches.items():
            channel.send(Tokens(batch))

    # ------------------------------------------------------------------------------------------------ moments

    def _stamp(self, request: _Request, moment: str) -> None:
        followed = self._followed.get(request.key)
        if followed is not None:
            followed[moment] = now_s()

    def _tell_prefill(self, request: _Request, msg: PrefillDone) -> None:
        """Tells the moments of a prefill that ends now, of which the engine itself measured the parts."""
        followed = self._followed.pop(request.key, None)
        if followed is not None:
            followed["admitted"] = followed["received"] + msg.queue_s
            followed["computed"] = followed["admitted"] + msg.compute_s
            followed["sent"] = now_s()
            self._tell(request, "prefill", followed)

    def _tell_first(self, items: list[Out]) -> None:
        """Tells the moments of the decodes whose first tokens are among these pieces."""
        for item in items:
            followed = self._followed.pop(item.attempt_id, None)
            if followed is not None:
                if self._stepping is not None:
                    followed["step"] = self._stepping.step_began_s
                followed["first"] = now_s()
                self._tell(self._requests[item.attempt_id], "decode", followed)

    def _tell(self, request: _Request, side: Side, followed: dict[str, float]) -> None:
        stamps = Stamps(self._me.id, side, CLOCK, followed)
        request.client.channel.send(Timed(request.attempt_id, stamps))

    @staticmethod
    def _named(msg: M, request: _Request) -> M:
        return (
            msg
            if request.key == request.attempt_id
            else msgspec.structs.replace(msg, attempt_id=request.attempt_id)
        )


def _started(engine: Engine, began_s: float, took_s: float) -> Started:
    """Returns how an engine's start of `took_s` seconds was spent, not announced yet."""
    weights_s, post_load_s = engine.loading_s if isinstance(engine, TimedStart) else (0.0, 0.0)
    read = engine.weights if isinstance(engine, ReadsWeights) else None
    process_s = max(0.0, took_s - weights_s - post_load_s)
    return Started(began_s, process_s, weights_s, post_load_s, weights=read)
