"""A listener whose process may open no more files: it sheds connections without a flood, and serves on afterwards."""

import json
import subprocess
import sys

import pytest

from app.ingress.http.listener import ACCEPTED_AT_ONCE

SCRIPT = """
import asyncio, json, os, resource, socket, ssl, sys, tempfile
from pathlib import Path
import httpx
from app.ingress.http import listener
from tests.app.ingress.rig import pair, raw, rig
from tests.app.ingress.test_tls import certificate

# as if connections to engines and open files had taken what is left for them
listener._affordable = lambda most: most

client_tls = None

async def answered(port):
    for _ in range(200):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_tls)
            writer.write(raw("GET", "/health/live", b"", "connection: close"))
            got = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            if got.startswith(b"HTTP/1.1 200"):
                return True
        except (OSError, TimeoutError):
            pass
        await asyncio.sleep(0.05)
    return False

async def main():
    global client_tls
    with tempfile.TemporaryDirectory() as folder:
        config = None
        if sys.argv[2] == "tls":
            cert, key = certificate(Path(folder))
            config = listener.ListenerConfig(port=0, tls_cert=cert, tls_key=key)
            client_tls = ssl.create_default_context(cafile=cert)
        async with rig(Path(folder), pair(Path(folder)), listener=config) as made:
            port = made.listener.port
            before = await answered(port)
            # the clients are made first: they have their files, and the listener has none left for its ends
            clients = [socket.socket() for _ in range(40)]
            for client in clients:
                client.setblocking(False)
            filler = []
            try:
                while True:
                    filler.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            for client in clients:
                try:
                    client.connect(("127.0.0.1", port))
                except BlockingIOError:
                    pass
            await asyncio.sleep(3.0)
            for client in clients:
                client.close()
            for one in filler:
                os.close(one)
            print(json.dumps({"before": before, "after": await answered(port)}))
            # what was made before still works
            url = made.url if client_tls is None else made.url.replace("http:", "https:")
            verify = client_tls or True
            async with httpx.AsyncClient(base_url=url, verify=verify, timeout=100) as client:
                answer = await client.post("/v1/chat/completions", json=made.chat())
            print(json.dumps({"status": answer.status_code}))

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_without_a_file_for_it_a_connection_is_shed(loop: str, tls: bool) -> None:
    command = [sys.executable, "-c", SCRIPT, loop, "tls" if tls else "plain"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    first, second = map(json.loads, ran.stdout.splitlines())
    assert first["before"]
    assert first["after"]
    # some tries of ACCEPTED_AT_ONCE connections each; with the queue's length of 2048 there are thousands
    assert ran.stderr.count("out of system resource") < 64 * ACCEPTED_AT_ONCE
    if tls:
        # once a second, for some 3 s and what a slow machine adds
        assert 1 <= ran.stderr.count("cannot accept connections") < 64
    assert second["status"] == 200
