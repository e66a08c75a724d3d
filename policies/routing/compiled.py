"""Numeric functions compiled with numba, typed; nothing else in policies imports it.

`compiled` makes machine code for a function's annotated types when its module is imported, never in a call, and keeps
it on disk: beside the source, else in the user's cache directory (numba's rules; NUMBA_CACHE_DIR overrides). Where
neither can be written it is made again in each process. What is kept is used as long as the function's own file has not
changed: so what it is compiled from, the parts and NamedTuples too, must be in that file.

No fast mathematics and no threads: the same inputs give the same bits, those that Python's own floats would give.
"""

from collections.abc import Callable
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
_PLAIN = {float: types.float64, int: types.int64, bool: types.boolean, type(None): types.void}


def rows_of(fields: Any) -> Any:
    """The type of an array of records, by its dtype; write it as Annotated[NDArray[void], rows_of(...)]."""
    return numba.from_dtype(fields)[::1]


def compiled(function: F) -> F:
    """Compiles a function at once. Its parameters are annotated with the arrays above, float, int, bool, or NamedTuples
    of such; so is what it returns.
    """
    hints = get_type_hints(function, include_extras=True)
    signature = _type_of(hints.pop("return"))(*map(_type_of, hints.values()))
    try:
        return cast(F, numba.njit(signature, cache=True)(function))
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return cast(F, numba.njit(signature)(function))  # there is no place that can be written


def part(function: F) -> F:
    """A function that compiled ones call; compiled as part of them."""
    return cast(F, numba.njit(function))


def _type_of(hint: Any) -> Any:
    if hint in _PLAIN:
        return _PLAIN[hint]
    if hasattr(hint, "_fields"):
        fields = get_type_hints(hint, include_extras=True)
        return types.NamedTuple([_type_of(fields[name]) for name in hint._fields], hint)
    return get_args(hint)[1]
