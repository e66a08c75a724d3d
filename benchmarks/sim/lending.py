"""Prefixes that one simulated engine lends another (MFS stage 1). The live rules are in `actors.engine.sim.prefix`.

    lender      computes the prefix and one token more, and holds it under a lease
    borrower    asks for the read and gets a grant, reads what it lacks, then queues the prompt

The life of the request decides (`policies.request.life`, LENDING); whatever goes wrong here, the prompt is computed. A
read that has begun goes on to its end, even if its request has gone, because the blocks are being written.

Deviation: a lender that fails ends its reads at once, and the message of that comes at the same moment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.sim.engine import Worker
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.pull import Transfer
from benchmarks.sim.records import RequestRecord
from policies.engine_model.blocks import BlockError
from policies.engine_model.borrowing import Borrowed, borrow, give_up, keep
from policies.engine_model.scheduler import Sequence
from policies.request import events as life_events
from policies.request.terms import Terms

StartFetch = Callable[["Loan", Worker, int, Callable[[], None]], Transfer]
"""Starts to move a number of bytes of a loan to a worker; the last argument is called when they have arrived."""


class Borrower(Protocol):
    """The request to which a prefix is lent."""

    attempt_id: str
    hashes: tuple[int, ...]
    terms: Terms
    record: RequestRecord
    loan: "Loan | None"
    unfit: life_events.EngineFailed | None

    def told_by_engine(self, event: life_events.Event) -> None:
        """Takes the report of an engine, once the message that follows it has reached another engine."""

    def report_unfit(self) -> None:
        """Handles `unfit`, if it is set."""


class Host(Protocol):
    """The ingress, as far as loans need it."""

    kernel: Kernel
    workers: dict[str, Worker]

    def expire(self, worker: Worker) -> None:
        """Ends the leases of a worker whose time is over."""


@dataclass(slots=True, eq=False)
class Read:
    """The read of a lent prefix into `reader`. `queue` queues the prompt afterwards. `moving` is set once bytes are on
    their way.
    """

    reader: Worker
    borrowed: Borrowed
    n_bytes: int
    queue: Callable[[], None]
    moving: Transfer | None = None


@dataclass(slots=True, eq=False)
class Loan:
    """A prefix that `lender` lends `request`, of which it is the `loan` until it is given up or was read.

    `seq` computes it, and once it is computed the lease `key` holds it. It is the owner of its `seq`.
    """

    request: Borrower
    lender: Worker
    tokens: int
    seq: Sequence
    key: str | None = None
    read: Read | None = None


@dataclass(slots=True)
class LoanStats:
    """Totals of a run. `asked` counts the loans, and `reads` the prefixes that arrived, with their bytes. `failed` are
    reads that could not begin or broke off; what was cached meanwhile is neither.
    """

    asked: int = 0
    reads: int = 0
    read_bytes: int = 0
    failed: int = 0


class Loans:
    """All loans of a simulation. `start_fetch` moves their bytes."""

    def __init__(self, ingress: Host, start_fetch: StartFetch, ask_and_grant_s: float, hop_s: float) -> None:
        self._ingress, self._start_fetch = ingress, start_fetch
        self._ask_and_grant_s, self._hop_s = ask_and_grant_s, hop_s
        self.stats = LoanStats()

    def lend(self, request: Borrower, order: life_events.Lend) -> None:
        """Has the engine that `order` names compute the prefix. A prefix that it can never hold is a failure, which
        follows once the life has noted the order.
        """
        lender = self._ingress.workers[order.engine_id]
        size = lender.pool.block_size_tokens
        hashes = request.hashes[: order.tokens // size] if lender.spec.prefix_cache else ()
        seq = Sequence(order.tokens + 1, 0, hashes, request.terms.priority, True)
        loan = seq.owner = Loan(request, lender, order.tokens, seq)
        self.stats.asked += 1
        try:
            lender.add(seq)
        except BlockError as error:
            request.unfit = life_events.EngineFailed(lender.name, "prefill", "bad_request", str(error), False)
        else:
            request.loan = loan

    def stands(self, loan: Loan) -> None:
        """Leases the KV of a prefix that has been computed, and tells the request."""
        ingress, request, lender, seq = self._ingress, loan.request, loan.lender, loan.seq
        assert seq.allocation is not None
        if request.loan is not loan:
            lender.pool.release(seq.allocation)
            return
        now_s, lease_s = ingress.kernel.now_s, lender.spec.lease_s
        loan.key = f"{request.attempt_id}/lent/{now_s}"
        lender.leases.grant(loan.key, seq.allocation, seq.prompt_tokens, now_s)
        ingress.kernel.after(lease_s, lambda: ingress.expire(lender))
        kv_bytes = lender.spec.profile.kv_bytes(seq.prompt_tokens)
        done = life_events.PrefillDone(lease_s, kv_bytes, seq.cached_tokens, engine_id=lender.name)
        request.told_by_engine(done)

    def read(self, loan: Loan, reader: Worker, prompt: Sequence, queue: Callable[[], None]) -> None:
        """Reads what `reader` lacks of the prefix of `prompt`, and calls `queue` once nothing is on its way any more,
        which may be at once.
        """
        lender, key = loan.lender, loan.key
        assert key is not None
        borrowed = borrow(reader.pool, prompt.hashes, loan.seq.prompt_tokens)
        if borrowed is None:
            self._ingress.kernel.after(self._hop_s, lambda: lender.free(key))
            queue()
            return
        kv_bytes = lender.spec.profile.kv_bytes(loan.seq.prompt_tokens)
        n_bytes = kv_bytes * borrowed.tokens // loan.seq.prompt_tokens
        loan.read = Read(reader, borrowed, n_bytes, queue)
        self._ingress.kernel.after(self._ask_and_grant_s, lambda: self._granted(loan))

    def give_up(self, loan: Loan) -> None:
        """Has the lender end its work for a loan, or free what it holds; a read under way ends first."""
        loan.request.loan = None
        if loan.key is None:
            loan.lender.remove(loan.seq)
        else:
            loan.lender.free(loan.key)

    def lender_failed(self, loan: Loan) -> None:
        """Ends a loan whose lender has failed. What is read of it does not arrive, and the prompt is computed."""
        read = loan.read
        self.give_up(loan)
        if read is not None and read.moving is not None and loan.key is not None:
            read.moving.cancel()
            loan.lender.read_ended(loan.key)
            self._broke_off(loan, read)

    def _granted(self, loan: Loan) -> None:
        """Begins to move the bytes of a read, unless the lease has ended meanwhile."""
        read, key = loan.read, loan.key
        assert read is not None
        assert key is not None
        if loan.lender.leases.begin_read(key) is None:
            self._broke_off(loan, read)
        else:
            read.moving = self._start_fetch(loan, read.reader, read.n_bytes, lambda: self._arrived(loan))

    def _arrived(self, loan: Loan) -> None:
        read, lender, key = loan.read, loan.lender, loan.key
        assert read is not None
        assert key is not None
        keep(read.reader.pool, read.borrowed)
        self._ingress.kernel.after(self._hop_s, lambda: lender.read_ended(key))
        self.stats.reads += 1
        self.stats.read_bytes += read.n_bytes
        loan.request.record.lent_tokens = read.borrowed.tokens
        self._go_on(loan, read)

    def _broke_off(self, loan: Loan, read: Read) -> None:
        give_up(read.reader.pool, read.borrowed)
        self.stats.failed += 1
        self._go_on(loan, read)

    def _go_on(self, loan: Loan, read: Read) -> None:
        """Has the prompt computed, if its request is still there."""
        loan.read = None
        read.queue()
        read.reader.group.kick()
        loan.request.report_unfit()
