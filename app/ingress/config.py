"""The settings of one ingress replica, which it makes of `ingress.options` and of its environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from actors.options import from_options
from app.api.extensions import MAX_PRIORITY, PRIORITY_OF_CLASS, Class, ClassSlo
from policies.admission.registry import ADMISSION, DEFAULT
from policies.routing.params import Number, OneOf, Whole, check


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """The settings of one ingress replica. Making them raises ValueError for a value out of range."""

    served_names: tuple[str, ...]
    """Names that the API accepts for the model. The first is the one in answers to requests that name none."""
    replica_id: str = "ingress-0"
    max_body_bytes: Annotated[int, Whole(1024)] = 32 * 2**20
    """Bytes of the largest request body; a prompt of 1 M token ids is 7 MB of JSON."""
    max_waiting_bytes: Annotated[int, Whole(1024)] = 256 * 2**20
    """Bytes of requests that are arriving, or wait behind others on their connection, over all connections. Beyond it
    those that hold more than 64 KiB are refused with 503.
    """
    max_connections: Annotated[int, Whole(1)] = 8192
    """Connections of clients at once on one port; others are answered with 503. Twice `max_in_flight`, because clients
    keep connections that they do not use.
    """
    max_connections_per_address: Annotated[int, Whole(1)] = 4096
    """Connections at once from one address (IPv6: from one /64) on one port; others are answered with 503. As many as
    `max_in_flight`, because all requests come from one address where a proxy is in front.
    """
    max_unread_bytes: Annotated[int, Whole(1024)] = 256 * 2**20
    """Bytes of answers that clients have not read, over all connections of one port; beyond it the connections with
    the most of them are cut.
    """
    max_answer_bytes: Annotated[int, Whole(1024)] = 2**30
    """Bytes that the log probabilities of answers which are not streamed take until the answers are complete, over all
    requests; beyond it the largest answers fail.
    """
    sse_keep_alive_s: Annotated[float, Number(above=0, unit="s")] | None = None
    """Seconds of silence after which a stream gets a comment, so that no proxy takes it for dead. A stream in the queue
    then has its status (200) before its first token, and a later refusal comes as an event. Without it none is sent.
    """
    allowed_hosts: tuple[str, ...] | None = None
    """Names that the Host header may have, beside addresses and local names; "*" stands for all. Without it all names
    may ask, but on a loopback address none: a web page could give itself the name of that address (DNS rebinding).
    """
    max_in_flight: Annotated[int, Whole(1)] = 4096
    """Requests under way at once; each may hold several sequences."""
    max_sequences: Annotated[int, Whole(1)] = 8192
    """Sequences under way at once: prompts times `n`, over all requests; beyond it requests are answered with 429.
    Twice `max_in_flight`: most requests have one, and the largest completion has 1,024.
    """
    max_prompt_bytes: Annotated[int, Whole(1024)] = 2**30
    """Bytes of the prompts under way, over all requests: their texts, 48 for each token, and what is kept of
    the options (lists, schemas, the chat if it has tools); beyond it requests that take more than a 16,384th of it (64
    KiB) are answered with 503. With the default `max_in_flight` requests have 5,000 tokens each on average: at 4
    characters a token, 4,096 x 5,000 x 52 bytes are 1.0 GiB.
    """
    request_timeout_s: Annotated[float, Number(above=0)] = 600.0
    """Longest time that a request may take in all, with the whole of its stream; an API key may have another."""
    max_retries: Annotated[int, Whole(0)] = 2
    """Attempts that may follow those which failed without output of their own."""
    max_migrations: Annotated[int, Whole(0)] = 2
    """Times that a request with output may go on at another engine."""
    # ASSUMPTION: the limits of the stages are back-stops for an engine that seems well and has lost a request; the
    # engines' own watchdogs are faster. A prompt may wait long in a busy engine and take minutes on CPUs.
    prefill_limit_s: Annotated[float, Number(above=0)] = 300.0
    """Longest time that an engine may take for a prompt, from the decision on, before it has stalled."""
    transfer_limit_s: Annotated[float, Number(above=0)] = 120.0
    """Longest time that a decode engine may take to read a request's KV once it has a slot for it. A request may wait
    there for the slot as long as its lease is renewed.
    """
    token_gap_limit_s: Annotated[float, Number(above=0)] = 120.0
    """Longest time between two tokens of a request; vLLM may preempt a request for others of a higher priority."""
    idle_limit_s: Annotated[float, Number(above=0)] = 600.0
    """Longest time without a further token of an answer that has some, over all its engines and the waits between them;
    then it ends with 504 `idle`. It is for requests that may take longer than this in all, by an API key of their own.
    Below `token_gap_limit_s` an answer ends before another engine could go on with it.
    """
    drain_s: Annotated[float, Number(above=0)] = 15.0
    """Time that running answers have to end when this replica is stopped. Then the rest end with an error."""
    lease_margin_s: Annotated[float, Number(above=0)] = 2.0
    """Seconds before the end of its KV lease (at most 1/5 of the lease) at which a pooled request is given up."""
    slow_client_bytes: Annotated[int, Whole(1)] = 2**20
    """Bytes of unread output of one stream above which its client counts as gone."""
    progress_interval_s: Annotated[float, Number(above=0)] = 0.02
    sweep_interval_s: Annotated[float, Number(above=0)] = 0.1
    status_max_age_s: Annotated[float, Number(0, unit="s")] = 1.0
    """Greatest age of `/metrics` and `/sluice/status`. A small fleet's are younger: each is kept for twice the CPU
    time that it took to make (`app.ingress.kept_page`). With 0 they are made for each request.
    """
    offload_prompt_chars: int = 16_384
    """Characters, or ids of a prompt given as ids, above which a request's prompts are tokenised in a thread; for a
    conversation, which is also rendered there, bytes of the body.
    """
    tokenise_threads: Annotated[int, Whole(1, 256)] = 2
    """Threads that prepare long prompts; each keeps a core busy while it works."""
    max_tokenising_chars: Annotated[int, Whole(1)] = 16 * 2**20
    """Characters of long prompts that may wait for these threads; above it requests are answered with 429, those of the
    tenant that has most of them here first (`app.ingress.intake_threads`). Two threads that tokenise 2.7 million
    characters a second each (SmolLM2's tokenizer, English text) take 3 s for them.
    """
    forced_traces_per_s: Annotated[float, Number(0, unit="1/s")] | None = 10.0
    """Requests a second whose traces are kept because their clients say so, by `traceparent` or by `x-sluice-times`,
    and as many again for missed objectives; what goes beyond is traced by ratio alone. Null sets no bound: for clients
    that are trusted, behind a proxy which samples. ASSUMPTION: 10 are enough for who looks at single requests, and cost
    no process much.
    """
    default_completion_tokens: Annotated[int, Whole(1)] = 16
    """`max_tokens` of a completion that names none; 16 is OpenAI's default."""
    replicas: Annotated[int, Whole(1)] = 1
    """Replicas of the ingress. Without a router each counts on its share of every engine's slots and KV."""
    fallback_queue: Annotated[int, Whole(1, unit="sequences")] = 1024
    """Sequences of this replica's requests that may wait for a prefill engine while there is no router; a request has
    one for each of its choices.
    """
    fallback_queue_tokens: Annotated[int, Whole(1, unit="tokens")] | None = None
    """Prompt tokens of this replica's requests that may wait for a prefill engine while there is no router; null sets
    no bound.
    """
    fallback_wait_s: Annotated[float, Number(above=0, unit="s")] = 60.0
    """Longest wait for room at an engine while there is no router; after it a request is rejected with 503."""
    fallback_admission: Annotated[str, OneOf(tuple(ADMISSION))] = DEFAULT
    """Admission policy while there is no router, with its default parameters. A served application has the one that
    `router.admission` names, where nothing else is given. It goes by the rates that this replica sees meanwhile.
    """
    expects_prefill: bool = False
    """Whether the deployment has prefill engines; the replica is then not ready before one of them or a colocated one
    is.
    """
    class_slo: dict[str, ClassSlo] = field(default_factory=dict)
    ceiling: Class | int = "standard"
    """The most urgent class or priority that a request may ask for where there is no `key_file`, in which each key has
    a ceiling of its own; an admin key has none. Classes are strict by default, so with "interactive" any client may
    hold up all that ask for nothing.
    """
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that give the right to administer; `app.ingress.admin` says what that includes, and which key there is
    without any.
    """
    status_needs_key: bool = False
    """Whether `/metrics` and `/sluice/status`, on every port, need an admin key or one of `viewer_keys`."""
    viewer_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that may see `/metrics` and `/sluice/status` where these need one, and nothing else."""
    key_file: str = ""
    """The file of the API keys, which `sluice key` writes. Without one, requests need no key and have no limits."""
    quota_redis: str = field(default="", repr=False)
    """URL of a Redis in which all ingress replicas count what keys use (redis://:PASSWORD@HOST:PORT/0). Without one
    each replica enforces its share of each limit.
    """
    tenant_labels: Annotated[int, Whole(0, 10_000)] = 64
    """Tenants that have series of their own in the metrics; the rest is `other`."""
    usage_log: str = ""
    """Folder for the usage log, of which bills can be made; without one there is none."""
    usage_log_bytes: Annotated[int, Whole(4096)] = 64 * 2**20
    """Bytes of a file of the usage log after which another one is begun."""

    audit_log: str = ""
    """Folder for the audit log of what administrators do. A served application has one in `audit-PORT` of its user's
    folder, where nothing else is given; an empty name turns it off.
    """
    audit_log_bytes: Annotated[int, Whole(4096)] = 4 * 2**20
    """Bytes of a file of the audit log after which another one is begun."""
    audit_log_files: Annotated[int, Whole(0)] = 16
    """Files of the audit log that are kept in its folder, those of all replicas of the node; 0: all."""

    def __post_init__(self) -> None:
        check(self, "ingress")
        if self.max_waiting_bytes < self.max_body_bytes:
            raise ValueError("ingress: max_waiting_bytes must be max_body_bytes at least")
        if not self.key_file and (self.quota_redis or self.usage_log):
            given = "quota_redis" if self.quota_redis else "usage_log"
            raise ValueError(f"ingress: {given} needs key_file: without keys there are no tenants")
        if self.quota_redis and not self.quota_redis.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("ingress: quota_redis must begin with redis://, rediss:// or unix://")
        if not self.served_names or not all(self.served_names):
            raise ValueError("ingress: served_names must hold at least one name")
        for name, keys in (("admin_keys", self.admin_keys), ("viewer_keys", self.viewer_keys)):
            if not all(len(key) >= 8 and key.isascii() and key.isprintable() for key in keys):
                raise ValueError(f"ingress: {name} must be printable ASCII of at least 8 characters each")
        if self.viewer_keys and not self.status_needs_key:
            raise ValueError(
                "ingress: viewer_keys needs status_needs_key: status and metrics are open without it"
            )
        priorities = Whole(-MAX_PRIORITY, MAX_PRIORITY)
        if self.ceiling not in PRIORITY_OF_CLASS and not priorities.allows(self.ceiling):
            classes = ", ".join(PRIORITY_OF_CLASS)
            raise ValueError(f"ingress: ceiling is {self.ceiling!r}: it must be {classes} or {priorities}")
        self._check_objectives()

    def _check_objectives(self) -> None:
        if not set(self.class_slo) <= set(PRIORITY_OF_CLASS):
            raise ValueError(f"ingress: class_slo: classes are {', '.join(PRIORITY_OF_CLASS)}")
        objective = Number(above=0.0)
        for name, slo in self.class_slo.items():
            for which, value in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s)):
                if value is not None and not objective.allows(value):
                    raise ValueError(
                        f"ingress: class_slo.{name}.{which} is {value!r}: it must be {objective}, in seconds"
                    )


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError that names the key if no replica could begin with these `ingress.options`.

    Where they name no key file, one may come from the environment of the replica's process, which is not known here.
    """
    from_options(
        IngressConfig, {"served_names": ("a model",), "key_file": "any", **options}, "ingress.options"
    )
