"""The finished parts of a long measurement, which are kept, so that the same command goes on after an interruption."""

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT, code_digest
from benchmarks.live.machine import LOAD
from benchmarks.results_io import json_lines, write_text

FOLDER = ROOT / "build" / "live"
# The facts about a machine that may differ between two parts of one measurement.
_PASSING = (LOAD, "commit", "clean")


class Parts:
    """The parts of one measurement, in one file.

    The file's name has a digest of the code, the machine and the configuration, so a part is taken up only by a run
    that would measure the same. A part during which the code has changed is not kept. Each part has the time at which
    it ended, and the machine's load before the run that measured it.
    """

    def __init__(
        self, name: str, machine: Mapping[str, Any], config: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        known = {name: fact for name, fact in machine.items() if name not in _PASSING}
        key = hashlib.sha256(json.dumps([known, config], sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or FOLDER) / f"{name}-{key}.json"
        self._machine = machine
        self._parts: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self._parts = json.loads(self.path.read_text("utf-8"))

    def get(self, part: str) -> dict[str, Any] | None:
        """Returns a finished part, or None."""
        return self._parts.get(part)

    def once(
        self, part: str, measure: Callable[[], Mapping[str, Any]], say: Callable[[str], object]
    ) -> dict[str, Any]:
        """Returns a part that is kept already, and says so; otherwise measures it and keeps it."""
        found = self.get(part)
        if found is None:
            return self.put(part, measure())
        say(f"{part}: kept already, from {found['ended_at']}")
        return found

    def ends(self) -> dict[str, dict[str, Any]]:
        """Returns for each part when it ended, and the load before the run that measured it; for the result."""
        return {
            part: {name: found[name] for name in ("ended_at", LOAD) if name in found}
            for part, found in self._parts.items()
        }

    def put(self, part: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps a finished part and returns it with the time, `ended_at`, and the load. An interrupted write leaves the
        old file.
        """
        ended = {"ended_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")}
        ended |= {name: fact for name, fact in self._machine.items() if name == LOAD}
        # as a later run would read it
        self._parts[part] = json.loads(json.dumps({**found, **ended}))
        if code_digest(self._machine["code_of"]) == self._machine["code"]:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json_lines(self._parts, 3))
        return self._parts[part]

    def forget(self) -> None:
        """Deletes the file, after the result has been written."""
        self.path.unlink(missing_ok=True)
