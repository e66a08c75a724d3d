"""The deployment that is profiled, reached over HTTP, and how a request is made to run colocated or disaggregated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from app.profile.plan import Mode

HEADER = "x-sluice-mode"
_ROLES: dict[Mode, tuple[str, ...]] = {"colocated": ("colocated",), "disaggregated": ("prefill", "decode")}


class ProfileError(Exception):
    """A measurement cannot be made; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Side:
    """One mode of serving: the URL and headers of its requests, and the number of engines that share the load."""

    url: str
    headers: dict[str, str]
    engines: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """Both modes of serving, and facts for the record. Every engine can serve `context_tokens`."""

    sides: dict[Mode, Side]
    model: str
    kinds: tuple[str, ...]
    context_tokens: int
    engines: list[dict[str, Any]]
    version: dict[str, Any]
    busy: int


async def discover(http: httpx.AsyncClient, colocated_url: str, disaggregated_url: str) -> Deployment:
    """Returns the facts about one deployment with all three roles (equal URLs), or two with one mode each.

    Raises ProfileError.
    """
    shared = colocated_url == disaggregated_url
    urls: dict[Mode, str] = {"colocated": colocated_url, "disaggregated": disaggregated_url}
    sides, engines, models, contexts, busy = {}, [], [], [], 0
    for mode, url in urls.items():
        status = await _get(http, url, "/sluice/status")
        ready = [e for e in status["engines"] if e["state"] == "ready"]
        mine = [e for e in ready if e["role"] in _ROLES[mode]]
        _check(mode, url, mine, [e for e in ready if e not in mine], shared)
        sides[mode] = Side(url, {HEADER: mode} if shared else {}, len(mine))
        engines += mine
        busy += status["requests"]["in_flight"]
        card = (await _get(http, url, "/v1/models"))["data"][0]
        models.append(card["id"])
        contexts.append(card["max_model_len"])
    if models[0] != models[1]:
        raise ProfileError(
            f"the deployments serve {models[0]} and {models[1]}: their times cannot be compared"
        )
    return Deployment(
        sides,
        models[0],
        tuple(sorted({e["kind"] for e in engines})),
        min(contexts),
        [{k: e[k] for k in ("id", "role", "kind", "slots", "kv_blocks_total", "node")} for e in engines],
        await _get(http, disaggregated_url, "/version"),
        busy,
    )


def _check(mode: Mode, url: str, mine: Sequence[Any], others: Sequence[Any], shared: bool) -> None:
    missing = [role for role in _ROLES[mode] if all(e["role"] != role for e in mine)]
    if missing:
        raise ProfileError(
            f"{url} has no ready {missing[0]} engine: deploy groups with the roles prefill, decode and colocated, or "
            "give --colocated-url and --disaggregated-url"
        )
    if others and not shared:
        raise ProfileError(
            f"{url} is to measure {mode} but has {others[0]['role']} engines too: use --url for a deployment with both"
        )


async def _get(http: httpx.AsyncClient, url: str, path: str) -> Any:
    try:
        answer = await http.get(url + path)
    except httpx.HTTPError as error:
        raise ProfileError(f"{url} cannot be reached ({error!r}): is the server running?") from None
    if answer.status_code != 200:
        raise ProfileError(f"{url}{path} answers {answer.status_code}: {answer.text[:200]}")
    return answer.json()
