"""`sluice profile heatmap`: measures where disaggregated serving beats colocated (DeepFlow 5.3) on what is deployed.

It measures one deployment with engine groups of all three roles (`--url`) or two deployments of equal engines, one
colocated, one disaggregated. With one deployment the command needs the right to administer it: an admin key
in the environment variable SLUICE_ADMIN_KEY, or the server's own key file on this machine (`app.admin_key`). Nothing
else should load the engines meanwhile.
"""

import argparse
import asyncio
import datetime as dt
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from app.admin_key import LOOPBACK_HOSTS, authorize
from app.profile.file import HeatmapFileError, pairs_of, read, write
from app.profile.fold import Folded, Pair, fold
from app.profile.measure import Load, Runner, measure
from app.profile.plan import Grid, Point, points
from app.profile.progress import Progress
from app.profile.target import Deployment, ProfileError, discover

COMPLETE, UNUSABLE, WRONG, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
_EXAMPLES = """examples:
  sluice profile heatmap --url http://127.0.0.1:8000 --out heatmap.json
  sluice profile heatmap --prefill-tokens 64,256,1024 --ratios 0.1,1 --rates 0.2,0.5 --budget-s 600

Run it again with the same --out to measure what is missing. Exit status: 0 every cell measured, 3 usable but some cells
are interpolated (marked in the file), 1 nothing usable, 2 wrong arguments or deployment.
"""


class ProfileCommand:
    """The subcommand `profile`; its one kind of measurement is `heatmap`."""

    name = "profile"
    help = "measure deployed engines and write the figures that policies read"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments to `parser`."""
        kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
        heatmap = kinds.add_parser(
            "heatmap",
            help="colocated against disaggregated over prefill length x decode ratio x rate",
            description=__doc__,
            epilog=_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _arguments(heatmap)

    def run(self, args: argparse.Namespace) -> int:
        """Measures a heatmap and returns the exit status, which the examples explain."""
        try:
            return asyncio.run(_heatmap(args))
        except (ProfileError, HeatmapFileError, ValueError, OSError) as error:
            print(f"sluice profile: {error}", file=sys.stderr)
            return WRONG
        except KeyboardInterrupt:
            print(f"\nsluice profile: interrupted; the same command goes on from {args.out}", file=sys.stderr)
            return INTERRUPTED


command = ProfileCommand()


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default_url = os.environ.get("SLUICE_BASE_URL", "http://127.0.0.1:8000")
    add(
        "--url",
        default=default_url,
        help="a deployment with prefill, decode and colocated engines (%(default)s)",
    )
    add(
        "--colocated-url",
        help="instead of --url, together with --disaggregated-url: a deployment of each kind",
    )
    add("--disaggregated-url")
    add(
        "--out", type=Path, default=Path("heatmap.json"), help="the file to write and to resume (%(default)s)"
    )
    add("--picture", type=Path, help="PNG or SVG (default: beside --out, as .png)")
    add("--prefill-tokens", type=_numbers(int), default=(64, 256, 1024), help="comma-separated (64,256,1024)")
    add("--ratios", type=_numbers(float), default=(0.05, 0.25, 1.0), help="decode/prefill (0.05,0.25,1)")
    add("--rates", type=_numbers(float), default=(0.2, 0.5), help="requests/s per engine (0.2,0.5)")
    add("--requests", type=int, default=12, help="per engine, point and mode (%(default)s)")
    add("--seed", type=int, default=0)
    add("--budget-s", type=float, help="stop after this many seconds; what is missing is marked")
    add("--at-once", action="store_true", help="both modes at the same time: only if they share no hardware")
    add("--vocabulary", type=int, default=8192, help="prompts are random token ids below this (%(default)s)")
    add("--fresh", action="store_true", help="measure anew what --out holds already")
    add("--note", default="", help="kept in the file's provenance")


def _numbers(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: give comma-separated numbers") from None

    return parse


async def _heatmap(args: argparse.Namespace) -> int:
    grid = Grid(args.prefill_tokens, args.ratios, args.rates)
    if args.requests < 1 or args.vocabulary < 2 or (args.budget_s is not None and not args.budget_s > 0):
        raise ValueError("--requests and --budget-s must be above 0, --vocabulary above 1")
    if bool(args.colocated_url) != bool(args.disaggregated_url):
        raise ValueError("--colocated-url and --disaggregated-url belong together")
    urls = [(url or args.url).rstrip("/") for url in (args.colocated_url, args.disaggregated_url)]
    started = dt.datetime.now(dt.UTC)
    admin_key = os.environ.get("SLUICE_ADMIN_KEY")
    key = admin_key or os.environ.get("SLUICE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    # for a proxy, loopback would be its own machine
    direct = {f"all://{f'[{host}]' if ':' in host else host}": None for host in LOOPBACK_HOSTS}
    async with httpx.AsyncClient(
        timeout=None, limits=limits, headers=headers, auth=None if admin_key else authorize, mounts=direct
    ) as http:
        deployment = await discover(http, *urls)
        load = Load(args.requests, args.seed, f"{started:%Y%m%dT%H%M%S}", args.vocabulary, args.at_once)
        session = _Session(args, grid, load, deployment, _provenance(args, load, deployment, started))
        left = await session.run(Runner(http, deployment, load))
    return session.finish(left)


@dataclass(slots=True)
class _Session:
    """One run of the command: its parameters, and the measured points, which it writes to the file as they come."""

    args: argparse.Namespace
    grid: Grid
    load: Load
    deployment: Deployment
    provenance: dict[str, Any]
    pairs: list[Pair] = field(default_factory=list)
    too_long: list[Point] = field(default_factory=list)

    async def run(self, runner: Runner) -> list[Point]:
        """Measures the points that the file lacks, and returns those that the budget left out."""
        fits, self.too_long = points(self.grid, self.deployment.context_tokens)
        self.pairs = [] if self.args.fresh else self._kept()
        known = {pair.point for pair in self.pairs}
        todo = [point for point in fits if point not in known]
        if known:
            print(f"{self.args.out}: {len(known)} points are measured already", file=sys.stderr)
        if self.deployment.busy:
            print(f"warning: {self.deployment.busy} requests of others run there now", file=sys.stderr)
        progress = Progress(todo, self.load.per_engine)

        def done(pair: Pair, seconds: float) -> None:
            self.pairs.append(pair)
            self._write()
            progress.add(pair, seconds)

        left = await measure(runner, todo, self.args.budget_s, done)
        progress.end()
        return left

    def finish(self, left: list[Point]) -> int:
        """Writes the file and the picture, says what is missing, and returns the exit status."""
        folded = self._write()
        failed = [pair for pair in self.pairs if not pair.whole]
        for pair in failed:
            print(
                f"{_name(pair.point)} failed: {pair.colocated.failed | pair.disaggregated.failed}",
                file=sys.stderr,
            )
        for what, missing in (
            ("the budget left out", left),
            ("longer than the context", self.too_long),
        ):
            if missing:
                print(f"{what}: {', '.join(map(_name, missing))}", file=sys.stderr)
        if folded.heatmap is None:
            print(f"{self.args.out}: no cell is measured", file=sys.stderr)
            return UNUSABLE
        from app.profile.picture import draw

        picture = self.args.picture or self.args.out.with_suffix(".png")
        kinds = "+".join(self.deployment.kinds)
        title = f"Colocated against disaggregated: {kinds} engines, model {self.deployment.model}"
        draw(picture, folded.heatmap, folded.marks, [asdict(rate) for rate in folded.rates], title)
        measured = sum(mark == "measured" for row in folded.marks for mark in row)
        cells = len(self.grid.prefill_tokens) * len(self.grid.ratios)
        print(f"{self.args.out}: {measured} of {cells} cells measured at every rate; picture {picture}")
        return COMPLETE if folded.complete else INCOMPLETE

    def _write(self) -> Folded:
        folded = fold(self.grid, self.pairs)
        write(self.args.out, folded, self.pairs, self.provenance)
        return folded

    def _kept(self) -> list[Pair]:
        """Returns the complete points of the file that exists already.

        Raises ProfileError if they were measured in another way than this run's.
        """
        if not self.args.out.exists():
            return []
        data = read(self.args.out)
        old, new = data["provenance"], self.provenance
        for name in _SAME:
            if old.get(name) != new[name]:
                raise ProfileError(
                    f"{self.args.out} was measured with {name} {old.get(name)!r}, not {new[name]!r}: "
                    "choose another --out, or --fresh to measure anew"
                )
        self.provenance["runs"] = [*old["runs"], *new["runs"]]
        return [pair for pair in pairs_of(data, self.args.out) if pair.whole]


_SAME = ("model", "kinds", "engines_per_mode", "requests_per_engine", "seed", "at_once")
"""Facts in which two runs must agree, so that their points belong to one map."""


def _name(point: Point) -> str:
    return f"{point.prefill_tokens}->{point.decode_tokens} at {point.rate_per_s:g}/s"


def _provenance(
    args: argparse.Namespace, load: Load, deployment: Deployment, started: dt.datetime
) -> dict[str, Any]:
    run = {
        "run": load.run,
        "started": started.isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": deployment.version,
        "engines": deployment.engines,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "others_in_flight": deployment.busy,
        "note": args.note,
    }
    return {
        "model": deployment.model,
        "kinds": list(deployment.kinds),
        "engines_per_mode": {mode: side.engines for mode, side in deployment.sides.items()},
        "requests_per_engine": load.per_engine,
        "seed": load.seed,
        "at_once": load.at_once,
        "axes": asdict(Grid(args.prefill_tokens, args.ratios, args.rates)),
        "runs": [run],
    }


def _commit() -> str | None:
    """Returns the commit of this checkout, or None for an installed package."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
