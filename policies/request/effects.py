"""Effects of a request's life on the world: the methods that a driver implements, and the values that they take.

Effects are calls, not values in a list, because some of them return an answer (whether a message could be sent, which
engine serves), and because one is made for every token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from policies.record import record
from policies.request.events import Event, Lend, Output, PrefillDone, RouteDecode, RoutePrefill
from policies.request.stage import LoanEnd, Outcome, Task


@record
class Failure:
    """The error that a client gets for a request that failed: an HTTP status, a message, and a code for programs.

    After `retry_after_s` another try may succeed (None: not known). `param` names the field of the request at fault.
    """

    status: int
    message: str
    code: str
    retry_after_s: float | None = None
    param: str | None = None


class Blame(NamedTuple):
    """The engine that broke an attempt, the task at which it did, and the code of its failure."""

    engine_id: str
    task: Task
    code: str


class Begins(Protocol):
    """A life that has not begun (`life.Life`), as the life from which it branches off sees it."""

    def on(self, event: Event, now_s: float) -> bool:
        """Handles an event; returns whether it was accepted."""


class Effects(ABC):
    """A driver's half of `life.Life`. No effect may wait, and none may raise because a peer has gone."""

    __slots__ = ()

    # ------------------------------------------------------------------------------------------------- attempts

    @abstractmethod
    def new_attempt(self) -> str:
        """Returns the next attempt's id, under which the driver finds this request's events from now on."""

    def ends(self, outcome: Outcome, blame: Blame | None) -> None:
        """Notes that the attempt ends; what it holds, and where, is still known. `blame` names the engine that failed
        it, if one did.
        """
        return

    @abstractmethod
    def forget(self, outcome: Outcome) -> None:
        """Forgets the attempt, which has ended and holds nothing; the driver must pass on no further event of it."""

    @abstractmethod
    def may_retry(self) -> bool:
        """Returns whether the retry budget has room for one more attempt after a failure that an engine answered."""

    @abstractmethod
    def retried(self, task: Task, code: str) -> None:
        """Notes that the attempt, which had no output, failed at `task` with the error `code`, and that another attempt
        follows.
        """

    @abstractmethod
    def migrated(self, task: Task, code: str, choices: int) -> None:
        """Notes that the attempt, which had output, failed at `task` with the error `code`, and that its `choices` go
        on elsewhere.
        """

    @abstractmethod
    def count_retry(self, change: int) -> None:
        """Adds `change`, 1 or -1, to the attempts under way that count against the retry budget."""

    @abstractmethod
    def resumed(self, stall_s: float) -> None:
        """Notes the first output since a migration; for `stall_s` there was none."""

    @abstractmethod
    def split(self) -> Sequence["Begins"]:
        """Leaves this request its first unfinished choice (`Life.become_choice`), and returns a life for each of the
        others (`Life.branch_of`), which has not begun.
        """

    @abstractmethod
    def wake_at(self, at_s: float) -> None:
        """Has `Life.wake` called at `at_s` or soon after, and no longer at the time given before (infinity: never)."""

    @abstractmethod
    def refused(self, event: object) -> None:
        """Notes that an event came that the stage does not accept, so that nothing has changed."""

    # --------------------------------------------------------------------------------------------------- router

    @abstractmethod
    def submit(self) -> None:
        """Asks the router for a prefill worker."""

    @abstractmethod
    def adopt(self) -> None:
        """Tells a router that does not know the attempt of its engines and its stage, which is not QUEUED."""

    @abstractmethod
    def report_prefill(self, done: PrefillDone) -> None:
        """Tells the router that the prompt's KV waits for a decode worker."""

    @abstractmethod
    def report_renewal(self, lease_s: float) -> None:
        """Tells the router that the lease on the prompt's KV lasts for `lease_s` more seconds."""

    @abstractmethod
    def close(self, outcome: Outcome, blame: Blame | None) -> None:
        """Tells the router, once for each attempt that it knows, that the attempt has ended. `blame` names the engine
        that failed, if one did.
        """

    # -------------------------------------------------------------------------------------------------- engines

    @abstractmethod
    def send_lend(self, lend: Lend, left_s: float) -> bool:
        """Asks an engine to hold a prefix of the prompt under a lease: it computes the prefix and one token more.
        Returns whether it is connected. It must be done within `left_s`.
        """

    def loan_ended(self, how: LoanEnd) -> None:
        """Notes how the loan of a prefix ended, once for each that `send_lend` has begun."""
        return

    @abstractmethod
    def send_prefill(self, route: RoutePrefill, left_s: float) -> bool:
        """Sends the prompt to the engine, with the handle of `Life.lent` if a prefix was lent. Returns whether it is
        connected. It must be done within `left_s`.
        """

    @abstractmethod
    def send_decode(self, route: RoutePrefill | RouteDecode, left_s: float) -> bool:
        """Sends the decode to the engine, with the KV's handle where there is one. Returns whether it is connected.

        The engine must be done within `left_s`.
        """

    @abstractmethod
    def stop_work(self, engine_id: str) -> None:
        """Ends the request's work at an engine. A decode engine also frees the prefill engine's copy of the KV."""

    @abstractmethod
    def release_kv(self, engine_id: str) -> None:
        """Gives back the KV that an engine holds under a lease."""

    @abstractmethod
    def renew_lease(self, engine_id: str) -> None:
        """Asks an engine to renew the lease under which it holds the request's KV. The answer is a Renewed, or nothing
        if the engine has gone or stands still.
        """

    @abstractmethod
    def leave_engine(self, engine_id: str) -> None:
        """Notes that an engine holds nothing of the request any more. The engine knows this and gets no message."""

    @abstractmethod
    def admitted(self) -> None:
        """Notes that the engine has admitted the request, so that tokens can come now."""

    # --------------------------------------------------------------------------------------------------- client

    @abstractmethod
    def output(self, event: Output) -> None:
        """Passes on to the client the piece of output that `event` stands for; only the driver knows its text."""

    @abstractmethod
    def unsent(self) -> bool:
        """Returns whether nothing of the answer has been sent to the client, so that it may begin anew."""

    @abstractmethod
    def restart(self) -> None:
        """Drops all output so far, of which nothing has been sent: the next attempt generates it from the start."""

    @abstractmethod
    def finished(self) -> None:
        """Completes the answer to the client: all choices have their last token."""

    @abstractmethod
    def failed(self, failure: Failure) -> None:
        """Ends the answer to the client with an error: the request has ended without all of its output."""
