"""Folders of internal sockets: one into which others may write is refused, by every part that puts a socket there."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from actors.engine.cores import claim
from actors.flow.line import Line, Peer
from actors.private_folder import check_own, make_private
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.sockets import connect, listen
from app.drain import DrainPoint

ROUTER = Identity("router", "r1")


def channel() -> Channel:
    return Channel(ROUTER, lambda *_: None)


async def wire(folder: Path) -> None:
    (await listen(f"unix:{folder}/r.sock", channel))[0].close()


async def drain_point(folder: Path) -> None:
    async def drain(seconds: float) -> None: ...

    point = DrainPoint(str(folder), "e1", drain)
    await point.start()
    await point.stop()


async def cores(folder: Path) -> None:
    claim(((0,),), 0, folder / "cores").release()


PARTS: list[Callable[[Path], Awaitable[None]]] = [wire, drain_point, cores]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
async def test_a_folder_into_which_others_may_write_gets_no_socket(
    tmp_path: Path, part: Callable[[Path], Awaitable[None]], mode: int
) -> None:
    # the claims to cores lie one folder deeper
    folder = tmp_path / ("cores" if part is cores else "sockets")
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="other users may write"):
        await part(tmp_path if part is cores else folder)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("part", PARTS)
async def test_a_folder_that_is_missing_is_made_for_this_user_alone(
    tmp_path: Path, part: Callable[[Path], Awaitable[None]]
) -> None:
    umask = os.umask(0)
    try:
        await part(tmp_path / "a" / "sockets")
    finally:
        os.umask(umask)
    assert (tmp_path / "a" / "sockets").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_could_put_another_one_in_place_of_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(PermissionError, match=f"everybody may write into {above}"):
        make_private(above / "sockets")
    # as the folder for temporary files has it
    above.chmod(0o1777)
    make_private(above / "sockets")
    # below the folder that is replaced, too
    above.chmod(0o777)
    (above / "sockets" / "deeper").mkdir(mode=0o700)
    with pytest.raises(PermissionError, match="everybody may write"):
        check_own(above / "sockets" / "deeper")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_folder_inside_another_users_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 1234, 1234)
    theirs.chmod(0o1777)
    with pytest.raises(PermissionError, match="user 1234 could put another folder in place"):
        make_private(theirs / "sockets")


# ------------------------------------------------------------------------------------------------- the user at the end


async def test_a_process_of_another_user_gets_no_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Channel] = []
    address = f"unix:{tmp_path}/r.sock"
    server, _ = await listen(address, lambda: Channel(ROUTER, lambda *_: None, opened.append))
    me = Identity("ingress", "i1")
    there = await connect((address,), lambda: Channel(me, lambda *_: None))
    assert there.open
    # what the kernel says of the peer does not change, so this process now runs as somebody else
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WireError, match=f"the peer is a process of user {os.getuid()}"):
        await connect((address,), lambda: Channel(me, lambda *_: None))
    line = Line(Peer(address, "worker"))
    assert line.pump(0.0, 0.0) == [] and f"is a socket of user {os.getuid()}" in line.reason
    monkeypatch.undo()
    assert len(opened) == 1
    there.abort("the test ends")
    server.close()
    await asyncio.sleep(0)
