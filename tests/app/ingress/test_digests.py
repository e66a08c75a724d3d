"""Digests leave an ingress instead of names; replicas of one application share them."""

import os
import tempfile
from pathlib import Path

import pytest

from actors.router.journal import JournalConfig, RouterJournal
from actors.router.records import Records
from actors.wire import messages as wire
from app.ingress.digests import salt_of_application, session_digest
from policies.request.terms import Terms
from tests.app.ingress.rig import pair, rig

SECRET = b"the wire's secret"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user, which does not exist yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"sluice-{os.getuid()}"


def test_replicas_of_a_port_share_a_salt_that_nobody_else_has(folder: Path) -> None:
    salt = salt_of_application(8000, None)
    assert salt_of_application(8000, None) == salt
    assert salt_of_application(8010, None) != salt
    file = folder / "digest-salt-8000"
    assert file.stat().st_mode & 0o777 == 0o600
    # the key is random, so another machine has another salt
    file.unlink()
    assert salt_of_application(8000, None) != salt


def test_with_a_secret_of_the_wire_nodes_share_the_salt_and_keep_no_file(folder: Path) -> None:
    salts = {salt_of_application(port, secret) for port in (8000, 8010) for secret in (SECRET, b"another")}
    assert len(salts) == 4
    assert salt_of_application(8000, SECRET) in salts
    assert not folder.exists()


def test_a_session_is_no_user_and_none_is_none() -> None:
    assert session_digest("", b"salt") == ""
    assert session_digest("a", b"salt") != session_digest("b", b"salt")
    assert len(session_digest("\ud800" + "x" * 511, b"salt")) == 32


async def sent(directory: Path, salt: bytes) -> tuple[Terms, str]:
    """Returns the terms that the router gets of a request of the session "rivers" and the user "somebody", and what
    the router's journal has of it.
    """
    async with rig(directory, pair(directory), salt=salt) as made:
        journal = RouterJournal(JournalConfig(), made.router.dispatcher, "0")
        made.router._records = Records(made.router.decisions, journal)
        heard: list[wire.Submit] = []
        submit = made.router._submit
        made.router._submit = lambda c, m: (heard.append(m), submit(c, m))[0]  # type: ignore[method-assign]
        body = made.chat(session="rivers", user="somebody")
        assert (await made.client.post("/v1/chat/completions", json=body)).status_code == 200
        await made.idle()
        made.router._records.catch_up()
        (message,) = heard
        return message.terms, "\n".join(journal.tail(1000))


async def test_sessions_are_equal_within_an_application_and_no_journal_has_their_names(
    tmp_path: Path,
) -> None:
    salt = salt_of_application(8000, None)
    one, journal = await sent(tmp_path, salt)
    two, _ = await sent(tmp_path, salt_of_application(8000, None))
    other, _ = await sent(tmp_path, salt_of_application(8010, None))
    assert one.session == session_digest("rivers", salt)
    assert (one.session, one.tenant) == (two.session, two.tenant)
    assert one.session != other.session and one.tenant != other.tenant
    assert one.session in journal
    assert "rivers" not in journal and "somebody" not in journal
