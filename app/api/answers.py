"""The types of the server's answers, for `/openapi.json`.

Answers themselves are built as bytes elsewhere (`app.api.chunks`, `app.ingress.status`); nothing here runs for a
request. The tests compare real answers with these types.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from actors.wire.messages import EngineState, Role


class ErrorDetail(TypedDict):
    """A description of a fault, in OpenAI's shape."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(TypedDict):
    """The body of every answer with a status of 400 or more, and of the last event of a stream that failed."""

    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    """Details of the prompt's tokens: `cached_tokens` is the number whose KV an engine had already."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of one request; `cached_tokens` are prompt tokens whose KV an engine had already."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class FunctionCall(TypedDict, total=False):
    """The name and the JSON arguments of a tool call; in a stream, pieces of them."""

    name: str | None
    arguments: str | None


class ToolCall(TypedDict, total=False):
    """A call of a tool that the model asks for."""

    index: int
    id: str | None
    type: str | None
    function: FunctionCall | None


class AssistantMessage(TypedDict):
    """The message that the model wrote."""

    role: str
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class Token(TypedDict):
    """A token with its natural-log probability."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChosenToken(Token):
    """The chosen token and the likeliest alternatives."""

    top_logprobs: list[Token]


class ChatLogprobs(TypedDict):
    """Log probabilities of the tokens of a chat choice."""

    content: list[ChosenToken]


class CompletionLogprobs(TypedDict):
    """Log probabilities of a completion as parallel lists, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int]


class CompletionChoice(TypedDict):
    """One of `n` continuations of a prompt; in a stream, a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int]


class Delta(TypedDict, total=False):
    """The piece of a message that a chunk adds."""

    role: str
    content: str | None
    tool_calls: list[ToolCall]


class ChunkChoice(TypedDict):
    """The piece of one choice that a chunk adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int]


class Resumed(TypedDict):
    """The place at which another engine went on: the choice, and how many tokens of it there were."""

    index: int
    after_tokens: int


class Migrations(TypedDict):
    """The changes of engines in the midst of an answer. With a `seed`, what follows such a place is the same whenever
    the change happens there, but not what an undisturbed answer has.
    """

    migrations: int
    resumed: list[Resumed]


class ChatCompletion(TypedDict):
    """A whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    sluice: NotRequired[Migrations]


class ChatCompletionChunk(TypedDict):
    """One event of a streamed answer; with `include_usage` the last one has the usage and no choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    sluice: NotRequired[Migrations]


class Completion(TypedDict):
    """A whole answer to prompts, or one event of a streamed answer (then `usage` may be missing)."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    sluice: NotRequired[Migrations]


class Model(TypedDict):
    """A served model; `max_model_len` is its context in tokens, null while no engine is known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    """All names under which the model is served."""

    object: Literal["list"]
    data: list[Model]


class Live(TypedDict):
    """The answer of a process that is alive."""

    live: Literal[True]


class Ready(Live):
    """The answer of a replica that can serve requests for output."""

    ready: Literal[True]


@with_config(ConfigDict(extra="allow"))
class Versions(TypedDict):
    """The server's version, and those of Ray and of the engines' packages by name.

    `transport` is `fast` on the ingress's own port, `plain` on Serve's.
    """

    version: str
    transport: Literal["fast", "plain"]


class StatusPolicy(TypedDict):
    """The names of the policies in use."""

    prefill: str
    decode: str


class StatusRouter(TypedDict):
    """The router as this replica sees it; `fallback` says that the replica decides alone."""

    connected: bool
    policy: StatusPolicy | None
    fallback: bool


class StatusLoad(TypedDict):
    """How loaded the fleet is: FlowKV's regime, the mean load scores of the prefill and of the decode engines (0 is
    idle, about 1 is full; null where there are none), and the workers that are idle enough to take on the other role.
    """

    regime: Literal["normal", "imbalanced", "extreme"]
    prefill: float | None
    decode: float | None
    idle: list[str]


class StatusQuarantine(TypedDict):
    """Why the router keeps new work from an engine, or from one of its ranks, and when it tries it again."""

    rank: int
    reason: str
    for_s: float
    probe_in_s: float
    probing: bool
    failure_rate: float
    times: int


class StatusEngine(TypedDict):
    """One engine; figures that it has not reported yet are null. A warm engine is ready and gets no requests."""

    id: str
    role: Role
    kind: str
    state: EngineState
    duty: Literal["active", "warm"]
    group: str
    node: str
    slots: int
    kv_blocks_total: int
    running: int | None
    waiting: int | None
    kv_blocks_used: int | None
    kv_usage: float | None
    leases: int | None
    quarantine: list[StatusQuarantine]


class StatusRequests(TypedDict):
    """Numbers of prompts in the whole system: all, waiting for a prefill worker, and waiting for a decode worker
    (`pool`).
    """

    in_flight: int
    queued: int
    pool: int


class StatusLoan(TypedDict):
    """Two engines of which one lends the other prefixes now, for this number of prompts."""

    lender: str
    borrower: str
    prompts: int


class StatusReplica(TypedDict):
    """The replica that answers: its open HTTP requests, the number of its prompts in each stage, and the loans of
    prefixes for them that are under way.
    """

    id: str
    pid: int
    metrics_port: int | None
    in_flight: int
    stages: dict[str, int]
    loans: list[StatusLoan]


class StatusSleep(TypedDict):
    """Engines that may sleep: the phase, the longest time that a wake may take, and why the last one failed."""

    phase: Literal["awake", "asleep", "waking", "failed"]
    wake_limit_s: float
    reason: str | None


class StatusApiKeys(TypedDict):
    """The API keys of clients. Their limits are "shared" by the ingresses through a Redis, or each of `ingresses`
    enforces its "share". `detail` says what is wrong.
    """

    keys: int
    tenants: int
    limits: Literal["shared", "share"]
    ingresses: int
    detail: NotRequired[str]


class Status(TypedDict):
    """The fleet as this replica and the router's last report know it; `detail` says why the replica is not ready.
    `load` is null while no router reports it, `sleep` is there where engines may sleep, and `api_keys` where requests
    need a key.
    """

    ready: bool
    detail: str | None
    model: str
    transport: Literal["fast", "plain"]
    sleep: NotRequired[StatusSleep]
    router: StatusRouter
    api_keys: NotRequired[StatusApiKeys]
    load: StatusLoad | None
    engines: list[StatusEngine]
    requests: StatusRequests
    leases: int
    replica: StatusReplica


class Policy(TypedDict):
    """A policy of any kind: its registered name, all its parameters, and its formula in those."""

    name: str
    params: dict[str, Any]
    formula: str


class AvailablePolicies(TypedDict):
    """All policies that can be chosen, by name, with their default parameters."""

    prefill: dict[str, Policy]
    decode: dict[str, Policy]
    admission: dict[str, Policy]
    fairness: dict[str, Policy]
    flow: dict[str, Policy]


class Policies(TypedDict):
    """The policies in use, the dispatcher's limits, and the policies that can be chosen. `flow` is None without flow
    agents.
    """

    prefill: Policy
    decode: Policy
    admission: Policy
    fairness: Policy
    dispatch: dict[str, Any]
    flow: Policy | None
    available: AvailablePolicies


class PolicyChoice(TypedDict):
    """A policy by name; parameters that are not given take their defaults."""

    name: str
    params: NotRequired[dict[str, Any]]


class PolicyChange(TypedDict, total=False):
    """A change of policies and limits that holds at once; what is left out stays. At least one key is needed."""

    prefill: str | PolicyChoice | None
    decode: str | PolicyChoice | None
    admission: str | PolicyChoice | None
    fairness: str | PolicyChoice | None
    flow: str | PolicyChoice | None
    dispatch: dict[str, Any] | None


class ScaledCounts(TypedDict):
    """Numbers of serving engines by role."""

    prefill: int
    decode: int
    colocated: int


class ScalingMove(TypedDict):
    """One engine's change in the plan of the scaling policy; `engine` is empty for a start."""

    way: Literal["switch", "activate", "start", "deactivate", "stop"]
    engine: str
    role: str


class ScalingOrder(TypedDict):
    """The role and the duty that an engine is ordered to have."""

    engine: str
    role: str
    duty: str


class ScalingPlan(TypedDict):
    """The wanted engines, the moves towards them, and what of these is ordered now: engines and numbers of replicas."""

    serving: ScaledCounts
    warm: int
    moves: list[ScalingMove]
    engines: list[ScalingOrder]
    replicas: dict[str, int]


class ScalingBounds(TypedDict):
    """The bounds of an engine group: its replicas, and those of them that wait warm and may at most."""

    min: int
    max: int
    warm: int
    warm_max: int


class ScaledGroup(TypedDict):
    """An engine group: its bounds and those of the configuration, the wanted number where an administrator has set it,
    and its engines by duty. Those that are `overdue` have not started in time and count as none.
    """

    name: str
    role: str
    min: int
    max: int
    keeps_warm: int
    warm_max: int
    configured: ScalingBounds
    wanted: int | None
    replicas: int | None
    starting: int
    warm: int
    active: int
    draining: int
    overdue: int


class ScalingPolicy(TypedDict):
    """The scaling policy by name, with all its parameters."""

    name: str
    params: dict[str, Any]


class ScalingLeads(TypedDict):
    """Seconds of each way to more capacity by which the policy plans."""

    switch_s: float
    activate_s: float
    start_s: float


class StartSteps(TypedDict):
    """Seconds of the five steps in which replicas start: for each the 0.9 quantile of those that were measured."""

    reserve_s: float
    process_s: float
    weights_s: float
    post_load_s: float
    announce_s: float


class Scaling(TypedDict):
    """The autoscaler's state and its last decision. `held` says why the policy's orders wait; `reasons` show its
    formula with numbers, and `notes` what came up while they were carried out.
    """

    mode: Literal["auto", "manual"]
    by: str | None
    policy: ScalingPolicy
    observed_for_s: float | None
    phase: Literal["awake", "asleep", "waking", "failed"]
    leads: ScalingLeads | None
    start_steps: StartSteps | None
    groups: list[ScaledGroup]
    held: str | None
    plan: ScalingPlan | None
    reasons: list[str]
    notes: list[str]


class BoundsChange(TypedDict, total=False):
    """New bounds of an engine group; those that are not named stay."""

    min: int
    max: int
    warm: int
    warm_max: int


class ScalingChange(TypedDict, total=False):
    """An order to the autoscaler, one of three: numbers of serving replicas by group, `auto` to give them back to the
    policy, or bounds by group. With `plan` nothing is changed, and the answer has the plan that the order would make.
    """

    counts: dict[str, int]
    mode: Literal["auto"]
    bounds: dict[str, BoundsChange]
    plan: bool


class Logs(TypedDict):
    """The levels of the router's loggers by name; a change also says how many other processes it was sent to."""

    levels: dict[str, str]
    told: NotRequired[int]


class LogsChange(TypedDict, total=False):
    """A change of the log lines of router, ingresses, engines and autoscaler: the least `level` of all or of one
    `logger`, and whether ingresses write a line for each request.
    """

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    logger: str
    access: bool


class EngineOrder(TypedDict, total=False):
    """An order to one engine: the role that it is to serve, and its duty. A warm engine gets no requests, and ends
    what it has. While an autoscaler runs, it alone gives such orders.
    """

    role: Literal["prefill", "decode", "colocated"]
    duty: Literal["active", "warm"]


class RoleAndDuty(TypedDict):
    """The role and the duty of an engine."""

    role: Literal["prefill", "decode", "colocated"]
    duty: Literal["active", "warm"]


class Assigned(TypedDict):
    """The role and duty that an engine had, and those that it was ordered to have."""

    engine: str
    before: RoleAndDuty
    after: RoleAndDuty


class Hop(TypedDict):
    """One part of an attempt's way, at a process or between two: work, a wait, or a wire with the event loops at its
    ends. Times are seconds since the request's arrival.
    """

    name: str
    process: str
    kind: Literal["work", "wait", "wire"]
    since_s: float
    until_s: float


class Way(TypedDict):
    """The way of one attempt to its first token, hop by hop. Its request arrived at `at_s` (seconds since 1970)."""

    attempt_id: str
    at_s: float
    hops: list[Hop]


class Explanation(TypedDict):
    """Every decision made for a request, oldest first; the fields depend on `action`. `times` has the ways of its
    attempts to their first token, if the client asked for them (`x-sluice-times`) or the request's trace is sampled.
    """

    id: str
    decisions: list[dict[str, Any]]
    times: list[Way]


class EngineFacts(TypedDict):
    """The facts that an engine has announced, with the running totals of its steps as it reported them last (`step_s`,
    `prefill_steps`, `prefill_step_tokens`, `decode_steps`, `decode_step_seqs`, `decode_step_kv_tokens`; empty where it
    counts none). `group` is its compatibility group.
    """

    id: str
    role: str
    kind: str
    group: str
    node: str
    state: str
    duty: str
    slots: int
    kv_blocks: int
    block_size_tokens: int
    max_model_len: int
    lease_s: float
    max_lease_s: float
    dp_ranks: int
    barrier: bool
    totals: dict[str, float]


class TierFacts(TypedDict):
    """Bandwidth and latency of a tier of the network, as configured."""

    bytes_per_s: float
    latency_s: float | None


class PlaceFacts(TypedDict):
    """Rack and pod of a node; an empty name is not known."""

    rack: str
    pod: str


class PairFacts(TypedDict):
    """The bandwidth of a pair of nodes as learnt from its transfers, `age_s` seconds ago."""

    sender: str
    receiver: str
    bytes_per_s: float
    latency_s: float | None
    age_s: float


class NetworkFacts(TypedDict):
    """The network: `tiers` (0 node, 1 rack, 2 pod, 3 beyond) and `places` of nodes, both configured, and `pairs` of
    nodes as learnt.
    """

    tiers: dict[str, TierFacts]
    places: dict[str, PlaceFacts]
    pairs: list[PairFacts]


class Facts(TypedDict):
    """The facts from which this fleet can be simulated: `sluice simulate --from-live` asks for them. `at_s` is the
    router's time, in seconds since 1970.
    """

    at_s: float
    engines: list[EngineFacts]
    network: NetworkFacts


class Journal(TypedDict):
    """The state of the router's event log, and its last events."""

    events: int
    folder: str | None
    file: str | None
    tail: list[Any]
