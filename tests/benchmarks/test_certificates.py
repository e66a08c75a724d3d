"""Certificates that bear names, of servers that are reached by an address: taken from those servers, and no others."""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.certificates import VARIABLE, client, pinned
from benchmarks.live.experiment.client import Client
from benchmarks.live.experiment.control import Control
from benchmarks.live.experiment.requests import Planned
from benchmarks.live.experiment.sampling import Sampler
from sluice import SluiceError
from tests.actors.wire.certificates import Authority
from tests.benchmarks.told_server import Told, told_server

STATUS = json.dumps({"ready": True, "model": "m", "engines": []})
ANSWERS = {"/sluice/status": STATUS, "/metrics": "sluice_retries_total 3\n"}


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> tuple[str, str]:
    """A certificate for a name, with that of its authority in the same file as usual, and its key."""
    folder = authority.member(tmp_path / "server", "sluice.example.org")
    with (folder / "tls.crt").open("ab") as file:
        file.write(authority.pem())
    return str(folder / "tls.crt"), str(folder / "tls.key")


@pytest.fixture
def server(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    with told_server(ANSWERS, files=files) as made:
        monkeypatch.setenv(VARIABLE, json.dumps({made.url: files[0]}))
        yield made


def test_an_application_with_such_a_certificate_is_controlled_and_sampled(server: Told) -> None:
    control = Control(server.url, "a key", server.url)
    assert control.client.status().ready
    sampler = Sampler(control)
    assert "error" not in sampler.sample(1.0)
    sampler.close()
    control.close()
    # without the variable it is refused as by everybody
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{server.url}/metrics", trust_env=False)


async def test_a_load_is_sent_to_it(server: Told) -> None:
    plan = [Planned(0.0, "a", "interactive", 3, 4)]
    [sent] = await Client(server.url, "m", "n").run(plan, 1, 20.0)
    assert sent.status == 503, sent.problem


def test_another_certificate_of_the_same_authority_is_refused(
    files: tuple[str, str], authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = authority.member(tmp_path / "other", "sluice.example.org")
    with told_server(ANSWERS, files=(str(folder / "tls.crt"), str(folder / "tls.key"))) as other:
        monkeypatch.setenv(VARIABLE, json.dumps({other.url: files[0]}))
        made = client(other.url)
        assert made is not None
        with made, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            made.get(f"{other.url}/metrics")


def test_a_certificate_that_has_expired_is_refused(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = authority.member(tmp_path / "old", expired=True)
    files = str(folder / "tls.crt"), str(folder / "tls.key")
    with told_server(ANSWERS, files=files) as server:
        monkeypatch.setenv(VARIABLE, json.dumps({server.url: files[0]}))
        made = client(server.url)
        assert made is not None
        with made, pytest.raises(httpx.ConnectError, match="expired"):
            made.get(f"{server.url}/metrics")


def test_other_servers_are_judged_as_usual(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert client("https://127.0.0.1:8000") is None
    monkeypatch.setenv(VARIABLE, json.dumps({"https://127.0.0.1:8000": files[0]}))
    for url in (None, "http://127.0.0.1:8000", "https://127.0.0.1:8001", "https://127.0.0.2:8000"):
        assert pinned(url) is None
    assert isinstance(pinned("https://127.0.0.1:8000/v1"), ssl.SSLContext)


@pytest.mark.parametrize("given", ["{", "[]", '{"https://127.0.0.1:8000": "/none"}'])
def test_what_cannot_be_used_is_named(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(SluiceError, match=f"{VARIABLE} is no JSON|/none cannot be used"):
        pinned("https://127.0.0.1:8000")


def test_a_file_without_a_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tls.crt"
    for content in ("", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"):
        file.write_text(content)
        monkeypatch.setenv(VARIABLE, json.dumps({"https://a": str(file)}))
        with pytest.raises(SluiceError, match="cannot be used"):
            pinned("https://a")
