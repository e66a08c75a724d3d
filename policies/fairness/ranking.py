"""Names in the order of numbers that change: to set one, to drop one and to find the first take O(log names)."""

import heapq


class Ranking:
    """Names in ascending order of their keys; of equal keys the one that was set first comes first.

    A heap with entries that may be outdated. These are dropped when they come first or are the majority.
    """

    def __init__(self) -> None:
        self._n = 0
        self._keys: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> float:
        """Returns the key of a name. Raises KeyError if the name is not ranked."""
        return self._keys[name][0]

    def set(self, name: str, key: float) -> None:
        """Ranks a name by this key from now on."""
        self._n += 1
        self._keys[name] = key, self._n
        heapq.heappush(self._heap, (key, self._n, name))
        if len(self._heap) > 16 + 4 * len(self._keys):
            self._heap = [(*by, ranked) for ranked, by in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Drops a name; one that is not ranked is no error."""
        self._keys.pop(name, None)

    def first(self) -> str | None:
        """Returns the name with the least key; None when there is none."""
        while self._heap:
            key, n, name = self._heap[0]
            if self._keys.get(name) == (key, n):
                return name
            heapq.heappop(self._heap)
        return None

    def ordered(self) -> list[tuple[float, int, str]]:
        """Returns a heap of all names: by their keys, and of equal keys by when they were set."""
        made = [(*by, name) for name, by in self._keys.items()]
        heapq.heapify(made)
        return made

    def firsts(self, most: int) -> list[str]:
        """Returns the `most` names with the least keys, in ascending order."""
        found: list[tuple[float, int, str]] = []
        while len(found) < most and self.first() is not None:
            found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [name for _, _, name in found]
