"""The router's predictor at work: admissions, ages, refreshes, outcomes."""

from predictors.feed import ForecastFeed, Refreshed, Tracked
from predictors.forecast import ForecastConfig
from predictors.oracle import Oracle
from predictors.protocol import Arrival, FinishReason, Outcome, Sampling


class Watched(Oracle):
    """An oracle that remembers what it was told."""

    def __init__(self, lengths: dict[str, int]) -> None:
        super().__init__(lengths)
        self.seen: list[Outcome] = []

    def observe(self, outcome: Outcome) -> None:
        self.seen.append(outcome)


def feed(lengths: dict[str, int]) -> tuple[ForecastFeed, Watched]:
    oracle = Watched(lengths)
    return ForecastFeed(Tracked(oracle), ForecastConfig(refresh_tokens=4), 10), oracle


def test_the_expected_length_is_told_where_it_is_asked_for() -> None:
    assert feed({"a": 30})[0].arrived(Arrival("a", 0.0, 5), 100) is None
    assert feed({"a": 30})[0].arrived(Arrival("a", 0.0, 5), 100, total=True) == 30.0


def test_refreshed_at_admission_and_every_k_tokens() -> None:
    f, _ = feed({"a": 12})
    f.arrived(Arrival("a", 0.0, 5), 100)
    assert f.refresh() == []  # not running yet
    f.progressed("a", 1)
    assert f.refresh() == [Refreshed("a", 1, None)]  # 11 more: beyond the window of 10
    f.progressed("a", 4)
    assert f.refresh() == []  # three tokens on
    f.progressed("a", 5)
    assert f.refresh() == [Refreshed("a", 5, 7.0)]


def test_requests_of_several_sequences_have_no_forecast() -> None:
    f, _ = feed({"a": 12})
    f.arrived(Arrival("a", 0.0, 5, sampling=Sampling(choices=2)), 100)
    f.progressed("a", 5)
    assert f.refresh() == []


def test_how_it_ended_is_what_the_predictor_learns() -> None:
    f, oracle = feed({})
    ends = [("stop", "finished", 7), ("long", "finished", 9), ("gone", "cancelled", 0), ("bad", "failed", 2)]
    for attempt_id, outcome, tokens in ends:
        f.arrived(Arrival(attempt_id, 0.0, 5), 9)
        if attempt_id == "gone":
            f.progressed(attempt_id, 3)  # the ingress cannot say how far it got
        f.closed(attempt_id, outcome, tokens, 5.0)
    assert [(o.arrival.request_id, o.output_tokens, o.reason) for o in oracle.seen] == [
        ("stop", 7, FinishReason.STOP),
        ("long", 9, FinishReason.LENGTH),
        ("gone", 3, FinishReason.CANCELLED),
        ("bad", 2, FinishReason.ERROR),
    ]
    assert len(f.book) == 0


def test_a_rejected_request_taught_nothing() -> None:
    f, oracle = feed({})
    f.arrived(Arrival("a", 0.0, 5), 9)
    assert f.closed("a", "rejected", 0, 1.0) is None
    assert f.closed("unknown", "finished", 4, 1.0) is None
    assert oracle.seen == []
