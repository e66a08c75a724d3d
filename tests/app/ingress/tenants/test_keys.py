"""The content of a key file: what is refused, what comes back unchanged, and salts."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ingress.tenants.keys import (
    BadKeyFile,
    Key,
    KeyBook,
    Keys,
    digest,
    dump,
    empty,
    new_id,
    new_secret,
    now,
    parse,
)

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z").filter(
    lambda name: name not in ("admin", "other")
)
times = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)).map(
    lambda at: at.replace(microsecond=0)
)
limits = st.none() | st.integers(1, 10**12)


@st.composite
def keys(draw: st.DrawFn) -> Keys:
    made = []
    for key_id in draw(st.lists(names, unique=True, max_size=4)):
        secret = new_secret(key_id, draw(times), draw(st.none() | times))[1]
        made.append(
            Key(
                id=key_id,
                tenant=draw(names),
                note=draw(st.text(st.characters(codec="utf-8"), max_size=20)),
                ceiling=draw(
                    st.sampled_from(["interactive", "standard", "batch"]) | st.integers(-1000, 1000)
                ),
                weight=draw(st.floats(0.001, 1e6)),
                requests_per_min=draw(limits),
                tokens_per_min=draw(limits),
                parallel=draw(limits),
                timeout_s=draw(st.none() | st.floats(0.001, 604_800)),
                expires=draw(st.none() | times),
                shares_cache=draw(st.booleans()),
                created=draw(times),
                secrets=(secret,),
            )
        )
    return empty().model_copy(update={"keys": tuple(made)})


@given(keys())
def test_a_file_is_read_as_it_was_written(content: Keys) -> None:
    assert parse(dump(content)) == content


@given(keys(), st.data())
def test_half_a_file_is_no_key_file(content: Keys, data: st.DataObject) -> None:
    whole = dump(content).rstrip()
    with pytest.raises(BadKeyFile):
        parse(whole[: data.draw(st.integers(0, len(whole) - 1))])


def file_with(**changed: Any) -> bytes:
    secret = new_secret("k1", AT)[1]
    key = Key(id="k1", tenant="acme", created=AT, secrets=(secret,))
    found = json.loads(dump(empty().model_copy(update={"keys": (key,)})))
    found["keys"][0] |= changed
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tenant": "admin"}, "admin"),
        ({"tenant": "a b"}, "tenant"),
        ({"weight": 0}, "weight"),
        ({"weight": "1"}, "weight"),
        ({"ceiling": "urgent"}, "ceiling"),
        ({"ceiling": -1001}, "ceiling"),
        ({"requests_per_min": 0}, "requests_per_min"),
        ({"parallel": 1.5}, "parallel"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 604_801}, "timeout_s"),
        ({"expires": "2026-01-02T03:04:05"}, "expires"),
        ({"limit": 3}, "limit"),
        ({"secrets": [{"sha256": "secret!", "created": "2026-01-02T03:04:05Z"}]}, "sha256"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], told: str) -> None:
    assert parse(file_with()).keys[0].id == "k1"
    with pytest.raises(BadKeyFile, match=told) as refused:
        parse(file_with(**changed))
    assert "secret!" not in str(refused.value)


@pytest.mark.parametrize("digits", [63, 65, 127], ids=str)
def test_a_salt_secret_has_whole_bytes(digits: int) -> None:
    """A file whose secret cannot be used would be an error at every request instead of at its reading."""
    found = json.loads(file_with()) | {"salt_secret": "a" * digits}
    with pytest.raises(BadKeyFile, match="salt_secret"):
        parse(json.dumps(found).encode())
    longer = KeyBook.of(parse(json.dumps(found | {"salt_secret": "a" * 66}).encode()))
    assert longer.cache_salt("acme", False, None)


def test_two_keys_have_neither_one_id_nor_one_secret() -> None:
    key = parse(file_with()).keys[0]
    for twin in (key.model_copy(update={"secrets": ()}), key.model_copy(update={"id": "k2"})):
        with pytest.raises(BadKeyFile, match="two keys"):
            parse(dump(empty().model_copy(update={"keys": (key, twin)})))


def test_a_file_holds_hashes_and_no_secrets() -> None:
    key_id = new_id()
    text, secret = new_secret(key_id, now())
    assert secret.sha256 == digest(text)
    key = Key(id="k1", tenant="acme", created=AT, secrets=(secret,))
    content = empty().model_copy(update={"keys": (key,)})
    # the secret itself may have hyphens
    assert text.partition(f"{key_id}-")[2].encode() not in dump(content)
    book = KeyBook.of(content)
    found = book.find(text)
    assert found is not None and found.key == key
    assert book.find(secret.sha256) is None
    assert book.find(text[:-1]) is None


def test_a_secret_ends_with_itself_or_its_key() -> None:
    ends = [None, AT, AT + timedelta(hours=1)]
    for of_key in ends:
        for of_secret in ends:
            text, secret = new_secret("k1", AT, of_secret)
            key = Key(id="k1", tenant="acme", created=AT, expires=of_key, secrets=(secret,))
            found = KeyBook.of(empty().model_copy(update={"keys": (key,)})).find(text)
            assert found is not None
            given_s = [time.timestamp() for time in (of_key, of_secret) if time is not None]
            assert found.expires_s == min(given_s, default=None)


def test_salts_come_from_the_files_secret() -> None:
    here, there = KeyBook.of(empty()), KeyBook.of(empty())
    assert (
        here.cache_salt("a", False, None)
        == here.cache_salt("a", True, "")
        == here.cache_salt("a", False, None)
    )
    assert here.cache_salt("a", False, None) != there.cache_salt("a", False, None)
    # tenant and salt are kept apart: neither can reach into the other
    assert here.cache_salt("a", False, "bc") != here.cache_salt("ab", False, "c")
