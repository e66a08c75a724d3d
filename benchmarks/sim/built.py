"""The policies with which a simulation was built, and all of their parameters.

A configuration names a policy and some parameters; the others have their defaults. Results keep them all, so that a
result says what ran even after a default has changed.
"""

import dataclasses
from typing import Any

BUILT: dict[str, dict[str, Any]] = {}
"""The policies of the last simulation that was built in this process: by task, `name` and `params`."""


def note(task: str, name: str, policy: Any) -> None:
    """Writes down in `BUILT` the `policy`, a dataclass, of a task (`prefill` or `decode`)."""
    params = {field.name: _plain(getattr(policy, field.name)) for field in dataclasses.fields(policy)}
    BUILT[task] = {"name": name, "params": params}


def _plain(value: Any) -> Any:
    """Returns a parameter as JSON data; what is neither a number, a text nor a list of them is given by its type."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
