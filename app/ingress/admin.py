"""The administrator's endpoints. They ask the router (`actors.router.admin`) over the ingress's own connection to it.

    GET  /sluice/admin/policy           policies in use, with parameters and formula, and what there is to choose from
    PUT  /sluice/admin/policy           {"prefill": NAME | {"name", "params"}, "decode": .., "dispatch": {..}}
    GET  /sluice/admin/explain/ID       every decision made for a request: ranking, terms, reason, waits
    GET  /sluice/admin/journal[/N]      the state of the event log, and its last N events
    GET  /sluice/admin/scale            what the autoscaler sees, wants and orders
    PUT  /sluice/admin/scale            {"counts": {GROUP: N}} | {"mode": "auto"}, and "plan": true to change nothing

A request for output needs the same permission to carry `x-sluice-mode`, which overrules the router.

With `admin_keys` configured (or SLUICE_ADMIN_KEYS, separated by commas, in the environment), a request on any port must
send one of them as a bearer token. Without keys only this machine may administer. The request must then come to the
ingress's own listener while that is bound to a loopback address, its `Host` must be a loopback address too (a web page
that rebinds its name to loopback fails here), and it must not have come through a proxy. Requests on Serve's port show
none of this, so they always need a key.
"""

import hmac
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import orjson

from app.api.errors import ApiError, bad_request
from app.ingress.connections import IngressConnections
from app.ingress.http.reply import Headers, Reply, Request
from app.profile.file import load_heatmap, shipped

PATH = "/sluice/admin/"
What = Literal["policy", "set_policy", "explain", "journal", "scale"]
_METHODS = {"policy": ("GET", "PUT"), "explain": ("GET",), "journal": ("GET",), "scale": ("GET", "PUT")}
_NOT_FOUND = {"explain": "decision_not_found", "scale": "no_autoscaler"}
"""Error codes of what the router says that it does not have."""
_PROXIED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")


class AdminApi:
    """Serves the endpoints below `PATH`. `respond(reply, request_id, status, body, headers)` sends JSON."""

    def __init__(
        self,
        keys: tuple[str, ...],
        connections: IngressConnections,
        respond: Callable[[Reply, str, int, bytes, Headers], None],
    ) -> None:
        self._keys = [key.encode() for key in keys]
        self._connections, self._respond = connections, respond

    def dispatch(self, request: Request, reply: Reply, request_id: str) -> None:
        """Hands a request below `PATH` to the router and answers it when the router does.

        Raises ApiError if the request is not allowed or not understood.
        """
        self.require(request)
        name, _, rest = request.path.removeprefix(PATH).partition("/")
        if name not in _METHODS or (name in ("policy", "scale") and rest) or (name == "explain" and not rest):
            raise ApiError(
                404,
                f"There is no {request.path}; there are {PATH}policy, {PATH}explain/ID, {PATH}journal and"
                f" {PATH}scale.",
                code="not_found",
            )
        if request.method not in _METHODS[name]:
            raise method_not_allowed(request, *_METHODS[name])
        what, body = _question(name, rest, request)

        def answered(status: int, answer: bytes) -> None:
            if status == 200:
                self._respond(reply, request_id, 200, answer, [])
            else:
                message = str(orjson.loads(answer)["message"])
                code = _NOT_FOUND.get(what) if status == 404 else None
                error = ApiError(status, message, code=code, retry_after_s=2.0 if status == 503 else None)
                self._respond(reply, request_id, status, error.body(), error.headers())

        self._connections.ask_router(what, body, answered)

    def require(self, request: Request) -> None:
        """Raises ApiError 401 or 403 unless the request may administer."""
        if self._keys:
            scheme, _, token = request.headers.get(b"authorization", b"").partition(b" ")
            given = token.strip() if scheme.lower() == b"bearer" else b""
            known = [hmac.compare_digest(given, key) for key in self._keys]
            if not any(known):
                raise ApiError(
                    401, "Administration needs one of the admin keys as bearer token.", code="admin_key"
                )
        elif not (
            request.local
            and _is_loopback_host(request.headers.get(b"host", b""))
            and not any(header in request.headers for header in _PROXIED)
        ):
            raise ApiError(
                403,
                "Without an admin key only this machine may administer, on the ingress's own loopback port: set"
                " SLUICE_ADMIN_KEYS (or ingress.options.admin_keys) and send a key as bearer token.",
                code="admin_key",
            )


def method_not_allowed(request: Request, *allowed: str) -> ApiError:
    """Returns the 405 of a request whose path exists and takes only the methods `allowed`."""
    message = f"{request.path} answers {' and '.join(allowed)}, not {request.method}."
    return ApiError(405, message, code="method_not_allowed", allow=allowed)


def admin_keys() -> tuple[str, ...]:
    """Returns the keys in the environment's SLUICE_ADMIN_KEYS, which commas separate."""
    given = os.environ.get("SLUICE_ADMIN_KEYS", "")
    return tuple(key.strip() for key in given.split(",") if key.strip())


def is_loopback(host: str) -> bool:
    """Returns whether `host`, an address or a name to listen on, is a loopback one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_loopback_host(header: bytes) -> bool:
    name = header.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return is_loopback(name)


def _question(name: str, rest: str, request: Request) -> tuple[What, bytes]:
    if name == "explain":
        return "explain", orjson.dumps({"id": rest})
    if name == "journal":
        if rest and not (rest.isascii() and rest.isdigit() and len(rest) < 7):
            raise bad_request(f"{rest!r} is no number of events.", "tail")
        return "journal", orjson.dumps({"tail": int(rest or 0)})
    if name == "scale":
        return "scale", request.body if request.method == "PUT" else b""
    if request.method == "PUT":
        return "set_policy", _change(request.body)
    return "policy", b""


def _change(body: bytes) -> bytes:
    """Returns the request's change of policies as JSON, with names of shipped heatmaps replaced by the heatmaps.

    The router checks the rest. Raises ApiError 400 for a body that is not JSON and for an unknown heatmap.
    """
    try:
        asked: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", None) from None
    if isinstance(asked, dict):
        for stage in ("prefill", "decode"):
            choice = asked.get(stage)
            params = choice.get("params") if isinstance(choice, dict) else None
            if isinstance(params, dict) and isinstance(params.get("heatmap"), str):
                params["heatmap"] = _heatmap(params["heatmap"])
    return orjson.dumps(asked)


def _heatmap(name: str) -> dict[str, Any]:
    if name not in shipped():
        known = ", ".join(shipped()) or "none"
        raise bad_request(
            f"heatmap {name!r} is not shipped (there is: {known}); give the content of a heatmap file instead,"
            " which the `sluice` command reads from --param heatmap=@FILE",
            "heatmap",
        )
    return load_heatmap(name, Path())
