"""The `sluice` command talks to a server (chat, status, policy, explain ...) and, where installed, runs one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from sluice import SluiceError
from sluice._version import __version__

from . import explain, generate, logs, plugins, scale, show
from .output import ENVIRONMENT_HELP, EXIT_HELP, Exit, UsageError, complain, connection_options, report

__all__ = ["main"]

_Configure = Callable[[argparse.ArgumentParser], None]
_COMMANDS: dict[str, tuple[str, _Configure]] = {
    "chat": ("ask the model; the answer streams", generate.configure_chat),
    "complete": ("continue a text, without a chat template", generate.configure_complete),
    "status": ("engines, router and requests in flight", show.configure_status),
    "policy": ("show the routing policies, or change them while it runs", explain.configure_policy),
    "scale": ("show what the autoscaler wants, or set numbers of replicas", scale.configure_scale),
    "logs": ("show levels of log lines, or change them while it runs", logs.configure_logs),
    "explain": ("why a request was routed as it was", explain.configure_explain),
    "models": ("list the served models", show.configure_models),
    "version": ("versions of this command and of the server", show.configure_version),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; on wrong usage argparse itself exits with 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):
        # An answer may have characters that the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except UsageError as error:
        complain(str(error))
        return Exit.USAGE
    except SluiceError as error:
        return report(error)
    except (plugins.MissingServerError, plugins.BrokenCommandError) as error:
        complain(str(error))
        return Exit.MISSING_SERVER
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.BROKEN_PIPE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _run(arguments: list[str]) -> int:
    requested = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _parser(requested)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return Exit.USAGE
    return int(args.run(args))


def _parser(requested: str | None) -> argparse.ArgumentParser:
    """Returns the parser. Of the server-side commands only the requested one is loaded and configured."""
    parser = argparse.ArgumentParser(
        prog="sluice",
        description="Talk to a Sluice server, or run one.",
        epilog=f"{ENVIRONMENT_HELP}\n\n{EXIT_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sluice {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, configure) in _COMMANDS.items():
        configure(
            commands.add_parser(
                name,
                help=summary,
                description=summary,
                epilog=ENVIRONMENT_HELP,
                parents=[connection_options()],
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    for name, summary in plugins.listed().items():
        if name in _COMMANDS:
            continue  # no plugin replaces a command
        if name == requested:
            command = plugins.load(name)
            child = commands.add_parser(name, help=command.help, description=command.help)
            command.configure(child)
            child.set_defaults(run=command.run)
        else:
            commands.add_parser(name, help=summary)
    return parser
