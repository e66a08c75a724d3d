"""Background work gives way to other work, and so do the processes that it starts, until they say otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CODE = """
import json, os, subprocess, sys, threading
from actors import background
go = threading.Event()
def policies():
    return sorted(os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task"))
CHILD = (
    "import os; from actors import background; before = os.sched_getscheduler(0); background.end();"
    "print(before, os.sched_getscheduler(0))"
)
with background.work():
    thread = threading.Thread(target=go.wait)
    thread.start()
    inside = policies()
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True).stdout.split()
after = policies()
go.set()
print(json.dumps([inside, after, child]))
"""


def test_all_threads_get_their_share_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    idle, other = os.SCHED_IDLE, os.SCHED_OTHER
    assert json.loads(done.stdout) == [[idle, idle], [other, other], [str(idle), str(other)]]
