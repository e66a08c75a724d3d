"""The file of the admin key: who may read it, who writes it, and to whom it is sent."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.admin_key import KeyFile, KeyFileError, authorize, warn_of_shown_keys
from app.user_folder import user_folder
from sluice._admin_key import key_of_this_machine

SECRET = b"the wire's secret"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user, which does not exist yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"sluice-{os.getuid()}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_is_for_its_user_alone_and_a_restart_keeps_the_key(folder: Path) -> None:
    umask = os.umask(0)
    try:
        key = KeyFile(8000).take()
    finally:
        os.umask(umask)
    path = folder / "admin-key-8000"
    assert (mode(path), mode(folder)) == (0o600, 0o700)
    assert len(key) == 43 and path.read_text() == key + "\n"
    assert KeyFile(8000).take() == key
    assert KeyFile(8010).take() != key
    assert sorted(os.listdir(folder)) == ["admin-key-8000", "admin-key-8010"]
    KeyFile(8000).remove()
    KeyFile(8000).remove()
    assert os.listdir(folder) == ["admin-key-8010"]
    assert KeyFile(8000).take() != key


REPLICA = """
import sys, tempfile
from app.admin_key import KeyFile
tempfile.tempdir = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
print(KeyFile(8000).take())
"""


def test_replicas_that_start_at_once_agree_on_one_key(folder: Path) -> None:
    command = [sys.executable, "-c", REPLICA, str(folder.parent)]
    pipe = subprocess.PIPE
    replicas = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for replica in replicas:
        assert replica.stdout is not None
        assert replica.stdout.readline() == "ready\n"
    for replica in replicas:
        assert replica.stdin is not None
        replica.stdin.write("\n")
        replica.stdin.flush()
    keys = {replica.communicate(timeout=100)[0].strip() for replica in replicas}
    assert keys == {(folder / "admin-key-8000").read_text().strip()}
    assert os.listdir(folder) == ["admin-key-8000"]


def test_a_key_that_another_replica_has_written_meanwhile_stays(folder: Path) -> None:
    first, second = KeyFile(8000), KeyFile(8000)
    key = first.take()
    # what a replica does that has seen no file
    second._write()
    assert second.take() == key and os.listdir(folder) == ["admin-key-8000"]


def test_nodes_with_one_wire_secret_have_one_key(folder: Path) -> None:
    here = KeyFile(8000, SECRET).take()
    assert SECRET.decode() not in here and len(here) == 64
    (folder / "admin-key-8000").rename(folder / "of-another-node")
    assert KeyFile(8000, SECRET).take() == here
    assert KeyFile(8010).take() != here
    # a key from before the secret was set is replaced
    KeyFile(8000).remove()
    assert KeyFile(8000).take() != here
    assert KeyFile(8000, SECRET).take() == here == (folder / "admin-key-8000").read_text().strip()
    assert KeyFile(8000, b"another").take() != here


def test_a_folder_that_others_can_enter_but_not_change_is_closed(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    KeyFile(8000).take()
    assert mode(folder) == 0o700


@pytest.mark.parametrize("too_open", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_into_which_others_may_write_is_refused(folder: Path, too_open: int) -> None:
    folder.mkdir()
    folder.chmod(too_open)
    with pytest.raises(KeyFileError, match=rf"other users may write .*{folder}.*chmod 700"):
        KeyFile(8000).take()
    assert os.listdir(folder) == []


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    user_folder().mkdir(mode=0o700)
    with pytest.raises(
        KeyFileError, match=f"belongs to user {other - 1} and not to {other}: remove it, or set"
    ):
        KeyFile(8000).take()


def test_a_link_in_place_of_the_folder_or_of_the_file_is_refused(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    folder.symlink_to(mine)
    with pytest.raises(KeyFileError, match="is not a folder"):
        KeyFile(8000).take()
    folder.unlink()
    folder.mkdir(mode=0o700)
    (mine / "private").write_text("a private secret\n")
    (mine / "private").chmod(0o600)
    (folder / "admin-key-8000").symlink_to(mine / "private")
    with pytest.raises(KeyFileError, match="no admin key can be kept in"):
        KeyFile(8000).take()
    assert key_of_this_machine("http://127.0.0.1:8000") is None


@pytest.mark.parametrize(
    ("text", "of_file", "says"),
    [
        ("a good admin key", 0o644, "is not this user's alone"),
        ("a good admin key", 0o620, "is not this user's alone"),
        ("short", 0o600, "holds no admin key"),
        ("two\nlines of it", 0o600, "holds no admin key"),
        ("", 0o600, "holds no admin key"),
    ],
)
def test_a_file_that_is_no_key_is_refused_and_says_to_remove_it(
    folder: Path, text: str, of_file: int, says: str
) -> None:
    folder.mkdir(mode=0o700)
    path = folder / "admin-key-8000"
    path.write_text(text)
    path.chmod(of_file)
    with pytest.raises(KeyFileError, match=rf"{says}.*remove the file"):
        KeyFile(8000).take()


# ------------------------------------------------------------------------------------------------------ who gets it


URLS = [
    ("http://127.0.0.1:8000", True),
    ("http://localhost:8000/v1", True),
    ("https://[::1]:8000", True),
    ("http://127.0.0.1:8001", False),
    ("http://127.0.0.1", False),
    ("http://10.0.0.1:8000", False),
    ("http://127.0.0.1.example.com:8000", False),
    ("http://localhost.example.com:8000", False),
    ("http://127.0.0.1@example.com:8000", False),
    ("http://0.0.0.0:8000", False),
]


@pytest.mark.parametrize(("url", "gets"), URLS)
def test_only_a_server_of_this_machine_gets_the_key(url: str, gets: bool) -> None:
    key = KeyFile(8000).take()
    request = authorize(httpx.Request("GET", url))
    assert request.headers.get("authorization") == (f"Bearer {key}" if gets else None)
    assert key_of_this_machine(url) == (key if gets else None)


def test_the_port_of_the_scheme_counts_where_the_url_has_none() -> None:
    http, https = KeyFile(80).take(), KeyFile(443).take()
    assert key_of_this_machine("http://127.0.0.1") == http
    assert key_of_this_machine("https://localhost") == https
    assert (
        authorize(httpx.Request("GET", "https://localhost/x")).headers["authorization"] == f"Bearer {https}"
    )


def test_a_file_that_another_user_could_have_made_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:8000"

    def told() -> tuple[str | None, str | None]:
        return key_of_this_machine(url), authorize(httpx.Request("GET", url)).headers.get("authorization")

    assert told() == (None, None)
    key = KeyFile(8000).take()
    assert told() == (key, f"Bearer {key}")
    folder.chmod(0o770)
    assert told() == (None, None)
    folder.chmod(0o700)
    (folder / "admin-key-8000").chmod(0o640)
    assert told() == (None, None)
    (folder / "admin-key-8000").chmod(0o600)
    assert told() == (key, f"Bearer {key}")
    other = os.getuid() + 1
    folder.rename(folder.with_name(f"sluice-{other}"))
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert told() == (None, None)


@pytest.mark.parametrize(("options", "warned"), [({"admin_keys": ["a secret key"]}, True), ({}, False)])
def test_keys_in_a_configuration_file_are_warned_of_without_showing_them(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], warned: bool
) -> None:
    warn_of_shown_keys(options)
    assert any(record.name == "ray.serve" for record in caplog.records) == warned
    assert ("SLUICE_ADMIN_KEYS" in caplog.text, "a secret key" in caplog.text) == (warned, False)
