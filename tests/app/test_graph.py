"""The graph of every shipped config: what cannot run here is checked by Serve's own schema and by building it."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deploy_utils import get_deploy_args
from ray.serve.schema import ServeDeploySchema

from actors.engine.server import CLOSE_S
from actors.engine.vllm.config import Device, VllmEngineConfig, engine_args
from actors.engine.vllm.engine import SHUTDOWN_S
from actors.options import ConfigError, from_options
from app import drain
from app.config import parse
from app.graph import END_S, build
from app.ingress.asgi import OBSERVED
from app.replicas import DRAIN_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted([*DEPLOY.glob("*.yaml"), *(ROOT / "app/profile/examples").glob("*.yaml")])


def schemas() -> dict[str, dict[str, Any]]:
    found = {}
    for path in FILES:
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") == "RayService":
                document = yaml.safe_load(document["spec"]["serveConfigV2"])
            if "applications" in document:
                found[str(path.relative_to(ROOT))] = document
    return found


SCHEMAS = schemas()


@pytest.fixture(params=list(SCHEMAS))
def schema(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SCHEMAS[request.param]


def test_serve_accepts_the_file_and_finds_the_builder(schema: dict[str, Any]) -> None:
    deploy = ServeDeploySchema.model_validate(schema)
    assert [a.import_path for a in deploy.applications] == ["app.graph:build"]


def test_the_graph_has_a_router_an_ingress_and_every_engine_group(schema: dict[str, Any]) -> None:
    args = schema["applications"][0]["args"]
    config = parse(args)
    built = build_app(build(args), name="sluice")
    deployments = {d.name: d for d in built.deployments}
    assert set(deployments) == {"Router", "Ingress", "Dashboard"} | {
        f"{g.name.title().replace('-', '')}Engine" for g in config.engines
    }
    assert built.ingress_deployment_name == "Ingress"
    assert deployments["Router"].ray_actor_options.get("resources", {}) == config.router.resources
    for group in config.engines:
        deployment = deployments[f"{group.name.title().replace('-', '')}Engine"]
        options = deployment.ray_actor_options
        assert deployment.num_replicas == group.replicas
        assert options.get("num_gpus", 0) == group.num_gpus
        assert group.resources.items() <= options.get("resources", {}).items()


def test_vllm_options_become_arguments_that_this_vllm_knows(schema: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = set(AsyncEngineArgs.__dataclass_fields__)
    config = parse(schema["applications"][0]["args"])
    for group in (g for g in config.engines if g.kind == "vllm"):
        options = {**group.engine.options, "engine_id": "x", "model": "some/model", "role": group.role}
        engine = from_options(VllmEngineConfig, options, "options")
        device: Device = "cuda" if group.num_gpus else "cpu"
        assert engine.device == device
        args = engine_args(engine, device)
        assert set(args) <= known
        assert args["kv_transfer_config"]["kv_buffer_device"] == device
        ranks = args["tensor_parallel_size"]
        assert ranks == max(1, group.num_gpus)
        assert args.get("distributed_executor_backend") == ("mp" if ranks > 1 else None)


KUBERAY = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
RAY_SERVICE = next(d for d in KUBERAY if d["kind"] == "RayService")["spec"]
CLUSTER = RAY_SERVICE["rayClusterConfig"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}


def of_kind(kind: str) -> dict[str, Any]:
    """The documents of a kind in kuberay.yaml, by name."""
    return {d["metadata"]["name"]: d for d in KUBERAY if d["kind"] == kind}


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def test_kuberay_names_the_listener_and_leaves_serve_its_port() -> None:
    serve = yaml.safe_load(RAY_SERVICE["serveConfigV2"])
    config = parse(serve["applications"][0]["args"])
    head, ingress = container(CLUSTER["headGroupSpec"]), container(GROUPS["ingress"])
    ports = {p["name"]: p["containerPort"] for p in (*head["ports"], *ingress["ports"])}
    assert ports["serve"] == serve["http_options"]["port"]
    assert (ports["sluice"], ports["metrics"]) == (config.ingress.port, config.ingress.metrics_port)
    assert of_kind("Service")["sluice"]["spec"]["ports"][0]["targetPort"] == "sluice"
    (page,) = container(GROUPS["dashboard"])["ports"]
    service = of_kind("Service")["sluice-dashboard"]["spec"]
    assert page["containerPort"] == service["ports"][0]["port"] == config.dashboard_port
    assert service["ports"][0]["targetPort"] == page["name"]
    assert service["selector"] == GROUPS["dashboard"]["template"]["metadata"]["labels"]
    # browsers in the cluster call it by the name of its Service
    assert config.dashboard.hosts == ("sluice-dashboard",)
    wanted = {r for g in (*config.engines, config.ingress, config.dashboard) for r in g.resources}
    offered = {r for g in GROUPS.values() for r in json.loads(json.loads(g["rayStartParams"]["resources"]))}
    assert wanted == offered
    containers = [head, *map(container, GROUPS.values())]
    assert all(c["env"][0]["name"] == "SLUICE_WIRE_SECRET" for c in containers)
    image = f"sluice:{importlib.metadata.version('sluice-server')}-cuda"
    assert {c["image"] for c in containers} == {image}
    assert f"VARIANT=cuda -t {image}" in (DEPLOY / "docker" / "Dockerfile").read_text()


def test_kuberay_has_a_pod_for_every_replica_and_ingresses_on_different_nodes() -> None:
    config = parse(yaml.safe_load(RAY_SERVICE["serveConfigV2"])["applications"][0]["args"])
    assert config.ingress.replicas == GROUPS["ingress"]["replicas"] == 2
    for engines in config.engines:
        assert engines.replicas == GROUPS[engines.name]["replicas"]
    labels = GROUPS["ingress"]["template"]["metadata"]["labels"]
    spread = GROUPS["ingress"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (rule,) = spread["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (rule["labelSelector"]["matchLabels"], rule["topologyKey"]) == (labels, "kubernetes.io/hostname")
    assert of_kind("Service")["sluice"]["spec"]["selector"] == labels


def test_kuberay_is_closed_by_default() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    config = parse(yaml.safe_load(RAY_SERVICE["serveConfigV2"])["applications"][0]["args"])
    certificates, keys = config.wire.tls_folder(), config.ingress.options["key_file"]
    specs = {"head": CLUSTER["headGroupSpec"], **GROUPS}
    for name, group in specs.items():
        mounts = {mount["name"]: mount["mountPath"] for mount in container(group)["volumeMounts"]}
        volumes = {one["name"]: one["secret"] for one in group["template"]["spec"]["volumes"]}
        assert set(mounts) == set(volumes) and mounts["wire-tls"] == certificates
        assert all(volume["defaultMode"] == 0o440 for volume in volumes.values())
        assert (mounts.get("keys") == str(Path(keys).parent)) == (name == "ingress")
        assert group["template"]["metadata"]["labels"] == {"sluice.io/role": name}
    policies = {name: one["spec"] for name, one in of_kind("NetworkPolicy").items()}
    ours = {"matchExpressions": [{"key": "sluice.io/role", "operator": "Exists"}]}
    # a pod that a policy selects is closed but for what policies open
    assert policies["sluice-inside"] == {
        "podSelector": ours,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": ours}]}],
    }
    opened = {
        (spec["podSelector"]["matchLabels"].get("sluice.io/role"), port["port"])
        for name, spec in policies.items()
        for rule in spec["ingress"]
        if name not in ("sluice-inside", "sluice-redis")
        for port in rule["ports"]
    }
    serve_port = yaml.safe_load(RAY_SERVICE["serveConfigV2"])["http_options"]["port"]
    metrics_port = config.ingress.metrics_port
    assert opened == {
        *(("ingress", port) for port in (config.ingress.port, metrics_port)),
        *(("head", port) for port in (8265, 52365, serve_port)),
    }
    # nobody is let in by an address alone or by nothing
    sources = [source for spec in policies.values() for rule in spec["ingress"] for source in rule["from"]]
    assert sources and all(source["podSelector"] for source in sources)
    redis = of_kind("StatefulSet")["sluice-redis"]["spec"]["template"]["metadata"]["labels"]
    assert policies["sluice-redis"]["podSelector"]["matchLabels"] == redis


def test_several_nodes_are_closed_by_default() -> None:
    schema = yaml.safe_load((DEPLOY / "multi-node.yaml").read_text())
    config = parse(schema["applications"][0]["args"])
    assert schema["http_options"]["host"] == "127.0.0.1"
    assert config.wire.interface and config.wire.tls_folder()
    assert config.ingress.options["key_file"] and config.ingress.tls_cert and config.ingress.tls_key


@pytest.mark.parametrize("file", sorted(path.name for path in DEPLOY.glob("*.yaml")))
def test_a_shipped_file_opens_no_port_of_serve_to_other_hosts(file: str) -> None:
    for document in yaml.safe_load_all((DEPLOY / file).read_text()):
        # Kubernetes has policies for that: see above
        if "http_options" in document:
            assert document["http_options"].get("host", "127.0.0.1") == "127.0.0.1"
            args = document["applications"][0]["args"]
            config = parse(args)
            open_to_others = config.ingress.host not in ("127.0.0.1", "localhost", "::1")
            assert not open_to_others or config.ingress.options.get("key_file")


def test_kuberay_drains_a_pod_within_its_grace_period() -> None:
    config = parse(yaml.safe_load(RAY_SERVICE["serveConfigV2"])["applications"][0]["args"])
    drains_s = {group.name: group.drain_s for group in config.engines}
    for name, group in {"head": CLUSTER["headGroupSpec"], **GROUPS}.items():
        python, dash_m, module, *arguments = container(group)["lifecycle"]["preStop"]["exec"]["command"]
        assert (python, dash_m, module, arguments[0]) == ("python", "-m", drain.__name__, "--seconds")
        # After the hook Ray's processes get SIGTERM, and what still drains has its replica's time.
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= float(arguments[1]) + drain.ANSWER_MARGIN_S + drains_s.get(name, DRAIN_S)


def test_a_replica_may_end_its_connections_and_its_engine_after_a_whole_drain() -> None:
    assert END_S >= CLOSE_S + SHUTDOWN_S


def test_kuberay_survives_the_loss_of_any_pod() -> None:
    options = CLUSTER["gcsFaultToleranceOptions"]
    redis = of_kind("Service")["sluice-redis"]["spec"]
    assert options["redisAddress"] == f"sluice-redis:{redis['ports'][0]['port']}"
    pods = of_kind("StatefulSet")["sluice-redis"]["spec"]["template"]
    assert redis["selector"] == pods["metadata"]["labels"]
    (password,) = pods["spec"]["containers"][0]["env"]
    assert options["redisPassword"]["valueFrom"] == password["valueFrom"]
    budgets = [
        budget["spec"]["selector"]["matchLabels"] for budget in of_kind("PodDisruptionBudget").values()
    ]
    for name, group in GROUPS.items():
        labels = group["template"]["metadata"]["labels"]
        assert labels == {"sluice.io/role": name}
        # the dashboard has one pod, and nothing of serving waits for it
        assert (labels in budgets) == (name != "dashboard")
        one = container(group)
        assert {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"} in one["env"]
        assert {"readinessProbe", "livenessProbe"} <= set(one)
    assert container(GROUPS["ingress"])["readinessProbe"]["httpGet"]["path"] in OBSERVED
    assert container(GROUPS["dashboard"])["readinessProbe"]["tcpSocket"] == {"port": "page"}


BEFORE: dict[str, Any] = {
    "engines": [
        {"name": "prefill", "role": "prefill", "replicas": 2},
        {"name": "decode", "role": "decode", "num_gpus": 1},
        {"name": "sim", "role": "decode", "kind": "sim"},
    ],
}


def deployed(monkeypatch: pytest.MonkeyPatch, args: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Version and init arguments of every deployment as `serve deploy` hands them to Serve's controller."""
    context = type("Context", (), {"get_job_id": lambda self: "01000000"})
    monkeypatch.setattr("ray.get_runtime_context", context)
    found = {}
    for deployment in build_app(build(args), name="sluice").deployments:
        sent = get_deploy_args(
            deployment.name,
            deployment._replica_config,
            deployment_config=deployment._deployment_config,
            version=f"hash of {args}",
        )
        config = DeploymentConfig.from_proto_bytes(sent["deployment_config_proto_bytes"])
        assert config.num_replicas == deployment.num_replicas
        found[deployment.name] = (str(config.version), repr(deployment._replica_config.init_args))
    return found


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({}, set()),
        ({"ingress": {"port": 8123}}, {"Ingress", "Dashboard"}),
        ({"dashboard": {"port": 8123}}, {"Dashboard"}),
        ({"ingress": {"options": {"max_body_bytes": 2000}}}, {"Ingress"}),
        ({"router": {"decode": {"name": "round_robin"}}}, {"Router"}),
        ({"router": {"engine_grace_s": 1.0}}, {"Router"}),
        (
            {"wire": {"secret_env": "ANOTHER"}},
            {"Router", "Ingress", "Dashboard", "PrefillEngine", "DecodeEngine", "SimEngine"},
        ),
        # The core share of the CPU engines is the same; Ray's resources are compared by Serve itself.
        ({"engines": [*BEFORE["engines"][:2], {**BEFORE["engines"][2], "replicas": 3}]}, set()),
        (
            {
                "engines": [
                    BEFORE["engines"][0],
                    {**BEFORE["engines"][1], "num_cpus": 2},
                    BEFORE["engines"][2],
                ]
            },
            set(),
        ),
        (
            {"engines": [*BEFORE["engines"][:2], {**BEFORE["engines"][2], "options": {"slots": 8}}]},
            {"SimEngine"},
        ),
        # Another number of CPU engines divides the cores anew.
        ({"engines": [{**BEFORE["engines"][0], "replicas": 3}, *BEFORE["engines"][1:]]}, {"PrefillEngine"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_a_changed_key_restarts_the_deployments_that_read_it(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], restarts: set[str]
) -> None:
    before, after = deployed(monkeypatch, BEFORE), deployed(monkeypatch, {**BEFORE, **change})
    assert {name for name in before if before[name][0] != after[name][0]} == restarts
    assert {name for name in before if before[name][1] != after[name][1]} == restarts


def test_another_number_of_replicas_under_an_autoscaler_restarts_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scaled(replicas: int) -> dict[str, Any]:
        first = {**BEFORE["engines"][0], "replicas": replicas, "scaling": {"max": 4}}
        return {"engines": [first, *BEFORE["engines"][1:]], "scaling": {"enabled": True}}

    before, after = deployed(monkeypatch, scaled(1)), deployed(monkeypatch, scaled(2))
    assert {name for name in before if before[name][0] != after[name][0]} == {"Autoscaler"}
    # replicas that start from now on know the new number
    assert before["PrefillEngine"][1] != after["PrefillEngine"][1]
    assert "active=2" in after["PrefillEngine"][1]


def test_another_admission_policy_restarts_the_router_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress has one by this name for the time without a router."""
    other = {**BEFORE, "router": {"admission": {"name": "open"}}}
    before, after = deployed(monkeypatch, BEFORE), deployed(monkeypatch, other)
    assert {name for name in before if before[name][0] != after[name][0]} == {"Router"}
    # replicas that start from now on know it
    assert {name for name in before if before[name][1] != after[name][1]} == {"Router", "Ingress"}
    assert "'open'" in after["Ingress"][1]


def test_a_wrong_config_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"engines\.0\.role"):
        build({"engines": [{"name": "x", "role": "both"}]})
    with pytest.raises(ConfigError, match=r"ingress\.options\.max_in_flght: no such option"):
        build({**BEFORE, "ingress": {"options": {"max_in_flght": 5}}})
    with pytest.raises(ConfigError, match=r"dashboard\.experiments\.rate: no such option"):
        build({**BEFORE, "dashboard": {"port": 0, "experiments": {"rate": 5}}})
