"""The decorators here compile numeric functions with numba, typed by their annotations. No other module of
`policies` imports numba.

`compiled` compiles a function when its module is imported, never in a call. It caches the machine code on disk
beside the source or, if that cannot be written, in the user's cache directory (numba's rules; NUMBA_CACHE_DIR
overrides). If neither can be written, each process compiles again. Numba reuses cached code until the function's
own file changes. A kernel here is spread over files, so `compiled` stamps the cache with the text of every file
that defines one of its parts. A constant or record that a kernel uses must therefore be defined in one of those
files.

Under NUMBA_DISABLE_JIT=1 both decorators return the function unchanged. It then runs as plain Python over the same
arrays, which is how tests run a kernel step by step. Neither fast mathematics nor threads are used, so compiled
code gives the same bits as Python's own floats.
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
    """Returns the array element type with the int and float fields that a class and its bases annotate. The bases'
    fields come last, because numba treats a record that begins with another's fields as a subtype of it.
    """
    hints = get_type_hints(kind)
    names = [name for owner in kind.__mro__ for name in inspect.get_annotations(owner)]
    fields = [(name, np.dtype(hints[name])) for name in names]
    return np.dtype((np.record, fields))


def table(kind: Any, rows: int) -> Table:
    """Returns an array of `rows` records of a class, with all fields 0."""
    return np.zeros(rows, record(kind))


def rows_of(kind: Any) -> Any:
    """Returns the compiled type of a table of a class. Parameters are annotated `Annotated[Table, rows_of(Kind)]`."""
    return numba.from_dtype(record(kind))[::1]


def compiled(function: F) -> F:
    """Compiles a function immediately and returns it. Its parameters and its result must be annotated with the
    array types above, tables, float, int, bool, or NamedTuples of these.
    """
    if numba.config.DISABLE_JIT:
        return function
    hints = get_type_hints(function, include_extras=True)
    signature = _type_of(hints.pop("return"))(*map(_type_of, hints.values()))
    dispatcher = numba.njit(function)
    try:
        dispatcher.enable_caching()
        dispatcher._cache._cache_file._source_stamp = _stamp(function)
    except RuntimeError as error:  # no cache directory can be written
        if "no locator available" not in str(error):
            raise
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return cast(F, dispatcher)


def part(function: F) -> F:
    """Marks a function that compiled functions call, and that is compiled as part of them."""
    return cast(F, numba.njit(function))


def _stamp(function: Callable[..., Any]) -> str:
    """Returns a digest of the files that define a function and its direct and indirect parts."""
    found, files = [function], {Path(__file__)}
    for made in found:  # the list grows during the loop
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
