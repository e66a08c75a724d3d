"""Every message that crosses a Sluice socket, in one file for each pair of peers. Other packages import them from here.

The ingress owns a request for its whole life. It asks the router where to run the request, sends the work to the
engines itself, streams the tokens to the client, and reports to the router what happened.

    any     -> any      Hello, Prove, Ping
    ingress -> router   Submit, PrefillReported, LeaseRenewed, Progress, Transferred, Adopt, TimesTold, Closed, Admin
    router  -> ingress  RoutePrefill, RouteDecode, Reject, Unknown, Fleet, FleetStatus, AdminAnswer, SetLogs
    ingress -> engine   Prefill, Decode, Cancel, ReleaseKV, RenewKV
    engine  -> ingress  PrefillDone, KVRenewed, Reading, Admitted, Timed, Tokens, Failed
    engine  -> router   Announce, Status, KvEvents, KvState
    router  -> engine   KvReplay, KvStop, Peers, SetRole, SetLogs
    engine  -> router   FindWeights (an engine that starts)
    router  -> engine   WeightsAt
    engine  -> engine   Pull, PullGrant, PullChunk, Sent, Pulled (sim engine only)
    engine  -> engine   AskWeights, WantPiece, PieceRead (from one that starts), WeightsLent, WeightsRefused, PieceLent
    worker  -> agent    JoinNode, SubmitFlow, AdvanceFlow, ChunkDone, WithdrawFlow, Unscheduled
    agent   -> worker   Permitted, FlowRefused, Beat
    agent   -> agent    both of the above: the agent of the reader is a worker of the source's agent, and sends Beat
    agent   -> agent    ChunkPosted
    agent   -> coordinator   BatchArrived, BatchLeft
    coordinator -> agent     FlowOrder, Beat
    agent   -> router   FlowReport
    router  -> agent    SetFlowPolicy
    router  -> autoscaler    FleetObserved, ScaleAsked, SetLogs
    autoscaler  -> router    Assign, LeadsTold, ScaleAnswered, Standby
    observer -> router  Observing, Admin
    router  -> observer Fleet, FleetStatus, PathsSeen, AdminAnswer, SetLogs
    ingress -> observer IngressObserved

Ownership is bound to the connection. When the connection of an ingress closes, each engine aborts all work that came
over it and frees what that work held, and the router gives back all charges of that ingress's attempts. Messages are
arrays on the wire, without field names, and tagged with their class name. A message of an unknown name or shape, or of
a kind that the receiver does not accept from this kind of peer, ends the connection and is counted
(`actors.wire.channel`). Times are durations in seconds.
"""

from actors.wire.messages.base import (
    MAX_COUNT,
    PROTOCOL_VERSION,
    Duty,
    EngineState,
    Hello,
    Ping,
    Prove,
    Role,
    SetLogs,
)
from actors.wire.messages.engines import (
    KV_EVENTS,
    Announce,
    EngineInfo,
    KvChange,
    KvEvents,
    KvReplay,
    KvState,
    KvStop,
    Peers,
    Pull,
    PullChunk,
    Pulled,
    PullGrant,
    Sent,
    SetRole,
    Started,
    Status,
)
from actors.wire.messages.flows import (
    MOST_NODES,
    AdvanceFlow,
    BatchArrived,
    BatchLeft,
    Beat,
    ChunkDone,
    ChunkPosted,
    FlowAgentStatus,
    FlowOrder,
    FlowRecord,
    FlowRefused,
    FlowReport,
    JoinNode,
    Permitted,
    SetFlowPolicy,
    SubmitFlow,
    Unscheduled,
    UnscheduledReason,
    WithdrawFlow,
)
from actors.wire.messages.observing import (
    Figures,
    IngressObserved,
    Note,
    ObserverInfo,
    Observing,
    PathSeen,
    PathsSeen,
)
from actors.wire.messages.requests import (
    Admin,
    AdminAnswer,
    Adopt,
    Closed,
    Fleet,
    FleetLoad,
    FleetStatus,
    Grown,
    Hints,
    LeaseRenewed,
    PrefillReported,
    Progress,
    PromptSignals,
    Quarantined,
    Reject,
    RouteDecode,
    RoutePrefill,
    Submit,
    TimesTold,
    Transfer,
    Transferred,
    Unknown,
)
from actors.wire.messages.scaling import (
    Assign,
    FleetObserved,
    LeadsTold,
    ScaleAnswered,
    ScaleAsked,
    Standby,
)
from actors.wire.messages.weights import (
    AskWeights,
    FindWeights,
    PieceLent,
    PieceRead,
    WantPiece,
    WeightsAt,
    WeightsLent,
    WeightsRead,
    WeightsRefused,
)
from actors.wire.messages.work import (
    Admitted,
    Cancel,
    Decode,
    Failed,
    KVRenewed,
    Out,
    Prefill,
    PrefillDone,
    Reading,
    ReleaseKV,
    RenewKV,
    Resume,
    Timed,
    Tokens,
)

Message = (
    Hello
    | Prove
    | Ping
    | Announce
    | Status
    | KvEvents
    | KvReplay
    | KvStop
    | KvState
    | Peers
    | SetRole
    | SetLogs
    | Prefill
    | Decode
    | Cancel
    | ReleaseKV
    | RenewKV
    | PrefillDone
    | KVRenewed
    | Reading
    | Admitted
    | Timed
    | Tokens
    | Failed
    | Submit
    | PrefillReported
    | LeaseRenewed
    | Progress
    | Transferred
    | TimesTold
    | Adopt
    | Closed
    | RoutePrefill
    | RouteDecode
    | Reject
    | Unknown
    | Fleet
    | FleetStatus
    | Admin
    | AdminAnswer
    | Pull
    | PullGrant
    | PullChunk
    | Sent
    | Pulled
    | JoinNode
    | SubmitFlow
    | AdvanceFlow
    | Permitted
    | ChunkPosted
    | ChunkDone
    | WithdrawFlow
    | Unscheduled
    | FlowRefused
    | Beat
    | BatchArrived
    | BatchLeft
    | FlowOrder
    | FlowReport
    | SetFlowPolicy
    | FleetObserved
    | Assign
    | Standby
    | ScaleAsked
    | ScaleAnswered
    | LeadsTold
    | Observing
    | PathsSeen
    | IngressObserved
    | FindWeights
    | WeightsAt
    | AskWeights
    | WeightsRefused
    | WeightsLent
    | WantPiece
    | PieceLent
    | PieceRead
)

__all__ = [
    "KV_EVENTS",
    "MAX_COUNT",
    "MOST_NODES",
    "PROTOCOL_VERSION",
    "Admin",
    "AdminAnswer",
    "Admitted",
    "Adopt",
    "AdvanceFlow",
    "Announce",
    "AskWeights",
    "Assign",
    "BatchArrived",
    "BatchLeft",
    "Beat",
    "Cancel",
    "ChunkDone",
    "ChunkPosted",
    "Closed",
    "Decode",
    "Duty",
    "EngineInfo",
    "EngineState",
    "Failed",
    "Figures",
    "FindWeights",
    "Fleet",
    "FleetLoad",
    "FleetObserved",
    "FleetStatus",
    "FlowAgentStatus",
    "FlowOrder",
    "FlowRecord",
    "FlowRefused",
    "FlowReport",
    "Grown",
    "Hello",
    "Hints",
    "IngressObserved",
    "JoinNode",
    "KVRenewed",
    "KvChange",
    "KvEvents",
    "KvReplay",
    "KvState",
    "KvStop",
    "LeadsTold",
    "LeaseRenewed",
    "Message",
    "Note",
    "ObserverInfo",
    "Observing",
    "Out",
    "PathSeen",
    "PathsSeen",
    "Peers",
    "Permitted",
    "PieceLent",
    "PieceRead",
    "Ping",
    "Prefill",
    "PrefillDone",
    "PrefillReported",
    "Progress",
    "PromptSignals",
    "Prove",
    "Pull",
    "PullChunk",
    "PullGrant",
    "Pulled",
    "Quarantined",
    "Reading",
    "Reject",
    "ReleaseKV",
    "RenewKV",
    "Resume",
    "Role",
    "RouteDecode",
    "RoutePrefill",
    "ScaleAnswered",
    "ScaleAsked",
    "Sent",
    "SetFlowPolicy",
    "SetLogs",
    "SetRole",
    "Standby",
    "Started",
    "Status",
    "Submit",
    "SubmitFlow",
    "Timed",
    "TimesTold",
    "Tokens",
    "Transfer",
    "Transferred",
    "Unknown",
    "Unscheduled",
    "UnscheduledReason",
    "WantPiece",
    "WeightsAt",
    "WeightsLent",
    "WeightsRead",
    "WeightsRefused",
    "WithdrawFlow",
]
