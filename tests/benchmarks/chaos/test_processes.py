"""Processes are found by their titles, stopped, starved and known as gone, on real ones."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from benchmarks.chaos.processes import SHORT_BYTES, Member, by_part, measure, members

PROGRAM = """
import sys
print("up", flush=True)
sys.stdin.readline()
x = bytearray(64 * 2**20)
print("had it", flush=True)
sys.stdin.readline()
"""


@contextmanager
def child(title: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [title, "-c", PROGRAM], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_members_are_found_by_title_and_followed_to_their_end() -> None:
    with child("ray::ServeReplica:sluice:Router") as router, child("ray::ServeController.x") as controller:
        until(lambda: {router.pid, controller.pid} <= set(members(os.getpid())))
        found = members(os.getpid())
        assert {part: [m.pid for m in those] for part, those in by_part(found.values()).items()} == {
            "router": [router.pid],
            "controller": [controller.pid],
        }
        member = found[router.pid]
        member.signal(signal.SIGSTOP)
        until(lambda: not member.running())
        assert member.alive()
        member.signal(signal.SIGCONT)
        until(member.running)
        tracks: dict[tuple[int, float], object] = {}
        measure(found.values(), 0.0, tracks)  # type: ignore[arg-type]
        assert len(tracks) == 2
        member.signal(signal.SIGKILL)
        until(lambda: not member.alive())
        assert router.pid not in members(os.getpid(), found)
        assert not member.signal(signal.SIGCONT)


def test_the_coordinator_of_flows_is_a_part_with_ray_and_without() -> None:
    with (
        child("ray::ServeReplica:sluice:FlowCoordinatorActor") as bare,
        child("ray::CoordinatorActor") as ray,
    ):
        until(lambda: {bare.pid, ray.pid} <= set(members(os.getpid())))
        assert {member.part for member in members(os.getpid()).values()} == {"coordinator"}


def test_a_starved_process_gets_no_memory_until_it_is_fed() -> None:
    for fed in (False, True):
        with child("ray::ServeReplica:sluice:Router") as process:
            until(lambda pid=process.pid: pid in members(os.getpid()))
            # it has started, and its heap does not grow any more when it reads
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            until(lambda pid=process.pid: members(os.getpid())[pid].process().status() == "sleeping")  # type: ignore[union-attr]
            member = members(os.getpid())[process.pid]
            limit, taken_bytes = member.starve(hoards=False), member.taken_bytes()
            assert limit is not None and taken_bytes is not None
            assert limit < taken_bytes
            if fed:
                member.feed()
            out, err = process.communicate(b"go\ngo\n", timeout=60)
            assert (b"had it" in out, b"MemoryError" in err) == (fed, not fed)


HOARDER = """
import os
from actors.engine.sim.faults import hoarded

# without memory only what is there already can be used
word, none, had = bytearray(1), b"none\\n", b"had it\\n"
words, hoard = [word], None
while os.readv(0, words):
    if word == b"h":
        hoard = hoarded()
    elif word == b"g":
        hoard = None
    try:
        bytearray(2**20)
        os.write(1, had)
    except MemoryError:
        os.write(1, none)
"""


def test_a_hoarding_process_has_taken_all_that_it_may_have() -> None:
    command = [sys.executable, "-c", HOARDER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def tell(word: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(word)
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        assert tell("?") == "had it"
        member = Member("decode", process.pid, psutil.Process(process.pid).create_time(), "x", "x")
        limit = member.starve(hoards=True)
        assert limit is not None
        assert (member.taken_bytes() or 0) <= limit - SHORT_BYTES
        assert tell("h") == "none"
        assert (member.taken_bytes() or 0) > limit - SHORT_BYTES
        assert tell("g") == "had it"
    finally:
        process.kill()
        process.communicate()
