"""The figures of `benchmarks.live.scaling` and `benchmarks.live.scaling_steps` from what they measured, with aims.

The aims stand in the docstrings of the two modules, where they were written before the first run.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.experiments.base import Row
from benchmarks.live.stats import percentile
from benchmarks.plots import COLOURS, figure, save
from benchmarks.sim.starts import StartSteps

ACTIVATION_S = 1.0
POOL_S = 10.0
IDLE_SHARE = 0.9
"""Per cent of a core: half of what an idle sim replica took when issue 14 was written."""
OVERLAPPED_LESS = 0.35
PREWARMED_TIMES = 5.0

STEPS = ("reserve", "process", "imports", "core", "weights", "post-load", "announce", "first token")
"""The steps of a start in order, as `benchmarks.live.scaling_steps` takes them apart."""
EVICTED = ("cold", "read ahead")
"""The ways to start that begin without the weights in the page cache."""


# -------------------------------------------------------------------------------------------------------- sim engines


def attainment(requests: Sequence[Sequence[Any]], burst: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of requests within both objectives by part of the burst, and in all. A request is [planned at,
    TTFT, TPOT] in seconds, None where it was lost.
    """
    ends = (
        ("before", burst["lead_s"]),
        ("burst", burst["lead_s"] + burst["burst_s"]),
        ("after", float("inf")),
    )
    met: dict[str, list[bool]] = {}
    for at_s, ttft_s, tpot_s in requests:
        within = ttft_s is not None and ttft_s <= burst["ttft_slo_s"] and tpot_s <= burst["tpot_slo_s"]
        phase = next(name for name, end_s in ends if at_s < end_s)
        met.setdefault(phase, []).append(within)
        met.setdefault("all", []).append(within)
    return {name: sum(shares) / len(shares) for name, shares in met.items()}


def scaling_rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of a result of `benchmarks.live.scaling`; a part that it does not have gives none."""
    parts, config = whole["parts"], whole["config"]
    if "activation" in parts:
        yield from _activation(parts["activation"]["rounds"])
    if "idle" in parts:
        yield from _idle(parts["idle"], IDLE_SHARE)
    for name in ("warm", "cold"):
        if name in parts:
            yield from _pool(name, parts[name])
    if "zero" in parts:
        yield from _zero(parts["zero"])
    for name, found in parts.get("burst", {}).items():
        if isinstance(found, dict):
            yield from _burst(name, found, config["burst"])
    if "streams" in parts:
        yield from _streams(parts["streams"])


def _idle(found: Mapping[str, Any], most: float | None) -> Iterator[Row]:
    """Yields the CPU of idle replicas by duty; `most` is the per cent of a core that a warm one may take, if there is
    an aim.
    """
    mean = {duty: 100.0 * sum(found[duty]) / len(found[duty]) for duty in ("active", "warm")}
    note = f"within {found['seconds']:g} s"
    for duty, share in mean.items():
        aimed = duty == "warm" and most is not None
        yield Row(f"idle, {duty}: engines", None, len(found[duty]))
        yield Row(
            f"idle, {duty}: CPU of a replica", None, share, "%",
            aim=f"at most {most:g}" if aimed else "", met=share <= (most or 0.0) if aimed else None, note=note,
        )  # fmt: skip
    if mean["active"]:
        yield Row(
            "idle: CPU of a warm replica, of that of an active one", None,
            100.0 * mean["warm"] / mean["active"], "%",
        )  # fmt: skip


def _activation(rounds: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    took_s = [took for one in rounds for took in one["first_text_s"]]
    missing = sum(map(_silent, rounds))
    yield Row("activation: engines", None, len(took_s) + missing)
    yield Row("activation: engines without a text", None, missing, aim="none", met=not missing)
    if took_s:
        p99 = percentile(took_s, 0.99)
        met = p99 <= ACTIVATION_S and not missing
        note = (
            f"of the {len(took_s)} engines that gave a text; the others have missed the aim"
            if missing
            else ""
        )
        yield Row("activation: order to first text, p50", None, percentile(took_s, 0.5), "s")
        yield Row(
            "activation: order to first text, p99", None, p99, "s", aim="at most 1 s", met=met, note=note
        )
    yield Row("activation: requests lost", None, _lost(rounds), aim="none", met=not _lost(rounds))


def _pool(name: str, found: Mapping[str, Any]) -> Iterator[Row]:
    took_s, size = found["first_text_s"], found["wanted"]
    note = "" if size == found["wanted_pool"] else f"memory has no room for {found['wanted_pool']}"
    yield Row(f"{name} pool: engines", None, size, note=note)
    yield Row(f"{name} pool: engines with a first text", None, len(took_s))
    if took_s:
        yield Row(f"{name} pool: order to first text, median engine", None, percentile(took_s, 0.5), "s")
        met = max(took_s) <= POOL_S and len(took_s) == size
        aim = {"aim": "at most 10 s", "met": met} if name == "warm" else {}
        yield Row(f"{name} pool: order to first text, last engine", None, max(took_s), "s", **aim)
    if "idle_cores" in found:
        share = 100.0 * found["idle_cores"]
        yield Row(
            f"{name} pool: CPU of an idle replica",
            None,
            share,
            "%",
            aim="at most 0.9",
            met=share <= IDLE_SHARE,
        )
    if "used_bytes" in found:
        yield Row(f"{name} pool: memory of the app", None, found["used_bytes"] / 2**30, "GiB")
    yield Row(f"{name} pool: requests lost", None, _lost([found]), aim="none", met=not _lost([found]))


def _zero(found: Mapping[str, Any]) -> Iterator[Row]:
    took_s = found["first_text_s"]
    yield Row("zero: wakes", None, found["rounds"])
    if took_s:
        yield Row("zero: request to first text, p50", None, percentile(took_s, 0.5), "s")
        yield Row("zero: request to first text, longest", None, max(took_s), "s")
    yield Row("zero: requests lost", None, _lost([found]), aim="none", met=not _lost([found]))


def _burst(name: str, found: Mapping[str, Any], burst: Mapping[str, Any]) -> Iterator[Row]:
    for phase, share in attainment(found["requests"], burst).items():
        yield Row(f"burst, {name}: attainment, {phase}", None, 100.0 * share, "%")
    at_s, first = burst["lead_s"], found["engines"][0][1]
    grown = [when - at_s for when, active, _ in found["engines"] if active > first and when >= at_s]
    most = max(active for _, active, _ in found["engines"])
    if grown:
        yield Row(f"burst, {name}: first more engines after the burst's begin", None, grown[0], "s")
        full_s = next(when for when, active, _ in found["engines"] if active == most) - at_s
        yield Row(f"burst, {name}: most serving engines after the burst's begin", None, full_s, "s")
    yield Row(f"burst, {name}: most serving engines", None, most)
    yield Row(f"burst, {name}: engine time", None, _engine_s(found["engines"]) / 60.0, "min")
    refused = _refused(found)
    lost = _lost([found]) - refused
    yield Row(f"burst, {name}: requests refused", None, refused)
    yield Row(f"burst, {name}: requests lost", None, lost, aim="none", met=not lost)


def _refused(found: Mapping[str, Any]) -> int:
    """Returns how many requests of a burst were told at once to come again, as their objective could not be met."""
    return sum(number for problem, number in found["lost"].items() if problem.startswith("status 429"))


def _engine_s(engines: Sequence[Sequence[float]]) -> float:
    """Returns the seconds of all ready engines together, warm ones included; each is (when, serving, ready)."""
    spans = pairwise(engines)
    return sum((later[0] - one[0]) * one[2] for one, later in spans)


def _streams(found: Mapping[str, Any]) -> Iterator[Row]:
    lost, differ, still = _lost([found]), found["other_texts"], bool(found["open_at_the_last_change"])
    note = "" if still else "not shown: all had ended before the last change"
    yield Row("streams", None, found["streams"])
    yield Row("streams: longest", None, found["longest_s"], "s")
    for key in ("grown", "drained", "switches", "migrations"):
        yield Row(f"streams: {key}", None, found[key])
    yield Row("streams: not whole before any change", None, sum(found["undisturbed_lost"].values()))
    yield Row("streams: cut or failed", None, lost, aim="none", met=still and not lost, note=note)
    yield Row("streams: other texts", None, differ, aim="none", met=still and not differ, note=note)
    probes = sum(found["probes_lost"].values()) + found["probes_differ"]
    yield Row("requests after a switch: lost or with another text", None, probes, aim="none", met=not probes)


def _lost(found: Sequence[Mapping[str, Any]]) -> int:
    return sum(sum(one["lost"].values()) for one in found)


def _silent(found: Mapping[str, Any]) -> int:
    """Returns how many of the engines that were ordered together gave no text."""
    return found["wanted"] - len(found["first_text_s"]) if "wanted" in found else 0


def harm(whole: Mapping[str, Any]) -> int:
    """Returns how many requests a result lost, how many texts differ, and how many engines that were ordered gave no
    text, in one sum. Requests of a burst that were refused at once are none of them.
    """
    parts = whole["parts"]
    found = list(parts.get("activation", {}).get("rounds", []))
    found += [parts[name] for name in ("warm", "cold", "zero", "streams", "switch", "drain") if name in parts]
    bursts = [one for one in parts.get("burst", {}).values() if isinstance(one, dict)]
    found += bursts
    differ = sum(int(one.get("other_texts", 0)) + int(one.get("probes_differ", 0)) for one in found)
    beside = sum(
        sum(one.get(key, {}).values()) for one in found for key in ("probes_lost", "undisturbed_lost")
    )
    return _lost(found) - sum(map(_refused, bursts)) + differ + beside + sum(map(_silent, found))


# ------------------------------------------------------------------------------------------------------- vLLM engines


def steps_rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of a result of `benchmarks.live.scaling_steps`; a part that it does not have gives none."""
    parts = whole["parts"]
    if "idle" in parts:
        yield from _idle(parts["idle"], None)
    if "activation" in parts:
        yield from _activation(parts["activation"]["rounds"])
    if "switch" in parts:
        yield from _switch(parts["switch"])
    if "drain" in parts:
        yield from _drain(parts["drain"])
    if "starts" in parts:
        yield from _starts(parts["starts"]["runs"])


def _switch(found: Mapping[str, Any]) -> Iterator[Row]:
    yield Row("switch: streams", None, found["streams"])
    yield Row("switch: role switches", None, len(found["switch_s"]))
    yield Row("switch: order to announced role, longest", None, max(found["switch_s"]), "s")
    lost, differ, equal = _lost([found]), found["other_texts"], found["equal_texts"]
    still = found["open_at_the_last_switch"]
    note = "" if still else "not shown: no stream was under way at the last switch"
    yield Row("switch: streams under way at the last switch", None, still, aim="1 or more", met=still >= 1)
    yield Row("switch: not whole before any change", None, sum(found["undisturbed_lost"].values()))
    yield Row(
        "switch: streams cut or failed", None, lost, aim="none", met=bool(still) and not lost, note=note
    )
    yield Row("switch: other texts", None, differ, aim="none", met=bool(still) and not differ, note=note)
    yield Row("switch: texts that part at a near tie", None, found["near_ties"])
    yield Row("switch: texts equal to the end", None, equal, aim="at least half of the streams",
              met=2 * equal >= found["streams"])  # fmt: skip


def _drain(found: Mapping[str, Any]) -> Iterator[Row]:
    yield Row("drain: leases held by the engine that stops", None, found["leases"], aim="20 or more",
              met=found["leases"] >= 20)  # fmt: skip
    yield Row("drain: requests", None, found["requests"])
    lost = _lost([found])
    yield Row("drain: requests lost", None, lost, aim="none", met=not lost)
    for key, what in (("retries", "attempts that were repeated"), ("expired", "leases that expired")):
        yield Row(f"drain: {what}", None, found[key], aim="none", met=not found[key])
    yield Row("drain: order to the engine's end", None, found["stopped_s"], "s")


def mean_steps(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the mean seconds of each step by way, in the order of the first run of each way."""
    ways = list(dict.fromkeys(run["way"] for run in runs))
    found = {}
    for way in ways:
        mine = [run["steps"] for run in runs if run["way"] == way]
        found[way] = {
            step: sum(one.get(step, 0.0) for one in mine) / len(mine)
            for step in STEPS
            if any(step in one for one in mine)
        }
    return found


def start_profiles(runs: Sequence[Mapping[str, Any]]) -> dict[str, StartSteps]:
    """Returns the mean steps of a start by way, as the simulator takes them; a warm engine does not start."""
    return {
        way: StartSteps(
            steps.get("reserve", 0.0),
            _process(steps),
            steps.get("weights", 0.0),
            steps.get("post-load", 0.0),
            steps.get("announce", 0.0),
        )
        for way, steps in mean_steps(runs).items()
        if way != "warm"
    }


def _starts(runs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    means = mean_steps(runs)
    for way, steps in means.items():
        for step, took_s in steps.items():
            yield Row(f"start, {way}: {step}", None, took_s, "s")
        yield Row(f"start, {way}: order to first token", None, sum(steps.values()), "s")
        if way in EVICTED:
            # what a process has mapped is not dropped, and such a start is none without the page cache
            share = max(run["cached_share"] for run in runs if run["way"] == way)
            yield Row(f"start, {way}: weights in the page cache before, most", None, 100.0 * share, "%")
    base = means.get("page cache")
    for way, least, aim in (
        ("overlapped", 1.0 - OVERLAPPED_LESS, "at most 0.65 of the start one after the other"),
        ("pre-warmed", 1.0 / PREWARMED_TIMES, "at most a fifth of cold"),
    ):
        if way not in means:
            continue
        if way == "overlapped" and base is not None:
            ratio = _process(means[way]) / _process(base)
            yield Row("start, overlapped: process and imports", None, ratio, "x", aim=aim, met=ratio <= least)
        elif way == "pre-warmed" and "cold" in means:
            ratio = sum(means[way].values()) / sum(means["cold"].values())
            yield Row("start, pre-warmed: against cold", None, ratio, "x", aim=aim, met=ratio <= least)


def _process(steps: Mapping[str, float]) -> float:
    return sum(steps.get(name, 0.0) for name in ("process", "imports", "core"))


def draw(runs: Sequence[Mapping[str, Any]], folder: Path, name: str) -> None:
    """Writes a plot with a bar for each way to start, in which the steps follow one another (DeepFlow's Figure 8)."""
    means = mean_steps(runs)
    ways = list(means)[::-1]
    made, (axes,) = figure(width=7.5, height=1.2 + 0.4 * len(ways))
    lefts = dict.fromkeys(ways, 0.0)
    for step, colour in zip(STEPS, COLOURS, strict=False):
        widths = [means[way].get(step, 0.0) for way in ways]
        if not any(widths):
            continue
        axes.barh(ways, widths, left=[lefts[way] for way in ways], color=colour, height=0.6, label=step)
        for way, width in zip(ways, widths, strict=True):
            lefts[way] += width
    longest = max(lefts.values(), default=1.0)
    for i, way in enumerate(ways):
        axes.text(lefts[way] + 0.01 * longest, i, f"{lefts[way]:.1f} s", va="center", fontsize=8)
    axes.grid(False)
    axes.set(xlabel="seconds from the order to the first token")
    axes.set_xlim(0.0, 1.12 * longest)
    axes.set_title("Starts of one vLLM engine, by step", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    save(folder, name, made)


def line(row: Row) -> str:
    """Returns a figure as one line of text."""
    value = "-" if row.ours is None else f"{row.ours:,.4g} {row.unit}".rstrip()
    aim = "" if not row.aim else f"   aim {row.aim}: {'met' if row.met else 'MISSED'}"
    return f"{row.name}: {value}{aim}" + (f"   ({row.note})" if row.note else "")
