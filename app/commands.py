"""Subcommands of `sluice` that need the server side; found by the entry point group `sluice.commands`."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Serve:
    """`sluice serve`: the same as `python -m app.serve`."""

    name: str = "serve"
    help: str = "run a Serve config file in the foreground, with its own Ray, until Ctrl-C"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from app.serve import configure

        configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        from app.serve import run

        return run(args)


serve = Serve()
