"""Counters and histograms of one thread show what prometheus_client's own would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from app.fleet.metric import LATENCY_S
from app.ingress.loop_metrics import LoopCounter, LoopHistogram

VALUES = st.floats(0, 2000) | st.sampled_from(LATENCY_S)


def lines(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(st.lists(st.tuples(VALUES, st.sampled_from(["chat", "batch", "none"]))))
def test_the_text_is_that_of_the_library(seen: list[tuple[float, str]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    loop = LoopHistogram("x_seconds", "How long.", ("class",), LATENCY_S, ours)
    usual = Histogram("x_seconds", "How long.", ("class",), registry=theirs, buckets=LATENCY_S)
    for value, label in seen:
        loop.observe(value, label)
        usual.labels(label).observe(value)
    assert lines(ours) == lines(theirs)


@given(st.lists(VALUES))
def test_without_labels_it_is_shown_from_the_start(seen: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    loop = LoopHistogram("x_seconds", "How long.", (), LATENCY_S, ours)
    usual = Histogram("x_seconds", "How long.", registry=theirs, buckets=LATENCY_S)
    for value in seen:
        loop.observe(value)
        usual.observe(value)
    assert lines(ours) == lines(theirs)


def test_a_name_that_is_taken_and_a_missing_label_are_refused() -> None:
    registry = CollectorRegistry()
    loop = LoopHistogram("x_seconds", "How long.", ("class",), LATENCY_S, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LoopHistogram("x_seconds", "Again.", (), LATENCY_S, registry)
    with pytest.raises(AssertionError):
        loop.observe(1.0)
    counter = LoopCounter("y_total", "How many.", ("class",), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LoopCounter("y_total", "Again.", (), registry)
    with pytest.raises(AssertionError):
        counter.inc()
    with pytest.raises(AssertionError):
        counter.labels("chat", "x")


def test_a_series_that_is_forgotten_begins_again_at_0() -> None:
    counter = LoopCounter("y_total", "How many.", ("class",), CollectorRegistry())
    for label in ("chat", "batch"):
        counter.labels(label).inc(3)
    counter.forget("chat")
    counter.forget("none such")
    assert counter.series() == [(("batch",), (3.0,))]
    counter.labels("chat").inc()
    assert counter.series() == [(("batch",), (3.0,)), (("chat",), (1.0,))]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["chat", "batch"]))))
def test_the_text_of_counters_is_that_of_the_library(seen: list[tuple[int, str]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    loop, plain = LoopCounter("x_total", "X.", ("class",), ours), LoopCounter("y_total", "Y.", (), ours)
    usual, usual_plain = (
        Counter("x_total", "X.", ("class",), registry=theirs),
        Counter("y_total", "Y.", registry=theirs),
    )
    for amount, label in seen:
        loop.labels(label).inc(amount)
        usual.labels(label).inc(amount)
        plain.inc()
        usual_plain.inc()
    assert lines(ours) == lines(theirs)
