"""The gate through which requests with API keys enter: whose they are, whether they fit, and what they have used.

    caller     who asks: the key of the bearer token, or the admin key, which has no limits
    admit      holds what the request may use; with a shared ledger the answer of Redis is waited for
    Grant      what an admitted request holds; its `ended` settles it, counts, and writes the line of the bill

Everything runs in the event loop, but for the reading of the key file and the writing of the usage log.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.api.errors import ApiError
from app.api.extensions import Defaults
from app.api.plan import Plan
from app.ingress.config import IngressConfig
from app.ingress.http.reply import Headers, Request
from app.ingress.intake import Prompts
from app.ingress.line_log import LineLog
from app.ingress.metrics import IngressMetrics, counting
from app.ingress.tenants.answers import headers_of, limited, no_key, wrong_key
from app.ingress.tenants.key_file import Watch, read
from app.ingress.tenants.keys import Found, KeyBook
from app.ingress.tenants.labels import TenantLabels
from app.ingress.tenants.ledger import (
    LEAST,
    Ledger,
    Limits,
    Meters,
    Need,
    Refusal,
    Reservation,
    never_fits,
)
from app.ingress.tenants.shared_ledger import SharedLedger, SharedReservation, StoreDownError

log = logging.getLogger(__name__)

STORE_RETRY_S = 1.0
"""Seconds for which a replica enforces its own share after Redis has failed, before it asks again."""
FIRST_ANSWER_TOKENS = 512
"""Tokens that an answer without `max_tokens` is held to have until answers of its key are known. ASSUMPTION: the order
of a chat's answer; what an answer has beyond what was held is settled at its end."""
ANSWER_WEIGHT = 0.1
"""Weight of the last answer in a key's mean length of answers. ASSUMPTION: some ten answers are remembered."""
MAX_UNSETTLED = 16_384
"""Most reservations that are settled later because Redis has failed; the oldest ones expire in it first. ASSUMPTION:
four times the requests that a replica has under way by default, at 0.3 kB each."""
SETTLE_MARGIN_S = 60.0
"""Seconds beyond the longest request after which Redis gives back what nobody has settled."""


@dataclass(slots=True, eq=False)
class Caller:
    """The sender of a request, by its key. `defaults` have the terms that the key gives to its requests; `label` is
    that of metrics.
    """

    key_id: str
    tenant: str
    limits: Limits
    shares_cache: bool
    defaults: Defaults
    label: str
    answer_tokens: float = FIRST_ANSWER_TOKENS
    """Mean number of output tokens of the choices that have ended with 200."""


@dataclass(frozen=True, slots=True)
class Used:
    """The tokens that a request has used, and how it ended."""

    request_id: str
    client_id: str
    path: str
    model: str
    request_class: str
    status: int
    choices: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float


class Grant:
    """The part of a key's limits that an admitted request holds until `ended`. `headers` tell the client of the
    limits.
    """

    __slots__ = ("_gate", "_held", "caller", "headers")

    def __init__(
        self, gate: "Gate", caller: Caller, held: Reservation | SharedReservation, meters: Meters
    ) -> None:
        self._gate, self.caller, self._held = gate, caller, held
        self.headers: Headers = headers_of(meters)

    def ended(self, used: Used) -> None:
        """Gives back what was not used; call exactly once, or `unused`."""
        self._gate.settle(self.caller, self._held, used)

    def unused(self) -> None:
        """Gives back everything, since the client left before its request began."""
        self._gate.give_back(self._held, 0)


class Gate:
    """The gate of one ingress replica. The constructor raises OSError (KeyFileError for the key file) and, for a bad
    URL of Redis, ValueError.

    `ingresses` returns the number of ingress replicas that are known, among which limits are shared out.
    """

    def __init__(
        self,
        config: IngressConfig,
        metrics: IngressMetrics,
        ingresses: Callable[[], int],
    ) -> None:
        self._metrics, self._ingresses = metrics, ingresses
        self._defaults = Defaults(
            config.default_completion_tokens, config.request_timeout_s, config.class_slo
        )
        self._labels = TenantLabels(config.tenant_labels)
        self._ledger = Ledger()
        self._shared: SharedLedger | None = None
        if config.quota_redis:
            self._shared = SharedLedger(config.quota_redis, config.request_timeout_s + SETTLE_MARGIN_S)
        self._store_down_until_s: float | None = None
        self._store_error: str | None = None
        self._settling: set[asyncio.Task[None]] = set()
        # with the tokens that were used; Redis may know of them already
        self._unsettled: deque[tuple[SharedReservation, int]] = deque(maxlen=MAX_UNSETTLED)
        self._usage: LineLog | None = None
        if config.usage_log:
            folder, count = Path(config.usage_log), counting(metrics.usage_lines)
            self._usage = LineLog("usage", folder, config.replica_id, config.usage_log_bytes, count)
        self._callers: dict[str, Caller] = {}
        # those of callers before the last change of the file
        self._answer_tokens: dict[str, float] = {}
        self._admin = Caller(
            "admin", "admin", Limits(), False, replace(self._defaults, tenant="admin"), "admin"
        )
        self._file_error: str | None = None
        self._book: KeyBook
        path = Path(config.key_file)
        keys, stamp = read(path)
        self._take(KeyBook.of(keys))
        self._watch = Watch(path, stamp, self._take, self._kept)

    def start(self) -> None:
        """Begins to watch the key file."""
        self._watch.start()

    async def stop(self) -> None:
        """Ends the watch, settles with Redis what has ended, and writes the rest of the usage log."""
        await self._watch.stop()
        if self._settling:
            await asyncio.wait(list(self._settling))
        if self._shared is not None:
            await self._shared.close()
        if self._usage is not None:
            await self._usage.stop()

    # ------------------------------------------------------------------------------------------------- who asks

    def caller(self, request: Request, is_admin: Callable[[Request], bool]) -> Caller:
        """Returns who asks. Raises ApiError 401 for a request without a key that is accepted.

        `is_admin` says whether a request has an admin key.
        """
        scheme, _, token = request.headers.get(b"authorization", b"").partition(b" ")
        secret = token.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""
        if not secret:
            raise no_key()
        found = self._book.find(secret)
        if found is not None:
            if found.expires_s is not None and found.expires_s <= time.time():
                raise wrong_key(expired=True)
            return self._caller(found)
        if is_admin(request):
            return self._admin
        raise wrong_key()

    def check(self, caller: Caller, least: Need = LEAST) -> None:
        """Raises ApiError 429 if no request of this key that needs `least` fits now, so that its body need not be read,
        or its prompts tokenised. It knows only what this replica counts itself, and holds nothing.
        """
        if not self.waits:
            now_s, share = time.monotonic(), self.share
            refused = self._ledger.refusal(caller.key_id, caller.limits, least, now_s, share)
        else:
            # what is more than the whole limit never fits, whatever Redis counts
            now_s, refused = time.monotonic(), never_fits(caller.limits, least)
        if refused is not None:
            raise self._refused(caller, refused, self._meters(caller, now_s))

    def prepare(self, caller: Caller, plan: Plan) -> None:
        """Gives a plan the cache salt of its tenant."""
        asked = plan.params.get("cache_salt")
        salt = self._book.cache_salt(caller.tenant, caller.shares_cache, asked)
        if salt is not None:
            plan.params["cache_salt"] = salt

    # ------------------------------------------------------------------------------------------------ what fits

    @property
    def waits(self) -> bool:
        """Whether `admit` is to be awaited, because Redis keeps the accounts and answers."""
        if self._shared is None:
            return False
        return self._store_down_until_s is None or time.monotonic() >= self._store_down_until_s

    @property
    def share(self) -> float:
        """The share of each limit that this replica enforces while it counts itself."""
        return 1.0 / max(1, self._ingresses())

    def admit_here(self, caller: Caller, plan: Plan, prompts: Prompts) -> Grant:
        """Holds what a request may use by what this replica counts itself. Raises ApiError 429."""
        now_s = time.monotonic()
        need = need_of(caller, plan, prompts)
        held = self._ledger.reserve(caller.key_id, caller.limits, need, now_s, self.share)
        meters = self._meters(caller, now_s)
        if isinstance(held, Refusal):
            raise self._refused(caller, held, meters)
        return Grant(self, caller, held, meters)

    async def admit(self, caller: Caller, plan: Plan, prompts: Prompts) -> Grant:
        """Holds what a request may use, by the accounts in Redis if it answers. Raises ApiError 429."""
        if self._shared is None or not self.waits:
            return self.admit_here(caller, plan, prompts)
        need = need_of(caller, plan, prompts)
        try:
            limit_s = caller.defaults.timeout_s
            most_s = None if limit_s is None else limit_s + SETTLE_MARGIN_S
            held, meters = await self._shared.reserve(caller.key_id, caller.limits, need, most_s=most_s)
        except StoreDownError as error:
            if error.unsure is not None:
                self._unsettled.append((error.unsure, 0))
            self._store_failed(error)
            return self.admit_here(caller, plan, prompts)
        self._store_answered()
        if isinstance(held, Refusal):
            raise self._refused(caller, held, meters)
        return Grant(self, caller, held, meters)

    def settle(self, caller: Caller, held: Reservation | SharedReservation, used: Used) -> None:
        """Ends a reservation: settles, counts, and has the line of the bill written."""
        self.give_back(held, used.prompt_tokens + used.completion_tokens)
        if used.status == 200 and used.choices:
            mean = used.completion_tokens / used.choices
            caller.answer_tokens += ANSWER_WEIGHT * (mean - caller.answer_tokens)
        self._metrics.tenant_used(
            caller.label, used.status, used.prompt_tokens, used.cached_tokens, used.completion_tokens
        )
        if self._usage is not None:
            self._usage.add(_line(caller, used))

    def give_back(self, held: Reservation | SharedReservation, used_tokens: int) -> None:
        """Ends a reservation, of which `used_tokens` were used."""
        if isinstance(held, Reservation):
            self._ledger.settle(held, used_tokens, time.monotonic(), self.share)
            return
        self._in_background(self._settle_shared(held, used_tokens))

    def status(self) -> dict[str, Any]:
        """Returns what `/sluice/status` shows: how many keys there are and who enforces their limits."""
        shown: dict[str, Any] = {
            "keys": len(self._book.content.keys),
            "tenants": len(self._book.tenants),
            "limits": "shared" if self.waits else "share",
            "ingresses": max(1, self._ingresses()),
        }
        if self._file_error is not None:
            shown["detail"] = "the key file has changed and cannot be used; the keys before it hold"
        elif self._store_error is not None:
            shown["detail"] = "the Redis of the quotas does not answer; each ingress enforces its share"
        return shown

    # ------------------------------------------------------------------------------------------------- the rest

    def _caller(self, found: Found) -> Caller:
        caller = self._callers.get(found.key.id)
        if caller is None:
            key = found.key
            defaults = replace(
                self._defaults,
                timeout_s=self._defaults.timeout_s if key.timeout_s is None else key.timeout_s,
                least_priority=key.least_priority,
                tenant=key.tenant,
                weight=key.weight,
            )
            caller = self._callers[key.id] = Caller(
                key.id,
                key.tenant,
                Limits(key.requests_per_min, key.tokens_per_min, key.parallel),
                key.shares_cache,
                defaults,
                self._labels.of(key.tenant),
                self._answer_tokens.get(key.id, FIRST_ANSWER_TOKENS),
            )
        return caller

    def _take(self, book: KeyBook) -> None:
        """Uses another content of the key file. Requests under way go on, and the accounts stay."""
        self._book, self._file_error = book, None
        self._answer_tokens |= {caller.key_id: caller.answer_tokens for caller in self._callers.values()}
        known = {key.id for key in book.content.keys}
        self._answer_tokens = {k: mean for k, mean in self._answer_tokens.items() if k in known}
        self._callers.clear()
        self._labels.learn(book.tenants)
        self._ledger.forget(known | {"admin"})
        self._metrics.key_file_loads.labels("ok").inc()

    def _kept(self, message: str) -> None:
        self._file_error = message
        self._metrics.key_file_loads.labels("failed").inc()

    def _meters(self, caller: Caller, now_s: float) -> Meters:
        return self._ledger.meters(caller.key_id, caller.limits, now_s, self.share)

    def _refused(self, caller: Caller, refusal: Refusal, meters: Meters) -> ApiError:
        self._metrics.tenant_limited.labels(caller.label, refusal.limit).inc()
        return limited(refusal, meters)

    async def _settle_shared(self, held: SharedReservation, tokens: int) -> None:
        assert self._shared is not None
        try:
            await self._shared.settle(held, tokens)
        except StoreDownError as error:
            self._unsettled.append((held, tokens))
            self._store_failed(error)

    async def _settle_again(self) -> None:
        """Settles what could not be settled, until Redis fails again."""
        assert self._shared is not None
        while self._unsettled:
            held, tokens = self._unsettled.popleft()
            try:
                await self._shared.settle(held, tokens, again=True)
            except StoreDownError as error:
                self._unsettled.appendleft((held, tokens))
                self._store_failed(error)
                return

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _store_failed(self, error: StoreDownError) -> None:
        self._metrics.quota_store_errors.inc()
        self._store_down_until_s = time.monotonic() + STORE_RETRY_S
        if self._store_error is None:
            log.error("the Redis of the quotas fails; this ingress enforces its share: %s", error)
        self._store_error = str(error)

    def _store_answered(self) -> None:
        if self._store_error is not None:
            log.info("the Redis of the quotas answers again")
            # without it a key would hold what has ended until it expires, which is minutes
            self._in_background(self._settle_again())
        self._store_error = self._store_down_until_s = None


def least_need_of(plan: Plan, prompt_tokens: int) -> Need:
    """Returns the least that a request may use whose prompts have this many tokens at least: a token for each answer
    more.
    """
    sequences = max(1, len(plan.prompts)) * plan.n
    return Need(sequences, prompt_tokens + sequences)


def need_of(caller: Caller, plan: Plan, prompts: Prompts) -> Need:
    """Returns the most that a request may use. Where it names no `max_tokens`, its answers are held to be as long as
    those of its key before, and so it may use more.
    """
    answers = sum(prompts.budgets)
    if plan.max_tokens is None:
        forecast = max(1, round(caller.answer_tokens))
        answers = sum(min(budget, forecast) for budget in prompts.budgets)
    sequences = len(prompts.tokens) * plan.n
    return Need(sequences, sum(map(len, prompts.tokens)) + answers * plan.n)


def _line(caller: Caller, used: Used) -> dict[str, Any]:
    """Returns the line of the usage log for a request that was answered, of which a bill can be made:

        {"time": 1798761600.123, "key": "k3f9a01bc42d7", "tenant": "acme", "request_id": "cmpl-...", "client_id": "",
         "path": "/v1/completions", "model": "tiny", "class": "standard", "status": 200, "choices": 1,
         "prompt_tokens": 12, "cached_tokens": 0, "completion_tokens": 4, "seconds": 0.512}

    No file of this log is ever removed: whoever makes the bills collects those that are complete.
    """
    return {
        "time": round(time.time(), 3),
        "key": caller.key_id,
        "tenant": caller.tenant,
        "request_id": used.request_id,
        "client_id": used.client_id,
        "path": used.path,
        "model": used.model,
        "class": used.request_class,
        "status": used.status,
        "choices": used.choices,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "completion_tokens": used.completion_tokens,
        "seconds": round(used.seconds, 6),
    }
