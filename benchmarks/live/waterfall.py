"""Shows where the time to the first token goes while clients come in bursts: hop by hop, with work, wait and wire.

    python -m benchmarks.live.waterfall                            8, 32 and 128 clients (a minute)
    python -m benchmarks.live.waterfall --concurrency 4 --bursts 3

Starts Sluice on sim engines that make a token every millisecond, and has all clients send at the same moment, burst
after burst: that is what streams of equal length do to a server by themselves, because they end in the same step. Every
second burst is followed (header `x-sluice-times`); those between show what following costs. The ways of the followed
requests come from the server (`/sluice/admin/explain`). The exit status is 1 if a request failed or has no way; no time
makes it fail.

The picture has the last followed burst of each number of clients: a line for each request, in the order of their first
tokens. Where the stages of a burst add up instead of overlapping, the same stage lies at the same place in all lines.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.live import load as client
from benchmarks.live import measure, targets
from benchmarks.live.machine import command, facts, save
from benchmarks.live.report import table
from benchmarks.live.servers import ROOT, Server, ServerError, administrator, running
from benchmarks.live.stats import percentile

TOKENS = 16
CONCURRENCY = (8, 32, 128)
BURSTS = 24
"""Bursts of each number of clients. ASSUMPTION: the medians of twelve followed bursts settle to a few percent."""
WARM_BURSTS = 4
"""Bursts before the first one that counts."""
KINDS = ("work", "wait", "wire")


class NotWhole(RuntimeError):
    """A request failed, or the server does not know its way; the message says which."""


def burst(server: Server, model: str, clients: int, name: str | None, seed: int) -> list[float]:
    """Sends one request of each client at the same moment and returns their times to the first token, in seconds.

    With a `name` they are followed: the request of client n is called NAME-n. Raises NotWhole.
    """
    bodies = measure.bodies(model, measure.prompts(seed, clients), TOKENS, measure.CHAT)
    heads = [("x-sluice-times: on", f"x-request-id: {name}-{n}") for n in range(clients)] if name else ()
    load = client.Load(server.command.port, measure.CHAT, bodies, clients, clients, 60.0, heads=heads)
    result = client.drive(load)
    if result.failures:
        raise NotWhole(f"a burst of {clients}: {dict(result.failures)}")
    return result.ttft_s


def ways(server: Server, clients: int, name: str) -> list[dict[str, Any]]:
    """Returns the ways of a burst's requests, as the server tells them. Raises NotWhole."""
    found: list[dict[str, Any]] = []
    with administrator(server.command.port, 30.0) as http:
        for n in range(clients):
            answer = http.get(f"/sluice/admin/explain/{name}-{n}")
            known = answer.json().get("times", []) if answer.status_code == 200 else []
            if len(known) != 1:
                raise NotWhole(f"request {name}-{n} has {len(known)} ways, status {answer.status_code}")
            found += known
    return found


def measured(server: Server, model: str, clients: int, bursts: int, seed: int) -> dict[str, Any]:
    """Measures bursts of `clients`, every second of them followed; returns times in ms. Raises NotWhole."""
    for number in range(WARM_BURSTS):
        burst(server, model, clients, None, seed + number)
    plain: list[float] = []
    told: list[float] = []
    collected: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for number in range(bursts):
        if number % 2 == 0:
            plain += burst(server, model, clients, None, seed + number)
            continue
        name = f"burst-{clients}-{number}"
        told += burst(server, model, clients, name, seed + number)
        last = ways(server, clients, name)
        collected += last
    return {
        "clients": clients,
        "requests": len(collected),
        "ttft_p50_ms": 1e3 * percentile(plain, 0.5),
        "ttft_p99_ms": 1e3 * percentile(plain, 0.99),
        "ttft_p50_followed_ms": 1e3 * percentile(told, 0.5),
        "hops": hops_of(collected),
        "last": last,
    }


def hops_of(collected: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each hop in the order of the way: its share of the whole, and its times in ms.

    A request without some hop took no time for it. Two hops of one name, as there and back to the router, are two rows.
    """
    kinds: dict[tuple[str, int], str] = {}
    took: dict[tuple[str, int], list[float]] = {}
    for way in collected:
        seen: dict[str, int] = {}
        for hop in way["hops"]:
            place = seen[hop["name"]] = seen.get(hop["name"], 0) + 1
            kinds.setdefault((hop["name"], place), hop["kind"])
            took.setdefault((hop["name"], place), []).append(1e3 * (hop["until_s"] - hop["since_s"]))
    whole_ms = sum(map(sum, took.values()))
    rows = []
    for (name, place), values in took.items():
        padded = values + [0.0] * (len(collected) - len(values))
        rows.append(
            {
                "name": name if place == 1 else f"{name}, {place}",
                "kind": kinds[name, place],
                "mean_ms": sum(padded) / len(padded),
                "p50_ms": percentile(padded, 0.5),
                "p95_ms": percentile(padded, 0.95),
                "share": sum(padded) / whole_ms if whole_ms else 0.0,
            }
        )
    return rows


def markdown(cases: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables of all numbers of clients."""
    parts = ["# Where the time to the first token goes in bursts\n"]
    for case in cases:
        sums = {kind: sum(row["mean_ms"] for row in case["hops"] if row["kind"] == kind) for kind in KINDS}
        parts.append(
            f"## {case['clients']} clients\n\n"
            f"TTFT p50 {case['ttft_p50_ms']:.2f} ms, p99 {case['ttft_p99_ms']:.2f} ms; followed, p50 "
            f"{case['ttft_p50_followed_ms']:.2f} ms. Means: "
            + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in sums.items())
            + ".\n"
        )
        rows = [
            [
                row["name"],
                row["kind"],
                *(f"{row[key]:.3f}" for key in ("mean_ms", "p50_ms", "p95_ms")),
                f"{100 * row['share']:.1f}",
            ]
            for row in case["hops"]
        ]
        parts.append(table(["hop", "kind", "mean ms", "p50 ms", "p95 ms", "% of all"], rows) + "\n")
    return "\n".join(parts)


_COLOURS = {
    "wire": "#D9D9D9",
    "ingress": "#0072B2",
    "router, wait": "#F5C87A",
    "router, work": "#D55E00",
    "prefill engine, wait": "#8FD3BD",
    "prefill engine, work": "#009E73",
    "decode engine, wait": "#E6BCD3",
    "transfer": "#CC79A7",
    "first step": "#000000",
}
"""The colour of each part of a way; those of waits are light."""

_PARTS = {
    "queue": "router, wait",
    "pool": "router, wait",
    "decide prefill": "router, work",
    "decide decode": "router, work",
    "prefill": "prefill engine, work",
    "report": "prefill engine, work",
    "wait for a step": "decode engine, wait",
    "transfer": "transfer",
    "step": "first step",
}


def part_of(hop: Mapping[str, Any], prefilled: bool) -> str:
    """Returns the part of a way to which a hop belongs; `prefilled` says whether the prompt was computed before it."""
    if hop["kind"] == "wire":
        return "wire"
    if hop["name"] == "wait for a slot":
        return "decode engine, wait" if prefilled else "prefill engine, wait"
    return _PARTS.get(hop["name"], "ingress")


def draw(cases: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draws the last burst of each number of clients, a line for each request."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from benchmarks.plots import figure, with_palette

    made, panels = figure(len(cases), width=6.0, height=5.0)
    used: dict[str, None] = {}
    for panel, case in zip(panels, cases, strict=True):
        begin_s = min(way["at_s"] for way in case["last"])
        lines = sorted(case["last"], key=lambda way: way["at_s"] + way["hops"][-1]["until_s"])
        for line, way in enumerate(lines):
            offset_ms, prefilled = 1e3 * (way["at_s"] - begin_s), False
            for hop in way["hops"]:
                part = part_of(hop, prefilled)
                prefilled |= hop["name"] == "prefill"
                used[part] = None
                left_ms, took_ms = 1e3 * hop["since_s"] + offset_ms, 1e3 * (hop["until_s"] - hop["since_s"])
                panel.barh(line, took_ms, left=left_ms, height=1.0, color=_COLOURS[part], linewidth=0)
        panel.set(xlabel="ms since the burst's first arrival", ylabel="request, by its first token")
        panel.set_title(f"{case['clients']} clients", loc="left")
        panel.invert_yaxis()
    names = [part for part in _COLOURS if part in used]
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[part]) for part in names]
    made.tight_layout(rect=(0, 0.12, 1, 1))
    made.legend(handles, names, loc="lower center", ncols=5)
    made.savefig(file, dpi=90)
    plt.close(made)
    with_palette(file)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 when a request failed or is not known, or a server misbehaved."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.waterfall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=list(CONCURRENCY), help="clients of a burst"
    )
    parser.add_argument("--bursts", type=int, default=BURSTS, help="bursts of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "overhead")
    args = parser.parse_args(argv)
    if args.bursts < 2 or min(args.concurrency) < 1:
        parser.error("a run needs two bursts, of which one is followed, and one client")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    machine, began_s = facts("benchmarks.live.waterfall"), time.time()
    cases = []
    with tempfile.TemporaryDirectory(prefix="sluice-waterfall-") as folder:
        app = targets.sim(Path(folder), targets.SimTiming(), prefill=1, decode=1)
        try:
            with running(app, lambda text: print(text, flush=True)) as server:
                measure.first_answer(server, "sim", TOKENS)
                for clients in args.concurrency:
                    cases.append(measured(server, "sim", clients, args.bursts, args.seed))
                    print(f"{clients} clients: TTFT p50 {cases[-1]['ttft_p50_ms']:.2f} ms", flush=True)
        except (ServerError, measure.MeasureError, NotWhole) as error:
            print(f"ended early: {error}", file=sys.stderr)
            return 1
    print("\n" + markdown(cases))
    whole = {
        "command": command("benchmarks.live.waterfall", argv),
        "machine": machine,
        "took_s": round(time.time() - began_s),
        "seed": args.seed,
        "tokens": TOKENS,
        "cases": cases,
    }
    if not save(args.out / "waterfall.json", whole):
        return 1
    (args.out / "waterfall.md").write_text(markdown(cases))
    draw(cases, args.out / "waterfall.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
