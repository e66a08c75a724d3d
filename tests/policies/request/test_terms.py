"""Tests of the deadline of terms, and that the journal and the wire carry every field of them."""

import math

import msgspec
import pytest

from actors.wire.messages import Submit
from policies.journal.codec import CodecError, decoder, dumps, encoder, loads
from policies.request.terms import NO_TERMS, Mode, Terms

FULL = Terms(-3, "vip", 0.5, 0.05, "talk", True, Mode.DISAGGREGATED, 60.0, slo_presses=False)


def test_the_total_time_counts_from_the_arrival() -> None:
    assert FULL.deadline_s(100.0) == 160.0
    assert NO_TERMS.deadline_s(100.0) == math.inf


@pytest.mark.parametrize("terms", [NO_TERMS, FULL])
def test_the_journal_writes_terms_by_name_and_reads_them_again(terms: Terms) -> None:
    encode = encoder(Terms)
    assert encode is not None
    plain = loads(dumps(encode(terms)))
    assert list(plain) == list(Terms._fields)
    back = decoder(Terms)(plain)
    assert (back, type(back), type(back.mode)) == (terms, Terms, type(terms.mode))


def test_the_journal_gives_a_missing_term_its_default_and_refuses_an_unknown_one() -> None:
    assert decoder(Terms)({"priority": 2}) == Terms(priority=2)
    with pytest.raises(CodecError, match=r"Terms: 'urgency' is unknown"):
        decoder(Terms)({"urgency": 2})


@pytest.mark.parametrize("terms", [NO_TERMS, FULL])
def test_the_wire_carries_terms_as_an_array(terms: Terms) -> None:
    data = msgspec.msgpack.encode(Submit("r", 10, 4, terms=terms))
    back = msgspec.msgpack.decode(data, type=Submit)
    assert (back.terms, type(back.terms), type(back.terms.mode)) == (terms, Terms, type(terms.mode))
