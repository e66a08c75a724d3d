"""The terms of a request: what its client asked of the service, not of the model.

`app.api` makes one `Terms` for each HTTP request, from the body, the headers and the operator's defaults. The same
value then goes unchanged through the ingress, over the wire and into the policies' `Request`; the simulator makes its
own. To add a term, add a field with a default here, make it in `app.api.extensions`, and read it where it counts.
"""

import math
from enum import StrEnum
from typing import NamedTuple


class Mode(StrEnum):
    """How a request asks to be served: prefill and decode on one worker, or KV moved between two."""

    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"


LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Bounds of a tenant's weight, which divides the tokens that it got."""


class Terms(NamedTuple):
    """The terms of one request. They are a tuple, because messages carry them as an array and a tuple is fast to read.

    A lower `priority` is served earlier, as in vLLM. `request_class` is one of `app.api.extensions.CLASSES`; in
    simulated workloads it is any name. The SLOs are None where the request has none. `session` names the conversation
    ("": none). With `local` the prefill must be computed where the answer is generated (for echoed prompt logprobs,
    say). `mode` fixes the choice between colocated and disaggregated; None leaves it to the policy. `timeout_s` is how
    long the whole request may take from its arrival at the ingress, all attempts together; None sets no limit. With
    `migrate` a request whose engine fails goes on at another engine even when it has output already. `tenant` is whose
    request it is: by its API key, or where keys are off by its user's name or client's address
    (`app.ingress.tenants.unnamed`; "": not known). `weight` is that tenant's share against others. `slo_presses` says
    whether the TTFT objective may bring the request before others in the pool: one that the client has named does so
    only if it is no shorter than the operator's for the class.
    """

    priority: int = 0
    request_class: str = "standard"
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    session: str = ""
    local: bool = False
    mode: Mode | None = None
    timeout_s: float | None = None
    migrate: bool = True
    tenant: str = ""
    weight: float = 1.0
    slo_presses: bool = True

    @property
    def has_objective(self) -> bool:
        """Whether the client asked for a time to the first token, or for a time for each later one."""
        return self.ttft_slo_s is not None or self.tpot_slo_s is not None

    def deadline_s(self, arrived_s: float) -> float:
        """Returns when the request must have ended, on the clock of `arrived_s`; infinity without a limit."""
        return math.inf if self.timeout_s is None else arrived_s + self.timeout_s


NO_TERMS = Terms()
"""The terms of a request that asks for nothing in particular."""
