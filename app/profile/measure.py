"""Runs the points: sends their requests over HTTP at the planned times and measures completion times.

The job completion time (JCT) of a request runs from sending it to having the whole answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from app.profile.fold import Pair, Sample, sample
from app.profile.plan import MODES, Mode, Planned, Point, requests_of
from app.profile.target import Deployment, ProfileError, Side


@dataclass(frozen=True, slots=True)
class Load:
    """The load of every point: `per_engine` requests for each engine, made from `seed`.

    With `at_once` both modes run together, which is right only if they share no hardware.
    """

    per_engine: int
    seed: int
    run: str
    vocabulary: int = 8192
    at_once: bool = False


class Runner:
    """Measures points on one deployment."""

    def __init__(self, http: httpx.AsyncClient, deployment: Deployment, load: Load) -> None:
        self._http = http
        self._deployment = deployment
        self._load = load

    async def warm_up(self, point: Point) -> None:
        """Sends one request of `point` in each mode. Raises ProfileError if one fails."""
        for mode, side in self._deployment.sides.items():
            (request, *_) = requests_of(point, mode, 1, 1, -1, self._load.run, self._load.vocabulary)
            _, failure = await self._one(side, request, time.perf_counter())
            if failure is not None:
                raise ProfileError(f"a {mode} request to {side.url} fails: {failure}")

    async def pair(self, point: Point, index: int) -> Pair:
        """Measures both modes at `point` and returns their samples.

        The mode that comes first alternates with `index`, so that drift does not favour one.
        """
        if self._load.at_once:
            colocated, disaggregated = await asyncio.gather(*(self._sample(point, mode) for mode in MODES))
            return Pair(point, colocated, disaggregated)
        order = MODES if index % 2 == 0 else MODES[::-1]
        samples = {mode: await self._sample(point, mode) for mode in order}
        return Pair(point, samples["colocated"], samples["disaggregated"])

    async def _sample(self, point: Point, mode: Mode) -> Sample:
        load, side = self._load, self._deployment.sides[mode]
        planned = requests_of(
            point, mode, side.engines, load.per_engine, load.seed, load.run, load.vocabulary
        )
        start_s = time.perf_counter()
        outcomes = await asyncio.gather(*(self._one(side, request, start_s) for request in planned))
        failed = Counter(failure for _, failure in outcomes if failure is not None)
        return sample(side.engines, [jct_s for jct_s, failure in outcomes if failure is None], failed)

    async def _one(self, side: Side, request: Planned, start_s: float) -> tuple[float, str | None]:
        """Sends one request at its time. Returns (JCT in s, None), or (0, the reason why there is no JCT)."""
        await asyncio.sleep(max(0.0, start_s + request.at_s - time.perf_counter()))
        body = {
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "min_tokens": request.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        sent_s = time.perf_counter()
        try:
            answer = await self._http.post(f"{side.url}/v1/completions", json=body, headers=side.headers)
        except httpx.HTTPError as error:
            return 0.0, f"{type(error).__name__}: {error}"
        jct_s = time.perf_counter() - sent_s
        if answer.status_code != 200:
            return 0.0, f"{answer.status_code}: {_message(answer)}"
        tokens = answer.json()["usage"]["completion_tokens"]
        if tokens != request.max_tokens:
            return 0.0, f"{tokens} tokens instead of {request.max_tokens}"
        return jct_s, None


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


async def measure(
    runner: Runner,
    todo: Sequence[Point],
    budget_s: float | None,
    done: Callable[[Pair, float], None],
) -> list[Point]:
    """Measures `todo` in order, calls `done(pair, seconds)` for each, and returns the points that the budget left out.

    A point that the budget interrupts is dropped, because half a batch has seen only part of its load. Raises
    ProfileError if the first request fails.
    """
    left = list(todo)
    try:
        async with asyncio.timeout(budget_s) as budget:
            if todo:
                await runner.warm_up(todo[0])
            for index, point in enumerate(todo):
                started_s = time.perf_counter()
                pair = await runner.pair(point, index)
                done(pair, time.perf_counter() - started_s)
                left = list(todo[index + 1 :])
    except TimeoutError:
        if not budget.expired():
            raise  # not the budget's timeout
    return left
