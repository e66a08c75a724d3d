"""Every message that crosses a Sluice socket, in a file for each pair of peers; imported from here.

Who talks to whom (DESIGN section 2): the ingress owns a request for its whole life. It asks the router where to run
it, sends the work to the engines itself, streams the tokens to the client and tells the router what happened.

    ingress -> router   Submit, Prefilled, Progress, Transferred, Adopt, Closed, Admin
    router  -> ingress  RoutePrefill, RouteDecode, Reject, Fleet, FleetStatus, AdminAnswer
    ingress -> engine   Prefill, Decode, Cancel, ReleaseKV
    engine  -> ingress  PrefillDone, Admitted, Tokens, Failed
    engine  -> router   Announce, Status, KvEvents, KvState
    router  -> engine   KvReplay, KvStop
    engine  -> engine   Pull, PullGrant, Sent, Pulled (sim engine only)

Ownership is bound to the connection: when an ingress connection closes, an engine aborts and frees everything that came
over it, and the router gives back every charge of it. Messages are arrays on the wire (no field names), tagged with
their class name. Times are durations in seconds, or absolute `time.time()` seconds where the name says `_at_s`.
"""

from actors.wire.messages.admin import Admin, AdminAnswer
from actors.wire.messages.base import PROTOCOL_VERSION, EngineState, Role
from actors.wire.messages.engines import KV_EVENTS, Announce, EngineInfo, Status
from actors.wire.messages.fleet import Fleet, FleetStatus
from actors.wire.messages.handshake import Hello, Prove
from actors.wire.messages.prefix_cache import KvChange, KvEvents, KvReplay, KvState, KvStop
from actors.wire.messages.pulls import Pull, Pulled, PullGrant, Sent
from actors.wire.messages.requests import (
    Adopt,
    Closed,
    Prefilled,
    Progress,
    Reject,
    RouteDecode,
    RoutePrefill,
    Submit,
    Transferred,
)
from actors.wire.messages.work import (
    Admitted,
    Cancel,
    Decode,
    Failed,
    Out,
    Prefill,
    PrefillDone,
    ReleaseKV,
    Tokens,
)

Message = (
    Hello
    | Prove
    | Announce
    | Status
    | KvEvents
    | KvReplay
    | KvStop
    | KvState
    | Prefill
    | Decode
    | Cancel
    | ReleaseKV
    | PrefillDone
    | Admitted
    | Tokens
    | Failed
    | Submit
    | Prefilled
    | Progress
    | Transferred
    | Adopt
    | Closed
    | RoutePrefill
    | RouteDecode
    | Reject
    | Fleet
    | FleetStatus
    | Admin
    | AdminAnswer
    | Pull
    | PullGrant
    | Sent
    | Pulled
)

__all__ = [
    "KV_EVENTS",
    "PROTOCOL_VERSION",
    "Admin",
    "AdminAnswer",
    "Admitted",
    "Adopt",
    "Announce",
    "Cancel",
    "Closed",
    "Decode",
    "EngineInfo",
    "EngineState",
    "Failed",
    "Fleet",
    "FleetStatus",
    "Hello",
    "KvChange",
    "KvEvents",
    "KvReplay",
    "KvState",
    "KvStop",
    "Message",
    "Out",
    "Prefill",
    "PrefillDone",
    "Prefilled",
    "Progress",
    "Prove",
    "Pull",
    "PullGrant",
    "Pulled",
    "Reject",
    "ReleaseKV",
    "Role",
    "RouteDecode",
    "RoutePrefill",
    "Sent",
    "Status",
    "Submit",
    "Tokens",
    "Transferred",
]
