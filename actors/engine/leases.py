"""The finished prefills whose KV an engine holds under leases, by attempt."""


class AttemptLeases:
    """The leases of each attempt. An attempt may have several, since it is prefilled again if its first decode
    fails.
    """

    def __init__(self) -> None:
        self._by_attempt: dict[str, dict[str, int]] = {}
        self._attempt_id: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._attempt_id)

    def granted(self, attempt_id: str, lease: str, rank: int = 0) -> None:
        """Adds a lease: data-parallel rank `rank` holds the KV of `attempt_id` under the engine's own name `lease`."""
        self._by_attempt.setdefault(attempt_id, {})[lease] = rank
        self._attempt_id[lease] = attempt_id

    def of(self, attempt_id: str) -> list[tuple[str, int]]:
        """Returns (lease, rank) for every lease of `attempt_id`."""
        return list(self._by_attempt.get(attempt_id, {}).items())

    def on_rank(self, rank: int) -> int:
        """Returns the number of leases that `rank` holds."""
        return sum(held == rank for leases in self._by_attempt.values() for held in leases.values())

    def ended(self, lease: str) -> None:
        """Removes a lease that was pulled, was released, or has expired. An unknown lease is no error."""
        attempt_id = self._attempt_id.pop(lease, None)
        if attempt_id is None:
            return
        leases = self._by_attempt[attempt_id]
        del leases[lease]
        if not leases:
            del self._by_attempt[attempt_id]

    def clear(self) -> None:
        """Removes all leases, because the engine has gone."""
        self._by_attempt.clear()
        self._attempt_id.clear()
