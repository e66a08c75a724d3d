"""The codec of the event journal: it turns frozen records into plain JSON data and back, exactly, by their type hints.

`encoder(hint)` and `decoder(hint)` build a function once for each type. A decoded value is equal to the encoded value
and encodes to the same bytes again: ints stay ints, mappings keep their order, tuples come back as tuples.

    float             a JSON number (Python's shortest form, which round-trips); inf and nan: "inf", "-inf", "nan"
    enum              its value
    tuple[X, ...]     a list
    Mapping[str, V]   an object; with other keys a list of [key, value]
    record            an object of its fields, in their order; in a union of records also "type", the record's name
    Any               plain JSON data as they are: str, int, finite float, bool, None, list, dict with str keys

A record is a dataclass (its init fields) or a NamedTuple. Decoding refuses unknown keys and wrong shapes with
`CodecError`. A missing field takes its default, so that lines of an older version can still be read.
"""

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]

_FINITE = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_PLAIN = (str, int, bool, type(None))


class CodecError(ValueError):
    """The data do not have the shape of the type, or a value cannot be written; the message names the fault."""


def dumps(plain: Any) -> str:
    """Returns an encoder's result as one line of ASCII JSON. Raises CodecError for a value that JSON cannot hold."""
    try:
        return _FINITE.encode(plain)
    except ValueError:  # some number is not finite
        return _FINITE.encode(_spell(plain))
    except TypeError as error:
        raise CodecError(f"cannot be written as JSON: {error}") from None


def loads(line: str) -> Any:
    """Returns the data in one line of JSON. Raises CodecError for a line that is no JSON or is nested too deeply."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise CodecError(f"no JSON: {error}") from None
    except RecursionError:
        raise CodecError("nested too deeply") from None


def _spell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    return value


# --------------------------------------------------------------------------------------------------------- encoding


@cache
def encoder(hint: Any) -> Encode | None:
    """Returns a function that turns a value of this type into plain data; None where values are plain already.

    Enums and tuples of plain values count as plain, because JSON writes them in the right form. Raises TypeError for a
    type that is not supported.
    """
    if hint in _PLAIN or hint is float or get_origin(hint) is Literal:
        return None
    if hint is Any:
        return _check_plain
    if isinstance(hint, type) and issubclass(hint, Enum):
        if not issubclass(hint, str | int):
            raise TypeError(f"{hint.__name__} is neither a StrEnum nor an IntEnum")
        return None
    if _is_record(hint):
        return _record_encoder(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union_encoder(hint)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        each = encoder(args[0])
        return None if each is None else lambda value: [each(item) for item in value]
    if origin is tuple:
        return _pair_encoder(args)
    if origin in (Mapping, dict):
        return _mapping_encoder(*args)
    raise TypeError(f"the codec does not know {hint!r}")


def _record_encoder(kind: Any) -> Encode:
    plan = [(name, encoder(hint)) for name, hint in _fields(kind).items()]
    plain = [name for name, encode in plan if encode is None]
    if len(plain) == len(plan):
        return lambda value: {name: getattr(value, name) for name in plain}
    return lambda value: {
        name: getattr(value, name) if encode is None else encode(getattr(value, name))
        for name, encode in plan
    }


def _union_encoder(hint: Any) -> Encode | None:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if len(kinds) == 1:
        only = encoder(kinds[0])
        return None if only is None else lambda value: None if value is None else only(value)
    if all(encoder(kind) is None for kind in kinds):
        return None
    if not all(_is_record(kind) for kind in kinds):
        raise TypeError(f"the codec does not know {hint!r}: a union of plain types or of records")
    by_type: dict[Any, Any] = {kind: encoder(kind) for kind in kinds}

    def encode(value: Any) -> Any:
        if value is None:
            return None
        if type(value) not in by_type:
            raise CodecError(f"{type(value).__name__} is none of {', '.join(k.__name__ for k in by_type)}")
        return {"type": type(value).__name__, **by_type[type(value)](value)}

    return encode


def _pair_encoder(args: tuple[Any, ...]) -> Encode | None:
    each = [encoder(arg) for arg in args]
    if all(encode is None for encode in each):
        return None
    return lambda value: [
        item if encode is None else encode(item) for item, encode in zip(value, each, strict=True)
    ]


def _mapping_encoder(key: Any, item: Any) -> Encode:
    value_of = encoder(item)
    if key is str:
        if value_of is None:
            return dict
        return lambda value: {k: value_of(v) for k, v in value.items()}
    key_of = encoder(key)
    return lambda value: [
        [k if key_of is None else key_of(k), v if value_of is None else value_of(v)] for k, v in value.items()
    ]


def _check_plain(value: Any) -> Any:
    ok = isinstance(value, _PLAIN) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, list):
        return [_check_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _check_plain(item) for key, item in value.items()}
    if not ok:
        raise CodecError(f"{value!r} is no plain JSON value")
    return value


# --------------------------------------------------------------------------------------------------------- decoding


@cache
def decoder(hint: Any) -> Decode:
    """Returns the inverse of `encoder`: a function that turns data read from JSON into a value of this type."""
    if hint is Any:
        return _same
    if hint in _PLAIN or hint is float:
        return _scalar_decoder(hint)
    if get_origin(hint) is Literal:
        return _literal_decoder(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_decoder(hint)
    if _is_record(hint):
        return _record_decoder(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union_decoder(hint)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        each = decoder(args[0])
        return lambda data: tuple([each(item) for item in _need(list, data)])
    if origin is tuple:
        several = [decoder(arg) for arg in args]
        return lambda data: tuple(
            decode(item) for item, decode in zip(_need(list, data), several, strict=True)
        )
    if origin in (Mapping, dict):
        return _mapping_decoder(*args)
    raise TypeError(f"the codec does not know {hint!r}")


def _same(data: Any) -> Any:
    return data


def _scalar_decoder(kind: type) -> Decode:
    allowed: tuple[type, ...] = (float, int) if kind is float else (kind,)

    def decode(data: Any) -> Any:
        if type(data) in allowed:
            return data
        if kind is float and data in ("inf", "-inf", "nan"):
            return float(data)
        raise CodecError(f"{data!r} is no {kind.__name__}")

    return decode


def _literal_decoder(allowed: tuple[Any, ...]) -> Decode:
    def decode(data: Any) -> Any:
        if data not in allowed:
            raise CodecError(f"{data!r} is none of {', '.join(map(str, allowed))}")
        return data

    return decode


def _enum_decoder(kind: type[Enum]) -> Decode:
    plain = int if issubclass(kind, int) else str

    def decode(data: Any) -> Any:
        if type(data) not in (plain, kind):
            raise CodecError(f"{data!r} is no {kind.__name__}")
        try:
            return kind(data)
        except ValueError as error:
            raise CodecError(str(error)) from None

    return decode


def _record_decoder(kind: Any) -> Decode:
    plan = {name: decoder(hint) for name, hint in _fields(kind).items()}
    needed = _needed(kind)

    def decode(data: Any) -> Any:
        given = _need(dict, data)
        if not given.keys() <= plan.keys() or not needed <= given.keys():
            wrong = sorted(given.keys() - plan.keys()) or sorted(needed - given.keys())
            raise CodecError(
                f"{kind.__name__}: {wrong[0]!r} is {'unknown' if wrong[0] in given else 'missing'}"
            )
        try:
            return kind(**{name: plan[name](item) for name, item in given.items()})
        except CodecError as error:
            raise CodecError(f"{kind.__name__}: {error}") from None

    return decode


def _union_decoder(hint: Any) -> Decode:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    optional = len(kinds) < len(get_args(hint))
    if len(kinds) == 1:
        only = decoder(kinds[0])
        return lambda data: None if data is None else only(data)
    if encoder(hint) is None:
        return _same
    by_name = {kind.__name__: decoder(kind) for kind in kinds}

    def decode(data: Any) -> Any:
        if data is None and optional:
            return None
        given = dict(_need(dict, data))
        name = given.pop("type", None)
        if name not in by_name:
            raise CodecError(f"type is {name!r}: it must be one of {', '.join(by_name)}")
        return by_name[name](given)

    return decode


def _mapping_decoder(key: Any, item: Any) -> Decode:
    value_of = decoder(item)
    if key is str:
        return lambda data: {k: value_of(v) for k, v in _need(dict, data).items()}
    key_of = decoder(key)
    return lambda data: {key_of(k): value_of(v) for k, v in _need(list, data)}


def _need(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise CodecError(f"{str(data)[:80]!r} is no {kind.__name__}")
    return data


def _is_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or _is_named_tuple(hint)


def _is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    if _is_named_tuple(kind):
        return {name: hints[name] for name in kind._fields}
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def _needed(kind: Any) -> set[str]:
    """Returns the names of a record's fields that have no default."""
    if _is_named_tuple(kind):
        return {name for name in kind._fields if name not in kind._field_defaults}
    missing = dataclasses.MISSING
    return {
        f.name
        for f in dataclasses.fields(kind)
        if f.init and f.default is missing and f.default_factory is missing
    }
