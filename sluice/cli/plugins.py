"""The subcommands of the server side, which registers them as entry points of the group `sluice.commands`.

An entry point loads an object with `name`, `help`, `configure(parser)` and `run(args) -> int`. Only the command that
was asked for is loaded, because the server side takes seconds to import.
"""

from __future__ import annotations

import argparse
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

GROUP = "sluice.commands"

KNOWN = {
    "serve": "start a server on this machine or cluster",
    "train": "fit output-length predictors to logged requests",
    "profile": "measure engines and write the figures that policies need",
    "replay": "decide a journal of router, flow agent or autoscaler again and compare every decision",
    "simulate": "run a policy and a workload in the cluster simulator",
    "key": "create, list, revoke and rotate the API keys of clients",
    "experiment": "send a load to a running server, change it meanwhile, measure, put back, compare",
}
"""Commands of the server side with their help, which is listed even where the server is not installed."""

SERVER = "sluice-server, from a checkout of Sluice: make setup, or pip install -e '.'"
"""The distribution that brings these commands, and how to install it."""


@runtime_checkable
class Command(Protocol):
    """A subcommand in the form in which an entry point must load it."""

    name: str
    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the work and returns the exit code."""


class MissingServerError(Exception):
    """The server is not installed, or not completely; the message says what to install."""


class BrokenCommandError(Exception):
    """An entry point loads something that is not a command; the message names it."""


def listed() -> dict[str, str]:
    """Returns names and one-line helps of all server-side commands, without importing any."""
    others = {entry.name: f"from {_origin(entry)}" for entry in entry_points(group=GROUP)}
    return {**others, **KNOWN}


def load(name: str) -> Command:
    """Returns the command called `name`. Raises MissingServerError or BrokenCommandError."""
    entry = next(iter(entry_points(group=GROUP, name=name)), None)
    if entry is None:
        raise MissingServerError(
            f"`sluice {name}` belongs to the server side, which is not installed here (or has no such command)."
            f" Install {SERVER}"
        )
    try:
        command = entry.load()
    except ImportError as error:
        raise MissingServerError(_advice(name, entry, error)) from error
    if not isinstance(command, Command):
        raise BrokenCommandError(
            f"`sluice {name}`: {entry.value} of {_origin(entry)} lacks name, help, configure or run; report it there"
        )
    return command


def _advice(name: str, entry: EntryPoint, error: ImportError) -> str:
    problem = f"`sluice {name}` cannot be loaded: {error}."
    if name in KNOWN:
        return f"{problem} It needs {SERVER}"
    return f"{problem} Install what {_origin(entry)} needs for it."


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
