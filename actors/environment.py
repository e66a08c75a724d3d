"""Changing the environment of a process that has started, as if it had been started with the other one.

A process's title is written over its arguments, which lie before its environment in memory. Ray and vLLM find them from
the first variable (as setproctitle does), so that variable must never change.
"""

import os
from collections.abc import Mapping

FIRST = "SLUICE_ENVIRONMENT_CHANGES"
"""The first variable of processes whose environment is to be changed."""


def changeable(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with which to start a process that will `change` it."""
    return {FIRST: "1"} | {name: value for name, value in environment.items() if name != FIRST}


def change(environment: Mapping[str, str]) -> None:
    """Gives this process another environment, which keeps `FIRST`."""
    for name in [name for name in os.environ if name != FIRST and name not in environment]:
        del os.environ[name]
    for name, value in environment.items():
        if name != FIRST and os.environ.get(name) != value:
            os.environ[name] = value
