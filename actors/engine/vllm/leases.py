"""Which finished prefills an engine still holds for others."""


class Leases:
    """Leases by the attempt_id of their request. An attempt_id may have several: it is prefilled again when its
    first decode fails.
    """

    def __init__(self) -> None:
        self._by_attempt: dict[str, dict[str, int]] = {}
        self._attempt_id: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._attempt_id)

    def granted(self, attempt_id: str, request_id: str, core: int) -> None:
        """The prefill `request_id` (vLLM's name) of `attempt_id` is held by engine core `core` (its data-parallel
        rank).
        """
        self._by_attempt.setdefault(attempt_id, {})[request_id] = core
        self._attempt_id[request_id] = attempt_id

    def of(self, attempt_id: str) -> list[tuple[str, int]]:
        """(vLLM's request id, core) of every lease of `attempt_id`."""
        return list(self._by_attempt.get(attempt_id, {}).items())

    def on_core(self, core: int) -> int:
        """How many engine core `core` holds."""
        return sum(held == core for leases in self._by_attempt.values() for held in leases.values())

    def ended(self, request_id: str) -> None:
        """It was pulled, released or has expired. Unknown ones are no error."""
        attempt_id = self._attempt_id.pop(request_id, None)
        if attempt_id is None:
            return
        leases = self._by_attempt[attempt_id]
        del leases[request_id]
        if not leases:
            del self._by_attempt[attempt_id]

    def clear(self) -> None:
        """The engine is gone and all its leases with it."""
        self._by_attempt.clear()
        self._attempt_id.clear()
