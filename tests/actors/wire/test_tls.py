"""TLS of the wire over real sockets: members meet, others do not, and new certificates count without a restart."""

import ast
import asyncio
import logging
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import uvloop

from actors.wire import channel as wire
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import Cancel, EngineInfo
from actors.wire.sockets import connect, listen
from actors.wire.tls import WireTls
from tests.actors.wire.certificates import Authority
from tests.actors.wire.test_channel import Side

SECRET = b"of the test"
TCP = "tcp:127.0.0.1:0"


def identity(kind: str, name: str, folder: Path | None) -> Identity:
    return Identity(kind, name, SECRET, tls=None if folder is None else WireTls(folder))  # type: ignore[arg-type]


@asynccontextmanager
async def listening(me: Identity, address: str = TCP) -> AsyncIterator[tuple[Side, str]]:
    """A side that listens at `address` with what `me` has, and the address at which clients find it."""
    side = Side(me)
    server, bound = await listen(address, side.new, me.tls)
    try:
        yield side, bound
    finally:
        server.close()
        for channel in side.channels:
            channel.abort("the test ends")


async def reach(me: Identity, address: str) -> Channel:
    """Connects as a link does, and waits until a message has gone each way."""
    side = Side(me)
    channel = await connect((address,), side.new, me.tls)
    channel.send(Cancel("ping"))
    async with asyncio.timeout(30):
        while not side.messages and not channel.closed.done():
            await asyncio.sleep(0.005)
    if channel.closed.done():
        raise WireError(channel.closed.result())
    return channel


def echo(side: Side) -> None:
    side.on_message = lambda channel, message: channel.send(message)


def serial(channel: Channel) -> str:
    """The serial number of the certificate that the peer has shown."""
    assert channel._transport is not None
    return str(channel._transport.get_extra_info("peercert")["serialNumber"])


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def node(authority: Authority, tmp_path: Path) -> Path:
    return authority.member(tmp_path / "node")


# --------------------------------------------------------------------------------------------------------- who gets in


async def test_members_meet_over_tls_1_3_and_nothing_is_read_on_the_way(
    authority: Authority, node: Path, tmp_path: Path
) -> None:
    client = identity("ingress", "i1", authority.member(tmp_path / "other"))
    async with listening(identity("router", "r1", node)) as (server, address):
        echo(server)
        seen = bytearray()
        async with tapped(address, seen) as tap:
            channel = await reach(client, tap)
            assert channel._transport is not None
            assert channel._transport.get_extra_info("ssl_object").version() == "TLSv1.3"
            assert server.messages == [Cancel("ping")]
            channel.close()
            await channel.closed
    assert len(seen) > 1000 and b"ingress" not in seen and b"ping" not in seen and b"router" not in seen


@asynccontextmanager
async def tapped(address: str, seen: bytearray) -> AsyncIterator[str]:
    """A way to `address` that notes every byte in both directions."""
    host, _, port = address.removeprefix("tcp:").rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    server = await asyncio.start_server(taken, "127.0.0.1", 0)
    try:
        yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_the_tap_of_these_tests_does_read_a_plain_connection() -> None:
    async with listening(Identity("router", "r1", SECRET)) as (server, address):
        echo(server)
        seen = bytearray()
        async with tapped(address, seen) as tap:
            await reach(Identity("ingress", "i1", SECRET), tap)
    assert b"ingress" in seen and b"ping" in seen and b"router" in seen


@pytest.mark.parametrize("who", ["another authority", "expired", "no certificate", "plain"])
async def test_a_client_that_is_no_member_gets_no_channel(
    authority: Authority, node: Path, tmp_path: Path, who: str
) -> None:
    async with listening(identity("router", "r1", node)) as (server, address):
        echo(server)
        if who == "plain":
            outsider = Identity("ingress", "i1", SECRET)
        elif who == "another authority":
            # it trusts the server, and the server does not trust it
            outsider = identity("ingress", "i1", Authority().member(tmp_path / "out", trusts=authority.pem()))
        elif who == "expired":
            outsider = identity("ingress", "i1", authority.member(tmp_path / "out", expired=True))
        else:
            outsider = identity("ingress", "i1", node)
            assert outsider.tls is not None
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            bare.check_hostname = False
            bare.load_verify_locations(node / "ca.crt")
            outsider.tls._client = bare
        with pytest.raises((WireError, ConnectionError)):
            await reach(outsider, address)
        assert (server.opened, server.messages) == ([], [])
        # and the listener goes on
        await reach(identity("ingress", "i2", node), address)


@pytest.mark.parametrize("who", ["another authority", "expired", "plain"])
async def test_a_server_that_is_no_member_is_not_believed(
    authority: Authority, node: Path, tmp_path: Path, who: str
) -> None:
    if who == "plain":
        me = Identity("router", "r1", SECRET)
    elif who == "another authority":
        me = identity("router", "r1", Authority().member(tmp_path / "out", trusts=authority.pem()))
    else:
        me = identity("router", "r1", authority.member(tmp_path / "out", expired=True))
    async with listening(me) as (server, address):
        with pytest.raises(ConnectionError, match="no address answers"):
            await reach(identity("ingress", "i1", node), address)
        assert server.opened == []


async def test_a_member_still_has_to_know_the_secret(node: Path) -> None:
    async with listening(identity("router", "r1", node)) as (server, address):
        with pytest.raises(WireError):
            await reach(Identity("ingress", "i1", b"another", tls=WireTls(node)), address)
        assert server.opened == []


async def test_sockets_inside_a_node_stay_plain(node: Path, tmp_path: Path) -> None:
    async with listening(identity("router", "r1", node), f"unix:{tmp_path}/r.sock") as (server, address):
        echo(server)
        channel = await reach(identity("ingress", "i1", node), address)
        assert channel._transport is not None
        assert channel._transport.get_extra_info("ssl_object") is None


async def test_older_tls_is_refused(node: Path) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(node / "tls.crt", node / "tls.key")
    old.load_verify_locations(node / "ca.crt")
    async with listening(identity("router", "r1", node)) as (_, address):
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, int(port), ssl=old)


# --------------------------------------------------------------------------------------------- certificates that change


async def test_a_renewed_certificate_counts_for_the_next_connection_and_those_that_stand_stay(
    authority: Authority, node: Path, tmp_path: Path
) -> None:
    me = identity("ingress", "i1", authority.member(tmp_path / "client"))
    async with listening(identity("router", "r1", node)) as (server, address):
        echo(server)
        first = await reach(me, address)
        seen_by_server = serial(server.opened[0])
        authority.member(node)
        authority.member(tmp_path / "client")
        second = await reach(me, address)
        assert serial(first) != serial(second)
        assert seen_by_server != serial(server.opened[1])
        assert first.open and not first.closed.done()


async def test_an_authority_that_was_taken_away_counts_no_more(
    authority: Authority, node: Path, tmp_path: Path
) -> None:
    new = Authority("the next one")
    both = authority.pem() + new.pem()
    old_member = identity("ingress", "old", authority.member(tmp_path / "old", trusts=both))
    new_member = identity("ingress", "new", new.member(tmp_path / "new", trusts=both))
    async with listening(identity("router", "r1", node)) as (server, address):
        echo(server)
        await reach(old_member, address)
        with pytest.raises((WireError, ConnectionError)):
            await reach(new_member, address)
        authority.member(node, trusts=both)
        await reach(old_member, address)
        await reach(new_member, address)
        new.member(node)
        with pytest.raises((WireError, ConnectionError)):
            await reach(old_member, address)
        await reach(new_member, address)
        assert [one.peer.id for one in server.opened if one.peer] == ["old", "old", "new", "new"]


async def test_files_that_cannot_be_used_change_nothing_until_they_can(
    authority: Authority, node: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    me = identity("ingress", "i1", authority.member(tmp_path / "client"))
    async with listening(identity("router", "r1", node)) as (server, address):
        echo(server)
        before = serial(await reach(me, address))
        (node / "tls.crt").write_bytes(b"half of it")
        with caplog.at_level(logging.ERROR):
            assert serial(await reach(me, address)) == before
        assert "so the last ones go on" in caplog.text and str(node) in caplog.text
        (node / "tls.key").unlink()
        assert serial(await reach(me, address)) == before
        authority.member(node)
        assert serial(await reach(me, address)) != before


@pytest.mark.parametrize("file", ["tls.crt", "tls.key", "ca.crt"])
def test_a_folder_without_good_files_is_refused_by_name(node: Path, file: str) -> None:
    (node / file).write_bytes(b"no certificate")
    with pytest.raises(OSError, match=f"{node} cannot be used"):
        WireTls(node)
    (node / file).unlink()
    with pytest.raises(OSError, match=file):
        WireTls(node)


def test_a_key_of_another_certificate_is_refused(authority: Authority, node: Path, tmp_path: Path) -> None:
    other = authority.member(tmp_path / "other")
    (node / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(OSError, match="cannot be used"):
        WireTls(node)


# ------------------------------------------------------------------------------------------- what a channel counts on


@pytest.mark.pure
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_big_frames_pass_and_a_peer_that_reads_nothing_is_noticed(
    authority: Authority, node: Path, loop: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PING_S", 0.05)

    async def run() -> None:
        async with listening(identity("router", "r1", node)) as (server, address):
            echo(server)
            me = identity("ingress", "i1", node)
            big = Cancel("x" * (20 * 2**20))
            side = Side(me)
            channel = await connect((address,), side.new, me.tls)
            channel.send(big)
            async with asyncio.timeout(60):
                while not side.messages:
                    await asyncio.sleep(0.01)
            assert side.messages == [big] and channel.open
            # a peer that lives, pings and reads nothing any more
            stuck = server.opened[0]
            monkeypatch.setattr(stuck, "lose", lambda reason: None)
            assert stuck._transport is not None
            stuck._transport.pause_reading()
            for _ in range(4):
                channel.send(big)
            async with asyncio.timeout(60):
                reason = await channel.closed
            assert "read nothing" in reason and channel.silent

    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        runner.run(run())


async def test_a_connection_that_says_nothing_holds_no_listener_up(node: Path) -> None:
    async with listening(identity("router", "r1", node)) as (server, address):
        echo(server)
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        with socket.create_connection((host, int(port))):
            await reach(identity("ingress", "i1", node), address)
        assert len(server.opened) == 1


# ------------------------------------------------------------------------------------------------- all parts use it

ROOT = Path(__file__).parents[3]


def test_every_listener_and_every_connection_of_the_application_passes_its_certificates_on() -> None:
    bare, passed = [], 0
    for package in ("actors", "app"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text()
            if "from actors.wire.sockets import" not in text:
                continue
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("listen", "connect"):
                    given = ast.unparse(call.args[2]) if len(call.args) == 3 else ""
                    passed += given.endswith(".tls")
                    if not given.endswith(".tls"):
                        bare.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert bare == [] and passed >= 10


async def test_an_engine_of_its_own_process_takes_its_certificates_from_the_environment(node: Path) -> None:
    env = {**os.environ, "SLUICE_WIRE_SECRET": SECRET.decode(), "SLUICE_WIRE_TLS": str(node)}
    command = (sys.executable, "-m", "actors.engine.host", "--id", "e1", "--listen", TCP)
    engine = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
    try:
        assert engine.stdout is not None
        line = (await engine.stdout.readline()).removeprefix(b"ready ")
        (address,) = msgspec.json.decode(line, type=EngineInfo).addresses
        with pytest.raises((WireError, ConnectionError)):
            await reach(Identity("ingress", "plain", SECRET), address)
        me = identity("ingress", "i1", node)
        channel = await connect((address,), Side(me).new, me.tls)
        assert channel.peer is not None and channel.peer.id == "e1"
        channel.close()
    finally:
        engine.terminate()
        await engine.wait()


async def test_a_process_whose_certificates_cannot_be_used_says_so_and_ends(node: Path) -> None:
    (node / "ca.crt").unlink()
    env = {**os.environ, "SLUICE_WIRE_SECRET": SECRET.decode(), "SLUICE_WIRE_TLS": str(node)}
    command = (sys.executable, "-m", "actors.flow.host", "--node", "n", "--listen", TCP)
    ended = await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.PIPE)
    _, said = await ended.communicate()
    assert ended.returncode == 2 and b"ca.crt" in said
