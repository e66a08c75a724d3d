"""`sluice logs`: the levels of log lines and the access lines, shown or changed while the server runs."""

from __future__ import annotations

import argparse

from sluice.types import Logs

from .output import Exit, UsageError, connect, table

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def configure_logs(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice logs` to `parser`."""
    parser.add_argument(
        "level",
        nargs="?",
        type=str.upper,
        choices=_LEVELS,
        help="the least level of lines from now on, until the processes end; nothing: show the levels",
    )
    parser.add_argument(
        "--logger", metavar="NAME", help="change one logger and those below it, such as actors.router"
    )
    parser.add_argument(
        "--access", choices=("on", "off"), help="whether ingresses write a line for each request"
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    parser.set_defaults(run=run_logs)


def run_logs(args: argparse.Namespace) -> int:
    """Makes the change, if one is asked for, prints the levels, and returns the exit code."""
    if args.logger is not None and args.level is None:
        raise UsageError("--logger needs a level, such as `sluice logs DEBUG --logger actors.router`")
    access = None if args.access is None else args.access == "on"
    with connect(args) as client:
        if args.level is None and access is None:
            told = client.logs()
        else:
            told = client.set_logs(args.level, logger=args.logger, access=access)
    print(told.model_dump_json(exclude_none=True) if args.json else render_logs(told))
    return Exit.OK


def render_logs(logs: Logs) -> str:
    """Returns the levels of the router's loggers as a table."""
    text = table(("LOGGER", "LEVEL"), sorted(logs.levels.items()))
    return text if logs.told is None else f"{text}\n\nsent to {logs.told} other processes"
