"""The rent of a decode slot is the time that other requests lose while a request holds it, in request-seconds.
`composition` uses it.

    rent(r, g) = hold_r * (rent_weight * Q T / S + near_g)
    near_g     = sum of occ_l^j * (x_(l+1) - x_l) over the workers' distances l, from that of g on

    hold_r   how long r holds its slots, in holds of a typical request: slots * Request.predicted_tokens /
             TypicalEntry.output_tokens (only slots without a forecast)
    Q, S, T  entries that find no free slot; slots of all workers; seconds of a typical hold. Each of Q entries waits
             hold_r T / S longer for its turn. Serving by value then serves the shortest first (Smith's rule), which is
             the order of least mean wait. Without typical lengths T is 0 and so is this part
    x_l      seconds to move a typical entry's KV (TypicalEntry.kv_bytes) from r's sender to the workers at distance l,
             by the oracle; own transfers are not counted
    occ_l^j  the estimated chance that no slot is free at distance l or nearer: the occupancy of those workers to the
             power `near_scarcity`. A request that comes then moves its KV farther, so near slots go to entries with
             much KV and few tokens to generate
Not claimed: that the next entry is like the last ones. The formula treats all senders as if they had r's distances.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.state.views import Request, TypicalEntry, Worker

Floats = npt.NDArray[np.float64]

FOREVER_S = 1e9
"""The longest x_l in seconds, which is also the x_l of a path without bandwidth."""


def queue_rent_s(
    typical: TypicalEntry, workers: Sequence[Worker], queued: int, step_s: float, rent_weight: float
) -> float:
    """Returns rent_weight * Q T / S in seconds. `queued` is Q, and `step_s` is the length of a decode step."""
    held_s = (typical.output_tokens or 0.0) * step_s
    return rent_weight * queued * held_s / float(sum([worker.slots for worker in workers]))


def holds(requests: Sequence[Request], slots: Floats, typical: TypicalEntry) -> Floats:
    """Returns hold_r of each request, (requests,). `slots` are their numbers of sequences."""
    if not typical.output_tokens:
        return slots
    forecast = [request.predicted_tokens for request in requests]
    known = np.array([tokens is not None for tokens in forecast])
    tokens = np.array([tokens or 0.0 for tokens in forecast], np.float64)
    return np.where(known, slots * tokens / typical.output_tokens, slots)


def near_rents_s(seconds: Floats, workers: Sequence[Worker], near_scarcity: float) -> Floats:
    """Returns near_g of each worker, in the shape of `seconds`, which are the workers' x_l, (workers,) or (senders,
    workers).
    """
    slots = np.array([worker.slots for worker in workers], np.float64)
    used = np.minimum([worker.slots_used for worker in workers], slots)
    seconds = np.minimum(seconds, FOREVER_S)
    order = seconds.argsort(axis=-1, kind="stable")
    ascending = np.take_along_axis(seconds, order, axis=-1)
    full = used[order].cumsum(axis=-1) / slots[order].cumsum(axis=-1)  # occupancy of the workers up to each
    gaps_s = np.diff(ascending, append=ascending[..., -1:])  # above 0 if the next is farther
    each_s = full**near_scarcity * gaps_s
    near_s = np.empty_like(seconds)
    np.put_along_axis(near_s, order, each_s[..., ::-1].cumsum(axis=-1)[..., ::-1], axis=-1)
    return near_s
