"""The command `sluice experiment`: run, list, compare, report, check, restore.

The entry point group `sluice.commands` loads `command`. It imports heavy modules only when it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "shipped"
_NAMES = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))

_EPILOG = f"""PLAN is a YAML file, `-` for standard input, or the name of a shipped file: {_NAMES}.
docs/experiments.md describes the file.

examples:
  sluice experiment check burst
  sluice experiment run burst
  sluice experiment run mine.yaml --url http://127.0.0.1:8000 --dashboard http://127.0.0.1:8002
  sluice experiment list
  sluice experiment compare RUN RUN
  sluice experiment report RUN --html report.html
"""


class ExperimentCommand:
    """The subcommand `experiment`."""

    name = "experiment"
    help = "send a load to a running server, change it meanwhile, measure, put back, compare"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the subcommand's arguments to `parser`."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EPILOG
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        _configure_run(actions.add_parser("run", help="run a plan against a server"))
        _configure_check(actions.add_parser("check", help="say what a plan does, or what is wrong with it"))
        listing = actions.add_parser("list", help="list the runs, or the shipped plans")
        listing.add_argument("--shipped", action="store_true", help="list the shipped plans with their texts")
        comparing = actions.add_parser("compare", help="show runs, or the arms of one, side by side")
        comparing.add_argument("runs", nargs="+", metavar="RUN")
        reporting = actions.add_parser("report", help="write a run's report")
        reporting.add_argument("runs", nargs=1, metavar="RUN")
        for kind in ("html", "png"):
            reporting.add_argument(
                f"--{kind}", metavar="FILE", help=f"write {kind.upper()} (- is standard output)"
            )
        showing = actions.add_parser("show", help="print a run with its series as JSON")
        showing.add_argument("runs", nargs=1, metavar="RUN")
        restoring = actions.add_parser("restore", help="put back what killed runs have changed")
        restoring.add_argument("--url", help=_RESTORED_HELP)
        restoring.add_argument(
            "--dashboard", metavar="URL", help="nothing that went through another dashboard (default: all)"
        )
        for one in (listing, comparing, reporting, showing, restoring):
            one.add_argument("--runs", dest="folder", type=Path, metavar="DIR", help=_RUNS_HELP)
            one.add_argument("--json", action="store_true", help="print JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Carries out the action. Returns 0, 1 for a run that failed, 2 for a request that cannot be met, or 130 for a
        run that was stopped.
        """
        from app.dashboard.store import RunError
        from benchmarks.live.experiment.control import ControlError
        from benchmarks.live.experiment.plan import PlanError
        from benchmarks.live.experiment.recorder import DiskFullError
        from sluice import SluiceError

        try:
            return int(getattr(self, f"_{args.action}")(args))
        except PlanError as error:
            return _refused(args, error.problems)
        except (RunError, ControlError, DiskFullError) as error:
            return _refused(args, [str(error)])
        except SluiceError as error:
            return _refused(args, [f"{error}; {error.hint}" if error.hint else str(error)])
        except OSError as error:
            return _refused(args, [f"{error.filename}: {error.strerror}" if error.filename else str(error)])

    def _run(self, args: argparse.Namespace) -> int:
        from benchmarks.live.experiment.control import Control
        from benchmarks.live.experiment.plan import read
        from benchmarks.live.experiment.runner import Options, Runner

        bounds, text = _bounds(args), _text(args.plan)
        plan = read(text, bounds)
        control = Control(args.url, args.key, args.dashboard)
        try:
            options = Options(args.nice, args.json, args.until_input_ends)
            return Runner(plan, text, control, _store(args), bounds, options, args.key).run()
        finally:
            control.close()

    def _check(self, args: argparse.Namespace) -> int:
        from benchmarks.live.experiment.plan import PlanError, described, read
        from benchmarks.live.experiment.requests import planned

        try:
            plan = read(_text(args.plan), _bounds(args))
            requests = sum(len(planned(plan.load, repeat)) for repeat in range(plan.repeats)) * (
                len(plan.arms) or 1
            )
        except PlanError as error:
            if args.json:
                print(json.dumps({"ok": False, "problems": error.problems, "plan": None}))
                return 0
            raise
        found = described(plan, requests)
        if args.json:
            print(json.dumps({"ok": True, "problems": [], "plan": found}))
            return 0
        print(f"{plan.name}: {requests} requests in {found['duration_s']:g} s, trials: {_trials(found)}")
        for phase in found["phases"]:
            print(
                f"  {phase['from_s']:g} to {phase['to_s']:g} s: {phase['name']}, {phase['rate_per_s']:g} requests/s"
            )
        for action in found["actions"]:
            print(f"  at {action['at_s']:g} s: {action['what']}")
        return 0

    def _list(self, args: argparse.Namespace) -> int:
        if args.shipped:
            shipped = _shipped()
            print(
                json.dumps(shipped)
                if args.json
                else "\n".join(f"{s['name']}: {s['summary']}" for s in shipped)
            )
            return 0
        store = _store(args)
        runs = store.all()
        if args.json:
            print(json.dumps(runs))
            return 0
        if args.folder is None:
            print(
                f"runs in {store.folder}; a dashboard has its own folder, which its page names: give that as --runs",
                file=sys.stderr,
            )
        for run in runs:
            summary = run["summary"] or {}
            met = summary.get("attainment")
            figures = f"{summary.get('requests', 0)} requests, {summary.get('failed', 0)} failed"
            figures += "" if met is None else f", {100 * met:.1f} % of SLOs met"
            print(
                f"{run['id']}  {run['state']:8}{figures}" + (f"; {run['message']}" if run["message"] else "")
            )
        return 0

    def _compare(self, args: argparse.Namespace) -> int:
        from benchmarks.live.experiment.figures import compare
        from benchmarks.live.experiment.report import table
        from benchmarks.live.experiment.stored import compared, load
        from benchmarks.whatif.table import text_table

        store = _store(args)
        if args.json:
            print(json.dumps(compared(store, args.runs), allow_nan=False))
            return 0
        columns = [column for run_id in args.runs for column in load(store, run_id).columns()]
        if not columns:
            return _refused(args, ["these runs have sent no request: there is nothing to compare"])
        print(text_table(*table(columns, compare(columns))))
        print("in brackets: the difference from the first column and its 95 % interval")
        return 0

    def _report(self, args: argparse.Namespace) -> int:
        from benchmarks.live.experiment import report
        from benchmarks.live.experiment.stored import load

        run = load(_store(args), args.runs[0])
        if args.html:
            _write(args.html, report.as_html(run).encode())
        if args.png:
            _write(args.png, report.as_png(run))
        if args.json or not (args.html or args.png):
            print(json.dumps(report.as_json(run), allow_nan=False))
        return 0

    def _show(self, args: argparse.Namespace) -> int:
        from benchmarks.live.experiment.stored import detail

        print(json.dumps(detail(_store(args), args.runs[0]), allow_nan=False))
        return 0

    def _restore(self, args: argparse.Namespace) -> int:
        from app.dashboard.store import same_server
        from benchmarks.live.experiment.control import ControlError
        from benchmarks.live.experiment.guardian import key_for, left_over, note_end, put_back, went_to
        from sluice import SluiceError
        from sluice._core import DEFAULT_BASE_URL

        store, status = _store(args), 0
        own = args.url or os.environ.get("SLUICE_BASE_URL") or DEFAULT_BASE_URL
        told: list[dict[str, Any]] = []
        for run_id in left_over(store):
            folder = store.path(run_id)
            try:
                if (changed := went_to(folder)) is None:
                    continue
                url, board = changed
                if args.url is not None and not same_server(url, args.url):
                    continue
                if (
                    args.dashboard is not None
                    and board is not None
                    and not same_server(board, args.dashboard)
                ):
                    continue
                done = put_back(folder, key=key_for(url, own))
            except (SluiceError, ControlError, ValueError) as error:
                told.append({"id": run_id, "done": [], "problem": str(error)})
                status = 1
                continue
            note_end(
                folder, "its process was killed; put back: " + ("; ".join(done) or "nothing had changed")
            )
            told.append({"id": run_id, "done": done, "problem": None})
        if args.json:
            print(json.dumps(told))
        else:
            for one in told:
                print(f"{one['id']}: {one['problem'] or '; '.join(one['done']) or 'nothing had changed'}")
            if not told:
                print(f"nothing is left to be put back{'' if args.url is None else f' at {args.url}'}")
        return status


command = ExperimentCommand()

_RUNS_HELP = "folder of the runs (default: SLUICE_RUNS, or sluice/experiments below XDG_STATE_HOME)"
_RESTORED_HELP = (
    "put back what runs have changed at this server alone, to which SLUICE_ADMIN_KEY belongs (default: at all servers;"
    " SLUICE_ADMIN_KEY goes to that of SLUICE_BASE_URL, or http://127.0.0.1:8000, and others need a key file here)"
)


def _configure_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN")
    parser.add_argument(
        "--url", help="the server's public port (default: SLUICE_BASE_URL, or http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--key", help="an admin key (default: SLUICE_ADMIN_KEY, or the key file of a server on this machine)"
    )
    parser.add_argument("--dashboard", metavar="URL", help="the dashboard, for role, drain and activate")
    parser.add_argument("--runs", dest="folder", type=Path, metavar="DIR", help=_RUNS_HELP)
    parser.add_argument("--json", action="store_true", help="print progress as JSON lines")
    parser.add_argument("--nice", type=int, default=5, help="niceness of the process (default: %(default)s)")
    parser.add_argument(
        "--until-input-ends",
        action="store_true",
        help="stop when standard input ends (a server that starts this does)",
    )
    _bound_options(parser)


def _configure_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with status 0 for a refused plan too"
    )
    _bound_options(parser)


def _bound_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most-rate", type=float, metavar="R", help="most requests a second (default 200)")
    parser.add_argument("--most-seconds", type=float, metavar="S", help="longest run (default 900)")
    parser.add_argument(
        "--most-bytes", type=int, metavar="B", help="most bytes of the run's files (default 256 MiB)"
    )
    parser.add_argument("--may-kill", action="store_true", help="let the plan kill engines of this machine")
    parser.add_argument(
        "--no-files", action="store_true", help="refuse traces that are files of this machine"
    )


def _bounds(args: argparse.Namespace) -> Any:
    from benchmarks.live.experiment.plan import Bounds

    given = {
        "rate_per_s": args.most_rate,
        "duration_s": args.most_seconds,
        "disk_bytes": args.most_bytes,
    }
    bounds = Bounds(may_kill=args.may_kill, may_read=not args.no_files)
    return dataclasses.replace(bounds, **{k: v for k, v in given.items() if v is not None})


def _store(args: argparse.Namespace) -> Any:
    from app.dashboard.store import RunStore, default_folder

    return RunStore(args.folder or default_folder())


def _text(plan: str) -> str:
    from benchmarks.live.experiment.plan import MOST_TEXT_BYTES, PlanError

    shipped = SHIPPED / f"{plan}.yaml"
    try:
        if plan == "-":
            raw = sys.stdin.buffer.read(MOST_TEXT_BYTES + 1)
        else:
            path = (
                shipped if not os.path.exists(plan) and "/" not in plan and shipped.exists() else Path(plan)
            )
            with path.open("rb") as file:
                raw = file.read(MOST_TEXT_BYTES + 1)
        return raw.decode()
    except OSError as error:
        raise PlanError([f"{plan}: {error.strerror}; shipped are {_NAMES}"]) from error
    except UnicodeDecodeError:
        raise PlanError([f"{plan}: this is no text in UTF-8"]) from None


def _shipped() -> list[dict[str, str]]:
    from benchmarks.live.experiment.plan import Bounds, read

    everything = Bounds(may_kill=True)
    found = []
    for path in sorted(SHIPPED.glob("*.yaml")):
        text = path.read_text("utf-8")
        found.append({"name": path.stem, "summary": read(text, everything).summary, "text": text})
    return found


def _trials(found: dict[str, Any]) -> str:
    return ", ".join(label or "one" for label in found["trials"])


def _write(target: str, content: bytes) -> None:
    if target == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        Path(target).write_bytes(content)


def _refused(args: argparse.Namespace, problems: list[str]) -> int:
    if getattr(args, "json", False):
        print(json.dumps({"event": "refused", "problems": problems}), flush=True)
    for problem in problems:
        print(f"experiment: {problem}", file=sys.stderr)
    return 2
