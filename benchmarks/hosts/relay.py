"""Carries Ethernet frames between two network devices, late, not all of them, or in one direction only.

    relay.py HOST_DEVICE NET_DEVICE SEED

The kernel of this machine has no netem, which would do this. The devices must not be ports of a bridge, and their
peers must not merge packets (`network.plain_frames`). Each line of standard input is a JSON object with the keys
`to_host` and `from_host`, each `{"delay_s": ..., "loss": ...}`; the answer is the number of frames that each direction
has carried and dropped so far. A loss of 1 cuts a direction. The program ends with its standard input.
"""

import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

ETH_P_ALL = 0x0003  # linux/if_ether.h
PACKET_OUTGOING = 4  # linux/if_packet.h
MAX_FRAME_BYTES = 65536


@dataclass
class Direction:
    """One direction: frames from `source` to `target`, and those that are under way with the time at which they
    arrive.
    """

    source: socket.socket
    target: socket.socket
    delay_s: float = 0.0
    loss: float = 0.0
    carried: int = 0
    dropped: int = 0
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, draw: random.Random) -> None:
        """Takes the frames that wait at the source."""
        while True:
            try:
                frame, address = self.source.recvfrom(MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # the device is down: its frames are lost
                return
            if address[2] == PACKET_OUTGOING:
                continue
            if self.loss and draw.random() < self.loss:
                self.dropped += 1
                continue
            self.under_way.append((time.monotonic() + self.delay_s, frame))

    def deliver(self) -> None:
        """Sends the frames whose time has come."""
        now_s = time.monotonic()
        while self.under_way and self.under_way[0][0] <= now_s:
            _, frame = self.under_way.popleft()
            try:
                self.target.send(frame)
                self.carried += 1
            except OSError:
                # the device is down or its queue is full; a network drops such a frame, too
                self.dropped += 1


def packet_socket(device: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.bind((device, 0))
    opened.setblocking(False)
    return opened


def main(host_device: str, net_device: str, seed: int) -> None:
    host, net = packet_socket(host_device), packet_socket(net_device)
    directions = {"to_host": Direction(net, host), "from_host": Direction(host, net)}
    draw = random.Random(seed)
    control = b""
    print("relays", flush=True)
    while True:
        due_s = [d.under_way[0][0] for d in directions.values() if d.under_way]
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        readable, _, _ = select.select([host, net, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            piece = os.read(sys.stdin.fileno(), MAX_FRAME_BYTES)
            if not piece:
                return
            control += piece
            *lines, control = control.split(b"\n")
            for line in lines:
                for name, settings in json.loads(line).items():
                    directions[name].delay_s = settings["delay_s"]
                    directions[name].loss = settings["loss"]
                print(json.dumps({n: [d.carried, d.dropped] for n, d in directions.items()}), flush=True)
        for direction in directions.values():
            direction.take(draw)
            direction.deliver()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
