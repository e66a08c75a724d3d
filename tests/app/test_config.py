"""The configuration: what is refused, and with which words; every shipped file parses."""

from pathlib import Path

import pytest
import yaml

from app.config import AppConfig, ConfigError, from_options, parse
from policies.dispatch import DispatchConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
OK = {"engines": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]}


def serve_configs() -> list[tuple[str, dict]]:  # type: ignore[type-arg]
    found = []
    for path in sorted(DEPLOY.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") == "RayService":
                document = yaml.safe_load(document["spec"]["serveConfigV2"])
            if "applications" in document:
                found.append((path.name, document))
    return found


CONFIGS = serve_configs()


def test_the_shipped_files_are_all_there() -> None:
    names = {name for name, _ in CONFIGS}
    assert names >= {
        "cpu.yaml",
        "cpu-colocated.yaml",
        "sim.yaml",
        "gpu-node.yaml",
        "multi-node.yaml",
        "kuberay.yaml",
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
        ({"engines": [{"name": "p", "role": "both"}]}, "engines.0.role"),
        ({"engines": [{"name": "d", "role": "decode", "replicas": -1}]}, "replicas"),
        ({"router": {"prefill": {"name": "best"}}}, "'best' is not known: choose one of"),
        ({"router": {"decode": {"name": "round_robin", "params": {"x": 1}}}}, "no parameter 'x'"),
        ({"router": {"dispatch": {"max_que": 1}}}, "router.dispatch.max_que: no such option; allowed are"),
        ({"router": {"dispatch": {"max_queue": 0}}}, "max_queue must be >= 1"),
        ({"ingress": {"port": 70000}}, "ingress.port"),
        ({"ingress": {"tls_cert": "a.pem"}}, "belong together"),
        ({"wire": {"interface": "eth0"}}, "eth0"),
        ({"modle": {}}, "modle"),
    ],
)
def test_a_wrong_config_is_refused_in_words(change: dict, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError) as refused:
        parse(OK | change)
    assert says in str(refused.value)


def test_options_become_the_component_s_dataclass_with_types_checked() -> None:
    assert from_options(DispatchConfig, {"max_queue": 5}, "x") == DispatchConfig(max_queue=5)
    with pytest.raises(ConfigError, match=r"x\.max_queue: .*integer"):
        from_options(DispatchConfig, {"max_queue": "many"}, "x")


def test_a_secret_comes_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_WIRE_SECRET", raising=False)
    assert parse(OK).wire.secret() is None
    monkeypatch.setenv("SLUICE_WIRE_SECRET", "hush")
    assert parse(OK).wire.secret() == b"hush"
    with pytest.raises(ConfigError, match="secret"):
        parse(OK | {"wire": {"secret": "in the file"}})
