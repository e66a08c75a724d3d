"""The queue of requests that wait for a prefill worker, served by (priority, arrival)."""

import heapq

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

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Appends a request as the last of its priority. It replaces a request of the same attempt_id."""
        self._seq += 1
        self._waiting[request.attempt_id] = (self._seq, request)
        heapq.heappush(self._urgent, (request.terms.priority, self._seq, request.attempt_id))
        heapq.heappush(self._patient, (-request.terms.priority, -self._seq, request.attempt_id))
        if len(self._patient) > 64 + 4 * len(self._waiting):  # most no longer wait
            self._urgent = [
                (r.terms.priority, seq, attempt_id) for attempt_id, (seq, r) in self._waiting.items()
            ]
            self._patient = [(-priority, -seq, attempt_id) for priority, seq, attempt_id in self._urgent]
            heapq.heapify(self._urgent)
            heapq.heapify(self._patient)

    def remove(self, attempt_id: RequestId) -> None:
        """Removes a request; an id that is not in the queue is no error."""
        self._waiting.pop(attempt_id, None)

    def head(self) -> Request | None:
        """Returns the request to be served next; None when the queue is empty."""
        while self._urgent:
            _, seq, attempt_id = self._urgent[0]
            waiting = self._waiting.get(attempt_id)
            if waiting is not None and waiting[0] == seq:
                return waiting[1]
            heapq.heappop(self._urgent)
        return None

    def least_urgent(self) -> RequestId:
        """Returns the id of the request to be served last. Raises IndexError when the queue is empty."""
        while True:
            _, minus_seq, attempt_id = self._patient[0]
            waiting = self._waiting.get(attempt_id)
            if waiting is not None and waiting[0] == -minus_seq:
                return attempt_id
            heapq.heappop(self._patient)

    def overdue(self, now_s: float, limit_s: float) -> list[RequestId]:
        """Returns the ids of requests that have waited longer than `limit_s` or whose own deadline has passed, in the
        order in which they were pushed.
        """
        return [
            attempt_id
            for attempt_id, (_, request) in self._waiting.items()
            if now_s - request.arrived_s > limit_s or now_s > request.deadline_s
        ]
