"""The simulated router's predictor. It is `predictors.feed`, which knows each request by the id of its attempt."""

from collections.abc import Mapping, Sequence

from benchmarks.sim.config import Forecasting
from benchmarks.sim.ingress import SimRequest
from policies.request.stage import Outcome
from policies.state import events as ev
from predictors.feed import ForecastFeed, Tracked
from predictors.protocol import Arrival


class Forecasts:
    """The forecasts of one run, made by a new predictor.

    A request's age counts its output tokens from the first, including those from before a return to the router.
    """

    def __init__(self, config: Forecasting, default_max_tokens: int) -> None:
        self._lengths: dict[str, int] = {}
        predictor = Tracked(config.source(self._lengths))
        for outcome in config.history:
            predictor.arrive(outcome.arrival)
            predictor.observe(outcome)
        self._feed = ForecastFeed(predictor, config.states, config.window_tokens)
        self._total = config.total_at_arrival
        self._default_max_tokens = default_max_tokens

    def arrived(self, request: SimRequest, now_s: float, wanted: bool) -> float | None:
        """Returns the expected output tokens of an arriving request, or None where they are not wanted.

        Returns None too for a request that comes back to the router after a preemption.
        """
        if request.generated:
            return None
        work = request.work
        self._lengths[request.attempt_id] = work.output_tokens
        arrival = Arrival(
            request_id=request.attempt_id,
            arrival_s=now_s,
            prompt_tokens=work.prompt_tokens,
            max_tokens=work.max_tokens,
            traffic_class=work.request_class,
            client=work.client or None,
            session=work.session or None,
            prompt_key=work.prompt_key or None,
        )
        total = wanted if self._total is None else self._total
        return self._feed.arrived(arrival, work.max_tokens or self._default_max_tokens, total)

    def progressed(self, items: Sequence[tuple[str, int]], live: Mapping[str, SimRequest]) -> None:
        """Updates ages from `items`, pairs (attempt id, tokens since the attempt came to its engine)."""
        for attempt_id, tokens in items:
            request = live.get(attempt_id)
            if request is not None:
                self._feed.progressed(attempt_id, tokens + request.generated)

    def refresh(
        self, now_s: float, live: Mapping[str, SimRequest], horizon: int | None
    ) -> list[ev.ForecastMade]:
        """Returns new forecasts for all requests that are due for one, made in one call of the predictor. `horizon` is
        H of the decode policy, or None if it has none.
        """
        return [
            ev.ForecastMade(
                now_s,
                made.request_id,
                made.age - live[made.request_id].generated,
                made.finishes_in_tokens,
            )
            for made in self._feed.refresh(horizon)
        ]

    def closed(self, request: SimRequest, outcome: Outcome, tokens: int, now_s: float) -> None:
        """Lets the predictor learn from an attempt that has ended with `outcome` after `tokens` output tokens."""
        self._feed.closed(request.attempt_id, outcome, tokens, now_s)
        self._lengths.pop(request.attempt_id, None)
