"""Messages between router and autoscaler: the fleet as a scaling policy sees it, orders to single engines, and the
questions of an administrator.

The router obeys one autoscaler at a time, the one of the highest generation (`Hello.generation`). The connection of an
earlier one ends when a later one connects, and an earlier one that comes afterwards is refused until the later one has
been away for some time.
"""

from typing import Literal

import msgspec

from actors.wire.messages.base import Duty, Role, Wire
from actors.wire.messages.engines import Started
from policies.state.standby import Abilities


class FleetObserved(Wire, frozen=True):
    """Router -> autoscaler, once a second: the fleet and its load. `observation` is the JSON of
    `policies.scaling.observation.Observation` by `policies.journal.codec`, which is exact.

    The timing profile in its capability is a guess. The autoscaler replaces it by the one that follows from the sums
    over `fitted_rows` reports of engines, whatever their roles: `fit_matrix` (25 numbers, row by row) and `fit_vector`
    (5), as in `policies.scaling.timing_fit.Fit`. Solving for it takes milliseconds, which the router has not. Unless
    the fit is whole, no plan that depends on an engine's capacity can be made yet. `abilities` are those of the
    engines that there are now. `starts` says of each connected engine how its start was spent, by the engine's id.
    """

    observation: bytes
    fitted_rows: int = 0
    fit_matrix: tuple[float, ...] = ()
    fit_vector: tuple[float, ...] = ()
    abilities: Abilities | None = None
    starts: dict[str, Started] = msgspec.field(default_factory=dict)


class Standby(Wire, frozen=True):
    """Autoscaler -> router, at each connection and at each observation; the router passes it on to ingresses in
    `Fleet`. It is the phase of the fleet (`policies.state.standby.Standby`), with the abilities that its engines have
    when it is awake; None: no engine has been seen yet.
    """

    phase: Literal["awake", "asleep", "waking", "failed"]
    roles: tuple[Role, ...] = ()
    wake_limit_s: float = 0.0
    reason: str = ""
    abilities: Abilities | None = None


class Assign(Wire, frozen=True):
    """Autoscaler -> router: the engine is to serve `role` with this `duty`, for good. The router passes it on as a
    SetRole. The order is level-triggered: it is lost if the engine is not connected, and the next FleetObserved shows
    what came of it.
    """

    engine_id: str
    role: Role
    duty: Duty


class LeadsTold(Wire, frozen=True):
    """Autoscaler -> router, once a second: seconds of each way to more capacity and of each step of a start, as they
    were learned, the numbers of pre-warmed processes, and figures of the fleet that it alone knows
    (`actors.scaling.fleet.figures`), by the names under which the router reports them as metrics.
    """

    figures: dict[str, float]


class ScaleAsked(Wire, frozen=True):
    """Router -> autoscaler: an administrator's question or order, as JSON. `id` numbers those of one connection."""

    id: int
    body: bytes


class ScaleAnswered(Wire, frozen=True):
    """Autoscaler -> router: the answer to question `id`: an HTTP `status` and a JSON `body`, which is {"message"} if
    `status` is above 200.
    """

    id: int
    status: int
    body: bytes
