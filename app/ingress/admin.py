"""The administrator's endpoints. They ask the router (`actors.router.admin`) over the ingress's own connection to it.

    GET  /sluice/admin/policy           policies in use, with parameters and formula, and what there is to choose from
    PUT  /sluice/admin/policy           {"prefill": NAME | {"name", "params"}, "decode": .., "dispatch": {..}}
    GET  /sluice/admin/explain/ID       every decision made for a request: ranking, terms, reason, waits
    GET  /sluice/admin/journal[/N]      the state of the event log, and its last N events
    GET  /sluice/admin/scale            what the autoscaler sees, wants and orders
    PUT  /sluice/admin/scale            {"counts": {GROUP: N}} | {"mode": "auto"} | {"bounds": {GROUP: {"min", "max",
                                        "warm", "warm_max"}}}, and "plan": true to change nothing
    GET  /sluice/admin/facts            engines with the totals of their steps, and the network as configured and learnt
    GET  /sluice/admin/logs             the levels of the router's log lines
    PUT  /sluice/admin/logs             {"level": NAME, "logger": NAME, "access": true | false}, for all processes
    PUT  /sluice/admin/engines/ID       {"role": ROLE, "duty": DUTY}, one of them or both: orders one engine

A request for output needs the same permission to carry `x-sluice-mode`, which overrules the router.

A request on any port must send an admin key as a bearer token; where it comes from gives no right. The keys are
`admin_keys` of the configuration or SLUICE_ADMIN_KEYS (separated by commas) of the environment. Without either, the key
is the one in the file that the ingress makes at its start (`app.admin_key`).
"""

import hmac
from collections.abc import Callable
from typing import Literal

import orjson

from app.admin_key import KeyFile, KeyFileError
from app.api.errors import ApiError, bad_request
from app.fleet.policy import policy_change
from app.ingress.audit import Audit
from app.ingress.connections import IngressConnections
from app.ingress.http.reply import Headers, Reply, Request

PATH = "/sluice/admin/"
What = Literal["policy", "set_policy", "explain", "journal", "scale", "facts", "assign", "logs", "set_logs"]
_METHODS = {
    "policy": ("GET", "PUT"),
    "explain": ("GET",),
    "journal": ("GET",),
    "scale": ("GET", "PUT"),
    "facts": ("GET",),
    "logs": ("GET", "PUT"),
    "engines": ("PUT",),
}
_NOT_FOUND = {"explain": "decision_not_found", "scale": "no_autoscaler", "assign": "engine_not_found"}
"""Error codes of what the router says that it does not have."""


class AdminApi:
    """Serves the endpoints below `PATH`. `respond(reply, request_id, status, body, headers)` sends JSON.

    One of `keys` gives the right to administer; without any, the key in `key_file` does, and without both nothing does.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        key_file: KeyFile | None,
        connections: IngressConnections,
        respond: Callable[[Reply, str, int, bytes, Headers], None],
        audit: Audit | None = None,
    ) -> None:
        self._audit = audit
        self._keys, self._key_file = keys, key_file
        self._connections, self._respond = connections, respond

    def dispatch(self, request: Request, reply: Reply, request_id: str) -> None:
        """Hands a request below `PATH` to the router and answers it when the router does. What was answered is audited.

        Raises ApiError if the request is not allowed or not understood.
        """
        try:
            self._ask(request, reply, request_id)
        except ApiError as error:
            self._note(request, request_id, error.status)
            raise

    def _ask(self, request: Request, reply: Reply, request_id: str) -> None:
        self.require(request)
        name, _, rest = request.path.removeprefix(PATH).partition("/")
        if (
            name not in _METHODS
            or (name in ("policy", "scale", "facts", "logs") and rest)
            or (name in ("explain", "engines") and not rest)
        ):
            raise ApiError(
                404,
                f"There is no {request.path}; there are {PATH}policy, {PATH}explain/ID, {PATH}journal,"
                f" {PATH}scale, {PATH}engines/ID, {PATH}facts and {PATH}logs.",
                code="not_found",
            )
        if request.method not in _METHODS[name]:
            raise method_not_allowed(request, *_METHODS[name])
        what, body = _question(name, rest, request)

        def answered(status: int, answer: bytes) -> None:
            self._note(request, request_id, status)
            if status == 200:
                self._respond(reply, request_id, 200, answer, [])
            else:
                message = str(orjson.loads(answer)["message"])
                code = _NOT_FOUND.get(what) if status == 404 else None
                error = ApiError(status, message, code=code, retry_after_s=2.0 if status == 503 else None)
                self._respond(reply, request_id, status, error.body(), error.headers())

        self._connections.ask_router(what, body, answered)

    def permits(self, request: Request) -> bool:
        """Returns whether the request has an admin key."""
        return self._has_one_of(self._accepted()[0], request)

    def require(self, request: Request) -> None:
        """Raises ApiError 401 unless the request has an admin key."""
        keys, where = self._accepted()
        if not self._has_one_of(keys, request):
            raise ApiError(
                401, f"Administration needs one of the admin keys as bearer token: {where}.", code="admin_key"
            )

    def require_viewer(self, request: Request, viewer_keys: tuple[str, ...]) -> None:
        """Raises ApiError 401 unless the request has one of `viewer_keys` or an admin key."""
        if not self._has_one_of(viewer_keys, request) and not self.permits(request):
            message = (
                "Status and metrics of this server need a viewer key (ingress.options.viewer_keys or the server's"
                " SLUICE_VIEWER_KEYS) or an admin key as bearer token."
            )
            raise ApiError(401, message, code="viewer_key")

    def require_mode(self, request: Request) -> None:
        """Raises ApiError 401, which is audited, unless the request may carry `x-sluice-mode`."""
        try:
            self.require(request)
        except ApiError as error:
            self._note(request, "", error.status)
            raise

    def _note(self, request: Request, request_id: str, status: int) -> None:
        if self._audit is not None:
            self._audit.note(request, request_id, _token(request), status)

    def _has_one_of(self, keys: tuple[str, ...], request: Request) -> bool:
        given = _token(request)
        known = [hmac.compare_digest(given, key.encode()) for key in keys]
        return any(known)

    def _accepted(self) -> tuple[tuple[str, ...], str]:
        """Returns the keys that give the right to administer, and where a person finds them."""
        if self._keys:
            return self._keys, "the server has its keys from ingress.options.admin_keys or SLUICE_ADMIN_KEYS"
        if self._key_file is None:
            return (), "the server has none, so set its SLUICE_ADMIN_KEYS (or ingress.options.admin_keys)"
        try:
            return (
                self._key_file.take(),
            ), f"it is in the file {self._key_file.path} on the server's machine"
        except KeyFileError as error:
            return (), f"{error}; or set SLUICE_ADMIN_KEYS of the server"


def _token(request: Request) -> bytes:
    """Returns the bearer token of a request, or nothing without one."""
    scheme, _, token = request.headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def method_not_allowed(request: Request, *allowed: str) -> ApiError:
    """Returns the 405 of a request whose path exists and takes only the methods `allowed`."""
    message = f"{request.path} answers {' and '.join(allowed)}, not {request.method}."
    return ApiError(405, message, code="method_not_allowed", allow=allowed)


def _question(name: str, rest: str, request: Request) -> tuple[What, bytes]:
    if name == "explain":
        return "explain", orjson.dumps({"id": rest})
    if name == "journal":
        if rest and not (rest.isascii() and rest.isdigit() and len(rest) < 7):
            raise bad_request(f"{rest!r} is no number of events.", "tail", "invalid_value")
        return "journal", orjson.dumps({"tail": int(rest or 0)})
    if name == "facts":
        return "facts", b""
    if name == "logs":
        return ("set_logs", request.body) if request.method == "PUT" else ("logs", b"")
    if name == "engines":
        return "assign", _order(rest, request.body)
    if name == "scale":
        return "scale", request.body if request.method == "PUT" else b""
    if request.method == "PUT":
        return "set_policy", policy_change(request.body)
    return "policy", b""


def _order(engine: str, body: bytes) -> bytes:
    """Returns an order to one engine for the router, which checks it. Raises ApiError 400 for a body that is no
    object.
    """
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", None, "invalid_json") from None
    if not isinstance(asked, dict) or set(asked) - {"role", "duty"}:
        raise bad_request("The body must be a JSON object with role, duty or both.", None, "invalid_value")
    return orjson.dumps({**asked, "engine": engine})
