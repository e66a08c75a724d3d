"""The numbers that the autoscaler reads from Serve's details, and what it asks of the cluster's own autoscaler."""

from typing import Any

import pytest

from actors.scaling.fleet import Deployed, Fleet, Replica
from app.counts import ServeCounts, fleet_of, spare_bundles


def replica(own: str, node: str | None, state: str = "RUNNING", at_s: float = 5.0) -> dict[str, Any]:
    return {"replica_id": own, "node_id": node, "state": state, "start_time_s": at_s}


DETAILS: dict[str, Any] = {
    "applications": {
        "sluice": {
            "last_deployed_time_s": 7.5,
            "external_scaler_enabled": True,
            "deployments": {
                "DEngine": {
                    "target_num_replicas": 3,
                    "replicas": [
                        replica("a", "n1"),
                        replica("b", "n2", "STOPPING"),
                        replica("c", None, "STARTING"),
                        replica("e", "n2", "PENDING_MIGRATION"),
                    ],
                },
                "Router": {"target_num_replicas": 1, "replicas": [replica("r", "n1")]},
            },
        },
        "other": {"deployments": {"X": {"target_num_replicas": 1, "replicas": [replica("x", "n2")]}}},
    }
}


def test_the_fleet_has_targets_replicas_and_the_crowd_of_every_node() -> None:
    fleet = fleet_of(DETAILS, "sluice", {"d": "DEngine"}, "n1")
    assert fleet.groups["d"] == Deployed(
        3,
        (
            Replica("a", "n1", 5.0),
            Replica("b", "n2", 5.0, running=False, stopping=True),
            Replica("c", None, 5.0, running=False),
            Replica("e", "n2", 5.0),
        ),
    )
    # those of other deployments and applications count, those that stop or start do not
    assert fleet.crowds == {"n1": 2, "n2": 2}
    assert (fleet.head, fleet.deployed_s, fleet.deploying) == ("n1", 7.5, False)
    assert fleet.companions == ("r",)
    deploying = {**DETAILS["applications"]["sluice"], "status": "DEPLOYING"}
    assert fleet_of({"applications": {"sluice": deploying}}, "sluice", {"d": "DEngine"}, "n1").deploying


@pytest.mark.parametrize(("application", "deployment"), [("gone", "DEngine"), ("sluice", "GoneEngine")])
def test_what_is_not_there_is_no_empty_fleet(application: str, deployment: str) -> None:
    with pytest.raises(KeyError):
        fleet_of(DETAILS, application, {"d": deployment}, None)


def test_spare_replicas_are_asked_for_beside_those_that_there_are() -> None:
    fleet = Fleet({"d": Deployed(2), "p": Deployed(1)})
    bundles = {"d": [{"GPU": 1.0}, {"CPU": 1.0}], "p": [{"CPU": 2.0}]}
    # 2 and 1 of d, 1 of p: Ray takes the request for the size of the whole cluster
    asked = [{"GPU": 1.0}, {"CPU": 1.0}] * 3 + [{"CPU": 2.0}]
    assert spare_bundles(fleet, {"d": 1, "p": 0}, bundles) == asked
    assert spare_bundles(fleet, {"d": 0, "p": 0}, bundles) == []


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_deploy_file_without_the_flag_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    counts = ServeCounts("sluice", {"d": "DEngine"}, {}, {})
    application = {**DETAILS["applications"]["sluice"], "external_scaler_enabled": enabled}
    monkeypatch.setattr(counts, "_details", lambda: {"applications": {"sluice": application}})
    if enabled:
        await counts.check()
        return
    with pytest.raises(RuntimeError, match="external_scaler_enabled: true"):
        await counts.check()
