"""Effects of a request's life on the world: the methods that a driver implements, and the values that they take.

Effects are calls, not values in a list: some of them answer (whether a message could be sent, which engine serves), and
one is made for every token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from policies.request.events import Output, PrefillDone, RouteDecode, RoutePrefill
from policies.request.stage import Outcome, Task


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that a client gets for a request that failed: an HTTP status, words, and a code for programs.

    `retry_after_s`: when another try may succeed (None: that is not known). `param`: the field that is at fault.
    """

    status: int
    message: str
    code: str
    retry_after_s: float | None = None
    param: str | None = None


class Effects(ABC):
    """A driver's half of `life.Life`. None of these may wait, and none may raise for a peer that has gone."""

    __slots__ = ()

    # ------------------------------------------------------------------------------------------------- attempts

    @abstractmethod
    def new_attempt(self) -> str:
        """Returns the next attempt's id, under which the driver finds this request's events from now on."""

    @abstractmethod
    def forget(self, outcome: Outcome) -> None:
        """The attempt has ended and holds nothing; no event of it comes any more."""

    @abstractmethod
    def retried(self, task: Task, code: str) -> None:
        """The next attempt follows, because of `code`."""

    @abstractmethod
    def wake_at(self, at_s: float) -> None:
        """`Life.wake` is to be called at `at_s` or soon after; this replaces what was asked for before."""

    @abstractmethod
    def refused(self, event: object) -> None:
        """An event came that the stage does not accept; nothing has changed."""

    # --------------------------------------------------------------------------------------------------- router

    @abstractmethod
    def submit(self) -> None:
        """Asks the router for a prefill worker."""

    @abstractmethod
    def adopt(self) -> None:
        """Tells a new router of the attempt and where it is."""

    @abstractmethod
    def report_prefill(self, done: PrefillDone) -> None:
        """Tells the router that the prompt's KV waits for a decode worker."""

    @abstractmethod
    def close(self, outcome: Outcome, culprit: str | None, task: Task | None) -> None:
        """Tells the router, once for each attempt that it knows, that the attempt is over. `culprit`: the engine."""

    @abstractmethod
    def choose_prefill(self) -> RoutePrefill | None:
        """Decides in the router's place; None without an engine that serves."""

    @abstractmethod
    def choose_decode(self) -> RouteDecode | None:
        """Decides in the router's place; None without an engine that serves."""

    # -------------------------------------------------------------------------------------------------- engines

    @abstractmethod
    def send_prefill(self, route: RoutePrefill, left_s: float) -> bool:
        """Sends the prompt, to be done within `left_s`. Returns whether the engine is connected."""

    @abstractmethod
    def send_decode(self, route: RoutePrefill | RouteDecode, left_s: float) -> bool:
        """Sends the decode, with the KV's handle where there is one. Returns whether the engine is connected."""

    @abstractmethod
    def stop_work(self, engine_id: str) -> None:
        """Ends the work at an engine; one that decodes frees the prefill engine's copy of the KV as well."""

    @abstractmethod
    def release_kv(self, engine_id: str) -> None:
        """Gives back the KV that an engine holds under a lease."""

    @abstractmethod
    def leave_engine(self, engine_id: str) -> None:
        """The request has nothing at an engine any more, which knows it already."""

    @abstractmethod
    def admitted(self) -> None:
        """Tokens can come now."""

    # --------------------------------------------------------------------------------------------------- client

    @abstractmethod
    def output(self, event: Output) -> None:
        """Passes on the piece of output that `event` is about; the driver knows which one that is."""

    @abstractmethod
    def finished(self) -> None:
        """All choices have their last token."""

    @abstractmethod
    def failed(self, failure: Failure) -> None:
        """The request has ended without all of its output."""
