"""`sluice replay`: decides the journal of a router, a flow agent or an autoscaler again by the pure code and says
whether every decision, permit and plan comes out equal.

The entry point group `sluice.commands` loads `command`; `python -m app.replay` is the same program.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from policies.journal import flows
from policies.journal.lines import JournalError
from policies.journal.replay import Step, TornJournal, replay
from policies.scaling import journal as scaling

SHOWN = 3
"""Number of differences that are printed for one log."""
WHAT = "the folder of router.journal, of flow.options.journal or of scaling.journal, or files of it"


class ReplayCommand:
    """The subcommand `sluice replay`.

    Its exit code is 0 if all decisions are equal, 1 if one differs, and 2 if there is no journal that can be replayed.
    """

    name = "replay"
    help = "decide a journal of router, flow agent or autoscaler again and compare every decision"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments to `parser`."""
        parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=WHAT)

    def run(self, args: argparse.Namespace) -> int:
        """Replays each log that the paths hold, and returns the exit code."""
        code = 0
        for path in args.paths:
            if not path.exists():
                print(f"{path}: no such file or folder: give {WHAT}", file=sys.stderr)
                code = 2
            elif path.is_dir() and not any(path.glob("*.jsonl")):
                print(f"{path}: no journal in it (*.jsonl): give {WHAT}", file=sys.stderr)
                code = 2
        for name, files in logs([path for path in args.paths if path.exists()]):
            try:
                code = max(code, _replay(name, files))
            except (JournalError, OSError, ValueError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                code = 2
        return code


def logs(paths: Sequence[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Yields each log (one life of a router) with its files, oldest first.

    The names of one log's files differ in the number at their end.
    """
    found = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    for name, files in groupby(sorted(found), key=lambda file: file.parent / file.stem.rpartition("-")[0]):
        yield str(name), list(files)


def _replay(name: str, files: Sequence[Path]) -> int:
    first = next(_lines(files[:1]), "")
    if first.startswith('{"scaling"'):
        return _replay_scaling(name, files)
    return _replay_flows(name, files) if first.startswith('{"flow_journal"') else _replay_router(name, files)


def _replay_scaling(name: str, files: Sequence[Path]) -> int:
    counts: Counter[str] = Counter()
    torn = ""
    try:
        for step in scaling.replay(_lines(files)):
            counts["steps"] += 1
            if isinstance(step.written, str):
                counts["failures"] += 1
            else:
                counts["moves"] += len(step.written.moves)
            if not step.same:
                counts["different"] += 1
                if counts["different"] <= SHOWN:
                    at = f"step {counts['steps']}, at {step.seen.now_s:.3f} s"
                    print(f"{at}\n  recorded  {step.written}\n  replayed  {step.decided}: {step.reasons}")
    except scaling.ScalingJournalError as error:
        if not counts["steps"] or not _is_torn(files[-1]):
            raise
        torn = f" ({error}: its writer was killed)"
    print(
        f"{name}: {counts['steps']} steps of scaling, {counts['moves']} moves, {counts['failures']} failed,"
        f" {counts['different']} different{torn}"
    )
    return 1 if counts["different"] else 0


def _is_torn(file: Path) -> bool:
    """Returns whether the file ends within a line."""
    return not file.read_bytes().endswith(b"\n")


def _replay_flows(name: str, files: Sequence[Path]) -> int:
    counts: Counter[str] = Counter()
    torn = ""
    try:
        for step in flows.replay(_lines(files)):
            counts["events"] += 1
            counts["permits"] += step.recorded.count('"flow_id"')
            if not step.equal:
                counts["different"] += 1
                if counts["different"] <= SHOWN:
                    print(
                        f"event {step.n}: {step.event}\n  recorded  {step.recorded}\n  replayed  {step.replayed}"
                    )
    except flows.TornFlowJournal as error:
        torn = f" ({error}: its writer was killed)"
    print(
        f"{name}: {counts['events']} events of flows, {counts['permits']} permits,"
        f" {counts['different']} different{torn}"
    )
    return 1 if counts["different"] else 0


def _replay_router(name: str, files: Sequence[Path]) -> int:
    counts: Counter[str] = Counter()
    torn = ""
    try:
        for step in replay(_lines(files)):
            counts["events"] += 1
            counts["actions"] += sum(line.startswith('{"action"') for line in step.recorded)
            counts["failures"] += any(line.startswith('{"error"') for line in step.recorded)
            if not step.equal:
                counts["different"] += 1
                if counts["different"] <= SHOWN:
                    print(_difference(step))
    except TornJournal as error:
        torn = f" ({error}: its writer was killed)"
    print(
        f"{name}: {counts['events']} events, {counts['actions']} actions, {counts['failures']} refused or failed,"
        f" {counts['different']} different{torn}"
    )
    return 1 if counts["different"] else 0


def _lines(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        with path.open(encoding="ascii") as file:
            yield from file


def _difference(step: Step) -> str:
    lines = [f"event {step.n}: {step.event}"]
    lines += [f"  recorded  {line}" for line in step.recorded or ("nothing",)]
    lines += [f"  replayed  {line}" for line in step.replayed or ("nothing",)]
    return "\n".join(lines)


command = ReplayCommand()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program without the `sluice` command, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m app.replay", description=command.help)
    command.configure(parser)
    return command.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
