"""Ingress <-> router: an administrator's questions and their answers."""

from typing import Literal

from actors.wire.messages.base import Wire


class Admin(Wire, frozen=True):
    """An administrator asks the router through an ingress; `body` is JSON (`actors.router.admin`). `ask` numbers the
    questions of one connection.
    """

    ask: int
    what: Literal["policy", "set_policy", "explain", "journal"]
    body: bytes = b""


class AdminAnswer(Wire, frozen=True):
    """The answer to `ask`: JSON; `status` as in HTTP, and with one above 200 the body is {"message"}."""

    ask: int
    status: int
    body: bytes
