"""Numeric functions compiled with numba, typed by their annotations; nothing else in `policies` imports numba.

`compiled` makes machine code of a function when its module is imported, never in a call, and keeps it on disk: beside
the source, else in the user's cache directory (numba's rules; NUMBA_CACHE_DIR overrides). Where neither can be written
it is made again in each process. Numba reuses cached code until the function's own file changes; a kernel here is
spread over files, so `compiled` stamps the cache with the text of every file that the function's parts stand in. A
constant or record that a kernel uses must therefore stand in one of those files.

Under NUMBA_DISABLE_JIT=1 both decorators return the function as it is: plain Python over the same arrays, which is how
tests read a kernel's steps one by one. Neither fast mathematics nor threads are used: the same inputs give the same
bits, compiled or not, those that Python's own floats would give.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

import numba
import numpy as np
import numpy.typing as npt
from numba import types

F = TypeVar("F", bound=Callable[..., Any])

Floats = Annotated[npt.NDArray[np.float64], types.float64[::1]]
FloatRows = Annotated[npt.NDArray[np.float64], types.float64[:, ::1]]
Integers = Annotated[npt.NDArray[np.int64], types.int64[::1]]
IntegerRows = Annotated[npt.NDArray[np.int64], types.int64[:, ::1]]
TruthRows = Annotated[npt.NDArray[np.bool_], types.boolean[:, ::1]]
Table = npt.NDArray[np.void]
_PLAIN = {float: types.float64, int: types.int64, bool: types.boolean, type(None): types.void}


@functools.cache
def record(kind: Any) -> np.dtype[Any]:
    """The array element with the int and float fields that a class and its bases annotate, the bases' last: a record
    that begins with another's fields would be taken for that one (numba's subtypes, an experiment of theirs).
    """
    hints = get_type_hints(kind)
    names = [name for owner in kind.__mro__ for name in inspect.get_annotations(owner)]
    fields = [(name, np.dtype(hints[name])) for name in names]
    return np.dtype((np.record, fields))


def table(kind: Any, rows: int) -> Table:
    """An array of `rows` records, all fields 0."""
    return np.zeros(rows, record(kind))


def rows_of(kind: Any) -> Any:
    """The compiled type of such a table; write it as `Annotated[Table, rows_of(Kind)]`."""
    return numba.from_dtype(record(kind))[::1]


def compiled(function: F) -> F:
    """Compiles a function at once. Its parameters and its result are annotated with the arrays above, tables, float,
    int, bool, or NamedTuples of such.
    """
    if numba.config.DISABLE_JIT:
        return function
    hints = get_type_hints(function, include_extras=True)
    signature = _type_of(hints.pop("return"))(*map(_type_of, hints.values()))
    dispatcher = numba.njit(function)
    try:
        dispatcher.enable_caching()
        dispatcher._cache._cache_file._source_stamp = _stamp(function)
    except RuntimeError as error:  # there is no place that can be written
        if "no locator available" not in str(error):
            raise
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return cast(F, dispatcher)


def part(function: F) -> F:
    """A function that compiled ones call; compiled as part of them."""
    return cast(F, numba.njit(function))


def _stamp(function: Callable[..., Any]) -> str:
    """A digest of the files that a function and its parts, direct and indirect, stand in."""
    found, files = [function], {Path(__file__)}
    for made in found:  # grows on the way
        files.add(Path(inspect.getfile(made)))
        named = [made.__globals__.get(name) for name in made.__code__.co_names]
        parts = [getattr(thing, "py_func", None) for thing in named]
        found += [other for other in parts if other is not None and other not in found]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _type_of(hint: Any) -> Any:
    if hint in _PLAIN:
        return _PLAIN[hint]
    if hasattr(hint, "_fields"):
        fields = get_type_hints(hint, include_extras=True)
        return types.NamedTuple([_type_of(fields[name]) for name in hint._fields], hint)
    return get_args(hint)[1]
