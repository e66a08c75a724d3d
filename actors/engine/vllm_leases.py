"""Which finished prefills an engine still holds for others."""


class Leases:
    """Leases by the rid of their request. A rid may have several: it is prefilled again when its first decode fails."""

    def __init__(self) -> None:
        self._by_rid: dict[str, dict[str, int]] = {}
        self._rid: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._rid)

    def granted(self, rid: str, request_id: str, core: int) -> None:
        """The prefill `request_id` (vLLM's name) of `rid` is held by engine core `core` (its data-parallel rank)."""
        self._by_rid.setdefault(rid, {})[request_id] = core
        self._rid[request_id] = rid

    def of(self, rid: str) -> list[tuple[str, int]]:
        """(vLLM's request id, core) of every lease of `rid`."""
        return list(self._by_rid.get(rid, {}).items())

    def on_core(self, core: int) -> int:
        """How many engine core `core` holds."""
        return sum(held == core for leases in self._by_rid.values() for held in leases.values())

    def ended(self, request_id: str) -> None:
        """It was pulled, released or has expired. Unknown ones are no error."""
        rid = self._rid.pop(request_id, None)
        if rid is None:
            return
        leases = self._by_rid[rid]
        del leases[request_id]
        if not leases:
            del self._by_rid[rid]

    def clear(self) -> None:
        """The engine is gone and all its leases with it."""
        self._by_rid.clear()
        self._rid.clear()
