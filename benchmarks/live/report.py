"""Presents the results of `benchmarks.live.overhead` as Markdown and as a picture."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.experiments.base import JUDGED, Row, aimed
from benchmarks.live.machine import save
from benchmarks.live.measure import Measurement, TreeState
from benchmarks.live.profile import Profile

LEGEND = """
Times in ms. c: open connections, each with one request at a time. Added: beyond the modelled idle engine (sim: prefill,
transfer and one step, so that from c = 8 on it includes waiting for a step that already runs), or beyond vLLM's own
server at the same c. Others' cores: what everything else on the machine used meanwhile; rows with more than 0.1 there
were disturbed.
"""
ENGINES = ("prefill", "decode", "colocated")
"""The roles of engines among the processes of an application (`benchmarks.live.proctree`)."""
HOT = ("ingress", "router")
"""The roles of the processes that stand between clients and engines."""

# The aims of issue 16, in milliseconds of CPU and in per cent of a core.
MOST_HOT_MS = 0.2
"""Aim: CPU of ingress and router a request of `AIMED_TOKENS` tokens, tokens included, at `AIMED_CLIENTS` clients."""
AIMED_TOKENS, AIMED_CLIENTS = 16, 128
MOST_HOT_TOKEN_MS = 0.02
"""Aim: CPU of ingress and router a token of a stream of `LONG_TOKENS` or more."""
LONG_TOKENS = 500
MOST_IDLE = 5.0
"""Aim: CPU at rest of all that is no engine, in per cent of a core."""


@dataclass(slots=True)
class Results:
    """All measurements of one run. `config` has the options of the command, `parts` when each target was measured."""

    config: dict[str, Any]
    machine: dict[str, Any]
    command: str
    cases: list[Measurement] = field(default_factory=list)
    trees: list[TreeState] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def find(self, target: str, client: str, concurrency: int, tokens: int, path: str) -> Measurement | None:
        """Returns the measurement of this case, or None where there is none."""
        for case in self.cases:
            if (case.target, case.client, case.concurrency, case.tokens, case.path) == (
                target, client, concurrency, tokens, path,
            ):  # fmt: skip
                return case
        return None


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of a result, with the issue's aims for those of Sluice that have one."""
    for case in whole["cases"]:
        path = "" if case["path"].endswith("chat/completions") else ", completions"
        name = f"{case['target']}{path}, {case['client']}, c = {case['concurrency']}, {case['tokens']} tokens"
        yield Row(f"{name}: requests/s", None, case["requests"] / case["wall_s"])
        if "ttft_p50" in case["added"]:
            # A file that was written before the base was kept has the difference only.
            base_ms = case.get("base", {}).get("ttft_p50")
            added_ms = case["added"]["ttft_p50"] if base_ms is None else case["ttft_ms"]["p50"] - base_ms
            yield Row(f"{name}: added TTFT p50", None, added_ms, "ms")
        if case["tokens"] > 100:
            yield Row(f"{name}: CPU a token", None, sum(case["cpu_ms_per_token"].values()), "ms")
        yield from _hot(name, case)
    for tree in whole["trees"]:
        yield Row(f"{tree['target']}: memory at rest (PSS)", None, tree["total"]["pss_bytes"] / 2**30, "GiB")
        if tree["target"].startswith("Sluice"):
            yield from _idle(tree["target"], tree["idle_cpu"])


def _hot(name: str, case: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the CPU time of ingress and router in a case that has an aim for it. Sim engines alone serve as many
    clients and tokens.
    """
    if not set(HOT) <= case["cpu_ms_per_request"].keys():
        return
    if (case["tokens"], case["concurrency"]) == (AIMED_TOKENS, AIMED_CLIENTS):
        ms = sum(case["cpu_ms_per_request"][role] for role in HOT)
        row = Row(f"{name}: CPU of ingress and router a request", None, ms, "ms")
        yield aimed(row, f"at most {MOST_HOT_MS:g} ms", most=MOST_HOT_MS)
    if case["tokens"] >= LONG_TOKENS:
        ms = sum(case["cpu_ms_per_token"][role] for role in HOT)
        row = Row(f"{name}: CPU of ingress and router a token", None, ms, "ms")
        yield aimed(row, f"at most {MOST_HOT_TOKEN_MS:g} ms", most=MOST_HOT_TOKEN_MS)


def _idle(target: str, idle: Mapping[str, float]) -> Iterator[Row]:
    """Yields the CPU at rest of all processes that are no engine and belong to none, by role and together."""
    others = {role: share for role, share in idle.items() if role.partition("/")[0] not in ENGINES}
    for role, share in others.items():
        yield Row(f"{target}: CPU at rest, {role}, of one core", None, 100 * share, "%")
    name = f"{target}: CPU at rest, all that is no engine, of one core"
    row = Row(name, None, 100 * sum(others.values()), "%")
    yield aimed(row, f"at most {MOST_IDLE:g}", most=MOST_IDLE)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table whose first column is text and whose others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["--:"] * (len(head) - 1)) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def markdown(results: Results) -> str:
    """Returns the whole report as Markdown."""
    machine = results.machine
    head = (
        f"# What Sluice adds to an engine\n\n{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, commit {machine['commit']}; load of the machine before: "
        f"{machine['load_1min_before']}. The load client ran on the same cores.\n"
    )
    parts = [head, "## Latency and throughput\n", latency_table(results.cases), LEGEND]
    parts += ["\n## In short\n", *(f"- {line}" for line in summary(results))]
    if judged := [row for row in rows(asdict(results)) if row.aim]:
        parts += ["\n## Aims\n", aims_table(judged)]
    parts += ["\n## CPU, ms a request\n", cpu_table(results.cases, lambda case: case.cpu_ms_per_request, 3)]
    parts += ["\n## CPU, µs a token\n", cpu_table(results.cases, lambda case: case.cpu_ms_per_token, 1, 1e3)]
    for tree in results.trees:
        parts += [
            f"\n## Memory at rest: {tree.target} (ready after {tree.started_s:.1f} s)\n",
            memory_table(tree),
        ]
    for profile in results.profiles:
        parts += [f"\n## CPU profile: {profile.role} (holds the GIL {profile.busy:.0%} of the time)\n"]
        parts += [profile_table(profile)]
    if results.notes:
        parts += ["\n## Notes\n", *(f"- {note}" for note in results.notes)]
    return "\n".join(parts) + "\n"


def aims_table(judged: Sequence[Row]) -> str:
    """Returns a table with a row for each figure that has an aim."""
    cells = [[row.name, f"{row.ours:.3g} {row.unit}", row.aim, JUDGED[row.met]] for row in judged]
    return table(["figure", "ours", "aim", ""], cells)


def latency_table(cases: Sequence[Measurement]) -> str:
    """Returns a table with a row for each measurement."""
    head = [
        "server",
        "client",
        "c",
        "tokens",
        "requests",
        "failed",
        "req/s",
        "tok/s",
        "TTFT p50",
        "p95",
        "added p50",
    ]
    head += ["p95", "ms/token p50", "added", "e2e p50", "events/req", "client CPU ms/req", "others' cores"]
    rows = []
    for case in cases:
        ttft, tpot, e2e, added = case.ttft_ms or {}, case.tpot_ms or {}, case.e2e_ms or {}, case.added
        rows.append([
            case.target + ("" if case.path.endswith("chat/completions") else " (completions)"),
            case.client, str(case.concurrency), str(case.tokens), str(case.requests),
            str(sum(case.failures.values())), f"{case.requests_per_s:,.1f}", f"{case.tokens_per_s:,.0f}",
            _number(ttft.get("p50")), _number(ttft.get("p95")), _number(added.get("ttft_p50")),
            _number(added.get("ttft_p95")), _number(tpot.get("p50"), 3), _number(added.get("tpot_p50"), 3),
            _number(e2e.get("p50")), _number(case.events_per_request, 1), _number(case.client_cpu_ms_per_request, 3),
            _number(case.other_cores),
        ])  # fmt: skip
    return table(head, rows)


def cpu_table(cases: Sequence[Measurement], pick: Any, digits: int, scale: float = 1.0) -> str:
    """Returns a table with a row for each role and a column for each case.

    Roles that are below a hundredth of the sum in every case are joined as `other`.
    """
    picked = [pick(case) for case in cases]
    roles: dict[str, None] = {}
    for values in picked:
        whole = sum(values.values())
        roles |= {role: None for role, value in values.items() if value >= 0.01 * whole > 0}
    head = ["role"] + [f"{_short(case)} c={case.concurrency} {case.client}" for case in cases]
    rows = [[role, *(_number(v.get(role, 0.0) * scale, digits) for v in picked)] for role in roles]
    other = [sum(value for role, value in values.items() if role not in roles) for values in picked]
    rows.append(["other", *(_number(value * scale, digits) for value in other)])
    rows.append(["**sum**", *(_number(sum(v.values()) * scale, digits) for v in picked)])
    return table(head, rows)


def memory_table(tree: TreeState) -> str:
    """Returns a table with a row for each role, then the sum."""
    rows = [_memory_row(role, memory, tree.idle_cpu.get(role, 0.0)) for role, memory in tree.memory.items()]
    rows.append(_memory_row("**sum**", tree.total, sum(tree.idle_cpu.values())))
    return table(["role", "processes", "RSS MiB", "PSS MiB", "idle CPU %"], rows)


def profile_table(profile: Profile) -> str:
    """Returns three tables: functions by self time, functions by total time, and lines by self time."""
    columns = {
        "function, by self": profile.functions,
        "function, by total": profile.callers,
        "line": profile.lines,
    }
    return "\n\n".join(
        table(
            [head, "self", "total"],
            [[f"`{s.where}`", f"{s.self_share:.1%}", f"{s.total_share:.1%}"] for s in spots],
        )
        for head, spots in columns.items()
    )


def summary(results: Results) -> list[str]:
    """Returns a line for each of the most important figures.

    These are added TTFT, CPU per token, the rate that the CPU allows, and the bare listener's rate beside ours.
    """
    said = []
    for case in results.cases:
        where = f"{case.target}, {case.client}, c={case.concurrency}"
        short = case.tokens == 16 and case.path.endswith("chat/completions")
        if "sim" in case.target and short and case.concurrency == 1 and case.added:
            said.append(f"{where}: added TTFT p50 {case.added['ttft_p50']:.2f} ms")
        if "sim" in case.target and case.tokens > 100:
            said.append(
                f"{where}: long streams cost {case.server_cpu_ms_per_token:.3f} ms CPU a token in all processes"
            )
        if "sim" in case.target and short and case.concurrency > 1:
            role, busiest = max(case.cpu_ms_per_request.items(), key=lambda item: item[1])
            whole = case.server_cpu_ms_per_request + case.client_cpu_ms_per_request
            said.append(
                f"{where}: CPU for at most {1e3 / busiest:,.0f} requests/s in the busiest process ({role}), "
                f"{results.machine['cores'] * 1e3 / whole:,.0f} on all cores with the client"
            )
        floor = results.find("bare listener", case.client, case.concurrency, case.tokens, case.path)
        if floor is not None and floor is not case and case.concurrency >= 32:
            said.append(
                f"{where}: {case.requests_per_s / floor.requests_per_s:.2f} x the bare listener's requests/s"
            )
    for tree in results.trees:
        said.append(f"{tree.target}: whole tree {tree.total['pss_bytes'] / 2**30:.2f} GiB (PSS)")
    return said


def write(results: Results, folder: Path, name: str = "overhead") -> list[Path]:
    """Writes NAME.json, NAME.md and NAME.png into `folder`; returns their paths.

    The list is empty if the code has changed since the beginning (`machine.save`).
    """
    files = [folder / f"{name}.json", folder / f"{name}.md", folder / f"{name}.png"]
    if not save(files[0], asdict(results)):
        return []
    files[1].write_text(markdown(results))
    draw(results, files[2])
    return files


def draw(results: Results, file: Path) -> None:
    """Draws three panels: requests/s, CPU a request by role, memory by role."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from benchmarks.plots import with_palette

    figure, axes = plt.subplots(1, 3, figsize=(20, 7), layout="constrained")
    cases = [case for case in results.cases if case.tokens <= 100]
    rates = axes[0].barh([_row(case) for case in cases], [case.requests_per_s for case in cases])
    axes[0].bar_label(
        rates, fmt="{:,.3g}" if max(rates.datavalues, default=0) < 1000 else "{:,.0f}", padding=2
    )
    axes[0].set(xlabel="requests/s", title="16 streamed tokens a request")
    axes[0].margins(x=0.15)
    # At c = 1 the tree's idle CPU time is larger than that of the requests.
    several = [case for case in cases if case.concurrency > 1]
    cpu = {_row(case): case.cpu_ms_per_request for case in several}
    memory = {
        tree.target: {role: own["pss_bytes"] / 2**20 for role, own in tree.memory.items()}
        for tree in results.trees
    }
    colours = _colours([*cpu.values(), *memory.values()], [mpl.colormaps["tab20"](i) for i in range(20)])
    _stack(axes[1], cpu, colours)
    axes[1].set(xlabel="CPU, ms a request", title="CPU by process")
    _stack(axes[2], memory, colours)
    axes[2].set(xlabel="PSS, MiB", title="memory at rest by process")
    for axis in axes:
        axis.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=9)
    figure.savefig(file, dpi=70)
    plt.close(figure)
    with_palette(file)


def _colours(rows: Sequence[Mapping[str, float]], palette: Sequence[Any]) -> dict[str, Any]:
    """Returns a colour for each role that is at least a fiftieth of some row, and one colour for all others."""
    shown: dict[str, None] = {}
    for row in rows:
        whole = sum(row.values()) or 1.0
        shown |= {role: None for role, value in row.items() if value >= 0.02 * whole}
    return {role: palette[i % len(palette)] for i, role in enumerate(shown)} | {"other": "lightgrey"}


def _stack(axis: Any, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, Any]) -> None:
    left = [0.0] * len(rows)
    for role, colour in colours.items():
        if role == "other":
            widths = [sum(v for r, v in row.items() if r not in colours) for row in rows.values()]
        else:
            widths = [row.get(role, 0.0) for row in rows.values()]
        axis.barh(list(rows), widths, left=left, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]


def _row(case: Measurement) -> str:
    return f"{_short(case)} {case.client} c={case.concurrency}"


def _short(case: Measurement) -> str:
    return (
        case.target.removeprefix("Sluice, ")
        + (f" {case.tokens} tok" if case.tokens > 100 else "")
        + ("" if case.path.endswith("chat/completions") else " compl.")
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _memory_row(role: str, memory: Mapping[str, int], idle: float) -> list[str]:
    return [
        role, str(memory["processes"]), f"{memory['rss_bytes'] / 2**20:,.0f}", f"{memory['pss_bytes'] / 2**20:,.0f}",
        f"{idle * 100:.1f}",
    ]  # fmt: skip
