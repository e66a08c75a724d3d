"""A change of policies as an administrator writes it, made ready for the router."""

from pathlib import Path
from typing import Any

import orjson

from app.api.errors import bad_request
from app.profile.file import load_heatmap, shipped


def policy_change(body: bytes) -> bytes:
    """Returns the request's change of policies as JSON, with names of shipped heatmaps replaced by the heatmaps.

    The router checks the rest. Raises ApiError 400 for a body that is not JSON and for an unknown heatmap.
    """
    try:
        asked: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", None, "invalid_json") from None
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
            "invalid_value",
        )
    return load_heatmap(name, Path())
