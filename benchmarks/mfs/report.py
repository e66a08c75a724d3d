"""The figures of the runs: one row for each policy and load with all runs together, the aims, a table and a plot."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.wire.messages import FlowRecord
from benchmarks.live.stats import percentile
from benchmarks.mfs.drive import Ask, Promise
from benchmarks.mfs.engines import UNSCHEDULED
from benchmarks.mfs.workload import KINDS, Kind
from policies.flow.base import Stage

MOST_UNSCHEDULED = 0.01
"""Share of flows without a permit above which a cell says nothing about its policy."""


def cell(
    asks: Sequence[Ask],
    promises: Mapping[Kind, Promise],
    wire_bytes: int = 0,
    flows: Sequence[FlowRecord] | None = None,
    lost: int = 0,
) -> dict[str, Any]:
    """Returns the figures of one run at one load.

    Times are in milliseconds, in order of arrival: `ttft_ms` from sending the prompt to the first token, `prefill_ms`
    to the end of the prefill (a lent prefix included), `transfer_ms` from the moment at which the decode engine begins
    to read (a hold included) to that at which it has the KV. `bytes_per_s` counts only time in which some read was
    under way; `spell_s` is the time from the first read's beginning to the last one's end. A request that failed counts
    as late.

    `flows` are those of which the agent says that they have ended, and `lost` is the number of those that it lost with
    their worker's connection; None where there is no agent. `unscheduled` has the number of flows of which a part moved
    without a permit, by reason.
    """
    well = [ask for ask in asks if ask.failed is None]
    found: dict[str, Any] = {"requests": len(asks), "failures": _counts(ask.failed for ask in asks)}
    for kind in KINDS:
        own = [ask for ask in well if ask.arrival.kind == kind]
        sent = sum(ask.arrival.kind == kind for ask in asks)
        ttft_s = [_first_s(ask) for ask in own]
        reads = [ask for ask in own if ask.reading_s is not None and ask.admitted_s is not None]
        found[kind] = {
            "requests": sent,
            "ttft_ms": [round(1e3 * s, 1) for s in ttft_s],
            "prefill_ms": [round(1e3 * (ask.prefilled_s - ask.sent_s), 1) for ask in own if ask.prefilled_s],
            "transfer_ms": [round(1e3 * _read_s(ask), 1) for ask in reads],
            "held_ms": [round(1e3 * ask.held_s, 1) for ask in reads],
            "in_time": sum(s <= promises[kind].ttft_s for s in ttft_s),
            "read_mb": round(sum(ask.bytes for ask in reads) / 1e6, 3),
            "least_cached_tokens": min((ask.cached_tokens for ask in own), default=0),
        }
    spans = [
        (ask.reading_s, ask.admitted_s)
        for ask in well
        if ask.reading_s is not None and ask.admitted_s is not None
    ]
    busy_s = covered_s(spans)
    found["busy_s"] = round(busy_s, 3)
    found["spell_s"] = (
        round(max(end for _, end in spans) - min(begin for begin, _ in spans), 3) if spans else 0.0
    )
    found["bytes_per_s"] = round(sum(ask.bytes for ask in well) / busy_s) if busy_s > 0 else None
    found["wire_mb"] = round(wire_bytes / 1e6, 3)
    if flows is not None:
        found |= _permitted(flows, lost, sum(ask.bytes > 0 for ask in well))
    return found


def _permitted(flows: Sequence[FlowRecord], lost: int, reads: int) -> dict[str, Any]:
    """Returns what the agent says of the flows of a run in which `reads` reads of finished prompts ended."""
    stages = {}
    for stage in Stage:
        own = [flow for flow in flows if flow.stage == stage]
        if own:
            stages[stage.name.lower()] = {
                "flows": len(own),
                "chunks": sum(flow.chunks for flow in own),
                "mb": round(sum(flow.size for flow in own) / 1e6, 3),
                "held_s": round(sum(flow.held_s for flow in own), 3),
            }
    # An agent knows nothing of a read whose worker had no connection to it, and twice of one that was submitted again.
    untold = reads - sum(flow.stage == Stage.P2D for flow in flows)
    why = [
        *(flow.unscheduled or None for flow in flows),
        *["agent_lost"] * lost,
        *["no_agent"] * max(0, untold),
    ]
    return {"stages": stages, "flows": len(flows) + lost + max(0, untold), "unscheduled": _counts(why)}


def unscheduled_share(cells: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the share of all flows of these cells of which a part moved without a permit; None without an agent."""
    told = [one for one in cells if "unscheduled" in one]
    if not told:
        return None
    return sum(sum(one["unscheduled"].values()) for one in told) / max(1, sum(one["flows"] for one in told))


def invalid(one: Mapping[str, Any]) -> str:
    """Returns why a cell says nothing about its policy; empty if it does."""
    share = unscheduled_share([one])
    if share is None or share <= MOST_UNSCHEDULED:
        return ""
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(one["unscheduled"].items()))
    return f"{100 * share:.1f} % of {one['flows']} flows moved without a permit ({reasons})"


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals (beginning, end)."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of a policy at a load together. Times are in milliseconds; `attainment` is over both classes.

    `prefill_p50` and `prefill_p99` are the times from sending a prompt to the end of its prefill, of both classes: if
    they grow with the load, requests wait for the prefill engine and not for the link. `link_share` is the share of
    what the link carries that was read from the first read's beginning to the last one's end (None where there are
    several links), and `unscheduled` the share of flows without a permit (None without an agent). `invalid` says why
    the row says nothing about the policy; empty if it does. `lends` says whether prefixes are lent (MFS stage 1).
    """

    policy: str
    lends: bool
    load: float
    runs: int
    requests: int
    failures: int
    tight_transfer_p50: float
    tight_transfer_p99: float
    tight_ttft_p50: float
    tight_ttft_p99: float
    loose_transfer_p99: float
    loose_ttft_p99: float
    prefill_p50: float
    prefill_p99: float
    tight_in_time: float
    loose_in_time: float
    attainment: float
    mb_per_s: float
    link_share: float | None
    unscheduled: float | None
    invalid: str

    @property
    def name(self) -> str:
        """The name of the policy, and whether stage 1 is off."""
        return self.policy if self.lends else f"{self.policy}, stage 1 off"


def rows(cells: Sequence[Mapping[str, Any]], bytes_per_s: float | None) -> list[Row]:
    """Returns a row for each load, policy and form of stage 1 among the cells, in the order in which they first come.
    The link carries `bytes_per_s` (None: there are several links).

    A cell is what `cell` returns, with `policy`, `lends` and `load`. One without an answer in a class makes no row.
    """
    groups: dict[tuple[float, str, bool], list[Mapping[str, Any]]] = {}
    for one in cells:
        groups.setdefault((one["load"], one["policy"], one["lends"]), []).append(one)
    made = [_row(policy, lends, load, own, bytes_per_s) for (load, policy, lends), own in groups.items()]
    return [row for row in made if row is not None]


def _row(
    policy: str, lends: bool, load: float, own: Sequence[Mapping[str, Any]], bytes_per_s: float | None
) -> Row | None:
    def values(kind: str, name: str) -> list[float]:
        return [value for one in own for value in one[kind][name]]

    def share(kinds: Sequence[str]) -> float:
        asked = sum(one[kind]["requests"] for one in own for kind in kinds)
        return float(sum(one[kind]["in_time"] for one in own for kind in kinds) / asked)

    series = [values(kind, name) for kind in KINDS for name in ("transfer_ms", "ttft_ms")]
    if not all(series):
        return None
    tight_transfer, tight_ttft, loose_transfer, loose_ttft = series
    prefill = [value for kind in KINDS for value in values(kind, "prefill_ms")]
    busy_s = sum(one["busy_s"] for one in own)
    read_mb = sum(one[kind]["read_mb"] for one in own for kind in KINDS)
    spell_s = sum(one["spell_s"] for one in own)
    return Row(
        policy=policy,
        lends=lends,
        load=load,
        runs=len(own),
        requests=sum(one["requests"] for one in own),
        failures=sum(sum(one["failures"].values()) for one in own),
        tight_transfer_p50=percentile(tight_transfer, 0.5),
        tight_transfer_p99=percentile(tight_transfer, 0.99),
        tight_ttft_p50=percentile(tight_ttft, 0.5),
        tight_ttft_p99=percentile(tight_ttft, 0.99),
        loose_transfer_p99=percentile(loose_transfer, 0.99),
        loose_ttft_p99=percentile(loose_ttft, 0.99),
        prefill_p50=percentile(prefill, 0.5),
        prefill_p99=percentile(prefill, 0.99),
        tight_in_time=share(["tight"]),
        loose_in_time=share(["loose"]),
        attainment=share(KINDS),
        mb_per_s=read_mb / busy_s,
        link_share=None if bytes_per_s is None else 1e6 * read_mb / (bytes_per_s * spell_s),
        unscheduled=unscheduled_share(own),
        invalid="; ".join(filter(None, map(invalid, own))),
    )


FORMS = ("mfs", "mfs-swept")
"""MFS with the printed thresholds, and with those that are shipped (`benchmarks.mfs.engines.AGENTS`)."""


@dataclass(frozen=True, slots=True)
class Aim:
    """One aim, written down before the measurement: what is compared, its bound, and what was found."""

    what: str
    bound: str
    found: float
    met: bool


def aims(found: Sequence[Row]) -> list[Aim]:
    """Returns the aims whose rows are all there and valid, with lent prefixes. The lower load decides on times and
    bytes, the higher one on attainment.
    """
    by_load: dict[float, dict[str, Row]] = {row.load: {} for row in found}
    for row in found:
        if row.lends and not row.invalid:
            by_load[row.load][row.policy] = row
    if not by_load:
        return []
    low, high, made = by_load[min(by_load)], by_load[max(by_load)], []
    for form in FORMS:
        if {UNSCHEDULED, form} <= low.keys():
            transfers = low[UNSCHEDULED].tight_transfer_p99 / low[form].tight_transfer_p99
            ttft = low[UNSCHEDULED].tight_ttft_p99 / low[form].tight_ttft_p99
            share = low[form].mb_per_s / low[UNSCHEDULED].mb_per_s
            made += [
                Aim(f"tight P99 of transfers, unscheduled / {form}", "at least 4", transfers, transfers >= 4),
                Aim(f"tight P99 of TTFT, unscheduled / {form}", "at least 2", ttft, ttft >= 2),
                Aim(f"bytes/s of {form} / unscheduled", "within 2 % of 1", share, abs(share - 1) <= 0.02),
            ]
        if {"edf", form} <= low.keys():
            against = low[form].tight_transfer_p99 / low["edf"].tight_transfer_p99
            made.append(Aim(f"tight P99 of transfers, {form} / EDF", "at most 1", against, against <= 1))
        if len(by_load) > 1 and {"edf", form} <= high.keys():
            points = 100 * (high[form].attainment - high["edf"].attainment)
            what = f"attainment of {form} less EDF's at the higher load, points"
            made.append(Aim(what, "above 0", points, points > 0))
    used = [row.link_share for row in high.values() if row.link_share is not None]
    if used and max(by_load) > 1:
        # else requests wait for something that no flow policy orders
        made.append(
            Aim(
                "least share of the link used at the higher load", "at least 0.9", min(used), min(used) >= 0.9
            )
        )
    return made


_COLUMNS = (
    "load",
    "reads",
    "tight transfer P50, P99 ms",
    "tight TTFT P50, P99 ms",
    "loose transfer P99 ms",
    "loose TTFT P99 ms",
    "prefill P50, P99 ms",
    "in time: tight, loose, all",
    "MB/s while reading",
    "link used",
    "without permit",
    "requests, failed",
)


def table(found: Sequence[Row], reached: Sequence[Aim]) -> str:
    """Returns the rows and the aims as Markdown."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for row in found:
        cells = (
            f"{100 * row.load:.0f} %",
            row.name,
            f"{row.tight_transfer_p50:,.0f}, {row.tight_transfer_p99:,.0f}",
            f"{row.tight_ttft_p50:,.0f}, {row.tight_ttft_p99:,.0f}",
            f"{row.loose_transfer_p99:,.0f}",
            f"{row.loose_ttft_p99:,.0f}",
            f"{row.prefill_p50:,.0f}, {row.prefill_p99:,.0f}",
            f"{100 * row.tight_in_time:.1f}, {100 * row.loose_in_time:.1f}, {100 * row.attainment:.1f} %",
            f"{row.mb_per_s:.1f}",
            _percent(row.link_share),
            f"**invalid**: {row.invalid}" if row.invalid else _percent(row.unscheduled),
            f"{row.requests}, {row.failures}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| aim | bound | found | met |", "|---|---|---|---|"]
    lines += [
        f"| {aim.what} | {aim.bound} | {aim.found:.2f} | {'yes' if aim.met else 'no'} |" for aim in reached
    ]
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def plot(cells: Sequence[Mapping[str, Any]], folder: Path, name: str) -> str:
    """Draws, for each load, the share of tight transfers that took longer than x, with lent prefixes, and returns the
    file's name.
    """
    from benchmarks.plots import COLOURS, figure, save

    loads = sorted({one["load"] for one in cells})
    policies = list(dict.fromkeys(one["policy"] for one in cells))
    made, axes = figure(columns=len(loads))
    for panel, load in zip(axes, loads, strict=True):
        for policy, colour in zip(policies, COLOURS, strict=False):
            own = [one for one in cells if (one["load"], one["policy"], one["lends"]) == (load, policy, True)]
            values = sorted(value for one in own for value in one["tight"]["transfer_ms"])
            if not values:
                continue
            shares = [1 - place / len(values) for place in range(len(values))]
            panel.step(values, shares, where="post", color=colour)
            panel.annotate(
                policy, (values[-1], shares[-1]), xytext=(4, 0), textcoords="offset points", color=colour
            )
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set(xlabel="transfer of a tight request, ms", ylabel="share that took longer")
        panel.set_title(f"{100 * load:.0f} % of the link", loc="left")
    return save(folder, name, made)


def _counts(failed: Iterable[str | None]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for code in failed:
        if code is not None:
            counts[code] = counts.get(code, 0) + 1
    return counts


def _first_s(ask: Ask) -> float:
    assert ask.first_s is not None
    return ask.first_s - ask.sent_s


def _read_s(ask: Ask) -> float:
    assert ask.admitted_s is not None
    assert ask.reading_s is not None
    return ask.admitted_s - ask.reading_s
