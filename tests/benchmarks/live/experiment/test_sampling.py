"""Samples of an application: one scrape each, with the key, and which engines are counted."""

import json

import pytest

from benchmarks.live.experiment.control import Control
from benchmarks.live.experiment.sampling import Sampler, gauges
from sluice.types import Status
from tests.benchmarks.told_server import told_server

METRICS = """# TYPE sluice_generation_tokens_total counter
sluice_generation_tokens_total{model="a"} 100
sluice_generation_tokens_total{model="b"} 20
# TYPE sluice_retries_total counter
sluice_retries_total 3
"""
LATER = METRICS.replace(" 100", " 160").replace(" 3", " 5")
STATUS = json.dumps({"ready": True, "engines": []})


def test_a_sample_scrapes_once_and_shows_the_key_to_a_dashboard_that_wants_one() -> None:
    board = told_server({"/metrics": METRICS}, key="a key")
    with told_server({"/sluice/status": STATUS}) as ingress, board as dashboard:
        control = Control(ingress.url, "a key", dashboard.url)
        sampler = Sampler(control)
        first = sampler.sample(10.0)
        assert "error" not in first and first["server_tokens_per_s"] is None
        assert dashboard.asked == [("GET", "/metrics", "a key")]
        dashboard.answers = {"/metrics": LATER}
        second = sampler.sample(12.0)
        # 60 tokens and 2 retries in 2 s; a counter without a sample yet is 0
        rates = {name: second[name] for name in second if name.endswith("_per_s")}
        assert rates == {
            "server_tokens_per_s": 30.0,
            "retries_per_s": 1.0,
            "kv_bytes_per_s": 0.0,
            "migrations_per_s": 0.0,
        }
        assert len(dashboard.asked) == 2
        sampler.close()
        control.close()


def test_without_a_dashboard_the_ingress_is_scraped_once() -> None:
    with told_server({"/sluice/status": STATUS, "/metrics": METRICS}) as ingress:
        control = Control(ingress.url, "a key")
        sampler = Sampler(control)
        assert "error" not in sampler.sample(1.0)
        assert [path for _, path, _ in ingress.asked] == ["/sluice/status", "/metrics"]
        sampler.close()
        control.close()


def test_a_wrong_key_is_told_in_the_sample() -> None:
    with (
        told_server({"/sluice/status": STATUS}) as ingress,
        told_server({"/metrics": METRICS}, key="another key") as dashboard,
    ):
        control = Control(ingress.url, "a key", dashboard.url)
        sampler = Sampler(control)
        found = sampler.sample(1.0)
        assert "401" in found["error"] and found["engines_held"] == 0
        sampler.close()
        control.close()


@pytest.mark.parametrize(
    ("state", "duty", "counted"),
    [
        ("ready", "active", {"engines_active", "engines_held"}),
        ("quarantined", "active", {"engines_active", "engines_held"}),
        (None, None, {"engines_active", "engines_held"}),
        ("ready", "warm", {"engines_warm", "engines_held"}),
        ("draining", "active", {"engines_held"}),
        ("starting", "active", {"engines_held"}),
        ("stalled", "active", {"engines_held"}),
        ("down", "active", set()),
    ],
)
def test_an_engine_is_counted_as_long_as_it_is_held(
    state: str | None, duty: str | None, counted: set[str]
) -> None:
    status = Status.model_validate({"ready": True, "engines": [{"id": "a-1", "state": state, "duty": duty}]})
    found = gauges(status)
    assert {name for name in ("engines_active", "engines_warm", "engines_held") if found[name]} == counted
