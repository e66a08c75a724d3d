"""A sampler of Azure's LLM conversations of May 2024, made from the published plots, which have been digitised.

The rows of the trace are not available. The archive holds three CSV files. Two give the cumulative distributions of
input and of output tokens, each point with a low and a high reading in per cent; the middle of the two is used. The
third gives requests a minute for each hour of one week. Input and output are drawn independently, because their joint
distribution is not published. The digitised output quantiles p90 to p99 lie within 2-4 % of the published ones; the
digitised median lies 17 % below the published one.
"""

from __future__ import annotations

import csv
import io
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.workloads.arrivals import Diurnal
from benchmarks.workloads.lengths import Quantiles
from benchmarks.workloads.synthetic import Synthetic
from predictors.traces import TraceError

_CDF = ("tokens", "cdf_pct_low", "cdf_pct_high")
_RATE = ("hour_since_2024-05-12T00Z", "req_per_min_mid", "rescaled_req_per_min")
_HOUR_S = 3_600.0


def load_azure2024(path: Path) -> Synthetic:
    """Returns the sampler made from the archive (or directory) at `path`. Raises TraceError with file and line."""
    texts = _texts(path)
    rates = [row[2] / 60.0 for row in _rows(path, texts, "hourly_rpm", _RATE)]
    return Synthetic(
        name="azure2024-sample",
        arrivals=Diurnal(tuple(rates), _HOUR_S),
        prompt=_lengths(path, texts, "input_cdf"),
        output=_lengths(path, texts, "output_cdf"),
    )


def _lengths(path: Path, texts: dict[str, str], part: str) -> Quantiles:
    """Returns the length distribution of the digitised curve whose file name contains `part`.

    A point's share is the middle of its two readings. Points that do not rise are left out, and the last share becomes
    1. Raises TraceError where the curve ends below 99 %.
    """
    knots = [(0.0, 1.0)]
    for tokens, low, high in _rows(path, texts, part, _CDF):
        share = min((low + high) / 200.0, 1.0)
        if tokens >= 1.0 and share > knots[-1][0]:
            knots.append((share, tokens))
    if knots[-1][0] < 0.99:
        raise TraceError(f"{path}: the curve {part!r} ends at {knots[-1][0]:.0%}; it should reach 100 %")
    knots[-1] = (1.0, knots[-1][1])
    return Quantiles(tuple(knots), logarithmic=False)


def _rows(path: Path, texts: dict[str, str], part: str, header: Sequence[str]) -> list[list[float]]:
    name = next((n for n in sorted(texts) if part in n), None)
    if name is None:
        raise TraceError(
            f"{path}: no file whose name has {part!r} in it; give the digitised Azure 2024 archive"
        )
    lines = list(csv.reader(io.StringIO(texts[name])))
    if not lines or tuple(lines[0]) != tuple(header):
        raise TraceError(f"{path}/{name}:1: the header should be {','.join(header)}")
    found = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = [float(cell) for cell in line]
            if len(row) != len(header) or not all(0 <= cell < float("inf") for cell in row):
                raise ValueError(f"{len(header)} numbers of 0 or more are wanted")
        except ValueError as error:
            raise TraceError(f"{path}/{name}:{number}: not a row of the digitised curve: {error}") from error
        found.append(row)
    return found


def _texts(path: Path) -> dict[str, str]:
    try:
        if path.is_dir():
            return {p.name: p.read_text("utf-8") for p in path.rglob("*.csv")}
        with tarfile.open(path, "r:*") as archive:
            found = {}
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is not None and member.name.endswith(".csv"):
                    found[Path(member.name).name] = stream.read().decode("utf-8")
            return found
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot read the archive: {error}") from error
