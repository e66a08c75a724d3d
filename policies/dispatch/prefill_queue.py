"""The queue of requests that wait for a prefill worker, served by (priority, arrival).

A request that is set aside keeps its place, but is not the head: it lets the others pass until `call_back`.
"""

import heapq
import math

from policies.state.views import Request, RequestId


class PrefillQueue:
    """A double-ended priority queue of two heaps. Heap entries of requests that no longer wait are dropped when they
    come first or are the majority.
    """

    def __init__(self) -> None:
        self._seq = 0
        self._waiting: dict[RequestId, tuple[int, Request]] = {}
        self._urgent: list[tuple[int, int, RequestId]] = []
        self._patient: list[tuple[int, int, RequestId]] = []
        self._aside: dict[RequestId, Request] = {}
        self._newest: dict[int, list[tuple[int, RequestId]]] = {}  # by priority, the newest last

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Appends a request as the last of its priority. It replaces a request of the same attempt_id."""
        self._seq += 1
        self._waiting[request.attempt_id] = (self._seq, request)
        self._aside.pop(request.attempt_id, None)
        heapq.heappush(self._urgent, (request.terms.priority, self._seq, request.attempt_id))
        heapq.heappush(self._patient, (-request.terms.priority, -self._seq, request.attempt_id))
        self._newest.setdefault(request.terms.priority, []).append((self._seq, request.attempt_id))
        if len(self._patient) > 64 + 4 * len(self._waiting):  # most no longer wait
            self._urgent = [
                (r.terms.priority, seq, attempt_id) for attempt_id, (seq, r) in self._waiting.items()
            ]
            self._patient = [(-priority, -seq, attempt_id) for priority, seq, attempt_id in self._urgent]
            self._urgent = [entry for entry in self._urgent if entry[-1] not in self._aside]
            heapq.heapify(self._urgent)
            heapq.heapify(self._patient)
            self._newest = {}
            for attempt_id, (seq, r) in sorted(self._waiting.items(), key=lambda item: item[1][0]):
                self._newest.setdefault(r.terms.priority, []).append((seq, attempt_id))

    def remove(self, attempt_id: RequestId) -> None:
        """Removes a request; an id that is not in the queue is no error."""
        self._waiting.pop(attempt_id, None)
        self._aside.pop(attempt_id, None)

    def set_aside(self, request: Request) -> None:
        """Lets the others pass this request, which is in the queue."""
        self._aside[request.attempt_id] = request

    def call_back(self) -> None:
        """Gives each request that was set aside its place again."""
        for attempt_id in self._aside:
            seq, request = self._waiting[attempt_id]
            heapq.heappush(self._urgent, (request.terms.priority, seq, attempt_id))
        self._aside = {}

    def head(self) -> Request | None:
        """Returns the request to be served next; None when none waits, or only such as were set aside."""
        while self._urgent:
            _, seq, attempt_id = self._urgent[0]
            waiting = self._waiting.get(attempt_id)
            if waiting is not None and waiting[0] == seq and attempt_id not in self._aside:
                return waiting[1]
            heapq.heappop(self._urgent)
        return None

    def newest(self, priority: int) -> Request | None:
        """Returns the request of a priority that came last; None when none waits, or only such as were set aside."""
        of = self._newest.get(priority, [])
        while of and self._waiting.get(of[-1][1], (0, None))[0] != of[-1][0]:
            of.pop()
        for seq, attempt_id in reversed(of):
            waiting = self._waiting.get(attempt_id)
            if waiting is not None and waiting[0] == seq and attempt_id not in self._aside:
                return waiting[1]
        return None

    def waiting(self) -> list[Request]:
        """Returns all requests that wait, in the order in which they were pushed."""
        return [request for _, request in self._waiting.values()]

    def least_urgent(self) -> RequestId:
        """Returns the id of the request to be served last. Raises IndexError when the queue is empty."""
        while True:
            _, minus_seq, attempt_id = self._patient[0]
            waiting = self._waiting.get(attempt_id)
            if waiting is not None and waiting[0] == -minus_seq:
                return attempt_id
            heapq.heappop(self._patient)

    def oldest_s(self) -> float | None:
        """Returns when the request that has waited longest arrived; None when the queue is empty."""
        return min((request.arrived_s for _, request in self._waiting.values()), default=None)

    def overdue(self, now_s: float, limit_s: float, from_s: float = -math.inf) -> list[RequestId]:
        """Returns the ids of requests that have waited longer than `limit_s` or whose own deadline has passed, in the
        order in which they were pushed. Waiting before `from_s` does not count.
        """
        return [
            attempt_id
            for attempt_id, (_, request) in self._waiting.items()
            if now_s - max(request.arrived_s, from_s) > limit_s or now_s > request.deadline_s
        ]
