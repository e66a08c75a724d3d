"""NIXL for weights: memory that is lent while a reader needs it, and reads of other engines' memory.

Each agent belongs to one thread, but may be made by another one. Importing NIXL imports PyTorch, and an agent has
threads of its own, so both happen only where weights move.
"""

import mmap
import os
import sys
import threading
import uuid
from dataclasses import dataclass
from typing import Any

import xxhash

from actors.engine.nixl_agents import CPU_DELAY_US, tuned
from actors.engine.weights.checkpoint import Bytes

_tuning = threading.Lock()
"""Held while an agent is made: the tuning changes NIXL's module."""


class PagesError(RuntimeError):
    """NIXL has failed. The message says at what."""


def digest(view: Bytes) -> bytes:
    """Returns a hash of what is in this memory (XXH3, 128 bits: it finds errors, and no forgery)."""
    # numpy lets other threads run meanwhile, so that nobody waits while pages come from disk
    view[:: mmap.PAGESIZE].max(initial=0)
    return xxhash.xxh3_128_digest(view.data)


@dataclass(eq=False, slots=True)
class Held:
    """Memory that is registered with an agent, by `count` users."""

    view: Bytes
    registered: Any
    count: int = 1

    @property
    def address(self) -> int:
        return int(self.view.ctypes.data)


class PagesAgent:
    """One NIXL agent. Raises PagesError where NIXL fails.

    What was held stays mapped until `close`. Over TCP UCX reads for others at any address of the process, registered or
    not, so a late read of a reader that was given up would end this process (SIGSEGV) if nothing were there.
    """

    def __init__(self, name: str) -> None:
        # as vLLM does before it imports NIXL, against a leak in UCX
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        try:
            from nixl import _api as api

            module: Any = sys.modules[api.nixl_agent.__module__]
            # an agent that comes again under an old name would not be known by its address
            self.name = f"{name}-weights-{uuid.uuid4().hex[:8]}"
            with _tuning, tuned(module, CPU_DELAY_US):
                self._agent: Any = api.nixl_agent(self.name, api.nixl_agent_config(backends=["UCX"]))
            self._bindings: Any = module.nixlBind
        except Exception as error:
            raise PagesError(f"no NIXL agent can be made: {error!r}") from error
        self._held: dict[tuple[int, int], Held] = {}
        self._mapped: dict[tuple[int, int], Bytes] = {}
        self._met: set[str] = set()

    # --------------------------------------------------------------------------------------------------- as a lender

    def connection(self) -> bytes:
        """Returns how others reach this agent."""
        try:
            nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [])
            return bytes(self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True))
        except Exception as error:
            raise PagesError(f"NIXL does not tell its address: {error!r}") from error

    def hold(self, view: Bytes) -> Held:
        """Registers memory until `drop`. The same memory may be held several times."""
        key = int(view.ctypes.data), len(view)
        held = self._held.get(key)
        if held is not None:
            held.count += 1
            return held
        try:
            registered = self._agent.register_memory([(*key, 0, "")], "DRAM")
        except Exception as error:
            raise PagesError(f"{len(view)} bytes cannot be registered: {error!r}") from error
        self._held[key], self._mapped[key] = Held(view, registered), view
        return self._held[key]

    def describe(self, held: Held) -> bytes:
        """Returns what a reader needs to read held memory."""
        try:
            return bytes(self._agent.get_partial_agent_metadata(held.registered))
        except Exception as error:
            raise PagesError(f"NIXL does not describe memory: {error!r}") from error

    def drop(self, held: Held) -> bool:
        """Ends one hold. Returns whether it was the last one of this memory, so that it is registered no more."""
        held.count -= 1
        if held.count:
            return False
        del self._held[held.address, len(held.view)]
        self._agent.deregister_memory(held.registered)
        return True

    @property
    def held(self) -> int:
        """Number of pieces of memory that are registered."""
        return len(self._held)

    # --------------------------------------------------------------------------------------------------- as a reader

    def meet(self, connection: bytes) -> str:
        """Returns the name of the agent that has told this."""
        try:
            name = self._agent.add_remote_agent(connection)
        except Exception as error:
            raise PagesError(f"the lender's NIXL agent is not reached: {error!r}") from error
        known = name.decode() if isinstance(name, bytes) else str(name)
        self._met.add(known)
        return known

    def learn(self, pages: bytes) -> None:
        """Takes in a description of memory (`describe`)."""
        try:
            self._agent.add_remote_agent(pages)
        except Exception as error:
            raise PagesError(f"the lender's memory is not understood: {error!r}") from error

    def read(self, name: str, address: int, into: Bytes) -> Any:
        """Begins to read as many bytes as `into` has, which must be held; returns a handle."""
        mine = self._agent.get_xfer_descs([(int(into.ctypes.data), len(into), 0)], "DRAM")
        theirs = self._agent.get_xfer_descs([(address, len(into), 0)], "DRAM")
        try:
            handle = self._agent.initialize_xfer("READ", mine, theirs, name)
        except Exception as error:
            raise PagesError(f"the read cannot be made: {error!r}") from error
        try:
            failed = self._agent.transfer(handle) == "ERR"
        except Exception as error:
            raise PagesError(f"the read cannot begin: {error!r}") from error
        if failed:
            raise PagesError("the read cannot begin")
        return handle

    def state(self, handle: Any) -> str:
        """Returns "PROC", "DONE" or "ERR"."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception:
            # NIXL raises for a peer that has gone
            return "ERR"

    def release(self, handle: Any) -> bool:
        """Releases a handle. Returns False if the read may still write."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:
            return False
        return True

    # ----------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Gives up all memory, all connections and the agent. Idempotent."""
        for held in list(self._held.values()):
            held.count = 1
            self.drop(held)
        for name in self._met:
            try:
                self._agent.remove_remote_agent(name)
            except Exception:  # noqa: S112  (a peer that has gone)
                continue
        self._met.clear()
        self._agent = None
        self._mapped.clear()
