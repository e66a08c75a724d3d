"""Keys, and the sessions that a login turns a key into: they say who may do what.

A session is a cookie that this server has signed: a role, a random number, and a digest of the key. It holds for
`session_s`, as long as this process lives, its key is still one of the keys, and nobody has logged out of it. The token
against forged requests (CSRF) follows from the random number, so only the numbers of logouts are stored.
"""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from itsdangerous import BadData, URLSafeTimedSerializer

from app.admin_key import KeyFile, KeyFileError, name_of_key
from app.dashboard.refusal import Refusal

Role = Literal["viewer", "admin"]

COOKIE = "sluice_session"
TRIES = 10
"""Wrong keys from one address within `TRIES_S`, above which further wrong ones are refused as too many."""
TRIES_S = 60.0
MOST_ADDRESSES = 1024
MOST_LOGOUTS = 4096
"""Logouts that are remembered. ASSUMPTION: there are fewer while a session lasts."""


class Who(NamedTuple):
    """A caller: what it may do, a name for the audit log, and its CSRF token (None for one that sends its key)."""

    role: Role
    name: str
    csrf: str | None


class Keys:
    """The keys that are taken. Without `admin` keys, those in `files` are, which this machine makes."""

    def __init__(self, viewer: Iterable[str], admin: Iterable[str], files: Iterable[KeyFile] = ()) -> None:
        self._viewer, self._admin, self._files = tuple(viewer), tuple(admin), tuple(files)

    def role_of(self, key: str) -> Role | None:
        """Returns the role that a key gives; None for a wrong key. It takes as long for every wrong key."""
        given = key.encode("utf-8", "surrogateescape")
        admin = [hmac.compare_digest(given, one.encode()) for one in self._admins()]
        viewer = [hmac.compare_digest(given, one.encode()) for one in self._viewer]
        return "admin" if any(admin) else "viewer" if any(viewer) else None

    def all(self) -> Iterable[str]:
        """Returns all keys that are taken now."""
        return (*self._viewer, *self._admins())

    def where(self) -> str:
        """Returns where a person finds an admin key."""
        if self._admin:
            return "the server has its keys from dashboard.admin_keys or SLUICE_ADMIN_KEYS"
        if not self._files:
            return "the server has none: set dashboard.admin_keys or SLUICE_ADMIN_KEYS"
        return f"it is in the file {self._files[0].path} on the server's machine"

    def _admins(self) -> list[str]:
        found = list(self._admin)
        for file in self._files:
            try:
                found.append(file.take())
            except KeyFileError:
                # the log of the start says what is wrong with it; without a key nobody gets in
                continue
        return found


class Sessions:
    """Logins and callers of one server. `now_s` is a clock for what a caller tries."""

    def __init__(self, keys: Keys, session_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._keys, self.session_s, self._now_s = keys, session_s, now_s
        self._secret = secrets.token_bytes(32)
        self._signer = URLSafeTimedSerializer(
            self._secret, salt="sluice dashboard", signer_kwargs={"digest_method": hashlib.sha256}
        )
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()

    def login(self, key: object, address: str) -> tuple[Role, str, str]:
        """Returns the role that a key gives, a cookie's value, and the CSRF token. Raises Refusal 401 or 429."""
        role = self.role_of_key(key if isinstance(key, str) else "", address)
        number = secrets.token_urlsafe(16)
        assert isinstance(key, str)
        cookie = self._signer.dumps([role, number, self._digest(key)])
        return role, cookie, self._token(number)

    def role_of_key(self, key: str, address: str) -> Role:
        """Returns the role that a key gives. Raises Refusal 401 for a wrong one, or 429 after many from one address.

        A right key is taken whatever else comes from its address: a program with an old key, or others behind the same
        proxy, must not lock an administrator out. So the limit keeps nobody from guessing on; keys at random do.
        """
        role = self._keys.role_of(key)
        if role is not None:
            return role
        tried = self._tries.setdefault(address, deque())
        self._tries.move_to_end(address)
        if len(self._tries) > MOST_ADDRESSES:
            self._tries.popitem(last=False)
        while tried and tried[0] < self._now_s() - TRIES_S:
            tried.popleft()
        if len(tried) >= TRIES:
            raise Refusal(429, f"{TRIES} wrong keys within {TRIES_S:.0f} s: wait a minute, then try again")
        tried.append(self._now_s())
        raise Refusal(401, f"this is none of the keys: {self._keys.where()}")

    def who(self, cookie: str | None, authorization: str | None, address: str) -> Who:
        """Returns the caller of a request by its key or its session. Raises Refusal 401 without either, or if it has
        expired.
        """
        if authorization is not None:
            scheme, _, key = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise Refusal(401, "send the key as `Authorization: Bearer KEY`")
            role = self.role_of_key(key.strip(), address)
            return Who(role, f"key {name_of_key(key.strip())} from {address}", None)
        if not cookie:
            raise Refusal(401, f"log in with a key: {self._keys.where()}")
        role, number, key = self._session(cookie)
        return Who(role, f"key {name_of_key(key)} from {address}", self._token(number))

    def holds(self, role: Role, cookie: str | None, authorization: str | None) -> bool:
        """Returns whether a caller that had this role still has it. A key that is taken no more is no guess, so it does
        not count as one.
        """
        if authorization is not None:
            return self._keys.role_of(authorization.partition(" ")[2].strip()) == role
        try:
            return cookie is not None and self._session(cookie)[0] == role
        except Refusal:
            return False

    def logout(self, cookie: str | None) -> None:
        """Ends a session wherever its cookie is."""
        try:
            _, number, _ = self._session(cookie or "")
        except Refusal:
            return
        self._left[number] = None
        if len(self._left) > MOST_LOGOUTS:
            self._left.popitem(last=False)

    def _session(self, cookie: str) -> tuple[Role, str, str]:
        """Returns role, number and key of a session. Raises Refusal 401 for one that has ended."""
        try:
            role, number, digest = self._signer.loads(cookie, max_age=int(self.session_s))
        except (BadData, ValueError, TypeError):
            raise Refusal(401, "the login has expired, or the server was restarted: log in again") from None
        if number in self._left:
            raise Refusal(401, "somebody has logged out of this login: log in again")
        held = next((one for one in self._keys.all() if hmac.compare_digest(self._digest(one), digest)), None)
        if held is None or self._keys.role_of(held) != role:
            raise Refusal(401, "the key of this login is not taken any more: log in again")
        return role, number, held

    def _digest(self, key: str) -> str:
        return hmac.new(self._secret, b"key " + key.encode(), hashlib.sha256).hexdigest()[:32]

    def _token(self, number: str) -> str:
        return hmac.new(self._secret, b"csrf " + number.encode(), hashlib.sha256).hexdigest()[:32]
