"""`sluice key` on a file, and what concurrent writers and broken files do to it."""

import json
import multiprocessing
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.ingress.tenants.command import main
from app.ingress.tenants.key_file import KeyFileError, changed, read
from app.ingress.tenants.keys import KeyBook


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def secret_of(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--file", str(path)]) == 0
    return capsys.readouterr().out.strip()


def book(path: Path) -> KeyBook:
    return KeyBook.of(read(path)[0])


def test_a_created_key_is_found_and_its_file_is_private(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = secret_of(
        path, capsys, "create", "--tenant", "acme", "--ceiling", "-5", "--requests-per-min", "60", "--tokens-per-min",
        "1000", "--parallel", "4", "--weight", "2", "--expires-in", "30d", "--note", "of the tests", "--shares-cache",
        "--timeout-s", "3600",
    )  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
    found = book(path).find(secret)
    assert found is not None
    key = found.key
    assert (key.tenant, key.ceiling, key.least_priority, key.weight) == ("acme", -5, -5, 2.0)
    assert (key.requests_per_min, key.tokens_per_min, key.parallel, key.shares_cache) == (60, 1000, 4, True)
    assert key.timeout_s == 3600.0
    assert key.expires is not None and (key.expires - key.created).days == 30
    assert main(["list", "--file", str(path)]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in (key.id, "acme", "1000", "3600s", "of the tests"))
    assert secret not in listed and key.secrets[0].sha256 not in listed
    assert main(["list", "--json", "--file", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["tenant"] == "acme"


def test_a_revoked_key_is_gone_and_the_others_stay(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secrets = [secret_of(path, capsys, "create", "--tenant", name) for name in ("a", "b")]
    salt = read(path)[0].salt_secret
    found = book(path).find(secrets[0])
    assert found is not None
    assert main(["revoke", found.key.id, "--file", str(path)]) == 0
    assert [book(path).find(secret) is not None for secret in secrets] == [False, True]
    # caches stay valid, and tenants keep their salts
    assert read(path)[0].salt_secret == salt
    assert main(["revoke", found.key.id, "--file", str(path)]) == 2
    assert "sluice key list" in capsys.readouterr().err


def test_a_rotated_key_takes_both_secrets_for_a_time(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = secret_of(path, capsys, "create", "--tenant", "a")
    found = book(path).find(old)
    assert found is not None
    key_id = found.key.id
    new = secret_of(path, capsys, "rotate", key_id, "--grace", "1h")
    now_s = datetime.now(UTC).timestamp()
    of_old, of_new = book(path).find(old), book(path).find(new)
    assert of_old is not None and of_new is not None
    assert of_old.expires_s is not None and now_s < of_old.expires_s <= now_s + 3600
    assert (of_new.expires_s, of_new.key.id) == (None, key_id)
    # a second rotation lengthens no grace
    newer = secret_of(path, capsys, "rotate", key_id, "--grace", "2h")
    again = book(path).find(old)
    assert again is not None and again.expires_s == of_old.expires_s
    newest = secret_of(path, capsys, "rotate", key_id, "--grace", "0s")
    assert [book(path).find(each) is not None for each in (old, new, newer, newest)] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["create", "--tenant", "other"], "other"),
        (["create", "--tenant", "a b"], "--tenant"),
        (["create", "--tenant", "a", "--requests-per-min", "0"], "--requests-per-min"),
        (["create", "--tenant", "a", "--weight", "nan"], "--weight"),
        (["create", "--tenant", "a", "--timeout-s", "0"], "--timeout-s"),
        (["revoke", "k1"], "no key file"),
        (["list"], "no key file"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_no_file(
    path: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--file", str(path)]) == 2
    assert told in capsys.readouterr().err
    assert not path.exists()


def test_without_a_file_the_command_asks_for_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLUICE_KEY_FILE", raising=False)
    assert main(["list"]) == 2
    assert "SLUICE_KEY_FILE" in capsys.readouterr().err


def _create(path: str, count: int) -> None:
    for _ in range(count):
        assert main(["create", "--tenant", "acme", "--file", path]) == 0


def test_writers_wait_for_one_another(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_create, args=(str(path), 8)) for _ in range(3)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            # a reader meets a whole file at any time
            count = len(read(path)[0].keys)
            assert count >= seen
            seen = count
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(read(path)[0].keys) == 24
    assert sorted(each.name for each in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_an_error_changes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret_of(path, capsys, "create", "--tenant", "a")
    before = path.read_bytes()
    with pytest.raises(RuntimeError), changed(path) as file:
        file[0] = file[0].model_copy(update={"keys": ()})
        raise RuntimeError
    assert path.read_bytes() == before


def test_a_file_behind_a_link_is_replaced_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "keys.json"
    secret_of(tmp_path / "real" / "keys.json", capsys, "create", "--tenant", "a")
    link.symlink_to(tmp_path / "real" / "keys.json")
    secret_of(link, capsys, "create", "--tenant", "b")
    assert link.is_symlink()
    assert len(read(tmp_path / "real" / "keys.json")[0].keys) == 2


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_may_use_is_refused(
    path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    secret_of(path, capsys, "create", "--tenant", "a")
    path.chmod(0o640)
    assert len(read(path)[0].keys) == 1
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read(path)


def test_a_folder_and_a_pipe_are_no_key_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe"):
        with pytest.raises(KeyFileError):
            read(tmp_path / name)
