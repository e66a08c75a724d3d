"""The figures and aims of a router's capacity, as the document shows them, and their picture.

Clients, ingresses, router and engines share the machine's cores. On few cores a router is not full by itself: its share
of a core stands beside the requests/s, and the rate at which it would be full is extrapolated from its CPU time a
request, 1 / CPU, which assumes that a request costs it as much when it has a core of its own and is full.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.capacity.measure import Cell
from benchmarks.experiments.base import Row, aimed
from benchmarks.live.versus import ratio_of
from benchmarks.plots import Series, figure, lines, save

HOT, ENGINES = ("ingress", "router"), ("prefill", "decode")
"""Roles of the processes: those whose price is the router's way, and engines."""
FEW, MANY, DEARER_PERCENT = 2, 64, 10.0
"""Aim of issue 16: a request with `MANY` engines is at most this much dearer than one with `FEW`."""
FULL = 0.9
"""Share of a core from which a router counts as full."""


def cell_of(one: Mapping[str, Any]) -> Cell:
    """Returns the cell of a measurement."""
    return Cell(one["policy"], one["ingresses"], one["engines"])


def best_rung(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rung of the ladder with the most requests/s."""
    rungs: Sequence[Mapping[str, Any]] = one["rungs"]
    return max(rungs, key=lambda rung: rung["requests_per_s"])


def bound_per_s(rung: Mapping[str, Any]) -> float | None:
    """Returns the requests/s at which the router would take a whole core, by its CPU time a request; None if the ticks
    of the process clock saw none.
    """
    us = rung["cpu_us"].get("router", 0.0)
    return 1e6 / us if us else None


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of a result: each cell, then what engines add to the price of a request."""
    for one in whole["cells"]:
        yield from rows_of(one)
    yield from _dearer(whole["cells"])


def rows_of(one: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of one cell."""
    name, rung = cell_of(one).name, best_rung(one)
    share, bound = rung["router_cores"], bound_per_s(rung)
    yield Row(
        f"{name}: requests/s",
        None,
        rung["requests_per_s"],
        note=f"{rung['concurrency']} clients ({rung['client']}), which share the cores with all processes",
    )
    full = "the router is full" if share >= FULL else "other processes fill the cores"
    yield Row(f"{name}: CPU of router, share of a core", None, 100.0 * share, "%", note=full)
    if bound is not None:
        yield Row(
            f"{name}: requests/s of a full router, extrapolated",
            None,
            bound,
            note="1 / CPU of router a request; not measured",
        )
    for role in HOT:
        if role in rung["cpu_us"]:
            yield Row(f"{name}: CPU of {role} a request", None, rung["cpu_us"][role], "us")
    engines = sum(rung["cpu_us"].get(role, 0.0) for role in ENGINES)
    yield Row(f"{name}: CPU of engines a request", None, engines, "us")
    timed = one["timed"]
    for quantile, ms in (timed["ttft_ms"] or {}).items():
        note = f"{timed['concurrency']} clients in Python, {timed['requests_per_s']:,.0f} requests/s"
        yield Row(f"{name}: TTFT {quantile}", None, ms, "ms", note=note)
    measured = [*one["rungs"], *one["common"][1:], timed]
    failed = sum(sum(rung["failures"].values()) for rung in measured)
    yield Row(f"{name}: requests that failed", None, failed, aim="none", met=failed == 0)
    decided = one["decided_by_ingresses"]
    yield Row(f"{name}: requests that no router decided", None, decided, aim="none", met=decided == 0)


def hot_us(rung: Mapping[str, Any]) -> float:
    """Returns the CPU time of ingresses and router for a request, in microseconds."""
    return float(sum(rung["cpu_us"].get(role, 0.0) for role in HOT))


def _dearer(cells: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields for each policy and number of ingresses how much dearer a request is with `MANY` engines, judged for one
    ingress.
    """
    by_cell = {cell_of(one): one for one in cells}
    for cell, many in by_cell.items():
        few = by_cell.get(Cell(cell.policy, cell.ingresses, FEW))
        if cell.engines != MANY or few is None:
            continue
        name = f"{cell.name} against {FEW}: CPU of ingress and router a request"
        before, after = ([hot_us(rung) for rung in one["common"]] for one in (few, many))
        if len(before) != len(after) or min(before + after) <= 0.0:
            continue
        note = (
            f"{few['common'][0]['concurrency']} clients, {len(before)} times in one life of each application"
        )
        if len(before) == 1:
            row = Row(name, None, 100.0 * (after[0] / before[0] - 1.0), "%", note=note)
        else:
            ratio = ratio_of(cell.name, "CPU", before, after)
            half = 100.0 * (ratio.high - ratio.low) / 2.0
            row = Row(name, None, 100.0 * (ratio.ratio - 1.0), "%", half, note=note)
        if cell.ingresses == 1:
            row = aimed(row, f"at most {DEARER_PERCENT:g} % more", most=DEARER_PERCENT)
        yield row


def draw(cells: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draws requests/s by engines, a panel for each policy and a line for each number of ingresses. The grey line is
    the rate at which the router would be full, from the cells of one ingress.
    """
    policies = list(dict.fromkeys(one["policy"] for one in cells))
    made, panels = figure(len(policies))
    for panel, policy in zip(panels, policies, strict=True):
        own = sorted((one for one in cells if one["policy"] == policy), key=lambda one: one["engines"])
        shown: dict[str, Series] = {}
        for ingresses in sorted({one["ingresses"] for one in own}):
            line = [one for one in own if one["ingresses"] == ingresses]
            name = cell_of(line[0]).name.split(", ")[1]
            rates = [best_rung(one)["requests_per_s"] for one in line]
            shown[name] = Series([one["engines"] for one in line], rates)
        fewest = min(one["ingresses"] for one in own)
        bounds = [(one["engines"], bound_per_s(best_rung(one))) for one in own if one["ingresses"] == fewest]
        known = [(engines, bound) for engines, bound in bounds if bound is not None]
        if known:
            x, y = zip(*known, strict=True)
            shown["full router, extrapolated"] = Series(list(x), list(y), quiet=True)
        # the labels are placed by the axis, so it has its limits before
        panel.set_ylim(0.0, 1.05 * max(rate for one in shown.values() for rate in one.y))
        lines(panel, shown, "engines", "requests/s", policy, log_x=True)
    save(file.parent, file.stem, made)
