"""The parts that all subcommands share: exit codes, the display of errors, connections, and argument types."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from enum import IntEnum

from sluice import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    ConfigurationError,
    ConnectionFailedError,
    NotFoundError,
    RateLimitedError,
    RequestTimeoutError,
    RetryPolicy,
    Sluice,
    SluiceError,
    StreamInterruptedError,
    Timeouts,
    UnavailableError,
)
from sluice._core import DEFAULT_BASE_URL


class Exit(IntEnum):
    """The exit codes of the command; `sluice --help` lists them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_SERVER = 3
    OVERLOADED = 4
    TIMEOUT = 5
    NOT_READY = 6
    MISSING_SERVER = 7
    INTERRUPTED = 130
    BROKEN_PIPE = 141


EXIT_HELP = """exit codes:
  0 success             1 the server or an engine failed      2 wrong usage, or the request was refused as it is
  3 no server there     4 overloaded, try again later         5 a time limit passed
  6 server not ready    7 the command needs the server's package  130 interrupted"""

ENVIRONMENT_HELP = f"""environment:
  SLUICE_BASE_URL  where the server is (default {DEFAULT_BASE_URL})
  SLUICE_API_KEY   sent as a bearer token, if set
  SLUICE_ADMIN_KEY sent instead by `policy`, `explain`, `scale` and `logs`; without it they read the key file of a
                   server on this machine; also sent by `status` where there is no SLUICE_API_KEY"""


class UsageError(Exception):
    """The command line, or what was piped in, cannot be used; the message says how to write it."""


def exit_code(error: SluiceError) -> Exit:
    """Returns the exit code for an SDK error."""
    if isinstance(error, StreamInterruptedError):
        return Exit.FAILED
    table: tuple[tuple[tuple[type[SluiceError], ...], Exit], ...] = (
        ((BadRequestError, AuthenticationError, NotFoundError, ConfigurationError), Exit.USAGE),
        ((ConnectionFailedError,), Exit.NO_SERVER),
        ((RateLimitedError, UnavailableError), Exit.OVERLOADED),
        ((RequestTimeoutError,), Exit.TIMEOUT),
    )
    return next((code for kinds, code in table if isinstance(error, kinds)), Exit.FAILED)


def complain(message: str, *hints: str) -> None:
    """Writes an error to stderr, and advice in lines below it."""
    print(f"sluice: {message}", file=sys.stderr)
    for hint in hints:
        print(f"  -> {hint}", file=sys.stderr)


def report(error: SluiceError) -> Exit:
    """Shows an SDK error on stderr and returns its exit code."""
    code = exit_code(error)
    hints = []
    if isinstance(error, ApiError) and error.retry_after_s is not None:
        hints.append(f"the server asks to wait {error.retry_after_s:g} s")
    if code is Exit.NO_SERVER:
        hints.append(
            "start a server with `sluice serve` (in a checkout: `make serve`), or set SLUICE_BASE_URL"
        )
    elif error.hint is not None:
        hints.append(error.hint)
    complain(str(error), *hints)
    return code


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text, with left-aligned columns two blanks apart."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def connection_options() -> argparse.ArgumentParser:
    """Returns the parent parser of every command that talks to a server."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("connection")
    group.add_argument(
        "--base-url", metavar="URL", help=f"the server (default: SLUICE_BASE_URL, or {DEFAULT_BASE_URL})"
    )
    group.add_argument(
        "--timeout", type=positive_float, metavar="S", help="seconds one request may take in all"
    )
    group.add_argument(
        "--retries",
        type=natural_int,
        default=3,
        metavar="N",
        help="retries when refused or not connected (default 3)",
    )
    return parent


def connect(args: argparse.Namespace, *, retries: int | None = None) -> Sluice:
    """Returns a client with the connection options of the command line; `retries` replaces the number of retries."""
    return Sluice(
        args.base_url,
        timeouts=Timeouts(total_s=args.timeout),
        retry=RetryPolicy(max_retries=args.retries if retries is None else retries),
    )


def finite_float(text: str) -> float:
    """Returns a number for argparse, which reports an error for any other text, nan and inf included."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def positive_float(text: str) -> float:
    """Returns a finite number above 0 for argparse, which reports an error for any other text."""
    value = finite_float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def natural_int(text: str) -> int:
    """Returns a whole number of 0 or more for argparse, which reports an error for any other text."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value
