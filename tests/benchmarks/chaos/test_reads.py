"""Harmed reads: the order of faults, the figures, and bytes that change in another process's memory."""

import json
import subprocess
import sys
from typing import Any

from benchmarks.chaos import memory
from benchmarks.chaos.reads import KINDS, rows, schedule

CHILD = """
import sys
import numpy as np
kept = np.zeros(2 << 20, dtype=np.uint32)
kept[::1024] = 1  # all pages are there
print(kept.ctypes.data, flush=True)
for line in sys.stdin:
    first, count, value = map(int, line.split())
    if count:
        kept[first : first + count] = value
    print(np.flatnonzero(kept[1::1024]).size, int(np.count_nonzero(kept == value)), flush=True)
"""


def test_every_round_has_all_faults_in_an_order_by_the_seed() -> None:
    rounds = [schedule(1, number) for number in range(3)]
    assert all(sorted(kinds) == sorted(KINDS) for kinds in rounds)
    assert len({tuple(kinds) for kinds in rounds}) == 3
    assert rounds[0] == schedule(1, 0) != schedule(2, 0)


def test_rows_judge_answers_and_what_is_left() -> None:
    def fault(kind: str, **more: Any) -> dict[str, Any]:
        plain = {"kind": kind, "first": "", "tries": 1, "right": True, "recovery_s": 2.0, "left": ""}
        return plain | more

    good = {"faults": [fault("cut"), fault("cut", recovery_s=7.0), fault("reader", first="engine_lost")]}
    found = {row.name: row for row in rows(good)}
    assert found["reads harmed"].ours == 3
    assert found["of them without a right answer"].met
    assert found["of them after which something was left"].met
    assert found["cut: went on at the first try"].ours == 2
    assert found["reader: went on at the first try"].ours == 0
    assert found["cut: longest from the fault to the first token"].ours == 7.0

    bad = {"faults": [fault("cut", right=False, recovery_s=None), fault("agent", left="decode-0: 1 leases")]}
    found = {row.name: row for row in rows(bad)}
    assert not found["of them without a right answer"].met
    assert not found["of them after which something was left"].met
    assert "cut: longest from the fault to the first token" not in found


def test_bytes_change_where_another_process_has_written() -> None:
    """Two mebibytes are written of eight; one byte in their middle changes, and nothing else."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def tell(*words: int) -> list[int]:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(" ".join(map(str, words)) + "\n")
        child.stdin.flush()
        return json.loads(f"[{child.stdout.readline().replace(' ', ',')}]")

    try:
        address = int(child.stdout.readline())
        before = memory.pages(child.pid)
        assert memory.written(before, before) == []
        count = 2 * 2**20 // 4
        assert tell(2**18, count, 7)[1] == count
        (row,) = memory.written(before, memory.pages(child.pid))
        # whole pages, of which the first and the last are written in part
        assert address + 2**20 - memory.PAGE_BYTES < row[0] <= address + 2**20
        assert abs(row[1] - 2 * 2**20) <= memory.PAGE_BYTES
        assert memory.flip(child.pid, [row]) == 1
        assert tell(0, 0, 7)[1] == count - 1
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
