"""The HTTP API: one synchronous `dispatch` answers every request, whichever transport brought it.

The fast listener calls `dispatch` with a reply that writes to its transport. Under an ASGI server (Ray Serve's proxy)
`__call__` reads the body, calls `dispatch` too, and pumps the reply out through `send`.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from app.admin_key import KeyFile
from app.api.errors import ApiError, draining, host_not_allowed, no_memory, too_large
from app.api.extensions import Defaults, least_priority_of
from app.api.plan import Plan, plan_chat, plan_completion
from app.api.structure import check_structure
from app.fleet.figures import FleetCollector, Seen
from app.ingress import access
from app.ingress.admin import PATH as ADMIN
from app.ingress.admin import AdminApi, method_not_allowed
from app.ingress.audit import Audit
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.exchange import CLIENT_CLOSED, JSON, HttpExchange
from app.ingress.http.head import ONCE, repeated_header
from app.ingress.http.memory import RequestMemory, most_body_bytes
from app.ingress.http.reply import AsgiReply, Headers, Reply, Request
from app.ingress.intake import Intake, Prompts
from app.ingress.intake_threads import IntakeThreads, Turn
from app.ingress.kept_page import KeptPage
from app.ingress.metrics import IngressMetrics
from app.ingress.open_requests import OpenRequests, RequestId
from app.ingress.pages import Pages
from app.ingress.status import status_of
from app.ingress.tenants.gate import Caller, Gate, least_need_of
from app.ingress.tenants.unnamed import unnamed_tenant
from app.ingress.tokenizer import TextCodec
from app.ingress.work_bound import held_of

if TYPE_CHECKING:
    from actors.telemetry.traces import Traces

log = logging.getLogger(__name__)

TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
OBSERVED = ("/metrics", "/sluice/status", "/health", "/health/live", "/health/ready", "/version")
"""Paths that a replica answers on its metrics port."""
OUTPUT = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths of requests for output; one that is refused before its exchange begins has an access line, too."""
TIMES = b"x-sluice-times"
"""The header by which a client has the way of its request noted, hop by hop, for `explain`: `on`."""
PARSED_ASIDE_BYTES = 64 * 2**10
"""Length of a body above which a thread parses it. ASSUMPTION: the worst body of this length takes 20 ms, and a thread
costs every body 0.1 ms.
"""
PROMPT_CHARS = 64
"""Characters that each prompt after the first counts as when it is decided whether a thread tokenises them. ASSUMPTION:
a call of the tokenizer takes 20 us, in which it tokenises 54 characters of English (`max_tokenising_chars`).
"""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

PlanOf = Callable[[bytes, dict[bytes, bytes], Defaults], Plan]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class IngressApp:
    """The application of one ingress replica.

    `/version` shows `versions` and `transport`; the listener sets `transport` to "fast" where the fast protocol is on.
    `/sluice/status` shows `metrics_port`, this replica's own port. `key_file` has the admin key if `config` has none.
    With a `gate`, requests need an API key; what administrators do is written to `audit`. Whoever made these two starts
    and stops them.
    """

    def __init__(
        self,
        config: IngressConfig,
        connections: IngressConnections,
        codec: TextCodec,
        metrics: IngressMetrics,
        versions: dict[str, str],
        key_file: KeyFile | None = None,
        traces: "Traces | None" = None,
        gate: Gate | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.config = config
        self._gate = gate
        self.connections = connections
        self._intake = Intake(config, codec)
        self._intake_threads = IntakeThreads(config.tokenise_threads, config.max_tokenising_chars)
        self.metrics = metrics
        self.versions = versions
        self.transport = "plain"
        self.metrics_port: int | None = None
        self.request_memory = RequestMemory(
            config.max_waiting_bytes, partial(metrics.listener_refused, "memory")
        )
        self.requests = OpenRequests(connections, traces)
        self._defaults = Defaults(
            config.default_completion_tokens,
            config.request_timeout_s,
            config.class_slo,
            least_priority_of(config.ceiling),
        )
        self._admin = AdminApi(config.admin_keys, key_file, connections, self._respond_json, audit)
        self._loop = asyncio.get_running_loop()
        self._created_s = int(time.time())
        self._preparing: set[asyncio.Task[None]] = set()
        # requests whose bodies a thread parses
        self._parsing = 0
        self.metrics_page = KeptPage(metrics.render, config.status_max_age_s)
        self.status_page = KeptPage(self._status_json, config.status_max_age_s)
        pages = Pages(config.served_names, versions["version"])
        self._routes: dict[str, tuple[str, Callable[[Request, Reply, RequestId], None]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._ready),
            "/health/live": ("GET", self._alive),
            "/health/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/version": ("GET", self._version),
            "/sluice/status": ("GET", self._status),
            "/": ("GET", pages.index),
            "/docs": ("GET", pages.docs),
            "/docs/openapi-explorer.js": ("GET", pages.explorer),
            "/openapi.json": ("GET", pages.openapi),
        }
        metrics.bind(lambda: float(self.in_flight))
        metrics.registry.register(FleetCollector(self._seen))

    def _seen(self) -> Seen:
        connections = self.connections
        return Seen(
            connections.engines(),
            connections.fleet_status,
            connections.router_connected(),
            connections.ready() is None,
        )

    # ------------------------------------------------------------------------------------------------- requests

    @property
    def in_flight(self) -> int:
        """Number of HTTP requests for output that are being answered."""
        return len(self.requests)

    def dispatch(self, request: Request, reply: Reply) -> None:
        """Answers one request, now or later. A fault of the client's is answered too and never raised."""
        request_id = self._request_id(request)
        route = self._routes.get(request.path)
        try:
            if route is None:
                if request.path.startswith("/v1/models/"):
                    route = ("GET", self._model)
                elif request.path.startswith(ADMIN):
                    self._admin.dispatch(request, reply, request_id.shown)
                    return
                else:
                    raise ApiError(
                        404, f"There is no {request.path}; / lists what there is.", code="not_found"
                    )
            method, handler = route
            if request.method != method and not (method == "GET" and request.method == "HEAD"):
                raise method_not_allowed(request, method)
            handler(request, reply, request_id)
        except ApiError as error:
            self._refuse_output(request, reply, request_id, error)

    def admit_head(self, request: Request) -> None:
        """Raises `ApiError` for a request for output that would be refused whatever its body holds. The listener asks
        before it reads a large body.
        """
        if request.path not in OUTPUT or request.method != "POST":
            return
        try:
            self._caller(request)
            _check_media_type(request)
            self._admit()
            self._context()
        except ApiError as error:
            request_id = self._request_id(request)
            self.metrics.answered(error.status, "none")
            access.write(request.path, error.status, 0.0, request_id.shown, code=error.code)
            error.more_headers.append((b"x-request-id", request_id.shown.encode()))
            raise

    def dispatch_observation(self, request: Request, reply: Reply) -> None:
        """Answers one request on the metrics port, which shows this replica and takes no work."""
        if request.path in OBSERVED:
            self.dispatch(request, reply)
            return
        message = f"There is no {request.path} on a metrics port; there are {', '.join(OBSERVED)}."
        self._refuse(ApiError(404, message, code="not_found"), reply, self._request_id(request))

    @property
    def draining(self) -> bool:
        """Whether this replica takes no more requests, because it is shutting down."""
        return self.requests.draining

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for those under way. Returns True if all ended within `timeout_s`; the others
        end with an error then.
        """
        return await self.requests.drain(timeout_s)

    def _refuse_output(self, request: Request, reply: Reply, request_id: RequestId, error: ApiError) -> None:
        self._refuse(error, reply, request_id)
        if request.path in OUTPUT:
            access.write(request.path, error.status, 0.0, request_id.shown, code=error.code)

    def _refuse(self, error: ApiError, reply: Reply, request_id: RequestId) -> None:
        self.metrics.answered(error.status, "none")
        headers = [JSON, *error.headers(), (b"x-request-id", request_id.shown.encode())]
        reply.respond(error.status, headers, error.body())

    def _request_id(self, request: Request) -> RequestId:
        given = request.headers.get(b"x-request-id")
        valid = given is not None and _REQUEST_ID.fullmatch(given) is not None
        request_id = self.requests.new_id(given.decode("ascii") if given is not None and valid else None)
        if self.requests.traces is not None and b"traceparent" in request.headers:
            traceparent = request.headers[b"traceparent"].decode("ascii", "replace")
            request_id = request_id._replace(traceparent=traceparent)
        if TIMES in request.headers:
            request_id = request_id._replace(wants_times=request.headers[TIMES] == b"on")
        return request_id

    # -------------------------------------------------------------------------------------------------- endpoints

    def _chat(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._plan(plan_chat, request, reply, request_id)

    def _completion(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._plan(plan_completion, request, reply, request_id)

    def _plan(self, plan_of: PlanOf, request: Request, reply: Reply, request_id: RequestId) -> None:
        """Plans a request for output and starts it: at once, or later where a thread reads its large body."""
        caller = self._caller(request)
        _check_media_type(request)
        started_s = self._admit()
        size = len(request.body)
        if size <= PARSED_ASIDE_BYTES:
            plan = self._plan_by(plan_of, request, caller)
            self._planned(plan, request, reply, request_id, started_s, caller)
            return
        turn = self._intake_threads.take(size, self._sender(request, caller))
        self._parsing += 1
        parse = partial(self._parse, plan_of, request, caller)

        async def run() -> None:
            try:
                plan = await self._intake_threads.run(turn, parse)
            finally:
                self._parsing -= 1
            if reply.gone:
                self.metrics.answered(CLIENT_CLOSED, "none")
                return
            if self.draining:
                raise draining("This replica is shutting down; try again.")
            self._planned(plan, request, reply, request_id, started_s, caller)

        self._in_background(run(), partial(self._refuse_output, request, reply, request_id))

    def _planned(
        self,
        plan: Plan,
        request: Request,
        reply: Reply,
        request_id: RequestId,
        started_s: float,
        caller: Caller | None,
    ) -> None:
        self._check(plan, request, caller)
        size = sum(map(len, plan.prompts))
        if plan.request is not None:
            size = len(request.body)
            if size <= self.config.offload_prompt_chars:
                plan.prompts = [self._intake.render(plan.request)]
                size = len(plan.prompts[0])
        self._start(plan, size, reply, request_id, started_s, caller)

    def _caller(self, request: Request) -> Caller | None:
        """Returns whose request for output it is, or None where API keys are off.

        Raises ApiError 401 without a key that is accepted, and 429 if nothing more of the key fits.
        """
        if self._gate is None:
            return None
        caller = self._gate.caller(request, self._admin.permits)
        self._gate.check(caller)
        return caller

    def _sender(self, request: Request, caller: Caller | None) -> str:
        """Returns the tenant that a request counts for before its body is read, which may name a user."""
        if caller is not None:
            return caller.tenant
        return unnamed_tenant("", request.address(), self.connections.salt)

    def _plan_by(self, plan_of: PlanOf, request: Request, caller: Caller | None) -> Plan:
        """Returns the plan of a request. Where API keys are off, an admin key lifts the ceiling of priorities."""
        defaults = self._defaults if caller is None else caller.defaults
        try:
            return plan_of(request.body, request.headers, defaults)
        except ApiError as error:
            # only here, because the admin key may have to be read from its file
            if error.code != "priority_not_allowed" or caller is not None or not self._admin.permits(request):
                raise
        return plan_of(request.body, request.headers, replace(defaults, least_priority=None))

    def _parse(self, plan_of: PlanOf, request: Request, caller: Caller | None) -> Plan:
        """Returns the plan of a large body, which may not have more parts than clients need."""
        check_structure(request.body)
        return self._plan_by(plan_of, request, caller)

    def _check(self, plan: Plan, request: Request, caller: Caller | None) -> None:
        self._intake.check(plan)
        if not plan.terms.tenant:
            plan.unnamed = unnamed_tenant(plan.user, request.address(), self.connections.salt)
        if plan.terms.mode is not None:
            self._admin.require_mode(request)
        if caller is not None and self._gate is not None:
            self._gate.prepare(caller, plan)

    def _admit(self) -> float:
        if self.draining:
            raise draining("This replica is shutting down; try again.")
        # A long prompt is tokenised to its end even if its client has left, so it counts as work until then.
        if max(len(self.requests) + self._parsing, len(self._preparing)) >= self.config.max_in_flight:
            message = f"This replica serves {self.config.max_in_flight} requests already; try again later."
            raise ApiError(429, message, code="too_many_requests", retry_after_s=1.0)
        return self.connections.now_s()

    def _context(self) -> int:
        context = self.connections.context_tokens()
        if context is None:
            reason = self.connections.ready() or "no engine is known"
            raise ApiError(503, f"Not ready: {reason}; try again later.", code="not_ready", retry_after_s=2.0)
        return context

    def _start(
        self,
        plan: Plan,
        size: int,
        reply: Reply,
        request_id: RequestId,
        started_s: float,
        caller: Caller | None,
    ) -> None:
        """Begins the exchange of a plan: at once, or later where a thread prepares long prompts, or Redis is asked
        whether they fit.

        `size` is in characters, ids, or bytes of a conversation that is not rendered yet.
        """
        context = self._context()
        if plan.engine_chat is not None:
            self._intake.check_tools(self.connections.decoding_features())
        work, tenant = self.requests.work, plan.unnamed or plan.terms.tenant
        # before the prompts cost time; their tokens may still be too many
        held = held_of(plan.prompts, (), plan.n, plan.kept_bytes)
        work.check(held, tenant=tenant)
        size += PROMPT_CHARS * (len(plan.prompts) - 1)
        if size <= self.config.offload_prompt_chars:
            parsed_s = self.connections.now_s() if request_id.wants_times else None
            prompts = self._intake.prepare(plan, context)
            held = held_of(plan.prompts, prompts.tokens, plan.n, plan.kept_bytes)
            work.check(held, tenant=tenant)
            grant = None
            if caller is not None and self._gate is not None and not self._gate.waits:
                grant = self._gate.admit_here(caller, plan, prompts)
            exchange = self._open(plan, reply, request_id, started_s, parsed_s)
            exchange.hold(held)
            if caller is not None and grant is None:
                self._later(exchange, self._admitted(exchange, prompts, caller))
            else:
                exchange.begin(prompts, grant)
        else:
            self._intake.check_lengths(plan, context)
            if caller is not None and self._gate is not None:
                # what its key will not admit in the end takes no thread's time from others
                self._gate.check(caller, least_need_of(plan, self._intake.fewest_tokens(plan)))
            turn = self._intake_threads.take(size, tenant)
            parsed_s = self.connections.now_s() if request_id.wants_times else None
            exchange = self._open(plan, reply, request_id, started_s, parsed_s)
            exchange.hold(held)
            self._later(exchange, self._prepared(exchange, context, turn, caller))

    def _later(self, exchange: HttpExchange, begins: Coroutine[Any, Any, None]) -> None:
        """Has an exchange begin when `begins` ends; an error of that is its answer."""
        self._in_background(begins, exchange.fail)

    def _in_background(self, work: Coroutine[Any, Any, None], fail: Callable[[ApiError], None]) -> None:
        """Has `work` done for one request, of which an error goes to `fail`."""

        async def run() -> None:
            try:
                await work
            except ApiError as error:
                fail(error)
            except MemoryError:
                fail(no_memory())
            except Exception:
                log.exception("a request could not begin")
                fail(ApiError(500, "Internal error; see the server's log."))

        task = self._loop.create_task(run())
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepared(
        self, exchange: HttpExchange, context: int, turn: Turn, caller: Caller | None
    ) -> None:
        """Begins an exchange after a thread has prepared its prompts, unless its client leaves meanwhile."""
        prompts = await self._intake_threads.run(
            turn, partial(self._prepare_unless_closed, exchange, context)
        )
        if prompts is not None:
            plan = exchange.plan
            exchange.hold(held_of(plan.prompts, prompts.tokens, plan.n, plan.kept_bytes))
            await self._admitted(exchange, prompts, caller)

    async def _admitted(self, exchange: HttpExchange, prompts: Prompts, caller: Caller | None) -> None:
        """Begins an exchange if its API key has room for it, unless its client leaves meanwhile."""
        grant = None
        if caller is not None and self._gate is not None:
            grant = await self._gate.admit(caller, exchange.plan, prompts)
        if not exchange.closed:
            exchange.begin(prompts, grant)
        elif grant is not None:
            grant.unused()

    def _prepare_unless_closed(self, exchange: HttpExchange, context: int) -> Prompts | None:
        return None if exchange.closed else self._intake.prepare(exchange.plan, context)

    def _open(
        self, plan: Plan, reply: Reply, request_id: RequestId, started_s: float, parsed_s: float | None
    ) -> HttpExchange:
        exchange = HttpExchange(self.requests, plan, reply, request_id, started_s)
        if parsed_s is not None:
            exchange.parsed(parsed_s)
        self.requests.opened(exchange)
        return exchange

    # ---------------------------------------------------------------------------------------- small endpoints

    def _json(self, reply: Reply, request_id: RequestId, value: Any, status: int = 200) -> None:
        self._respond_json(reply, request_id.shown, status, orjson.dumps(value))

    def _respond_json(
        self, reply: Reply, request_id: str, status: int, body: bytes, headers: Headers | None = None
    ) -> None:
        reply.respond(status, [JSON, (b"x-request-id", request_id.encode()), *(headers or [])], body)

    def _models(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._identify(request)
        self._json(
            reply, request_id, {"object": "list", "data": [self._card(n) for n in self.config.served_names]}
        )

    def _model(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._identify(request)
        name = request.path.removeprefix("/v1/models/")
        if name not in self.config.served_names:
            raise ApiError(
                404, f"The model '{name}' is not served here.", param="model", code="model_not_found"
            )
        self._json(reply, request_id, self._card(name))

    def _identify(self, request: Request) -> None:
        """Raises ApiError 401 for a request without an API key, where there are any."""
        if self._gate is not None:
            self._gate.caller(request, self._admin.permits)

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created_s, "owned_by": "sluice"}
        return card | {"max_model_len": self.connections.context_tokens()}

    def _alive(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._json(reply, request_id, {"live": True})

    def _ready(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        reason = "shutting down" if self.draining else self.connections.ready()
        if reason is not None:
            raise ApiError(503, f"Not ready: {reason}.", code="not_ready", retry_after_s=2.0)
        self._json(reply, request_id, {"live": True, "ready": True})

    def _metrics(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._require_viewer(request)
        reply.respond(200, [TEXT], self.metrics_page.get())

    def _version(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._json(reply, request_id, {**self.versions, "transport": self.transport})

    def _status(self, request: Request, reply: Reply, request_id: RequestId) -> None:
        self._require_viewer(request)
        self._respond_json(reply, request_id.shown, 200, self.status_page.get())

    def _require_viewer(self, request: Request) -> None:
        """Raises ApiError 401 if status and metrics need a key and the request has none that may see them."""
        if self.config.status_needs_key:
            self._admin.require_viewer(request, self.config.viewer_keys)

    def _status_json(self) -> bytes:
        status = status_of(self.connections, self.requests, self.transport, self.metrics_port, self._gate)
        return orjson.dumps(status)

    # ------------------------------------------------------------------------------------------------------ ASGI

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Receive,
        send: Send,
        permits: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Serves HTTP and lifespan connections of ASGI. Raises ValueError for any other kind of connection. `permits`
        says whether a Host may be answered, for a listener of ours.
        """
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"this application does not speak {scope['type']}")
        reply = AsgiReply(self.config.slow_client_bytes)
        headers: dict[bytes, bytes] = {}
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        request = Request(scope["method"], path, headers, b"", partial(_address_of, scope))
        try:
            for name, value in scope["headers"]:
                if name.lower() in ONCE and name.lower() in headers:
                    raise repeated_header(name.lower())
                headers[name.lower()] = value
            host = headers.get(b"host", b"")
            if permits is not None and not permits(host):
                self.metrics.listener_refused("host")
                raise host_not_allowed(host.decode("ascii", "replace"))
            body = await self._read_body(path, headers, receive)
            if body is None:
                return
            request.body = body
            self.dispatch(request, reply)
        except ApiError as error:
            self._refuse(error, reply, self._request_id(request))
        await reply.pump(receive, send)

    async def _read_body(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Returns the body, or None if the client left meanwhile. Raises `ApiError` 413 or 503 if it is too long."""
        memory, limit = self.request_memory, most_body_bytes(path, OUTPUT, self.config.max_body_bytes)
        parts: list[bytes] = []
        size = 0
        announced = headers.get(b"content-length", b"")
        try:
            if announced.isdigit():
                if int(announced) > limit:
                    raise too_large(limit)
                memory.check_announced(int(announced))
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                memory.change(size, size + len(parts[-1]))
                size += len(parts[-1])
                if size > limit:
                    raise too_large(limit)
                memory.check_held(size)
                if not message.get("more_body", False):
                    return b"".join(parts)
        finally:
            memory.change(size, 0)


def _address_of(scope: dict[str, Any]) -> str:
    """Returns the address of an ASGI connection's client, or nothing if the server does not tell."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _check_media_type(request: Request) -> None:
    """Raises `ApiError` 415 for a body that is not declared as JSON.

    A web page can have a browser send such a body anywhere, without asking the server first (the CORS protocol of the
    Fetch standard, "CORS-safelisted request-header"). It cannot add a bearer token unasked.
    """
    media_type = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type == b"application/json" or media_type.endswith(b"+json"):
        return
    if not request.headers.get(b"authorization", b"").lower().startswith(b"bearer "):
        message = "The body must be sent with 'content-type: application/json'."
        raise ApiError(415, message, code="unsupported_media_type")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
