"""Configurations that `make serve` refuses, the addresses that it shows, and a call to Ray after Ray's end."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.options import ConfigError
from app.config import parse
from app.serve import _greet, load, run

ARGS: dict[str, Any] = {
    "model": {"path": "sim"},
    "engines": [{"name": "c", "role": "colocated", "kind": "sim"}],
    "ingress": {"tls_cert": "cert.pem", "tls_key": "key.pem"},
}
TLS = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}


def config(folder: Path, http: dict[str, Any] | None, args: dict[str, Any]) -> str:
    file = folder / "serve.yaml"
    schema = {"applications": [{"name": "sluice", "import_path": "app.graph:build", "args": args}]}
    file.write_text(yaml.safe_dump(schema if http is None else schema | {"http_options": http}))
    return str(file)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_serves_own_port_is_not_open_in_plain_http_beside_an_ingress_with_tls(
    tmp_path: Path, host: str
) -> None:
    with pytest.raises(ConfigError, match=rf"http_options.host is {host}.*set it to 127\.0\.0\.1, or give"):
        load(config(tmp_path, {"host": host, "port": 8001}, ARGS))


@pytest.mark.parametrize(
    "http", [None, {"port": 8001}, {"host": "127.0.0.1"}, {"host": "localhost"}, {"host": "0.0.0.0"} | TLS]
)
def test_it_may_be_on_loopback_or_speak_tls(tmp_path: Path, http: dict[str, Any] | None) -> None:
    load(config(tmp_path, http, ARGS))


def test_without_tls_at_the_ingress_there_is_nothing_to_keep(tmp_path: Path) -> None:
    load(config(tmp_path, {"host": "0.0.0.0"}, ARGS | {"ingress": {}}))


def test_a_late_call_starts_no_other_ray() -> None:
    """The thread that deploys may still ask for the state of the replicas when Ctrl-C has ended Ray."""
    code = """
from app.serve import _environment
_environment()
import ray
try:
    ray.get_actor("anybody")
except Exception as error:
    print(type(error).__name__, ray.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.split()[1:] == ["False"], (done.stdout, done.stderr)


def test_serve_passes_its_own_figures_on_twice_in_each_export_of_them() -> None:
    """The shorter default wakes each replica twenty times a second, half of them for its handle to the router. What an
    operator has set stays.
    """
    code = """
import os
from app.serve import _environment
_environment()
from ray.serve._private.constants import RAY_SERVE_METRICS_EXPORT_INTERVAL_MS as interval_ms
print(interval_ms)
"""
    for given, wanted in ({}, "5000"), ({"RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "250"}, "250"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        assert done.stdout.split()[-1] == wanted


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"ingress": {"options": {"max_in_flght": 5}}}, r"ingress\.options\.max_in_flght: no such option"),
        ({"dashboard": {"experiments": {"rate": 5}}}, r"dashboard\.experiments\.rate: no such option"),
    ],
)
def test_options_that_only_a_replica_reads_are_refused_before_anything_starts(
    tmp_path: Path, args: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(config(tmp_path, None, ARGS | args))


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]")],
)
def test_addresses_are_shown_as_urls_by_which_this_machine_reaches_them(
    capsys: pytest.CaptureFixture[str], host: str, shown: str
) -> None:
    args = ARGS | {"ingress": {"host": host, "port": 8000}, "dashboard": {"host": host}}
    _greet(parse(args), 8001, print)
    told = capsys.readouterr().out
    assert f"curl -N http://{shown}:8000/v1/chat/completions " in told
    assert f"The dashboard is at http://{shown}:8002" in told


def test_a_port_that_is_in_use_is_named_with_what_chooses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, None, ARGS | {"ingress": {}})
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(argparse.Namespace(config=file, port=port, http_port=None, address=None)) == 1
    told = capsys.readouterr().err
    assert f"port {port} is in use" in told
    assert 'make serve PORT=8010 ARGS="--http-port 8011"' in told
