"""The audit log: a line for each request of an administrator with who, what and how it ended, and no key in any."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from app.admin_key import name_of_key
from app.ingress import line_log
from app.ingress.audit import ASKED_BYTES, REFUSALS, REFUSALS_S, Audit
from app.ingress.config import IngressConfig
from app.ingress.http.reply import Request
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig, pair, rig, until
from tests.app.ingress.test_admin import asgi

POLICY = "/sluice/admin/policy"
CHAT = "/v1/chat/completions"


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("audit-*.jsonl"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def audited(folder: Path, **more: Any) -> IngressConfig:
    config: dict[str, Any] = {"served_names": (MODEL,), "sweep_interval_s": 0.02, "admin_keys": (ADMIN_KEY,)}
    return IngressConfig(**config, audit_log=str(folder), **more)


async def ask(made: Rig, method: str, path: str, body: Any = None, **headers: str) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await made.client.request(method, path, json=body, headers=given)).status_code


async def test_each_request_of_an_administrator_has_a_line_with_who_what_and_how_it_ended(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "audit"
    change = {"dispatch": {"max_queue": 7}}
    async with rig(tmp_path, pair(tmp_path), audited(folder)) as made:
        proxied = {"x_request_id": "mine", "x_forwarded_for": "203.0.113.9"}
        assert await ask(made, "PUT", POLICY, change, **proxied) == 200
        assert await ask(made, "PUT", POLICY, {"dispatch": {"no_such": 1}}) == 400
        assert await ask(made, "GET", "/sluice/admin/explain/nobody") == 404
        assert await ask(made, "GET", POLICY, authorization="Bearer a-wrong-key") == 401
        assert await ask(made, "PUT", POLICY, change, authorization="") == 401
        overruling = {"x_sluice_mode": "colocated", "authorization": ""}
        assert await ask(made, "POST", CHAT, made.chat(), **overruling) == 401
        # neither output nor status is administration
        assert await ask(made, "POST", CHAT, made.chat()) == 200
        assert await ask(made, "GET", "/sluice/status") == 200
        await until(lambda: made.metric("sluice_audit_lines_total", result="written") == 6, "the lines")
    found = lines(folder)
    mine = name_of_key(ADMIN_KEY)
    assert [(one["status"], one["key"], one["method"], one["path"]) for one in found] == [
        (200, mine, "PUT", POLICY),
        (400, mine, "PUT", POLICY),
        (404, mine, "GET", "/sluice/admin/explain/nobody"),
        (401, name_of_key("a-wrong-key"), "GET", POLICY),
        (401, "", "PUT", POLICY),
        (401, "", "POST", CHAT),
    ]
    first = found[0]
    assert json.loads(first["asked"]) == change
    assert (first["request_id"], first["address"], first["forwarded"]) == ("mine", "127.0.0.1", "203.0.113.9")
    assert first["replica"] == "ingress-0" and abs(first["time"] - folder.stat().st_mtime) < 100
    # what somebody without a key has sent takes no room
    assert found[4]["asked"] == ""
    text = "".join(file.read_text() for file in folder.iterdir())
    assert ADMIN_KEY not in text and "a-wrong-key" not in text


async def test_what_comes_through_serves_own_port_is_audited(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    async with rig(tmp_path, pair(tmp_path), audited(folder)) as made:
        assert (await asgi(made, "GET", POLICY))[0] == 401
        key = (b"authorization", f"Bearer {ADMIN_KEY}".encode())
        assert (await asgi(made, "GET", POLICY, key))[0] == 200
    assert [one["status"] for one in lines(folder)] == [401, 200]


def test_the_address_of_an_asgi_client_is_that_which_the_server_tells() -> None:
    from app.ingress.asgi import _address_of

    assert _address_of({"client": ("203.0.113.9", 4711)}) == "203.0.113.9"
    assert (_address_of({"client": None}), _address_of({})) == ("", "")


async def test_a_disk_that_hangs_delays_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, write = threading.Event(), line_log._write_all

    def slow(file: int, data: bytes) -> None:
        goes_on.wait()
        write(file, data)

    monkeypatch.setattr(line_log, "_write_all", slow)
    folder = tmp_path / "audit"
    try:
        async with rig(tmp_path, pair(tmp_path), audited(folder)) as made:
            for _ in range(5):
                assert await ask(made, "GET", POLICY) == 200
            assert made.metric("sluice_audit_lines_total", result="written") == 0
            goes_on.set()
    finally:
        goes_on.set()
    assert len(lines(folder)) == 5


# ------------------------------------------------------------------------------------------------------ what is bounded


class Log:
    """An audit log with a clock of the test's."""

    def __init__(
        self, folder: Path, max_bytes: int = 10**6, most_files: int | None = None, name: str = "i0"
    ) -> None:
        self.now_s = 1000.0
        self.audit = Audit(folder, name, max_bytes, most_files, clock_s=lambda: self.now_s)

    def note(self, status: int, body: bytes = b"", path: str = POLICY) -> None:
        self.audit.note(Request("PUT", path, {}, body), "r", b"a key", status)


async def test_refusals_fill_no_disk_and_those_that_are_not_written_are_counted(tmp_path: Path) -> None:
    log = Log(tmp_path / "audit")
    for _ in range(REFUSALS + 25):
        log.note(401)
    log.note(200)
    log.note(403)
    log.now_s += REFUSALS_S
    log.note(401)
    # a clock that was set back must not silence the log
    log.now_s -= 500
    log.note(401)
    await log.audit.stop()
    found = lines(tmp_path / "audit")
    assert [one["status"] for one in found] == [401] * REFUSALS + [200, 401, 401]
    assert [one.get("refused_more") for one in found[REFUSALS:]] == [25, 1, None]


async def test_a_line_is_bounded_whatever_is_asked(tmp_path: Path) -> None:
    log = Log(tmp_path / "audit")
    log.note(200, b"\xff" * 10**6, "/sluice/admin/explain/" + "x" * 10**6)
    await log.audit.stop()
    (line,) = (tmp_path / "audit").glob("*.jsonl")
    # a byte that is no UTF-8 takes four characters, one of them a backslash, which JSON doubles
    assert 5 * ASKED_BYTES < line.stat().st_size < 5 * ASKED_BYTES + 1000


async def test_files_are_rotated_and_the_oldest_removed_those_of_other_processes_too(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    folder.mkdir(mode=0o700)
    for number in range(3):
        old = folder / f"audit-another-{number}.jsonl"
        old.write_text("{}\n")
        os.utime(old, (number, number))
    (folder / "usage-of-somebody.jsonl").write_text("{}\n")
    log = Log(folder, max_bytes=4096, most_files=4)
    log.note(200)
    await log.audit.stop()
    assert len(list(folder.glob("audit-*.jsonl"))) == 4 and len(list(folder.glob("audit-another*"))) == 3
    log = Log(folder, max_bytes=4096, most_files=4, name="i1")
    for number in range(200):
        log.note(200, b"%d" % number)
    await log.audit.stop()
    files = list(folder.glob("audit-*.jsonl"))
    assert len(files) == 4 and not list(folder.glob("audit-another*"))
    # a line of some 200 bytes may go beyond the limit by less than itself
    assert all(file.stat().st_size < 4096 + 300 for file in files)
    asked = [one["asked"] for one in lines(folder)]
    assert asked == [str(number) for number in range(200 - len(asked), 200)]
    assert (folder / "usage-of-somebody.jsonl").exists()


async def test_folder_and_file_are_for_their_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    log = Log(folder)
    log.note(200)
    await log.audit.stop()
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="other users may write"):
        Log(folder)


async def test_stopping_waits_for_lines_that_are_on_their_way(tmp_path: Path) -> None:
    log = Log(tmp_path / "audit")
    for _ in range(1000):
        log.note(200)
    await asyncio.gather(log.audit.stop())
    assert len(lines(tmp_path / "audit")) == 1000
