"""The router's predictor in the simulation: `predictors.feed`, told of jobs. Request ids are those of attempts."""

from collections.abc import Mapping, Sequence

from benchmarks.sim.config import Forecasting
from benchmarks.sim.job import Job
from policies.state import events as ev
from predictors.feed import ForecastFeed, Tracked
from predictors.protocol import Arrival


class Forecasts:
    """One per run; the predictor is made fresh. Ages count from the first token, also over a return to the router."""

    def __init__(self, config: Forecasting, default_max_tokens: int) -> None:
        self._lengths: dict[str, int] = {}
        predictor = Tracked(config.source(self._lengths))
        for outcome in config.history:
            predictor.arrive(outcome.arrival)
            predictor.observe(outcome)
        self._feed = ForecastFeed(predictor, config.states, config.window_tokens)
        self._total = config.total_at_arrival
        self._default_max_tokens = default_max_tokens

    def arrived(self, job: Job, now_s: float, wanted: bool) -> float | None:
        """Expected output tokens, where they are `wanted` or configured; None for one that comes back."""
        if job.generated:
            return None
        work = job.work
        self._lengths[job.attempt_id] = work.output_tokens
        arrival = Arrival(
            request_id=job.attempt_id,
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

    def progressed(self, items: Sequence[tuple[str, int]], jobs: Mapping[str, Job]) -> None:
        """Pairs (attempt_id, tokens of this stay at an engine)."""
        for attempt_id, tokens in items:
            job = jobs.get(attempt_id)
            if job is not None:
                self._feed.progressed(attempt_id, tokens + job.generated)

    def refresh(self, now_s: float, jobs: Mapping[str, Job]) -> list[ev.ForecastMade]:
        """One predictor call for all that are due."""
        return [
            ev.ForecastMade(
                now_s,
                made.request_id,
                made.age - jobs[made.request_id].generated,
                made.finishes_in_tokens,
            )
            for made in self._feed.refresh()
        ]

    def closed(self, job: Job, outcome: ev.Outcome, tokens: int, now_s: float) -> None:
        """An attempt is over."""
        self._feed.closed(job.attempt_id, outcome, tokens, now_s)
        self._lengths.pop(job.attempt_id, None)
