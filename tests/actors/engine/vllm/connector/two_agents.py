"""A borrower whose lender is stopped or killed in the middle of a read: `python two_agents.py stop kill`.

Both are processes of their own, forked from this one, whose imports take more time than a read. UCX moves data over TCP
(the environment says so), because between processes of one node it would copy a stopped process's memory without its
help. Prints a JSON object of what was seen for each word.
"""

import base64
import json
import os
import signal
import sys
import time
from typing import Any

import nixl._api as nixl
import numpy as np

from actors.engine.nixl_agents import CPU_DELAY_US
from actors.engine.vllm.connector.lease_table import GenerationProbe, GenerationTable, Source
from actors.engine.vllm.connector.transfer import tuned_agents

PATIENCE_S = 60.0
SLOT, GENERATION = 5, 77
COUNT = 1 << 21


def agent(name: str) -> Any:
    with tuned_agents(CPU_DELAY_US):
        return nixl.nixl_agent(name, nixl.nixl_agent_config(num_threads=1, capture_telemetry=True))


def lend(tell: int, borrower: int) -> None:
    """Tells one end of a pipe what can be read, and ends with the process at the other end of another one."""
    lender = agent("lender")
    table = GenerationTable(lender, ["UCX"])
    table.open("r", SLOT, GENERATION)
    data = np.arange(COUNT, dtype=np.uint64)
    kept = lender.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
    facts = [table.address, data.ctypes.data, base64.b64encode(lender.get_agent_metadata()).decode()]
    os.write(tell, json.dumps(facts).encode() + b"\n")
    os.read(borrower, 1)
    del kept


def borrow(how: str) -> dict[str, Any]:
    told, tell = os.pipe()
    borrower, here = os.pipe()
    lender = os.fork()
    if lender == 0:
        os.close(here)
        lend(tell, borrower)
        os._exit(0)
    os.close(tell)
    try:
        with os.fdopen(told) as facts:
            table, address, metadata = json.loads(facts.readline())
        return disturbed(how, lender, table, address, base64.b64decode(metadata))
    finally:
        os.kill(lender, signal.SIGKILL)
        os.waitpid(lender, 0)


def disturbed(how: str, pid: int, table: int, address: int, metadata: bytes) -> dict[str, Any]:
    borrower = agent("borrower")
    copy = np.zeros(COUNT, dtype=np.uint64)
    kept = borrower.register_memory([(copy.ctypes.data, copy.nbytes, 0, "")], "DRAM")
    probe = GenerationProbe(borrower, ["UCX"], timeout_s=1.0)
    source = Source(borrower.add_remote_agent(metadata), (0, 0))
    first = probe.post(source, table, SLOT, GENERATION, time.perf_counter())
    while probe.poll(first, first.posted_s) is None:
        time.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    read = borrower.initialize_xfer(
        "READ",
        borrower.get_xfer_descs([(copy.ctypes.data, copy.nbytes, 0)], "DRAM"),
        borrower.get_xfer_descs([(address, copy.nbytes, 0)], "DRAM"),
        source.agent,
    )
    borrower.transfer(read)
    second = probe.post(source, table, SLOT, GENERATION, time.perf_counter())
    timed_out = refused = False
    while not timed_out:
        try:
            probe.poll(second, time.perf_counter())
        except TimeoutError:
            timed_out = True
    stuck = borrower.check_xfer_state(read)
    try:
        probe.post(source, table, SLOT, GENERATION, time.perf_counter())
    except TimeoutError:
        refused = True
    overdue = probe.overdue
    os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGCONT)
    end_s = time.monotonic() + PATIENCE_S
    state = "PROC"
    while (state == "PROC" or probe.overdue) and time.monotonic() < end_s:
        time.sleep(0.01)
        probe.sweep()
        if state == "PROC":
            try:
                state = borrower.check_xfer_state(read)
            except nixl.nixlBind.nixlBackendError as error:
                state = type(error).__name__
            except Exception as error:
                state = type(error).__name__
    del kept
    return {
        "first": first.valid, "stuck": stuck, "timed_out": timed_out, "refused": refused, "overdue": overdue,
        "state": state, "overdue_at_end": probe.overdue, "second": second.valid,
        "copied": bool((copy == np.arange(COUNT, dtype=np.uint64)).all()),
    }  # fmt: skip


if __name__ == "__main__":
    for word in sys.argv[1:]:
        # NIXL's threads do not survive a fork: here there are none yet.
        child = os.fork()
        if child == 0:
            print("SEEN " + json.dumps({word: borrow(word)}), flush=True)
            # NIXL's threads may wait for a peer that is gone.
            os._exit(0)
        os.waitpid(child, 0)
