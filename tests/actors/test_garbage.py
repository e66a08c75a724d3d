"""The garbage collector of a process that serves: in a process of its own, because its settings are the process's."""

import subprocess
import sys

PROGRAM = """
import gc
from actors import garbage

class Node: pass

loaded = Node()
loaded.itself = loaded
garbage.settle()
assert gc.get_freeze_count() > 0
assert all(kept is not loaded for kept in gc.get_objects())
before = gc.get_stats()[0]["collections"]
living = [[] for _ in range(garbage.NET_OBJECTS // 2)]
assert gc.get_stats()[0]["collections"] == before
for _ in range(3 * garbage.NET_OBJECTS):
    lost = Node()
    lost.itself = lost
    del lost
assert gc.get_stats()[0]["collections"] > before, "cycles must still be found"
assert sum(isinstance(kept, Node) for kept in gc.get_objects()) <= garbage.NET_OBJECTS
"""


def test_what_is_loaded_is_left_alone_and_later_cycles_are_found() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
