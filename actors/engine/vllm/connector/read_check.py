"""The check of a read whose last chunk has ended: its lease still holds, and, if asked for, its bytes are the lender's.

The steps of one check, each a few microseconds unless the lender is slow:

    lease      the lease's entry is read from the lender's table; it must still have the lease's generation
    checksums  (with integrity) once the lender knows them, its checksums of what was read are fetched
    compare    and compared with those of the blocks here

Each check ends with the reason why what was read must not be used, or with an empty reason. `ReadChecks` waits for no
lender: the thread that reads polls it.
"""

import concurrent.futures
import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.engine.vllm.connector.chunked_read import ChunkedRead
from actors.engine.vllm.connector.integrity import Fetch, SumsAt, SumsTable, chosen
from actors.engine.vllm.connector.lease_table import (
    GenerationProbe,
    Probe,
    allowed_after,
)

GIVEN_BACK = "given back before it was read"
UNREADABLE = "the lender's lease table could not be read"
CORRUPT = "checksums differ"

_AGAIN_S = 0.002
"""Seconds between two looks at a lease whose checksums are still being computed."""


@dataclass(slots=True)
class _Check:
    read: ChunkedRead
    begun_s: float
    probe: Probe | None = None
    again_s: float = 0.0
    fetch: Fetch | None = None
    indices: Any = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    differ: "concurrent.futures.Future[int] | None" = None

    @property
    def allowed_s(self) -> float:
        """Seconds since the check began in which the checksums must have come (`lease_table.PATIENCE`)."""
        return allowed_after(self.read.busy_s)


class ReadChecks:
    """All checks that are under way. `sums` is this worker's own table of checksums; without it none are compared."""

    def __init__(self, agent: Any, backends: list[str], probe: GenerationProbe) -> None:
        self._agent = agent
        self._backends = backends
        self._probe = probe
        self.sums: SumsTable | None = None
        self._checks: list[_Check] = []
        self._late: list[Fetch] = []

    def __len__(self) -> int:
        return len(self._checks)

    @property
    def overdue(self) -> bool:
        """Whether reads that were given up have not ended."""
        return bool(self._late) or self._probe.overdue > 0

    def heard(self, agent: str, now_s: float) -> None:
        """Notes that bytes have come from a lender, so that its table is waited for."""
        self._probe.heard(agent, now_s)

    def begin(self, read: ChunkedRead, now_s: float) -> None:
        """Begins to check a read that has ended well."""
        self._checks.append(_Check(read, now_s))

    def poll(self, now_s: float) -> list[tuple[ChunkedRead, str]]:
        """Goes on with all checks, and returns the reads whose checks have ended, with the reason for a refusal."""
        self._probe.sweep()
        self._late = [fetch for fetch in self._late if not _closed(fetch)]
        ended = []
        for check in list(self._checks):
            try:
                reason = self._step(check, now_s)
            except Exception as error:
                reason = f"{UNREADABLE}: {error}"
            if reason is None and check.read.aborted:
                reason = ""
            if reason is not None:
                self._checks.remove(check)
                self._leave(check)
                ended.append((check.read, reason))
        return ended

    def _step(self, check: _Check, now_s: float) -> str | None:
        """Returns None if the check goes on, or its result."""
        lease = check.read.terms.lease
        if lease is None:
            return ""
        if check.differ is not None:
            if not check.differ.done():
                return None
            wrong = check.differ.result()
            return f"{CORRUPT} in {wrong} of {len(check.indices)} descriptors" if wrong else ""
        if check.fetch is not None:
            self._compare(check, check.fetch, now_s)
            return None
        if check.probe is None:
            if now_s >= check.again_s:
                source = check.read.terms.source
                check.probe = self._probe.post(
                    source, lease.table, lease.slot, lease.generation, now_s, check.read.busy_s
                )
            return None
        held = self._probe.poll(check.probe, now_s)
        if held is None:
            return None
        if not held:
            return GIVEN_BACK
        theirs = lease.sums
        if self.sums is None or theirs is None or check.read.remote.extent != (theirs.count, theirs.bytes):
            return ""
        if check.probe.summed:
            self._fetch(check, self.sums, theirs, lease.generation)
        else:
            self._look_again(check, now_s)
        return None

    def _look_again(self, check: _Check, now_s: float) -> None:
        if now_s - check.begun_s > check.allowed_s:
            raise TimeoutError(f"the lender's checksums were not ready in {check.allowed_s:.1f} s")
        check.probe, check.again_s = None, now_s + _AGAIN_S

    def _fetch(self, check: _Check, ours: SumsTable, theirs: SumsAt, generation: int) -> None:
        """Begins to read the checksums of what was read. If none was chosen, the check has ended."""
        read = check.read
        share = max(theirs.share, ours.at.share)
        check.indices = np.flatnonzero(chosen(read.remote.asked, generation, share))
        if len(check.indices):
            remote = read.remote.asked[check.indices]
            check.fetch = Fetch(self._agent, self._backends, read.terms.source.agent, theirs, remote)
        else:
            check.differ = concurrent.futures.Future()
            check.differ.set_result(0)

    def _compare(self, check: _Check, fetch: Fetch, now_s: float) -> None:
        """Begins to compare, once the checksums are there. Raises TimeoutError if they take too long."""
        expected = fetch.poll()
        if expected is not None and self.sums is not None:
            local = check.read.local
            check.differ = self.sums.compare(local.blocks, local.asked[check.indices], expected)
        elif now_s - check.begun_s > check.allowed_s:
            raise TimeoutError(f"the lender's checksums were not read in {check.allowed_s:.1f} s")

    def _leave(self, check: _Check) -> None:
        if check.probe is not None:
            self._probe.give_up(check.probe)
        if check.fetch is not None and not _closed(check.fetch):
            self._late.append(check.fetch)


def _closed(fetch: Fetch) -> bool:
    """Whether the fetch holds nothing any longer. After an error of NIXL's it is tried again: the memory of a read that
    NIXL has not released may still be written.
    """
    with contextlib.suppress(Exception):
        return fetch.close()
    return False
