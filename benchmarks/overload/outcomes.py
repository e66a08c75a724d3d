"""The outcome of one request, as the client saw it or the simulator says."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.overload.load import Work

End = Literal["whole", "refused", "failed", "cut"]
"""How an answer ended: `cut` is one that the client gave up at the end of the measurement."""

REFUSED = ("429", "503", "408")
"""The statuses that say that there is no room: of Sluice, of a vLLM server that is full, of vllm-router's queue."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are seconds from the start of the load; `first_s` is that of the first text.

    `reason` says why there is no whole answer: the error's code where there is one, else the status or what failed.
    """

    work: Work
    sent_s: float
    ended_s: float
    end: End
    first_s: float | None = None
    reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the planned time to the first text, or None without text. The client's own delay counts."""
        return None if self.first_s is None else self.first_s - self.work.at_s

    @property
    def served_s(self) -> float | None:
        """When the request was served, which is when its first text came; None if it never was, or failed later."""
        return self.first_s if self.end in ("whole", "cut") else None

    @property
    def refused_s(self) -> float | None:
        """When the request was refused, or None."""
        return self.ended_s if self.end == "refused" else None


def end_of(problem: str | None, body: bytes) -> tuple[End, str]:
    """Returns how an answer ended and why.

    `problem` is what `benchmarks.live.load.StreamConnection` tells, and `body` that of an answer without status 200.
    """
    if problem is None:
        return "whole", ""
    status = problem[7:10] if problem.startswith("status ") else ""
    text = (body.decode(errors="replace") if status else problem).replace('"code": ', '"code":')
    # a code of our own is a word; that of vLLM's server is the status once more
    code = text.partition('"code":"')[2].partition('"')[0]
    if status in REFUSED:
        return "refused", code or f"status {status}"
    if problem.startswith("error event") and '"code":503' in text:
        # vLLM's server, where a stream had begun before there was no room
        return "refused", "status 503 in the stream"
    if status == "500" and "returned 503" in text:
        # vllm-router's words where a prefill engine has refused
        return "refused", "status 503 of a prefill engine"
    return "failed", " ".join(filter(None, (f"status {status}" if status else problem[:40], code)))
