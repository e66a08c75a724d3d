"""Every message that crosses a Sluice socket, in one file for each pair of peers; importers take them from here.

The ingress owns a request for its whole life. It asks the router where to run it, sends the work to the engines itself,
streams the tokens to the client and tells the router what happened.

    ingress -> router   Submit, PrefillReported, Progress, Transferred, Adopt, Closed, Admin
    router  -> ingress  RoutePrefill, RouteDecode, Reject, Fleet, FleetStatus, AdminAnswer
    ingress -> engine   Prefill, Decode, Cancel, ReleaseKV
    engine  -> ingress  PrefillDone, Admitted, Tokens, Failed
    engine  -> router   Announce, Status, KvEvents, KvState
    router  -> engine   KvReplay, KvStop
    engine  -> engine   Pull, PullGrant, Sent, Pulled (sim engine only)

Ownership is bound to the connection: when the connection of an ingress closes, each engine aborts and frees everything
that came over it, and the router gives back every charge of it. Messages are arrays on the wire, without field names,
and tagged with their class name. A message whose name or shape is unknown, or that the receiver does not take from this
kind of peer, ends the connection and is counted (`actors.wire.channel`). Times are durations in seconds.
"""

from actors.wire.messages.base import PROTOCOL_VERSION, EngineState, Hello, Prove, Role
from actors.wire.messages.engines import (
    KV_EVENTS,
    Announce,
    EngineInfo,
    KvChange,
    KvEvents,
    KvReplay,
    KvState,
    KvStop,
    Pull,
    Pulled,
    PullGrant,
    Sent,
    Status,
)
from actors.wire.messages.requests import (
    Admin,
    AdminAnswer,
    Adopt,
    Closed,
    Fleet,
    FleetStatus,
    Grown,
    Hints,
    PrefillReported,
    Progress,
    PromptSignals,
    Reject,
    RouteDecode,
    RoutePrefill,
    Submit,
    Transfer,
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
    | PrefillReported
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
    "Grown",
    "Hello",
    "Hints",
    "KvChange",
    "KvEvents",
    "KvReplay",
    "KvState",
    "KvStop",
    "Message",
    "Out",
    "Prefill",
    "PrefillDone",
    "PrefillReported",
    "Progress",
    "PromptSignals",
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
    "Transfer",
    "Transferred",
]
