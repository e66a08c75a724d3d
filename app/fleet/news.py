"""The watch on a connected router, which sends its figures once a second: one that sends none any more is stopped, or
hangs, or is cut off, and is given up.
"""

from collections.abc import Callable

from actors.loop_timeout import LoopTicks, Silence

TICK_S = 0.5
SILENT_TICKS = 6
"""Ticks without a FleetStatus after which the router is lost. It sends one each second (`actors.router.server`), so two
may be late; every new request of an ingress waits for as long."""


class RouterNews:
    """The watch of one process. `lose(reason)` drops the connection to the router."""

    def __init__(self, lose: Callable[[str], None]) -> None:
        self._lose = lose
        self._silence = Silence(SILENT_TICKS)
        self._ticks: LoopTicks | None = None

    def begin(self) -> None:
        """Watches the router of a new connection from now on."""
        self._silence = Silence(SILENT_TICKS)
        self._ticks = LoopTicks(TICK_S, self._tick)

    def heard(self) -> None:
        """Notes a FleetStatus."""
        self._silence.heard = True

    def end(self) -> None:
        """Watches no more. Idempotent."""
        if self._ticks is not None:
            self._ticks.cancel()

    def _tick(self, lived: bool) -> None:
        if self._silence.tick(lived):
            self._lose(f"router sent no status for {SILENT_TICKS * TICK_S:g} s")
