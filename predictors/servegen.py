"""Requests are sampled here from ServeGen's published per-client distributions (Alibaba,
github.com/alibaba/ServeGen).

Each client has two files. `chunk-N-trace.csv` has rows of start_s, rate per s, cv, Gamma | Weibull, shape, scale; a
row describes the gaps between requests in the 600 s from its start. `chunk-N-dataset.json` has the marginal
distributions of input and output tokens for every 21,600 s. Input and output are drawn independently given client
and window, because no joint distribution is published. So a prompt's length helps a predictor only by what it says
about the client.

All clients together make some 16 requests/s. `sample` stretches every client's gaps by one factor, so that about
`requests` requests come out and the mix over the day stays the same.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import lzma
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from predictors.protocol import Arrival, FloatArray, IntArray, Outcome
from predictors.traces import TraceError, finish_time_s

RATE_WINDOW_S = 600.0
LENGTH_WINDOW_S = 21_600.0


@dataclass(frozen=True, slots=True)
class RateWindow:
    """The distribution of one client's gaps between requests in [start_s, start_s + 600)."""

    start_s: float
    rate_per_s: float
    family: str
    shape: float
    scale_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Marginal:
    """A distribution over token counts: the counts `values` (m,), ascending, and their `cumulative` weights (m,)."""

    values: IntArray
    cumulative: FloatArray

    def draw(self, rng: np.random.Generator) -> int:
        """Returns one token count drawn from the distribution."""
        at = int(np.searchsorted(self.cumulative, rng.random() * self.cumulative[-1], side="right"))
        return int(self.values[min(at, self.values.size - 1)])


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """One client: its rate windows, and for each start of a length window the distributions of (input, output)
    tokens.
    """

    name: str
    rates: tuple[RateWindow, ...]
    lengths: dict[float, tuple[Marginal, Marginal]]


def load_clients(path: Path) -> list[Client]:
    """Returns all clients of a directory or a .tar(.xz) that holds chunk-N-trace.csv and chunk-N-dataset.json.
    Raises TraceError if a file is missing or damaged.
    """
    texts = _texts(path)
    names = sorted(n.removesuffix("-trace.csv") for n in texts if n.endswith("-trace.csv"))
    if not names:
        raise TraceError(
            f"{path}: holds no chunk-N-trace.csv; give the directory or archive of one ServeGen model"
        )
    missing = [n for n in names if f"{n}-dataset.json" not in texts]
    if missing:
        raise TraceError(f"{path}: {missing[0]}-dataset.json is missing beside {missing[0]}-trace.csv")
    return [
        Client(
            n,
            _rates(f"{path}/{n}-trace.csv", texts[f"{n}-trace.csv"]),
            _lengths(f"{path}/{n}-dataset.json", texts[f"{n}-dataset.json"]),
        )
        for n in names
    ]


def sample(clients: list[Client], requests: int, seed: int) -> list[Outcome]:
    """Samples about `requests` requests from the clients' published span and returns them in order of arrival. The
    same arguments give the same sample. Raises ValueError if the clients make no requests or `requests` is below 1.
    """
    expected = sum(
        r.rate_per_s * RATE_WINDOW_S for c in clients for r in c.rates if _length_window(r) in c.lengths
    )
    if expected <= 0 or requests < 1:
        raise ValueError(f"cannot sample {requests} requests from clients that make {expected:.0f} a day")
    stretch = expected / requests
    rows: list[tuple[float, str, int, int]] = []
    for index, client in enumerate(clients):
        rng = np.random.default_rng((seed, index))
        for at_s, (prompt, output) in _arrivals(client, stretch, rng):
            rows.append((at_s, client.name, prompt.draw(rng), output.draw(rng)))
    rows.sort(key=lambda row: row[0])
    return [
        Outcome(
            Arrival(f"servegen:{i}", at_s, prompt, client=name, wall_clock_s=at_s),
            output,
            finish_time_s(at_s, output),
        )
        for i, (at_s, name, prompt, output) in enumerate(rows)
    ]


def _arrivals(
    client: Client, stretch: float, rng: np.random.Generator
) -> list[tuple[float, tuple[Marginal, Marginal]]]:
    """Returns the client's arrival times, each with the length distributions to draw from. Every mean gap is
    `stretch` times as long as published. A gap that outlasts its window continues in the next one: what is left of
    it is kept in units of the mean gap.
    """
    found: list[tuple[float, tuple[Marginal, Marginal]]] = []
    # The time to the first request is a random share of a mean gap.
    left = rng.random()
    for window in client.rates:
        lengths = client.lengths.get(_length_window(window))
        if window.rate_per_s <= 0 or lengths is None:
            continue
        mean_s = stretch / window.rate_per_s
        at_s, end_s = window.start_s, window.start_s + RATE_WINDOW_S
        while at_s + left * mean_s < end_s:
            at_s += left * mean_s
            found.append((at_s, lengths))
            left = _gap(window, rng)
        left -= (end_s - at_s) / mean_s
    return found


def _gap(window: RateWindow, rng: np.random.Generator) -> float:
    """Draws a gap in units of its mean. The fitted shape gives the burstiness; the caller scales the gap by the
    measured rate.
    """
    if window.family == "Gamma":
        return float(rng.gamma(window.shape) / window.shape)
    from math import gamma

    return float(rng.weibull(window.shape) / gamma(1.0 + 1.0 / window.shape))


def _length_window(rate: RateWindow) -> float:
    return rate.start_s - rate.start_s % LENGTH_WINDOW_S


def _texts(path: Path) -> dict[str, str]:
    """Returns the text of each chunk file by the file's name without its folder."""
    try:
        if path.is_dir():
            return {p.name: p.read_text("utf-8") for p in path.rglob("chunk-*") if p.is_file()}
        with tarfile.open(path, "r:*") as archive:
            found: dict[str, str] = {}
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is not None and Path(member.name).name.startswith("chunk-"):
                    found[Path(member.name).name] = stream.read().decode("utf-8")
            return found
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot read the ServeGen archive: {error}") from error


def _rates(name: str, text: str) -> tuple[RateWindow, ...]:
    windows = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            start, rate, _cv, family, shape, scale = row
            if float(rate) > 0 and (family not in ("Gamma", "Weibull") or float(shape) <= 0):
                raise ValueError(f"gap family {family!r} with shape {shape!r}")
            windows.append(RateWindow(float(start), float(rate), family, float(shape), float(scale)))
        except ValueError as error:
            raise TraceError(f"{name}:{number}: not a ServeGen rate window: {error}") from error
    return tuple(sorted(windows, key=lambda w: w.start_s))


def _lengths(name: str, text: str) -> dict[float, tuple[Marginal, Marginal]]:
    try:
        windows = json.loads(text)
        found = {}
        for start, both in windows.items():
            prompt, output = _marginal(both["input_tokens"]), _marginal(both["output_tokens"])
            if prompt is not None and output is not None:
                found[float(start)] = (prompt, output)
        return found
    except (ValueError, KeyError, TypeError, SyntaxError, AttributeError) as error:
        raise TraceError(f"{name}: not a ServeGen length file: {error!r}") from error


def _marginal(literal: str) -> Marginal | None:
    """Parses a published distribution, which is a Python dict in a JSON string. Returns None for an empty one,
    which means that the window had no request.
    """
    table = ast.literal_eval(literal)
    if not table:
        return None
    values = np.array(sorted(table), dtype=np.int64)
    return Marginal(values, np.cumsum([float(table[v]) for v in values.tolist()]))
