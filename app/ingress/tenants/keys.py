"""The content of a key file: which API keys there are, whose they are, and what each may use. No I/O.

    {"version": 1,
     "salt_secret": HEX,                         the secret of which tenants' cache salts are derived
     "keys": [{"id": "k3f9a01bc42d7", "tenant": "acme", "note": "", "created": TIME,
               "ceiling": "standard",            most urgent class or priority that a request may ask for
               "weight": 1.0,                    share of the tenant against others
               "requests_per_min": 60, "tokens_per_min": 100000, "parallel": 8,    null: no limit
               "timeout_s": 3600,                time that a request may take in all; null: as for all requests
               "expires": null, "shares_cache": false,
               "secrets": [{"sha256": HEX, "created": TIME, "expires": null}]}]}

A TIME is ISO 8601 with its offset. A key has several secrets while it is rotated. A secret is 32 random bytes, so a
plain SHA-256 of it can neither be guessed nor inverted, and the file holds no secret that a client could send.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    model_validator,
)

from actors.options import problem_line
from app.api.extensions import Ceiling, least_priority_of
from policies.request.terms import LEAST_WEIGHT, MOST_WEIGHT

RESERVED = ("admin", "other")
"""Names that are no tenant's: requests with an admin key are of `admin`, and `other` is a label of metrics."""
PREFIX = "sk-sluice-"
"""The beginning of every API key, by which scanners for leaked secrets can find one."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Limit = Annotated[int, Field(ge=1, le=10**12)]
MOST_TIMEOUT_S = 7 * 86_400
"""Longest time that a key may give to a request."""


class BadKeyFile(ValueError):
    """The content is no key file; the message names the place and what is allowed."""


class _Record(BaseModel):
    # times come as texts, which strict mode admits from JSON
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @field_serializer("created", "expires", check_fields=False)
    def _shown(self, value: datetime | None) -> str | None:
        return None if value is None else value.isoformat(timespec="seconds")


class Secret(_Record):
    """One secret of a key, by its hash; it is accepted until it `expires`."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None


class Key(_Record):
    """One API key: its tenant, what its requests may ask for, and its limits (None: no limit). `timeout_s` takes the
    place of the ingress's `request_timeout_s`.
    """

    id: Name
    tenant: Name
    note: Annotated[str, Field(max_length=200)] = ""
    ceiling: Ceiling = "standard"
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    requests_per_min: Limit | None = None
    tokens_per_min: Limit | None = None
    parallel: Limit | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MOST_TIMEOUT_S)] | None = None
    expires: AwareDatetime | None = None
    shares_cache: bool = False
    created: AwareDatetime
    secrets: tuple[Secret, ...] = ()

    @model_validator(mode="after")
    def _not_reserved(self) -> "Key":
        if self.tenant in RESERVED:
            raise ValueError(f"the tenant's name may not be {' or '.join(RESERVED)}")
        return self

    @cached_property
    def least_priority(self) -> int:
        """The smallest, which is the most urgent, priority that a request may ask for."""
        return least_priority_of(self.ceiling)

    def expired(self, now_s: float) -> bool:
        """Returns whether the key itself has expired, whatever its secrets; `now_s` is Unix time."""
        return self.expires is not None and self.expires.timestamp() <= now_s


class Keys(_Record):
    """The whole content of a key file."""

    version: Literal[1] = 1
    # whole bytes
    salt_secret: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){32,}$")]
    keys: tuple[Key, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> "Keys":
        _refuse_twice("id", [key.id for key in self.keys])
        _refuse_twice("secret", [secret.sha256 for key in self.keys for secret in key.secrets])
        return self


def empty() -> Keys:
    """Returns the content of a new file: no keys, and a secret for salts."""
    return Keys(salt_secret=secrets.token_hex(32))


def parse(data: bytes) -> Keys:
    """Returns the content of a key file. Raises BadKeyFile."""
    try:
        return Keys.model_validate_json(data)
    except ValidationError as error:
        # the input may hold secrets, so it is not shown
        lines = [problem_line({**problem, "input": "..."}, "keys file") for problem in error.errors()]
        raise BadKeyFile("\n".join(lines)) from None


def dump(keys: Keys) -> bytes:
    """Returns the file's bytes, which `parse` reads."""
    return keys.model_dump_json(indent=1).encode() + b"\n"


def digest(secret: str) -> str:
    """Returns the hash under which a key file knows a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def new_id() -> str:
    """Returns the id of a new key. It is no secret: logs and answers show it."""
    return f"k{secrets.token_hex(6)}"


def new_secret(key_id: str, now: datetime, expires: datetime | None = None) -> tuple[str, Secret]:
    """Returns what a client sends, which nobody can read again later, and its form in the file."""
    text = f"{PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    return text, Secret(sha256=digest(text), created=now, expires=expires)


def now() -> datetime:
    """Returns the present time in whole seconds."""
    return datetime.fromtimestamp(int(time.time()), UTC)


@dataclass(frozen=True, slots=True)
class Found:
    """The key of a secret, and when the secret or the key expires (Unix time); None: never."""

    key: Key
    expires_s: float | None


@dataclass(frozen=True)
class KeyBook:
    """A key file's content, ready for look-ups."""

    content: Keys
    _by_digest: dict[str, Found] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, content: Keys) -> "KeyBook":
        """Returns the book of a file's content."""
        found = {
            secret.sha256: Found(key, _earlier(key.expires, secret.expires))
            for key in content.keys
            for secret in key.secrets
        }
        return cls(content, found)

    def find(self, secret: str) -> Found | None:
        """Returns what is known of a secret, expired or not. The time that this takes tells nothing of the secrets,
        because a hash is looked up.
        """
        return self._by_digest.get(digest(secret))

    @property
    def tenants(self) -> list[str]:
        """The distinct tenants, in the order of the file."""
        return list(dict.fromkeys(key.tenant for key in self.content.keys))

    def cache_salt(self, tenant: str, shares_cache: bool, asked: str | None) -> str | None:
        """Returns the cache salt of a tenant's request that asked for one, or for none.

        A tenant's salt is derived from the file's secret, so no other tenant can name it; the same holds for a salt
        that a request names, which is thereby the tenant's own. With `shares_cache` a request that names none has none.
        """
        if asked is None and shares_cache:
            return None
        text = f"cache salt\0{tenant}\0{asked or ''}"
        secret = bytes.fromhex(self.content.salt_secret)
        return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _earlier(*times: datetime | None) -> float | None:
    given = [time.timestamp() for time in times if time is not None]
    return min(given, default=None)


def _refuse_twice(what: str, values: Iterable[Any]) -> None:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"two keys have the same {what}" + (f" {value}" if what == "id" else ""))
        seen.add(value)
