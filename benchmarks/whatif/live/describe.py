"""Makes a what-if file of what a running application told.

    fleet      active, ready engines by group; ranks of one engine count as engines of one barrier
    network    one node: the learnt bandwidth and latency between its engines. Several: a fat tree of the known racks
               and pods, whose NICs have the learnt bandwidth
    workload   the requests with their classes, priorities and weights; tenants are told apart, and are not named

Not claimed: engines of different speeds in one group, and the objectives of single requests (the commonest pair stands
for all), their limits of time and of output, and whether they must be served by engines of one kind.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.results_io import write_text
from benchmarks.whatif.live.ask import Live, kind_of
from benchmarks.whatif.live.errors import FromLiveError
from benchmarks.whatif.live.requests import SIMULATED_TIMEOUT_S, Seen, measured
from policies.engine_model.timing import CPU_SMOLLM2, TimingProfile

BASE, WORKLOAD, MEASURED = "base.yaml", "workload.jsonl", "measured.json"
STAGES = ("prefill", "decode", "admission", "fairness")
"""The policies of a router that a simulation has, too."""


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
        measured_of = fingerprint(self.text, self.workload.encode())
        told = {"measured": self.measured, "facts": self.facts, "of": measured_of}
        write_text(folder / MEASURED, json.dumps(told, indent=1) + "\n")
        write_text(folder / BASE, self.text)
        return folder / BASE

    def as_json(self) -> dict[str, Any]:
        """Returns what the page shows of it."""
        return {"text": self.text, "facts": self.facts, "problems": self.problems, "measured": self.measured}


def fingerprint(text: str, workload: bytes) -> str:
    """Returns a digest of a base and its requests, of all that decides what is simulated of them.

    Comments, variants (`what_if`) and the number of seeds are no part of it.
    """
    base = yaml.safe_load(text)
    base.pop("what_if", None)
    base["run"] = {key: value for key, value in (base.get("run") or {}).items() if key != "seeds"}
    digest = hashlib.sha256(json.dumps(base, sort_keys=True, default=str).encode())
    digest.update(workload)
    return digest.hexdigest()


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
    clients = _clients(live.requests)
    lines = [
        {
            "timestamp": round((one.at_s - first_s) * 1e3, 3),
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "hash_ids": list(one.hash_ids),
            "request_class": one.request_class,
            "priority": one.priority,
            **({"client": clients[one.tenant]} if one.tenant else {}),
            "weight": one.weight,
        }
        for one in live.requests
    ]
    lost = sum(one.lost for one in live.requests)
    if lost:
        problems.append(
            f"{lost} requests have a time limit other than {SIMULATED_TIMEOUT_S:g} s, or must be served by engines of"
            " one kind: the simulation leaves that out"
        )
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
    chosen: dict[str, Any] = {}
    for stage in STAGES:
        policy = live.policies.get(stage)
        if policy is None:
            problems.append(
                f"the server tells of no {stage} policy, because it is older than this command: the simulator's default"
                " stands for it"
            )
        else:
            chosen[stage] = {key: policy[key] for key in ("name", "params")}
    return {
        **chosen,
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


def _clients(requests: Sequence[Seen]) -> dict[str, str]:
    """Returns a number as the name of each tenant: the file says which requests are of one, and not of whom."""
    return {
        tenant: str(number)
        for number, tenant in enumerate(dict.fromkeys(one.tenant for one in requests if one.tenant), start=1)
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
        "policies": ", ".join(
            f"{stage} {policy['name']}"
            for stage in STAGES
            if (policy := live.policies.get(stage)) is not None
        ),
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
