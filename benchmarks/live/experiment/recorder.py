"""The files that a run writes into its folder, within a bound of bytes, and what it says while it runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from app.dashboard.store import ACTIONS, PLAN, REQUESTS, RUN, SAMPLES, write

RESERVE_BYTES = 256 * 1024
"""Bytes that a run takes at its start and gives back when the disk is full, so that its end can be noted."""
QUIET_S = 10.0
"""Seconds between two lines of progress for people within a phase."""


class DiskFullError(Exception):
    """The run's files have reached their bound, or the disk takes no more."""


class Recorder:
    """The files of one run. `most_bytes` bounds them; `out` gets the progress as JSON lines, or as text for people."""

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        text: str,
        most_bytes: int,
        out: TextIO | None,
        as_json: bool,
    ) -> None:
        self.folder = folder
        self.run: dict[str, Any] = dict(run)
        self._left = most_bytes - RESERVE_BYTES
        self._out = sys.stdout if out is None else out
        self._as_json = as_json
        self._began_s = time.monotonic()
        self._told = (0.0, "")
        self._files: dict[str, IO[str]] = {}
        self._reserve = folder / ".reserve"
        try:
            self._reserve.write_bytes(b"\0" * RESERVE_BYTES)
            (folder / PLAN).write_text(text, "utf-8")
            write(folder / RUN, self.run)
            for name in (SAMPLES, REQUESTS, ACTIONS):
                self._files[name] = (folder / name).open("w", encoding="utf-8")
        except OSError as error:
            raise DiskFullError(f"nothing can be written to {folder}: {error.strerror}; make room") from error

    def sample(self, content: Mapping[str, Any]) -> None:
        """Adds a sample. Raises DiskFullError, as the next two do."""
        self._append(SAMPLES, content)

    def request(self, content: Mapping[str, Any]) -> None:
        """Adds a request that has ended."""
        self._append(REQUESTS, content)

    def action(self, content: Mapping[str, Any]) -> None:
        """Adds something that was done to the application, and says it."""
        self._append(ACTIONS, content)
        self.say("action", **content)

    def progress(self, share: float, phase: str) -> None:
        """Notes how far the run is. Raises DiskFullError."""
        self.run |= {"progress": round(share, 4), "phase": phase, "took_s": self.took_s()}
        self._replace()
        self.say("progress", progress=self.run["progress"], phase=phase, took_s=self.run["took_s"])

    def took_s(self) -> float:
        """Returns the seconds since the run began."""
        return round(time.monotonic() - self._began_s, 3)

    def end(self, state: str, message: str | None, **more: Any) -> None:
        """Notes the end of the run; with a full disk this takes the room that was reserved."""
        for file in self._files.values():
            try:
                file.close()
            except OSError:
                # what was buffered is lost; the message says that the disk is full
                continue
        self._reserve.unlink(missing_ok=True)
        progress = 1.0 if state == "done" else self.run["progress"]
        self.run |= {
            "state": state,
            "message": message,
            "progress": progress,
            "took_s": self.took_s(),
            **more,
        }
        try:
            self._replace()
        except DiskFullError as error:
            print(f"experiment: the end of the run is not noted: {error}", file=sys.stderr)
        self.say("ended", state=state, message=message, summary=self.run.get("summary"))

    def say(self, event: str, **content: Any) -> None:
        """Prints one line of progress; a reader that has gone ends nothing."""
        if self._as_json:
            line = json.dumps({"event": event, "id": self.run["id"], **content}, allow_nan=False)
        else:
            line = self._words(event, content)
        if not line:
            return
        try:
            print(line, file=self._out, flush=True)
        except (OSError, ValueError):
            # the page that read it, or its server, has gone
            return

    def _words(self, event: str, content: Mapping[str, Any]) -> str:
        """Returns progress as text; "" where there is nothing new for a person."""
        match event:
            case "started":
                plan = content["plan"]
                return f"{self.run['id']}: {plan['requests']} requests in {plan['duration_s']:g} s"
            case "progress":
                now_s = time.monotonic()
                if content["phase"] == self._told[1] and now_s - self._told[0] < QUIET_S:
                    return ""
                self._told = (now_s, str(content["phase"]))
                return f"{content['progress']:4.0%}  {content['phase']}"
            case "action":
                return f"      at {content['at_s']:.1f} s: {content['what']}"
        return _ended({**content, "id": self.run["id"]})

    def _append(self, name: str, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, allow_nan=False) + "\n"
        self._left -= len(line)
        if self._left < 0:
            raise DiskFullError(
                "the run's files have reached their bound: make the load shorter, delete old runs, or raise the bound"
            )
        try:
            self._files[name].write(line)
            self._files[name].flush()
        except OSError as error:
            raise DiskFullError(
                f"the disk takes no more ({error.strerror}): make room in {self.folder}"
            ) from error

    def _replace(self) -> None:
        try:
            write(self.folder / RUN, self.run)
        except OSError as error:
            raise DiskFullError(
                f"the disk takes no more ({error.strerror}): make room in {self.folder}"
            ) from error


_IN_SHORT = (
    ("attainment", "SLOs met", 100.0, "%"),
    ("goodput_per_s", "goodput", 1.0, "req/s"),
    ("ttft_p50_s", "TTFT p50", 1e3, "ms"),
    ("ttft_p95_s", "TTFT p95", 1e3, "ms"),
    ("tpot_mean_s", "TPOT mean", 1e3, "ms"),
)
"""The figures of a summary that people are shown at the end."""


def _ended(content: Mapping[str, Any]) -> str:
    message = f": {content['message']}" if content.get("message") else ""
    lines = [f"{content['state']}{message}"]
    summary = content.get("summary")
    if summary:
        lines.append(f"{summary['requests']} requests, {summary['failed']} failed")
        figures = [(label, summary[name], scale, unit) for name, label, scale, unit in _IN_SHORT]
        lines.append(
            ", ".join(f"{label} {v * scale:.4g} {unit}" for label, v, scale, unit in figures if v is not None)
        )
        lines.append(f"more: sluice experiment report {content['id']} --html report.html")
    return "\n".join(line for line in lines if line)
