"""Scaling in the configuration: what is refused, with which words, and what the autoscaler and the graph get."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from actors.options import ConfigError
from app.config import AppConfig, parse
from app.graph import build
from policies.scaling.base import Counts
from policies.scaling.sleep import MaySleep, Sleep
from policies.state.views import Role

DEPLOY = Path(__file__).parents[2] / "deploy"


def args(scaling: dict[str, Any] | None = None, **decode: Any) -> dict[str, Any]:
    """A prefill group of 1 to 2 and a decode group, whose scaling is `decode`, with scaling enabled."""
    return {
        "model": {"path": "sim"},
        "engines": [
            {"name": "p", "role": "prefill", "kind": "sim", "scaling": {"max": 2}},
            {"name": "d", "role": "decode", "kind": "sim", "replicas": 2, "scaling": decode},
        ],
        "scaling": {"enabled": True, **(scaling or {})},
    }


def config(**decode: Any) -> AppConfig:
    return parse(args(**decode))


def test_the_policys_bounds_are_those_of_the_groups() -> None:
    policy = config(min=2, max=6, warm=1, warm_max=3).autoscaler.policy()
    limits = policy.limits
    assert policy.name == "joint"
    assert (limits.least, limits.most) == (Counts(1, 2, 0), Counts(2, 6, 0))
    assert (limits.warm_min, limits.warm_max, limits.budget) == (1, 3, 8)


def test_a_role_whose_groups_may_have_none_sleeps_and_has_one_engine_when_it_is_awake() -> None:
    given = args({"sleep_after_s": 60, "wake_limit_s": 90}, min=0, max=6)
    given["engines"].append({"name": "k", "role": "decode", "kind": "sim", "scaling": {"min": 1, "max": 2}})
    kept = parse(given).autoscaler.policy()
    assert kept.limits.least == Counts(1, 1, 0)
    assert not isinstance(kept, MaySleep)
    given["engines"][0]["scaling"]["min"] = 0
    policy = parse(given).autoscaler.policy()
    assert isinstance(policy, MaySleep)
    # the decode engines of k stay, and the prefill role alone sleeps
    assert policy.sleep == Sleep(60.0, 90.0, 0, 1, 0)
    assert policy.limits.least == Counts(1, 1, 0)
    assert parse(given).autoscaler.groups()["d"].least == 0


def test_parameters_of_the_policy_and_its_step_and_budget() -> None:
    made = parse(
        args({"params": {"calm_s": 60, "limits": {"step": 1}}, "budget": 5}, max=6, warm=1)
    ).autoscaler.policy()
    assert made.calm_s == 60  # type: ignore[attr-defined]
    assert (made.limits.step, made.limits.budget) == (1, 5)


def test_groups_as_the_autoscaler_knows_them() -> None:
    group = config(min=2, max=6, warm=1).autoscaler.groups()["d"]
    assert (group.role, group.least, group.most, group.first, group.warm) == (Role.DECODE, 2, 6, 2, 1)
    # the lease of 30 s, and 5 s
    assert (group.deployed, group.drain_s) == (3, 35.0)


@pytest.mark.parametrize(
    ("scaling", "decode", "says"),
    [
        ({"sleep_after_s": 0}, {"min": 0}, r"scaling\.sleep_after_s: Input should be greater than 0"),
        ({"start_limit_s": 0}, {}, r"scaling\.start_limit_s: Input should be greater than 0"),
        (
            {"params": {"sleep": {}}},
            {},
            r"scaling\.params\.sleep: the sleep is set by engines\[\]\.scaling\.min",
        ),
        ({}, {"min": 3}, r"engines\.d\.replicas is 2: it must be at least scaling\.min, 3"),
        ({}, {"max": 2, "warm": 1}, r"scaling\.max is 2: it must be at least replicas and warm, 2 \+ 1"),
        ({}, {"max": 4, "warm": 2, "warm_max": 1}, r"warm_max is 1: it must be 2\.\.3, from warm to max"),
        ({}, {"max": 4, "warm_max": 4}, r"warm_max is 4: it must be 0\.\.3"),
        ({}, {"mx": 4}, r"engines\.1\.scaling\.mx: no such option"),
        ({}, {"drain_s": 30}, r"drain_s is 30: it must be above the lease of its engines, 30 s"),
        ({"budget": 2}, {}, r"scaling\.budget is 2: the groups begin with 3 replicas"),
        ({"policy": "jointly"}, {}, "no scaling policy is called 'jointly'; there are: joint, fixed"),
        ({"params": {"clam_s": 1}}, {}, "unknown parameter 'clam_s'"),
        ({"params": {"limits": {"prefill_max": 9}}}, {}, r"limits has `step` only: the other bounds are"),
        ({"journal": {"folder": "here"}}, {}, "it must be an absolute path"),
        ({"journal": {"files": 0}}, {}, "files"),
    ],
)
def test_wrong_scaling_is_refused_with_key_and_allowed_values(
    scaling: dict[str, Any], decode: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(args(scaling, **decode))


def test_no_replica_at_deploy_one_role_alone_and_two_deciders_are_refused() -> None:
    none = args()
    none["engines"][0]["replicas"] = 0
    with pytest.raises(ConfigError, match=r"engines\.p\.replicas is 0: .*begin with 1"):
        parse(none)
    one_role = args()
    del one_role["engines"][0]
    with pytest.raises(
        ConfigError, match=r"engines: only decode engines; .* add a group with role prefill or colocated"
    ):
        parse(one_role)
    two = args() | {"router": {"role_switch": {"switch_s": 3}}}
    with pytest.raises(ConfigError, match=r"router\.role_switch\.switch_s: .*scaling policy alone"):
        parse(two)


def test_the_drain_time_is_above_the_lease_without_scaling_too() -> None:
    off = args({"enabled": False})
    off["engines"][0]["options"] = {"lease_s": 60.0}
    group = parse(off).engines[0]
    assert group.drain_s == 65.0
    off["engines"][0]["scaling"] = {"drain_s": 50.0}
    with pytest.raises(ConfigError, match=r"engines\.p\.scaling\.drain_s is 50: .*60 s"):
        parse(off)


# ------------------------------------------------------------------------------------------------------------- graph


def deployments(given: dict[str, Any]) -> dict[str, Any]:
    return {d.name: d for d in build_app(build(given), name="sluice").deployments}


def test_an_autoscaler_is_deployed_only_if_it_is_enabled() -> None:
    assert "Autoscaler" in deployments(args())
    assert "Autoscaler" not in deployments(args({"enabled": False}))


def test_a_group_begins_with_its_warm_replicas_and_serve_waits_for_its_drain() -> None:
    made = deployments(args(max=4, warm=1, drain_s=45))
    assert made["DEngine"].num_replicas == 3
    assert made["DEngine"]._deployment_config.graceful_shutdown_timeout_s == 65.0
    stay = made["DEngine"]._replica_config.init_args[6]
    assert (stay.drain_s, stay.active) == (45.0, 2)
    off = deployments(args({"enabled": False}, max=4, warm=1))
    assert off["DEngine"].num_replicas == 2
    assert off["DEngine"]._replica_config.init_args[6].active is None


def test_a_replica_has_a_placement_group_of_its_own() -> None:
    given = args()
    given["engines"][1] |= {
        "placement_group_bundles": [{"CPU": 0.02}, {"CPU": 0.01}],
        "placement_group_strategy": "SPREAD",
        "num_cpus": 0.02,
    }
    made = deployments(given)["DEngine"]._replica_config
    assert made.placement_group_bundles == [{"CPU": 0.02}, {"CPU": 0.01}]
    assert made.placement_group_strategy == "SPREAD"
    assert deployments(given)["PEngine"]._replica_config.placement_group_bundles is None
    given["engines"][1]["placement_group_bundles"] = [{"CPU": 0}]
    with pytest.raises(ConfigError, match=r"engines\.d\.placement_group_bundles: give at least one bundle"):
        parse(given)


@pytest.mark.parametrize(
    ("more", "bundle", "least"),
    [
        # a replica reserves 0.1 where the configuration says nothing
        ({}, {"CPU": 0.02}, "CPU: 0.1 "),
        ({"num_cpus": 0.5, "num_gpus": 1}, {"CPU": 0.5}, "GPU: 1 "),
        ({"resources": {"left": 2}}, {"CPU": 1.0, "left": 1}, "left: 2 "),
    ],
)
def test_a_first_bundle_without_room_for_the_replica_is_refused_with_its_key(
    more: dict[str, Any], bundle: dict[str, float], least: str
) -> None:
    given = args()
    given["engines"][1] |= {"placement_group_bundles": [bundle, {"CPU": 4.0}], **more}
    with pytest.raises(
        ConfigError, match=rf"engines\.d\.placement_group_bundles: the first bundle .* at least {least}"
    ):
        parse(given)


@pytest.mark.parametrize(
    ("gpus", "refused"), [(0, False), (0.25, False), (1, False), (2, False), (1.5, True)]
)
def test_a_replica_has_a_part_of_one_gpu_or_whole_ones(gpus: float, refused: bool) -> None:
    given = args()
    given["engines"][1]["num_gpus"] = gpus
    if refused:
        with pytest.raises(
            ConfigError, match=r"engines\.d\.num_gpus is 1\.5: Ray shares out parts of a single GPU"
        ):
            parse(given)
    else:
        assert parse(given).engines[1].num_gpus == gpus


def test_cores_are_divided_for_the_most_replicas() -> None:
    given = {
        "engines": [
            {"name": "p", "role": "prefill", "scaling": {"max": 3}},
            {"name": "d", "role": "decode", "scaling": {"max": 4}},
        ],
        "scaling": {"enabled": True},
    }
    made = deployments(given)
    shares = [made[name]._replica_config.init_args[2] for name in ("PEngine", "DEngine")]
    assert shares == [(0, 7), (3, 7)]


def test_every_shipped_file_lets_its_numbers_of_replicas_be_set() -> None:
    found = 0
    for path in sorted(DEPLOY.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") == "RayService":
                document = yaml.safe_load(document["spec"]["serveConfigV2"])
            if "applications" in document:
                found += 1
                for application in ServeDeploySchema.model_validate(document).applications:
                    assert application.external_scaler_enabled, path
    assert found >= 6
