"""Many clients that leave: opens streaming requests over raw sockets and cuts them at a chosen stage of their life.

The stage is read from the server (`/sluice/status` counts requests by stage), so a disconnect is counted only where it
really happened. Loads are such that a stage lasts for seconds, or until the cut; loops are bounded in count and time.
"""

import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.live.serving import App, pressure

STATE_OF = {
    "queued": "queued",
    "prefill": "prefilling",
    "pool": "pooled",
    "transfer": "transferring",
    "decode": "decoding",
}
MAX_ROUNDS = 40
ROUND_S = 20.0
ALL_ROUNDS_S = 600.0


def prompt(words: int, salt: str) -> str:
    """A prompt of about `words` words that shares no prefix with those of another salt."""
    rng = random.Random(salt)
    return (
        salt
        + " "
        + " ".join(rng.choice(("river", "stone", "cloud", "seven", "walks", "under")) for _ in range(words))
    )


class Crowd:
    """Open streaming requests against one app. `leave` cuts all of them without a word, as a dying client does."""

    def __init__(self, app: App) -> None:
        host, port = app.url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._sockets: list[socket.socket] = []

    def send(self, count: int, words: int, max_tokens: int, salt: str) -> None:
        """Sends `count` requests; their answers are never read."""
        for n in range(count):
            body = json.dumps(
                {
                    "prompt": prompt(words, f"{salt}-{n}"),
                    "max_tokens": max_tokens,
                    "ignore_eos": True,
                    "stream": True,
                    "temperature": 0,
                }
            ).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            ).encode()
            s = socket.create_connection(self._address, timeout=60)
            s.sendall(head + body)
            self._sockets.append(s)

    def leave(self, count: int | None = None) -> None:
        """Cuts the first `count` connections, or all."""
        gone, self._sockets = self._sockets[:count], [] if count is None else self._sockets[count:]
        for s in gone:
            s.close()


def jobs(status: dict[str, Any], stage: str) -> int:
    """How many requests of the replica are in a stage."""
    count: int = status["replica"]["stages"][STATE_OF[stage]]
    return count


def leave_at(app: App, stage: str, need: int, load: Callable[[Crowd, int], None], want: int = 1) -> int:
    """Rounds of `load`, each cut when at least `want` requests are in `stage`, until `need` were cut there in all.

    Returns the count; fails with what each round saw when a stage is not reached within a bounded number of rounds.
    """
    cut = 0
    rounds: list[str] = []
    end_s = time.monotonic() + ALL_ROUNDS_S
    while len(rounds) < MAX_ROUNDS and time.monotonic() < end_s:
        crowd = Crowd(app)
        load(crowd, len(rounds))
        began_s = time.monotonic()
        seen = most = polls = 0
        while time.monotonic() < began_s + ROUND_S:
            seen = jobs(app.status(), stage)
            polls, most = polls + 1, max(most, seen)
            if seen >= min(want, need - cut):
                break
        crowd.leave()
        cut += seen
        if cut >= need:
            return cut
        rounds.append(f"{most} at most, {seen} cut, {polls} polls in {time.monotonic() - began_s:.1f} s")
    raise AssertionError(
        f"{stage}: only {cut} of {need} disconnects hit the stage; {pressure()}; rounds:\n  "
        + "\n  ".join(rounds)
    )
