"""The heatmap file, which `sluice profile heatmap` writes and resumes from, and which a configuration names.

    {"format": "sluice-heatmap/1",
     "heatmap": policies.routing.deepflow.heatmap.Heatmap as plain data, or null while nothing is measured,
     "marks": [[measured | partial | interpolated]],  "rates": [{"rate_per_s", "cells", "standard_errors"}],
     "provenance": {...},  "pairs": [every measured point with both samples]}

A configuration names a file (relative to the configuration's own folder) or one of the shipped ones.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.profile.fold import Folded, Pair, Sample
from app.profile.plan import Point
from policies.routing.deepflow.heatmap import Heatmap, heatmap_from
from policies.routing.params import BadParameter

FORMAT = "sluice-heatmap/1"
SHIPPED = Path(__file__).parent / "heatmaps"
SUFFIX = ".json"


class HeatmapFileError(ValueError):
    """A heatmap file is missing or unusable; the message says what to do."""


def shipped() -> list[str]:
    """Returns the names of the heatmaps that come with Sluice; each was measured on one kind of engine."""
    return sorted(path.name.removesuffix(SUFFIX) for path in SHIPPED.glob(f"*{SUFFIX}"))


def locate(name: str, base: Path) -> Path:
    """Returns the path of a shipped heatmap by its name, or of a file relative to `base`. Raises HeatmapFileError."""
    if name in shipped():
        return SHIPPED / (name + SUFFIX)
    path = base / name
    if not path.is_file():
        raise HeatmapFileError(
            f"heatmap {name!r}: there is no file {path}; measure one with `sluice profile heatmap --out {name}`, or "
            f"name a shipped one: {', '.join(shipped()) or 'none'}"
        )
    return path


def read(path: Path) -> dict[str, Any]:
    """Returns a heatmap file's content. Raises HeatmapFileError where it is no heatmap file."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise HeatmapFileError(f"heatmap {path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise HeatmapFileError(
            f'heatmap {path}: "format" is not {FORMAT!r}; write it with `sluice profile heatmap`'
        )
    return data


def load_heatmap(name: str, base: Path) -> dict[str, Any]:
    """Returns a heatmap as plain data, checked, for a policy's `heatmap` parameter.

    `name` is a shipped name or a file relative to `base`. Raises HeatmapFileError.
    """
    path = locate(name, base)
    plain = read(path).get("heatmap")
    if plain is None:
        raise HeatmapFileError(
            f"heatmap {path}: no cell is measured yet; run `sluice profile heatmap --out {name}` again"
        )
    try:
        return plain_data(heatmap_from(plain))
    except BadParameter as error:
        raise HeatmapFileError(f"{path}: {error}") from None


def plain_data(heatmap: Heatmap) -> dict[str, Any]:
    """Returns a heatmap as the lists and numbers that `heatmap_from` takes."""
    return {
        "prefill_tokens": list(heatmap.prefill_tokens),
        "ratios": list(heatmap.ratios),
        "cells": [list(row) for row in heatmap.cells],
        "rates": heatmap.rates,
    }


def write(path: Path, folded: Folded, pairs: Sequence[Pair], provenance: Mapping[str, Any]) -> None:
    """Writes a heatmap file and replaces the old one in one step, so that nobody ever reads half a file."""
    data = {
        "format": FORMAT,
        "heatmap": None if folded.heatmap is None else plain_data(folded.heatmap),
        "marks": folded.marks,
        "rates": [asdict(rate) for rate in folded.rates],
        "provenance": dict(provenance),
        "pairs": [asdict(pair) for pair in pairs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    os.replace(part, path)


def pairs_of(data: Mapping[str, Any], path: Path) -> list[Pair]:
    """Returns the measured points in the content of a heatmap file. Raises HeatmapFileError."""
    try:
        return [
            Pair(Point(**p["point"]), Sample(**p["colocated"]), Sample(**p["disaggregated"]))
            for p in data["pairs"]
        ]
    except (KeyError, TypeError) as error:
        raise HeatmapFileError(
            f"heatmap {path}: its pairs cannot be read ({error}); measure anew with --fresh"
        ) from None
