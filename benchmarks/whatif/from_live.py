"""Writes a what-if file from a running application: its fleet, policies, network, timing, and latest requests.

    sluice simulate --from-live http://127.0.0.1:8000 --write mine/

asks the application for some seconds and writes `base.yaml`, `workload.jsonl` and `measured.json` into the folder. What
it asks are the endpoints of administrators: facts, policies, scaling and journal.

    fleet      active, ready engines by group; ranks of one engine count as engines of one barrier
    timing     `policies.scaling.timing_fit` over the totals of engines' steps: their whole life as one row each, and a
               row for each second that was watched (`scaled` is its prior)
    network    one node: the learnt bandwidth and latency between its engines. Several: a fat tree of the known racks
               and pods, whose NICs have the learnt bandwidth
    workload   the requests of the journal's last minutes where its folder can be read here, else what the router's ring
               of events holds and what came while it was watched

The simulation of this base stands beside what was measured of the same requests (`trust`).

Not claimed: engines of different speeds in one group, requests with several choices (left out), the objectives of
single requests (the commonest pair stands for all), clients that left, and what is older than the window.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks.live.stats import percentile
from benchmarks.results_io import write_text
from policies.engine_model.timing import CPU_SMOLLM2, TimingProfile
from policies.journal.codec import CodecError, loads
from policies.journal.lines import JournalError, parse_event
from policies.request.attempts import request_id_of
from policies.scaling.timing_fit import Fit, Totals
from policies.state import events as ev
from policies.state.views import Request
from predictors.traces import MOONCAKE_BLOCK_TOKENS
from sluice import NotFoundError, Sluice, SluiceError, Timeouts
from sluice._admin_key import key_of_this_machine

BASE, WORKLOAD, MEASURED = "base.yaml", "workload.jsonl", "measured.json"
WATCH_S, MINUTES = 10.0, 5.0
MOST_JOURNAL_BYTES = 64 << 20
"""Most bytes that are read from the end of a journal. ASSUMPTION: they hold some minutes of any load."""
MOST_REQUESTS = 20_000
TRUSTED = 0.15
"""Largest relative difference between a simulated and a measured figure with which the simulation is to be trusted."""
JUDGED = ("ttft_mean_s", "tpot_mean_s", "goodput_per_s", "slo_share")
"""The figures by which a simulation is judged; the difference of a share is taken in points."""

_TOTALS = (
    "step_s", "prefill_steps", "prefill_step_tokens", "decode_steps", "decode_step_seqs", "decode_step_kv_tokens",
)  # fmt: skip


class FromLiveError(Exception):
    """The application cannot be described; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request of the live application: its arrival (Unix seconds), lengths, objectives, and how it went."""

    at_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    outcome: str
    ttft_s: float | None
    tpot_s: float | None
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    hash_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Live:
    """The facts that were learnt of an application. `kv_bytes` are (bytes, tokens) of finished prefills."""

    engines: list[dict[str, Any]]
    network: dict[str, Any]
    policies: dict[str, Any]
    scaling: dict[str, Any] | None
    fits: dict[tuple[Any, ...], Fit]
    requests: list[Seen]
    source: str
    kv_bytes: tuple[float, float] = (0.0, 0.0)
    transfers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    learns: bool = False
    problems: list[str] = field(default_factory=list)


# ----------------------------------------------------------------------------------------------------------- asking


def collect(
    url: str | None,
    key: str | None = None,
    watch_s: float = WATCH_S,
    minutes: float = MINUTES,
    say: Callable[[float, str], None] = lambda share, what: None,
) -> Live:
    """Asks the application for `watch_s` seconds. Raises FromLiveError or SluiceError.

    `say` gets the share of the time that has passed and what is being done.
    """
    with Sluice(url, admin_key=key, timeouts=Timeouts(3.0, 15.0, 30.0)) as client:
        given = key or os.environ.get("SLUICE_ADMIN_KEY") or key_of_this_machine(client.base_url)
        headers = {} if given is None else {"authorization": f"Bearer {given}"}
        with httpx.Client(base_url=client.base_url, headers=headers, timeout=15.0, trust_env=False) as http:
            policies = client.policies()
            try:
                scaling: dict[str, Any] | None = client.scaling().model_dump()
            except NotFoundError:
                scaling = None
            watched = _watch(http, watch_s, say)
            transfers = tuple(
                _total(client, f"sluice_kv_transfer{name}_total") for name in ("s", "_bytes", "_seconds")
            )
            learns = _total(client, "sluice_router_predictor_outcomes_total") > 0
    requests, kv_bytes, source, problems = _requests(watched.journal, watched.events, minutes)
    facts = watched.facts
    return Live(
        facts["engines"],
        facts["network"],
        policies.model_dump(exclude={"available"}),
        scaling,
        watched.fits,
        requests,
        source,
        kv_bytes,
        (transfers[0], transfers[1], transfers[2]),
        learns,
        problems,
    )


def _total(client: Sluice, name: str) -> float:
    return sum(sample.value for sample in client.metrics().select(name))


@dataclass(slots=True)
class _Watched:
    facts: dict[str, Any]
    fits: dict[tuple[Any, ...], Fit]
    journal: dict[str, Any]
    events: dict[int, dict[str, Any]]


def _watch(http: httpx.Client, watch_s: float, say: Callable[[float, str], None]) -> _Watched:
    """Asks for facts and events once a second, at least twice, for `watch_s` seconds."""
    fits: dict[tuple[Any, ...], Fit] = {}
    before: dict[str, Totals] = {}
    events: dict[int, dict[str, Any]] = {}
    began_s = time.monotonic()
    while True:
        facts = _get(http, "/sluice/admin/facts")
        if facts is None:
            raise FromLiveError(
                "the server does not tell facts about its engines: it is older than this command"
            )
        counted = [(engine, _totals(engine)) for engine in facts["engines"]]
        for engine, now in counted:
            if now is None:
                continue
            kind = kind_of(engine)
            if kind not in fits:
                fits[kind] = Fit(scaled([t for one, t in counted if t is not None and kind_of(one) == kind]))
            fits[kind] = fits[kind].added(before.get(engine["id"], Totals()), now)
            before[engine["id"]] = now
        journal = _get(http, "/sluice/admin/journal/1000") or {}
        for line in journal.get("tail", []):
            if isinstance(line, dict) and line.get("event") in ("Arrived", "Closed", "PrefillDone"):
                events[int(line["n"])] = line
        passed_s = time.monotonic() - began_s
        if passed_s >= watch_s:
            return _Watched(facts, fits, journal, events)
        say(passed_s / watch_s, "watching the engines")
        time.sleep(min(1.0, max(0.05, watch_s - passed_s)))


def _totals(engine: Mapping[str, Any]) -> Totals | None:
    """Returns the totals of an engine's steps; None for an engine that counts none."""
    if not all(name in engine["totals"] for name in _TOTALS):
        return None
    return Totals(*(float(engine["totals"][name]) for name in _TOTALS))


def scaled(totals: Sequence[Totals]) -> TimingProfile:
    """Returns a profile that is CPU_SMOLLM2 times a factor for prefills and one for decodes, by least squares.

    It takes the place of the fit's prior: what the traffic does not tell apart (a step's cost from a token's) keeps the
    proportions of that profile, and not its seconds, which may be hundreds of times those of the engines here.
    """
    p = CPU_SMOLLM2
    rows = np.array(
        [
            (
                p.prefill_base_s * t.prefill_steps + p.prefill_per_token_s * t.prefill_tokens,
                p.decode_base_s * t.decode_steps
                + p.decode_per_seq_s * t.decode_seqs
                + p.decode_per_kv_token_s * t.decode_kv_tokens,
                t.busy_s,
            )
            for t in totals
            if t.busy_s > 0
        ]
    ).reshape(-1, 3)
    factors = np.ones(2)
    used = rows[:, :2].sum(axis=0) > 0
    if used.any():
        factors[used] = np.linalg.lstsq(rows[:, :2][:, used], rows[:, 2], rcond=None)[0]
    # engines of one kind that do both may not be told apart: the least is a thousandth
    prefill, decode = np.maximum(factors, 1e-3).tolist()
    return replace(
        p,
        source="CPU_SMOLLM2, scaled to the totals of engines",
        prefill_base_s=p.prefill_base_s * prefill,
        prefill_per_token_s=p.prefill_per_token_s * prefill,
        decode_base_s=p.decode_base_s * decode,
        decode_per_seq_s=p.decode_per_seq_s * decode,
        decode_per_kv_token_s=p.decode_per_kv_token_s * decode,
    )


def _get(http: httpx.Client, path: str) -> dict[str, Any] | None:
    """Returns an answer; None where the server has no such thing. Raises FromLiveError for a refusal."""
    try:
        answer = http.get(path)
    except httpx.HTTPError as error:
        raise FromLiveError(f"{http.base_url} cannot be reached: {error}") from error
    if answer.status_code == 404:
        return None
    try:
        found: dict[str, Any] = loads(answer.text)
        if answer.status_code != 200:
            raise FromLiveError(f"{path}: {found['error']['message']}")
    except (CodecError, KeyError, TypeError) as error:
        raise FromLiveError(f"{path}: status {answer.status_code}, and no answer of Sluice's") from error
    return found


def kind_of(engine: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what engines of equal speed have in common, as the router has it (`actors.router.observing.Kind`)."""
    return (
        engine["kind"],
        engine["group"],
        engine["slots"],
        engine["kv_blocks"] * engine["block_size_tokens"],
    )


# --------------------------------------------------------------------------------------------------------- requests


def _requests(
    journal: Mapping[str, Any], ring: Mapping[int, dict[str, Any]], minutes: float
) -> tuple[list[Seen], tuple[float, float], str, list[str]]:
    """Returns the latest requests that have ended, (bytes, tokens) of their KV, where they are from, and problems."""
    problems: list[str] = []
    lines: dict[int, dict[str, Any]] = dict(ring)
    source = (
        "the router's last events and those of the seconds that were watched (no journal is kept in a folder)"
    )
    folder = journal.get("folder")
    if folder and os.access(folder, os.R_OK):
        lines = {
            int(line["n"]): line for line in _journal_lines(Path(folder), str(journal.get("file") or ""))
        } | lines
        source = f"the journal's last {minutes:g} minutes"
    elif folder:
        problems.append(
            f"the journal's folder {folder} cannot be read on this machine: the router's last events stand for it"
        )
    elif not lines:
        problems.append("the router keeps no events (router.journal.ring_events is 0): there is no workload")
    requests, kv_bytes, left_out = requests_of(_events(lines))
    if requests:
        since_s = requests[-1].at_s - 60.0 * minutes
        requests = [one for one in requests if one.at_s >= since_s][-MOST_REQUESTS:]
    if left_out:
        problems.append(
            f"{left_out} requests with several choices or cancelled by their clients are left out"
        )
    return requests, kv_bytes, source, problems


def _journal_lines(folder: Path, current: str) -> Iterator[dict[str, Any]]:
    """Yields the lines about requests at the end of the log to which the file `current` belongs."""
    run = Path(current).name.rpartition("-")[0]
    files = sorted(folder.glob(f"{run}-*.jsonl" if run else "journal-*.jsonl"))
    left, chosen = MOST_JOURNAL_BYTES, []
    for file in reversed(files):
        size = file.stat().st_size
        chosen.append((file, max(0, size - left)))
        left -= size
        if left <= 0:
            break
    for file, skip in reversed(chosen):
        with file.open("rb") as source:
            source.seek(skip)
            if skip:
                source.readline()
            for raw in source:
                if (
                    b'"event":"Arrived"' in raw
                    or b'"event":"Closed"' in raw
                    or b'"event":"PrefillDone"' in raw
                ):
                    try:
                        line = loads(raw.decode())
                    except (CodecError, UnicodeDecodeError):
                        # the last line, which is being written
                        continue
                    yield line


def _events(lines: Mapping[int, dict[str, Any]]) -> Iterator[ev.Event]:
    for n in sorted(lines):
        try:
            yield parse_event(lines[n])
        except (CodecError, JournalError) as error:
            raise FromLiveError(f"event {n} of the journal cannot be read: {error}") from error


def requests_of(events: Iterable[ev.Event]) -> tuple[list[Seen], tuple[float, float], int]:
    """Returns the requests that ended in `events` by arrival, (bytes, tokens) of their KV, and how many were left out.

    A request that was tried again arrived with its first attempt. One whose arrival is not among the events is unknown.
    """
    first: dict[str, Request] = {}
    found: list[Seen] = []
    n_bytes = n_tokens = 0.0
    left_out = 0
    for event in events:
        match event:
            case ev.Arrived():
                first.setdefault(request_id_of(event.request.attempt_id), event.request)
            case ev.PrefillDone():
                of = first.get(request_id_of(event.attempt_id))
                if of is not None and event.kv_bytes > 0:
                    n_bytes, n_tokens = n_bytes + event.kv_bytes, n_tokens + of.prompt_tokens
            case ev.Closed() if event.ended is not None:
                request = first.pop(request_id_of(event.attempt_id), None)
                if request is None:
                    continue
                if request.slots != 1 or event.ended.outcome == "cancelled":
                    left_out += 1
                    continue
                found.append(_seen(request, event))
    return sorted(found, key=lambda one: one.at_s), (n_bytes, n_tokens), left_out


def _seen(request: Request, event: ev.Closed) -> Seen:
    ended = event.ended
    assert ended is not None
    # what was refused or failed would have had some length; its limit is all that is known of it
    output = ended.output_tokens if ended.outcome == "finished" else request.max_tokens
    return Seen(
        request.arrived_s,
        event.now_s,
        request.prompt_tokens,
        max(output, 1),
        ended.outcome,
        ended.ttft_s,
        ended.tpot_s,
        request.terms.ttft_slo_s,
        request.terms.tpot_slo_s,
        _hash_ids(request),
    )


def _hash_ids(request: Request) -> tuple[int, ...]:
    """Returns the names of the prompt's full blocks of 512 tokens: a chained hash of a small block names all before."""
    small = request.block_tokens
    if not small or MOONCAKE_BLOCK_TOKENS % small:
        return ()
    step = MOONCAKE_BLOCK_TOKENS // small
    return tuple(h % 2**63 for h in request.block_hashes[step - 1 :: step])


def measured(requests: Sequence[Seen], slo: tuple[float | None, float | None]) -> dict[str, float | None]:
    """Returns the figures of requests as the simulator names them; all are judged by the objectives `slo`."""
    if not requests:
        return {}
    seconds = max(max(one.ended_s for one in requests) - requests[0].at_s, 1e-9)
    done = [one for one in requests if one.outcome == "finished"]
    met = sum(_met(one, slo) for one in done)
    found: dict[str, float | None] = {
        "slo_share": None if slo == (None, None) else met / len(requests),
        "goodput_per_s": met / seconds,
        "throughput_tok_s": sum(one.output_tokens for one in done) / seconds,
    }
    for name, values in (
        ("ttft", [one.ttft_s for one in done if one.ttft_s is not None]),
        ("tpot", [one.tpot_s for one in done if one.tpot_s is not None]),
    ):
        found[f"{name}_mean_s"] = math.fsum(values) / len(values) if values else None
        for q in (50, 95):
            found[f"{name}_p{q}_s"] = percentile(values, q / 100) if values else None
    return found


def _met(one: Seen, slo: tuple[float | None, float | None]) -> bool:
    pairs = zip((one.ttft_s, one.tpot_s), slo, strict=True)
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


# ---------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Described:
    """A what-if base made of a live application: the file's text, the workload's lines, measured figures, facts for
    people, and problems.
    """

    text: str
    workload: str
    measured: dict[str, float | None]
    facts: dict[str, Any]
    problems: list[str]

    def write(self, folder: Path) -> Path:
        """Writes the three files into `folder` and returns the path of the first."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / WORKLOAD, self.workload)
        write_text(
            folder / MEASURED, json.dumps({"measured": self.measured, "facts": self.facts}, indent=1) + "\n"
        )
        write_text(folder / BASE, self.text)
        return folder / BASE

    def as_json(self) -> dict[str, Any]:
        """Returns what the page shows of it."""
        return {"text": self.text, "facts": self.facts, "problems": self.problems, "measured": self.measured}


def described(live: Live) -> Described:
    """Returns the what-if file of a live application. Raises FromLiveError where there is nothing to simulate."""
    problems = list(live.problems)
    if not live.requests:
        raise FromLiveError(
            "no request has ended lately: send a load (`sluice experiment run burst`), and ask again meanwhile"
        )
    groups, nodes = _groups(live, problems)
    network = _network(live, nodes, problems) if len(nodes) > 1 else None
    if network is not None:
        _place(groups, nodes, network)
    slo = _commonest(live.requests, problems)
    first_s = live.requests[0].at_s
    base: dict[str, Any] = {
        "cluster": {
            "engines": [{k: v for k, v in group.items() if not k.startswith("_")} for group in groups]
        },
        **({"network": network} if network is not None else {}),
        "policies": _policies(live, problems),
        **_scaling(live, problems),
        "workload": {
            "file": WORKLOAD,
            **({} if slo[0] is None else {"ttft_slo_s": slo[0]}),
            **({} if slo[1] is None else {"tpot_slo_s": slo[1]}),
        },
        "run": {"seeds": 2},
    }
    lines = [
        {
            "timestamp": round((one.at_s - first_s) * 1e3, 3),
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "hash_ids": list(one.hash_ids),
        }
        for one in live.requests
    ]
    if not any(one.hash_ids for one in live.requests):
        problems.append(
            "what prompts share is not known here (no policy asks for it, or no prompt is long): they share nothing"
        )
    figures = measured(live.requests, slo)
    facts = _facts(live, groups, nodes, slo)
    comment = "".join(f"# {line}\n" for line in (*_said(facts), *(f"problem: {one}" for one in problems)))
    text = comment + yaml.safe_dump(base, sort_keys=False, width=110)
    return Described(text, "".join(json.dumps(line) + "\n" for line in lines), figures, facts, problems)


def _groups(live: Live, problems: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the engine groups, and the nodes on which there are engines. `_nodes` has the node of each engine."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for engine in live.engines:
        if engine["state"] in ("ready", "quarantined") and engine["duty"] == "active":
            by_name.setdefault(
                f"{engine['id'].rpartition('-')[0] or engine['id']}/{engine['role']}", []
            ).append(engine)
    if not by_name:
        raise FromLiveError("no engine is ready and active: there is no fleet to simulate")
    left = len(live.engines) - sum(map(len, by_name.values()))
    if left:
        problems.append(f"{left} engines that are warm, starting, draining or dead are left out")
    groups = []
    names: Counter[str] = Counter()
    for key, engines in sorted(by_name.items()):
        name = _group_name(key.partition("/")[0], engines[0]["role"], names)
        first = engines[0]
        if any(kind_of(one) != kind_of(first) for one in engines):
            problems.append(f"group {name}: its engines differ; all are simulated as its first one")
        ranks = first["dp_ranks"]
        profile = _profile(live, first, name, problems)
        groups.append(
            {
                "name": name,
                "role": first["role"],
                "count": len(engines) * ranks,
                "profile": profile,
                "slots": max(1, first["slots"] // ranks),
                "kv_blocks": max(1, first["kv_blocks"] // ranks),
                "block_size_tokens": first["block_size_tokens"],
                "lease_s": first["lease_s"],
                "max_lease_s": first["max_lease_s"],
                **({"barrier": name} if first["barrier"] else {}),
                "_nodes": [one["node"] for one in engines for _ in range(ranks)],
            }
        )
    nodes = sorted({node for group in groups for node in group["_nodes"]})
    return groups, nodes


def _group_name(name: str, role: str, taken: Counter[str]) -> str:
    short = "".join(c if c.isalnum() or c in "_-" else "-" for c in name.lower()).strip("-_")[:24] or role
    short = short if short[0].isalpha() else f"g{short}"
    taken[short] += 1
    return short if taken[short] == 1 else f"{short}-{role}"


def _profile(live: Live, engine: Mapping[str, Any], name: str, problems: list[str]) -> dict[str, Any]:
    fit = live.fits.get(kind_of(engine))
    if fit is None or not fit.rows:
        problems.append(f"group {name}: its engines count no steps; their timing is a guess")
        made: TimingProfile = replace(CPU_SMOLLM2, source="ASSUMPTION: nothing was measured")
    else:
        made = fit.profile()
    n_bytes, tokens = live.kv_bytes
    if tokens:
        made = replace(made, kv_bytes_per_token=max(1, round(n_bytes / tokens)))
    else:
        problems.append(f"group {name}: no KV was seen; its size is a guess")
    bandwidth, latency_s = _link(live)
    if bandwidth is None:
        problems.append(f"group {name}: no transfer was seen; its bandwidth is a guess")
    else:
        made = replace(
            made,
            transfer_bandwidth_bytes_per_s=bandwidth,
            transfer_latency_s=made.transfer_latency_s if latency_s is None else latency_s,
        )
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(made).items()}


def _link(live: Live) -> tuple[float | None, float | None]:
    """Returns bandwidth and latency between two engines: medians learnt of pairs, else the mean of all transfers."""
    pairs = live.network["pairs"]
    if pairs:
        latencies = [one["latency_s"] for one in pairs if one["latency_s"] is not None]
        return median(one["bytes_per_s"] for one in pairs), median(latencies) if latencies else None
    transfers, n_bytes, seconds = live.transfers
    if transfers and n_bytes > 0 and seconds > 0:
        return n_bytes / seconds, 0.0
    return None, None


def _network(live: Live, nodes: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Returns a fat tree with the known racks and pods, and the learnt or configured bandwidths."""
    places, tiers = live.network["places"], live.network["tiers"]
    across = [one["bytes_per_s"] for one in live.network["pairs"] if one["sender"] != one["receiver"]]
    nic = (
        median(across)
        if across
        else next((tiers[t]["bytes_per_s"] for t in ("1", "2", "3") if t in tiers), None)
    )
    if nic is None:
        problems.append("no bandwidth between nodes is known: 10 Gbit/s are a guess")
        nic = 1.25e9
    own = [one["bytes_per_s"] for one in live.network["pairs"] if one["sender"] == one["receiver"]]
    inside = median(own) if own else tiers.get("0", {}).get("bytes_per_s") or 10 * nic
    pods: dict[str, dict[str, int]] = {}
    for node in nodes:
        place = places.get(node, {"rack": "", "pod": ""})
        racks = pods.setdefault(place["pod"], {})
        racks[place["rack"]] = racks.get(place["rack"], 0) + 1
    per_node = Counter(engine["node"] for engine in live.engines)
    latency_us = [0.0, 0.0, 0.0, 0.0]
    for tier in range(4):
        known = tiers.get(str(tier), {}).get("latency_s")
        latency_us[tier] = max(latency_us[tier - 1] if tier else 0.0, (known or 0.0) * 1e6)

    def over(tier: str) -> float:
        far = tiers.get(tier, {}).get("bytes_per_s")
        near = tiers.get("1", {}).get("bytes_per_s")
        return near / far if far and near and near > far else 1.0

    return {
        "topology": {
            "pods": len(pods),
            "racks_per_pod": max(map(len, pods.values())),
            "nodes_per_rack": max(n for racks in pods.values() for n in racks.values()),
            "gpus_per_node": max(per_node.values()) * max(engine["dp_ranks"] for engine in live.engines),
            "nvlink_gbyte_per_s": float(f"{max(inside, nic) / 1e9:.6g}"),
            "nic_gbit_per_s": float(f"{nic * 8 / 1e9:.6g}"),
            "rack_oversubscription": over("2"),
            "pod_oversubscription": over("3"),
            "latency_us": latency_us,
        }
    }


def _place(groups: Sequence[dict[str, Any]], nodes: Sequence[str], network: Mapping[str, Any]) -> None:
    """Gives each engine a node of the topology, so that those of one node stay together."""
    from benchmarks.sim.network.topology import Topology

    names = list(Topology.build(network["topology"]).nodes)
    at = dict(zip(nodes, names, strict=False))
    for group in groups:
        group["nodes"] = [at[node] for node in group["_nodes"]]


def _policies(live: Live, problems: list[str]) -> dict[str, Any]:
    dispatch = {k: v for k, v in (live.policies.get("dispatch") or {}).items() if k != "seed"}
    if live.policies.get("flow"):
        problems.append(
            "KV transfers are scheduled by flow agents, which the simulation of a what-if leaves out"
        )
    return {
        "prefill": {k: live.policies["prefill"][k] for k in ("name", "params")},
        "decode": {k: live.policies["decode"][k] for k in ("name", "params")},
        "dispatch": dispatch,
        **({"predictor": "survival"} if live.learns else {}),
    }


def _scaling(live: Live, problems: list[str]) -> dict[str, Any]:
    scaling = live.scaling
    if scaling is None:
        return {}
    if scaling["mode"] != "auto":
        problems.append("numbers of engines are set by hand: the simulated fleet keeps them")
        return {}
    steps = scaling.get("start_steps")
    return {
        "scaling": {
            "policy": scaling["policy"]["name"],
            "params": scaling["policy"]["params"],
            **({"start": steps} if steps else {}),
            "warm": sum(group["warm"] for group in scaling["groups"]),
        }
    }


def _commonest(requests: Sequence[Seen], problems: list[str]) -> tuple[float | None, float | None]:
    pairs = Counter((one.ttft_slo_s, one.tpot_slo_s) for one in requests)
    (best, n), *_ = pairs.most_common(1)
    if n < len(requests):
        problems.append(
            f"requests have {len(pairs)} different pairs of objectives: that of {n} of {len(requests)} requests stands"
            " for all, in the simulation and in what was measured"
        )
    return best


def _facts(
    live: Live,
    groups: Sequence[Mapping[str, Any]],
    nodes: Sequence[str],
    slo: tuple[float | None, float | None],
) -> dict[str, Any]:
    requests = live.requests
    seconds = requests[-1].at_s - requests[0].at_s
    return {
        "workload": f"{len(requests)} requests in {seconds:.0f} s, from {live.source}",
        "engines": ", ".join(f"{group['count']} {group['name']} ({group['role']})" for group in groups),
        "nodes": len(nodes),
        "policies": f"{live.policies['prefill']['name']} and {live.policies['decode']['name']}",
        "timing": f"fitted to {sum(fit.rows for fit in live.fits.values())} reports of engines",
        "objectives": f"TTFT {_ms(slo[0])}, TPOT {_ms(slo[1])}",
    }


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e3:g} ms"


def _said(facts: Mapping[str, Any]) -> list[str]:
    return [
        "Made from a running application by `sluice simulate --from-live`.",
        *(f"{k}: {v}" for k, v in facts.items()),
    ]


# ------------------------------------------------------------------------------------------------------------ trust


def trust(
    found: Mapping[str, float | None],
    simulated: Mapping[str, float | None],
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns whether a simulated base is near enough to what was measured, and the reason in words."""
    worst: tuple[float, str] | None = None
    compared = 0
    for name in JUDGED:
        ours, live = simulated.get(name), found.get(name)
        if ours is None or live is None:
            continue
        compared += 1
        share = name.endswith("_share")
        off = (
            abs(ours - live) if share else abs(ours - live) / abs(live) if live else math.inf if ours else 0.0
        )
        text = f"{(labels or {}).get(name, name)}: simulated {ours:.4g}, measured {live:.4g}"
        if worst is None or off > worst[0]:
            worst = (off, text)
    if worst is None:
        return {"ok": False, "text": "nothing was measured with which the simulation could be compared"}
    if worst[0] > TRUSTED:
        return {
            "ok": False,
            "text": f"{worst[1]}. They differ by more than {TRUSTED:.0%}: do not trust the other columns",
        }
    return {"ok": True, "text": f"{compared} figures agree within {TRUSTED:.0%}; the worst is {worst[1]}"}


__all__ = ["Described", "FromLiveError", "Live", "SluiceError", "collect", "described", "measured", "trust"]
