"""The dashboard's routes for experiments and what-if questions. Who may use them is the mounting server's business."""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.dashboard import runs as runs_room
from app.dashboard import whatif as whatif_room
from app.dashboard.commands import checked_text
from app.dashboard.runs import Runs
from app.dashboard.store import RunError
from app.dashboard.whatif import WhatIf

Handler = Callable[[Request], Awaitable[Response]]
MOST_BODY_BYTES = 512 << 10
_TYPES = {"html": "text/html; charset=utf-8", "json": "application/json", "png": "image/png"}


Table = tuple[tuple[str, str, Handler], ...]


def routes(runs: Runs, whatif: WhatIf) -> list[Route]:
    """Returns the routes below `/api/experiments` and `/api/whatif`."""
    table = (*_of_runs(runs), *_of_whatif(whatif))
    return [Route(path, _told(handler), methods=[method]) for method, path, handler in table]


def _of_runs(runs: Runs) -> Table:
    async def listed(request: Request) -> Response:
        return _json(await runs.all())

    async def check(request: Request) -> Response:
        return _json(await runs.check(checked_text(await _body(request), runs_room.MOST_TEXT_BYTES)))

    async def start(request: Request) -> Response:
        return _json(await runs.start(checked_text(await _body(request), runs_room.MOST_TEXT_BYTES)))

    async def stop(request: Request) -> Response:
        return _json(await runs.stop_asked())

    async def detail(request: Request) -> Response:
        return _json(await runs.detail(request.path_params["run_id"]))

    async def delete(request: Request) -> Response:
        await runs.delete(request.path_params["run_id"])
        return _json({"deleted": request.path_params["run_id"]})

    async def compare(request: Request) -> Response:
        asked = request.query_params.get("ids", "")
        return _json(await runs.compare([one for one in asked.split(",") if one]))

    async def report(request: Request) -> Response:
        run_id, kind = request.path_params["run_id"], request.path_params["kind"]
        if kind not in _TYPES:
            raise RunError(
                404, f"there is no report.{kind[:20]}; there are report.html, report.json and report.png"
            )
        content = await runs.report(run_id, kind)
        headers = {
            "content-disposition": f'attachment; filename="{run_id}.{kind}"',
            "x-content-type-options": "nosniff",
        }
        return Response(content, media_type=_TYPES[kind], headers=headers)

    return (
        ("GET", "/api/experiments", listed),
        ("POST", "/api/experiments/check", check),
        ("POST", "/api/experiments/start", start),
        ("POST", "/api/experiments/stop", stop),
        ("GET", "/api/experiments/compare", compare),
        ("GET", "/api/experiments/runs/{run_id}", detail),
        ("DELETE", "/api/experiments/runs/{run_id}", delete),
        ("GET", "/api/experiments/runs/{run_id}/report.{kind}", report),
    )


def _of_whatif(whatif: WhatIf) -> Table:
    async def base(request: Request) -> Response:
        return _json(await whatif.base())

    async def ask(request: Request) -> Response:
        body = await _body(request)
        text = checked_text(body, whatif_room.MOST_TEXT_BYTES)
        return _json(await whatif.start(text, body.get("changes"), body.get("base")))

    async def state(request: Request) -> Response:
        return _json(whatif.state())

    async def give_up(request: Request) -> Response:
        await whatif.stop()
        return _json(whatif.state())

    return (
        ("POST", "/api/whatif/base", base),
        ("POST", "/api/whatif/start", ask),
        ("GET", "/api/whatif", state),
        ("POST", "/api/whatif/stop", give_up),
    )


def _told(handler: Handler) -> Handler:
    """Returns a handler that answers a RunError in words."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except RunError as error:
            return _json({"message": str(error)}, error.status)

    return answered


async def _body(request: Request) -> dict[str, Any]:
    """Returns the JSON object in a request's body. Raises RunError 400 or 413."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MOST_BODY_BYTES:
            raise RunError(413, f"the body is longer than {MOST_BODY_BYTES // 1024} kB")
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RunError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise RunError(400, "the body must be a JSON object")
    return found


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
