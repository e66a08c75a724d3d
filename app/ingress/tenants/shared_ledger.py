"""The accounts of all keys in a Redis that the ingress replicas share, so that their limits hold exactly over all.

It is `ledger` with a share of 1, in scripts that Redis runs whole, one after another, on its own clock. Each account is
a hash (what is spent of requests and tokens, and when that was so), a sorted set of what is held, one member for each
running request, and a hash with the sums of these members. A member expires, so a replica that dies gives back what its
requests held.

A reservation reads the sums and the members that have expired, so its time does not grow with what a key holds. The
sums know of how many members they are. If that is another number than the set's, because Redis has evicted one of the
two or a replica of an earlier version has written to the set, they are added up again.
"""

import itertools
import secrets
from typing import Any, NamedTuple

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app.ingress.tenants.ledger import Limit, Limits, Meter, Meters, Need, Refusal

TIMEOUT_S = 0.25
"""Seconds for one call. ASSUMPTION: a Redis in the same data centre answers in a millisecond; each call delays a
request, and after one that failed the replica enforces its own share."""
KEPT_S = 86_400
"""Seconds after its last use for which Redis keeps an account. ASSUMPTION: long enough for any debt to drain."""

_LIMITS: tuple[Limit, ...] = ("requests", "tokens", "parallel")

_COMMON = """
local now = tonumber(ARGV[1])
if not now then
  local t = redis.call('TIME')
  now = t[1] + t[2] / 1e6
end
local function spent(name, per_min)
  local v = redis.call('HMGET', KEYS[1], name, name .. '_at')
  local s, at = tonumber(v[1]) or 0, tonumber(v[2]) or now
  if now > at then s = math.max(0, s - (now - at) * per_min / 60) end
  return s
end
local function spend(name, amount)
  redis.call('HSET', KEYS[1], name, string.format('%.17g', amount), name .. '_at', string.format('%.17g', now))
  redis.call('EXPIRE', KEYS[1], KEPT)
end
""".replace("KEPT", str(KEPT_S))

_RESERVE = (
    _COMMON
    + """
local rpm, tpm, parallel = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local sequences, tokens, member, ttl = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local sums = redis.call('HMGET', KEYS[3], 'members', 'running', 'held')
local members, running, held = tonumber(sums[1]) or 0, tonumber(sums[2]) or 0, tonumber(sums[3]) or 0
local function count(found, sign)
  for _, m in ipairs(found) do
    local s, t = string.match(m, ':(%d+):(%d+)$')
    members, running, held = members + sign, running + sign * s, held + sign * t
  end
  return #found > 0
end
local changed = false
if members ~= redis.call('ZCARD', KEYS[2]) then
  members, running, held, changed = 0, 0, 0, true
  count(redis.call('ZRANGE', KEYS[2], 0, -1), 1)
end
if count(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now), -1) then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  changed = true
end
local rs, ts = 0, 0
if rpm then rs = spent('requests', rpm) end
if tpm then ts = spent('tokens', tpm) end
local refused, used, wait = 0, 0, 0
if parallel and running + sequences > parallel then
  refused, used, wait = 3, running, 1
  if sequences > parallel then wait = -1 end
elseif rpm and rs + 1 - rpm > 1e-6 then
  refused, used, wait = 1, math.max(0, math.ceil(rs - 1e-6)), math.max(0.001, math.min(rs + 1 - rpm, rs) * 60 / rpm)
elseif tpm and tokens > tpm then
  refused, used, wait = 2, math.max(0, math.ceil(ts - 1e-6)) + held, -1
elseif tpm and ts + held + tokens - tpm > 1e-6 then
  refused, used = 2, math.max(0, math.ceil(ts - 1e-6)) + held
  wait = math.max(0.001, math.min(ts + held + tokens - tpm, ts) * 60 / tpm)
else
  if rpm then
    rs = rs + 1
    spend('requests', rs)
  end
  redis.call('ZADD', KEYS[2], now + ttl, member)
  redis.call('EXPIRE', KEYS[2], ttl + 60)
  members, running, held, changed = members + 1, running + sequences, held + tokens, true
end
if changed then
  redis.call('HSET', KEYS[3], 'members', members, 'running', running, 'held', held)
  redis.call('EXPIRE', KEYS[3], ttl + 60)
end
return {refused, used, string.format('%.6f', wait), string.format('%.6f', rs), string.format('%.6f', ts), held}
"""
)

_SETTLE = (
    _COMMON
    + """
local ended = redis.call('ZREM', KEYS[2], ARGV[3]) == 1
if ended and redis.call('EXISTS', KEYS[3]) == 1 then
  local s, t = string.match(ARGV[3], ':(%d+):(%d+)$')
  redis.call('HINCRBY', KEYS[3], 'members', -1)
  redis.call('HINCRBY', KEYS[3], 'running', -s)
  redis.call('HINCRBY', KEYS[3], 'held', -t)
end
local tpm = tonumber(ARGV[2])
if tpm and (ended or ARGV[5] ~= '1') then spend('tokens', spent('tokens', tpm) + tonumber(ARGV[4])) end
return 0
"""
)


class SharedReservation(NamedTuple):
    """The part of a key's limits that a request holds in Redis until it is settled."""

    key_id: str
    limits: Limits
    member: str


class StoreDownError(Exception):
    """Redis does not answer, or not as it should. `unsure` is a reservation that it may have made all the same."""

    unsure: SharedReservation | None = None


class SharedLedger:
    """The accounts in the Redis at `url`. A reservation that is not settled ends after `most_s`, in seconds, unless it
    names another time.
    """

    def __init__(self, url: str, most_s: float) -> None:
        # the client would try three times by default, and a reservation that Redis made may not be made again
        once = Retry(NoBackoff(), 0)
        self._redis: Any = redis.asyncio.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=once
        )
        self._most_s = round(most_s)
        self._reserve = self._redis.register_script(_RESERVE)
        self._settle = self._redis.register_script(_SETTLE)
        self._me, self._numbers = secrets.token_hex(6), itertools.count()

    async def reserve(
        self,
        key_id: str,
        limits: Limits,
        need: Need,
        now_s: float | None = None,
        most_s: float | None = None,
    ) -> tuple[SharedReservation | Refusal, Meters]:
        """Holds what a request may use, or returns why it does not fit, with the states of the limits afterwards.

        `now_s` stands for Redis's clock. The reservation ends after `most_s` (None: the ledger's) if it is not settled.
        Raises StoreDownError, which has the reservation.
        """
        member = f"{self._me}-{next(self._numbers)}:{need.sequences}:{need.tokens}"
        given = [
            *(_number(value) for value in (now_s, limits.requests_per_min, limits.tokens_per_min, limits.parallel)),
            need.sequences, need.tokens, member, self._most_s if most_s is None else round(most_s),
        ]  # fmt: skip
        try:
            refused, used, wait, *state = await self._call(self._reserve, key_id, given)
        except StoreDownError as error:
            error.unsure = SharedReservation(key_id, limits, member)
            raise
        meters = _meters(limits, *(float(value) for value in state))
        if not refused:
            return SharedReservation(key_id, limits, member), meters
        limit = _LIMITS[refused - 1]
        most = getattr(limits, limit if limit == "parallel" else f"{limit}_per_min")
        asked = {"requests": 1, "tokens": need.tokens, "parallel": need.sequences}[limit]
        wait_s = float(wait)
        return Refusal(limit, most, used, asked, None if wait_s < 0 else wait_s), meters

    async def settle(
        self, held: SharedReservation, used_tokens: int, now_s: float | None = None, again: bool = False
    ) -> None:
        """Ends a reservation, of which `used_tokens` were used. With `again`, after a call that has failed and may have
        been carried out all the same, nothing happens if the reservation has ended. Raises StoreDownError.
        """
        given = [
            _number(now_s), _number(held.limits.tokens_per_min), held.member, used_tokens, int(again),
        ]  # fmt: skip
        await self._call(self._settle, held.key_id, given)

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()

    async def _call(self, script: Any, key_id: str, given: list[Any]) -> Any:
        # the braces keep all keys of an account on one node of a cluster
        account = f"sluice:quota:{{{key_id}}}"
        keys = [account, f"{account}:held", f"{account}:sums"]
        try:
            return await script(keys=keys, args=given)
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreDownError(f"{type(error).__name__}: {error}") from error


def _number(value: float | None) -> float | str:
    """Returns a number for a script, which takes "" as none."""
    return "" if value is None else value


def _meters(limits: Limits, requests: float, tokens: float, held: float) -> Meters:
    return Meters(_meter(limits.requests_per_min, requests, 0.0), _meter(limits.tokens_per_min, tokens, held))


def _meter(limit: int | None, spent: float, held: float) -> Meter | None:
    if limit is None:
        return None
    return Meter(limit, max(0, int(limit - spent - held + 1e-6)), spent * 60.0 / limit)
