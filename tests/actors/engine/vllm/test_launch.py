"""Ports of NIXL's side channel: kept until the engine listens, and a taken one is said instead of waited for."""

import socket
import threading
from pathlib import Path

import pytest
import zmq

from actors.engine.vllm.launch import reserve_ports

HOST = "127.0.0.1"


def test_reserved_ports_are_nobody_else_s_but_the_side_channel_can_listen_there() -> None:
    port, held = reserve_ports(HOST, 3)
    try:
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert port + 2 < first_given
        for taken in range(port, port + 3):
            with socket.socket() as other, pytest.raises(OSError):
                other.bind((HOST, taken))
            with zmq.Context() as context, context.socket(zmq.ROUTER) as channel:
                channel.bind(f"tcp://{HOST}:{taken}")
    finally:
        for one in held:
            one.close()
    with socket.socket() as other:
        other.bind((HOST, port))


def test_a_side_channel_s_port_that_is_taken_ends_the_start_with_a_hint() -> None:
    from actors.engine.vllm.connector.scheduler import SluiceScheduler

    scheduler = SluiceScheduler.__new__(SluiceScheduler)  # what is tested needs no engine
    scheduler._listen_error = None
    ready = threading.Event()
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        scheduler._nixl_handshake_listener({}, ready, threading.Event(), HOST, port)
    assert ready.is_set()
    assert "in use" in str(scheduler._listen_error)
