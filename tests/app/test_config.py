"""The configuration: what is refused, and with which words; every shipped file parses."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.options import ConfigError, from_options
from app.config import AppConfig, parse
from app.ingress.config import IngressConfig, check_options
from policies.dispatch.dispatcher import DispatchConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted([*DEPLOY.glob("*.yaml"), *(ROOT / "app/profile/examples").glob("*.yaml")])
OK = {"engines": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]}


def serve_configs() -> list[tuple[str, dict]]:  # type: ignore[type-arg]
    found = []
    for path in FILES:
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") == "RayService":
                document = yaml.safe_load(document["spec"]["serveConfigV2"])
            if "applications" in document:
                found.append((str(path.relative_to(ROOT)), document))
    return found


CONFIGS = serve_configs()


def test_the_shipped_files_are_all_there() -> None:
    names = {name for name, _ in CONFIGS}
    assert names >= {
        "deploy/cpu.yaml",
        "deploy/cpu-colocated.yaml",
        "deploy/sim.yaml",
        "deploy/gpu-node.yaml",
        "deploy/one-gpu.yaml",
        "deploy/multi-node.yaml",
        "deploy/kuberay.yaml",
        "app/profile/examples/cpu.yaml",
        "app/profile/examples/sim.yaml",
    }


@pytest.mark.parametrize(("name", "schema"), CONFIGS, ids=[name for name, _ in CONFIGS])
def test_a_shipped_file_parses(name: str, schema: dict) -> None:  # type: ignore[type-arg]
    config = parse(schema["applications"][0]["args"])
    assert isinstance(config, AppConfig)
    assert config.ingress.port != schema["http_options"]["port"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engines": []}, "engines"),
        ({"engines": [{"name": "p", "role": "prefill"}]}, "only prefill engines"),
        ({"engines": [{"name": "p", "role": "decode"}, {"name": "p", "role": "prefill"}]}, "not unique"),
        ({"engines": [{"name": "P!", "role": "decode"}]}, "engines.0.name"),
        ({"model": {"path": "sim"}}, "'sim' has no weights: vllm engines need a real model"),
        ({"engines": [{"name": "p", "role": "both"}]}, "engines.0.role"),
        ({"engines": [{"name": "d", "role": "decode", "kind": "vlm"}]}, "'vlm' is no kind of engine"),
        (
            {"engines": [{"name": "d", "role": "decode", "options": {"slot": 1}}]},
            "engines.d.options.slot: no such option; allowed are",
        ),
        ({"engines": [{"name": "d", "role": "decode", "replicas": -1}]}, "replicas"),
        ({"router": {"prefill": {"name": "best"}}}, "'best' is not known: choose one of"),
        ({"router": {"decode": {"name": "round_robin", "params": {"x": 1}}}}, "no parameter 'x'"),
        ({"router": {"dispatch": {"max_que": 1}}}, "router.dispatch.max_que: no such option; allowed are"),
        (
            {"router": {"network": {"files": "x"}}},
            "router.network.files: no such option; allowed are change_ratio",
        ),
        ({"router": {"network": {"refresh_s": 0}}}, "router.network.refresh_s is 0.0: it must be above 0"),
        (
            {
                "engines": [
                    {"name": n, "role": "decode", "topology": {"node": "x", "rack": n}} for n in ("a", "b")
                ]
            },
            "engines: b and another group put node x into different places",
        ),
        (
            {"engines": [{"name": "d", "role": "decode", "topology": {"zone": "x"}}]},
            "engines.0.topology.zone",
        ),
        ({"router": {"dispatch": {"max_queue": 0}}}, "max_queue is 0: it must be a whole number >= 1"),
        ({"ingress": {"port": 70000}}, "ingress.port"),
        ({"ingress": {"tls_cert": "a.pem"}}, "belong together"),
        (
            {"ingress": {"metrics_port": 65535, "replicas": 2}},
            "metrics_port: the last replica's would be 65536; 65535 is the highest",
        ),
        ({"wire": {"interface": "eth0"}}, "wire.interface: Value error, 'eth0' does not appear"),
        ({"wire": {"interface": "eth0"}}, "give a network, such as 10.1.0.0/16, or auto"),
        (
            {"flow": {"options": {"arbiter": {"windw": 1}}}},
            "flow.options.arbiter.windw: no such option; allowed are",
        ),
        ({"wire": {"interface": "10.1.0.5/16"}}, "10.1.0.5/16 has host bits set"),
        ({"wire": {"ports": "7700-7600"}}, "wire.ports is 7700-7600: write first-last, at most 65535"),
        ({"wire": {"ports": "7600-77000"}}, "wire.ports is 7600-77000: write first-last, at most 65535"),
        ({"wire": {"ports": "any"}}, "wire.ports"),
        ({"modle": {}}, "modle: no such option (got {})"),
    ],
)
def test_a_wrong_config_is_refused_in_words(change: dict, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError) as refused:
        parse(OK | change)
    assert says in str(refused.value)


def test_by_default_requests_are_admitted_by_their_wait_and_no_class_has_an_objective() -> None:
    config = parse(OK)
    assert config.router.admission.name == "by_wait"
    options = from_options(
        IngressConfig, {"served_names": ("m",), **config.ingress.options}, "ingress.options"
    )
    assert options.class_slo == {}


def test_options_become_the_component_s_dataclass_with_types_checked() -> None:
    assert from_options(DispatchConfig, {"max_queue": 5}, "x") == DispatchConfig(max_queue=5)
    with pytest.raises(ConfigError, match=r"x\.max_queue: .*integer"):
        from_options(DispatchConfig, {"max_queue": "many"}, "x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        # a request has its objectives in ms, the configuration in s
        (
            {"class_slo": {"batch": {"ttft_ms": 5}}},
            "ingress.options.class_slo.batch.ttft_ms: no such option (got 5)",
        ),
        (
            {"class_slo": {"batch": {"ttft_s": "soon"}}},
            "ingress.options.class_slo.batch.ttft_s: Input should be",
        ),
        (
            {"class_slo": {"batch": {"ttft_s": 0}}},
            "class_slo.batch.ttft_s is 0.0: it must be a number > 0, in seconds",
        ),
        (
            {"class_slo": {"batch": {"tpot_s": math.nan}}},
            "class_slo.batch.tpot_s is nan: it must be a number > 0",
        ),
        ({"max_in_flght": 5}, "ingress.options.max_in_flght: no such option; allowed are"),
        ({"key_file": "", "usage_log": "/log"}, "usage_log needs key_file"),
    ],
)
def test_wrong_options_of_the_ingress_are_refused_before_anything_starts(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options(options)
    assert says in str(refused.value)


def test_a_refusal_shows_no_key_that_is_right() -> None:
    with pytest.raises(ConfigError) as refused:
        check_options({"admin_keys": ["a-secret-of-ours"], "max_body_bytes": 4096, "max_waiting_bytes": 2048})
    assert "max_waiting_bytes must be max_body_bytes at least" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_options_that_need_a_key_file_may_have_it_from_the_environment_of_the_replica() -> None:
    check_options(
        {"usage_log": "/log", "quota_redis": "redis://127.0.0.1", "class_slo": {"batch": {"ttft_s": 5}}}
    )


def test_an_unknown_key_of_a_sim_engines_link_is_refused() -> None:
    engine = {"name": "d", "role": "decode", "kind": "sim", "options": {"links": {"*": {"bandwidth": 1e9}}}}
    with pytest.raises(ConfigError, match=r"engines\.d\.options\.links\.\*\.bandwidth: no such option"):
        parse({"model": {"path": "sim"}, "engines": [engine]})


def test_a_secret_comes_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_WIRE_SECRET", raising=False)
    assert parse(OK).wire.secret() is None
    monkeypatch.setenv("SLUICE_WIRE_SECRET", "hush")
    assert parse(OK).wire.secret() == b"hush"
    with pytest.raises(ConfigError, match="secret"):
        parse(OK | {"wire": {"secret": "in the file"}})


def test_a_wrong_network_file_is_refused_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text("tiers: {1: {bandwidth_bytes_per_s: 1}, 2: {bandwidth_bytes_per_s: 2}}")
    with pytest.raises(ConfigError, match="tier 2 has more bandwidth than the nearer tier 1"):
        parse(OK | {"router": {"network": {"file": str(file)}}})
    file.write_text("tiers: {1: {bandwidth_bytes_per_s: 2}, 2: {bandwidth_bytes_per_s: 1}}")
    assert parse(OK | {"router": {"network": {"file": str(file)}}}).router.network_config().file == str(file)


def test_a_topology_becomes_labels() -> None:
    config = parse({"engines": [{"name": "d", "role": "colocated", "topology": {"rack": "r1", "pod": "p1"}}]})
    assert config.engines[0].topology.labels() == {"sluice.io/rack": "r1", "sluice.io/pod": "p1"}
    assert parse(OK).engines[0].topology.labels() == {}


@pytest.mark.parametrize(
    ("ingress", "cores", "replicas", "metrics_port"),
    [
        ({}, 1, 1, 9000),
        ({}, 3, 1, 9000),
        ({}, 4, 2, 9000),
        ({}, 64, 2, 9000),
        ({"replicas": 1}, 64, 1, 9000),
        ({"replicas": 3, "metrics_port": 9400}, 2, 3, 9400),
        ({"metrics_port": 0}, 4, 2, 0),
        ({"port": 0}, 4, 2, 0),
        # 64534 + 1000 is 65534, and the second of two replicas takes 65535, the last port there is.
        ({"port": 64534}, 4, 2, 65534),
        ({"port": 64535}, 4, 2, 63535),
    ],
)
def test_a_machine_with_four_cores_has_two_ingresses_by_default(
    ingress: dict[str, int], cores: int, replicas: int, metrics_port: int
) -> None:
    found = parse(OK | {"ingress": ingress}).ingress.resolved(cores)
    assert (found.replicas, found.metrics_port) == (replicas, metrics_port)


def shown_parts() -> list[Any]:
    """Returns the parts of a configuration that documents show as YAML."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        examples = re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        for number, text in enumerate(examples):
            part = yaml.safe_load(text)
            if part.keys() <= AppConfig.model_fields.keys():
                found.append(pytest.param(part, id=f"{path.stem}-{number}"))
    return found


SHOWN = shown_parts()


def test_documents_show_parts_of_the_configuration() -> None:
    assert len(SHOWN) > 20


@pytest.mark.parametrize("part", SHOWN)
def test_a_part_of_the_configuration_that_a_document_shows_can_be_used(part: dict[str, Any]) -> None:
    check_options(parse(OK | part).ingress.options)
