"""A line to a silent agent over TCP: its thread waits, and does not turn in a loop."""

import socket
import time

from actors.flow.line import Line, Peer


def test_a_line_to_an_agent_that_accepts_and_says_nothing_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(Peer(f"tcp:127.0.0.1:{server.getsockname()[1]}", "w"))
        line.pump(0.0, 0.0)
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(20.0)
            line.pump(0.0, 0.0)
            # the agent has our Hello, so the socket is connected
            assert accepted.recv(1)
            line.pump(0.0, 0.0)
            before_s = time.monotonic()
            line.wait(0.2)
            assert time.monotonic() - before_s >= 0.19
            line.close()
