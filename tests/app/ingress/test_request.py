"""The router learns of a request's text and user by digests, never themselves."""

import dataclasses

import msgspec

from actors.router.forecasts import arrival_of
from actors.wire.messages import Hints, Submit
from app.ingress.request import RequestSpec, hints_of
from policies.request.terms import Terms
from predictors.protocol import Arrival

SALT = b"secret"


def told(user: str, text: str | None = None, salt: bytes = SALT) -> tuple[Arrival, Hints]:
    plain = RequestSpec([1, 2], {"temperature": 0.5}, 5, 1, Terms(), 100.0)
    spec = dataclasses.replace(plain, user=user, text=text)
    hints = hints_of(spec, "m", salt)
    return arrival_of(Submit("r", 2, 5, hints=hints), 1.0), hints


def test_requests_of_one_user_meet_and_those_of_none_have_no_client() -> None:
    first, again, other = told("ann")[0], told("ann")[0], told("bob")[0]
    assert first.client == again.client is not None
    assert other.client != first.client
    assert told("")[0].client is None


def test_neither_name_nor_text_leaves_the_ingress_and_another_key_gives_other_digests() -> None:
    arrival, hints = told("ann", "how many words?")
    sent = msgspec.msgpack.encode(hints)
    assert b"ann" not in sent
    assert b"words" not in sent
    assert arrival.text is not None
    assert arrival.client != told("ann", salt=b"other")[0].client
