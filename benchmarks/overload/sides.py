"""The sides of the comparison: how each is served, and how it wants its requests.

On sim engines (`--setup sim`) every side has two prefill and two decode engines with the same timing and slots:

`sluice`            Sluice with admission by predicted wait (`by_wait`) and fairness `vtc`
`open`              Sluice without admission control; fairness is `vtc` as well, which is the default
`router`            vllm-router before ticking sources that refuse what is too much, its own best settings
`router-unbounded`  vllm-router before ticking sources that take everything, which is vLLM's default
`simulator`         the simulator's figures of `sluice`, of the same requests and engines; no server

On vLLM (`--setup vllm`) every side is one engine of the installed vLLM with the same options:

`sluice`, `open`    Sluice as above before a colocated engine
`engine`            vLLM's own OpenAI server that refuses what is too much, its own best settings
`engine-unbounded`  vLLM's own OpenAI server that takes everything, the default, and serves by priority

Sluice knows the classes with their objectives and the tenants by their API keys. A rival has no objectives and no
tenants, so it gets what its own configuration has against overload: a bound on what an engine takes, such that what it
takes still begins within the tightest objective (vLLM's `--max-num-queued-reqs`, and for prompts
`--max-num-queued-tokens`, with the formulas of vLLM's own documentation of them). Within such a bound the order by
arrival serves everybody in time, so the priorities are sent only to the engine without one, where they help the
interactive class. vllm-router's own limit is not used: it gives a permit back with the first text, and adds at least
one a second on top, so the number of those that wait grows without end.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.ingress.tenants.key_file import changed
from app.ingress.tenants.keys import Key, new_id, new_secret, now
from benchmarks.live import targets
from benchmarks.live.load import body_of
from benchmarks.live.servers import Command, free_ports, python
from benchmarks.overload.client import Form
from benchmarks.overload.fleet import Engines, Fleet
from benchmarks.overload.load import PRIORITY, SLO_S, TIGHTEST_S, WEIGHTS, Mix, Work
from benchmarks.overload.source import Timing

SLUICE, OPEN, SIMULATOR = "sluice", "open", "simulator"
ROUTER, ROUTER_UNBOUNDED = "router", "router-unbounded"
ENGINE, ENGINE_UNBOUNDED = "engine", "engine-unbounded"

NAMES: Mapping[str, str] = {
    SLUICE: "Sluice",
    OPEN: "Sluice, open admission",
    SIMULATOR: "Sluice, simulated",
    ROUTER: "vllm-router, bounded",
    ROUTER_UNBOUNDED: "vllm-router, unbounded",
    ENGINE: "vLLM's server, bounded",
    ENGINE_UNBOUNDED: "vLLM's server, unbounded",
}
"""The name of each side in reports."""

SIDES: Mapping[str, tuple[str, ...]] = {
    "sim": (SLUICE, OPEN, ROUTER, ROUTER_UNBOUNDED, SIMULATOR),
    "vllm": (SLUICE, OPEN, ENGINE, ENGINE_UNBOUNDED),
}
"""The sides of each setup, in the order of reports."""

MIXES: Mapping[str, Mix] = {
    "sim": Mix(prompt_tokens=200.0, output_tokens=60.0, longest_prompt=4_000, longest_output=512),
    # short, since a CPU carries few tokens a second
    "vllm": Mix(prompt_tokens=32.0, output_tokens=16.0, longest_prompt=400, longest_output=160),
}
"""The lengths of requests in each setup."""

# ------------------------------------------------------------------------------------------------------- sim engines

PREFILLS, DECODES, SLOTS, PREFILL_SLOTS = 2, 2, 8, 32
"""Engines of each role, and the sequences that one runs at once."""
STEP_S = 0.04
PREFILL = Timing(0.005, 0.0002)
"""The timing of a prefill. The decode slots are the tightest resource: prompts of 200 tokens on average use a seventh
of the prefill engines at the capacity.
"""
CAPACITY_PER_S = DECODES * SLOTS / (MIXES["sim"].output_tokens * STEP_S)
"""Requests per second with which all decode slots of any side are full."""

PROMPT_WAIT_S = 0.3
"""Seconds of prompts that a bounded prefill source takes; a prefill engine of Sluice gets as much with `by_wait`."""
SLOT_WAIT_S = (TIGHTEST_S - PROMPT_WAIT_S) / 1.2
"""Mean seconds of wait for a slot for which a bounded decode source takes requests: what the tightest objective leaves,
with the margin of `by_wait` (0.2), since the lengths of answers vary.
"""
MOST_AT_DECODE = SLOTS + int(SLOT_WAIT_S * CAPACITY_PER_S / DECODES)
MOST_PROMPT_TOKENS = round(PROMPT_WAIT_S / PREFILL.token_s)
MANY = 16_384
"""Requests and connections that an ingress takes at once, more than there are in any load: what is refused is refused
by the policy.
"""


def sim_timing() -> dict[str, Any]:
    """Returns the timing of the sim engines, as replaced fields of their profile."""
    return {
        "prefill_base_s": PREFILL.base_s,
        "prefill_per_token_s": PREFILL.token_s,
        "decode_base_s": STEP_S,
    }


def _sluice_args(side: str, keys: Path) -> dict[str, Any]:
    """Returns what Sluice's sides have in common of an application's arguments."""
    options = {
        "max_in_flight": MANY,
        "max_sequences": MANY,
        "max_connections": MANY,
        "max_connections_per_address": MANY,
        "key_file": str(keys),
        "class_slo": {name: {"ttft_s": slo_s} for name, slo_s in SLO_S.items()},
    }
    policies = {
        "admission": {"name": "by_wait" if side == SLUICE else "open"},
        "fairness": {"name": "vtc"},
    }
    return {"router": {**policies, "journal": {}}, "ingress": {"replicas": 1, "options": options}}


def sim_sluice(side: str, folder: Path, keys: Path) -> Command:
    """Returns the command of Sluice on sim engines, without Ray."""
    engines = [
        {
            "name": name,
            "role": name,
            "kind": "sim",
            "replicas": count,
            "options": {"slots": slots, "timing": sim_timing(), "vocab_size": 32_000},
        }
        for name, count, slots in (("prefill", PREFILLS, PREFILL_SLOTS), ("decode", DECODES, SLOTS))
    ]
    args = {
        "model": {"path": "sim", "name": "sim"},
        "engines": engines,
        "wire": {"socket_dir": str(folder / "sockets")},
        **_sluice_args(side, keys),
    }
    made = targets.sluice_app(NAMES[side], folder / "app.yaml", args, 120.0)
    argv = list(made.argv)
    argv[argv.index("app.serve")] = "benchmarks.chaos.bare"
    (folder / "orders").mkdir()
    return replace(made, argv=[*argv, "--orders", str(folder / "orders")])


def sim_fleet(side: str, ports: Sequence[int]) -> Fleet:
    """Returns the sources behind vllm-router; `ports` are those of the prefill sources, then of the decode sources."""
    bounded = side == ROUTER
    prefill = Engines(
        tuple(ports[:PREFILLS]), PREFILL, PREFILL_SLOTS, most_tokens=MOST_PROMPT_TOKENS if bounded else None
    )
    decode = Engines(
        tuple(ports[PREFILLS:]), Timing(STEP_S), SLOTS, most_requests=MOST_AT_DECODE if bounded else None
    )
    return Fleet(prefill, decode)


def sim_router(side: str, program: Path) -> Command:
    """Returns the command of vllm-router with its sources."""
    port, metrics_port, *ports = free_ports(2 + PREFILLS + DECODES)
    argv = python("-m", "benchmarks.overload.fleet", "--program", str(program), "--port", str(port))
    argv += ["--metrics-port", str(metrics_port), "--fleet", json.dumps(asdict(sim_fleet(side, ports)))]
    return Command(NAMES[side], argv, port, "/health", (metrics_port, *ports), timeout_s=60.0)


# -------------------------------------------------------------------------------------------------------------- vLLM

OPTIONS = targets.EngineOptions(max_model_len=2048, slots=16, kv_space_gib=1, dtype="float32")
"""The options of the engine on every side."""


def vllm_sluice(side: str, folder: Path, keys: Path) -> Command:
    """Returns the command of Sluice before one colocated engine of vLLM."""
    engines = [{"name": "colocated", "role": "colocated", "kind": "vllm", "options": asdict(OPTIONS)}]
    args = {"model": {"path": targets.MODEL}, "engines": engines, **_sluice_args(side, keys)}
    return targets.sluice_app(NAMES[side], folder / "app.yaml", args, 420.0)


def most_at_engine(capacity_per_s: float) -> int:
    """Returns the requests that a bounded engine of vLLM takes: its slots, and what gets one within the tightest
    objective, with the margin of `by_wait` (0.2).
    """
    return OPTIONS.slots + int(capacity_per_s * TIGHTEST_S / 1.2)


def vllm_engine(side: str, model: str, capacity_per_s: float | None) -> Command:
    """Returns the command of vLLM's own server. A bounded one has a known capacity."""
    made = targets.bare_engine(OPTIONS, model)
    bound: list[str] = []
    if side == ENGINE:
        if capacity_per_s is None:
            raise ValueError("the bound of an engine follows from its capacity, which must be measured first")
        bound = ["--max-num-queued-reqs", str(most_at_engine(capacity_per_s))]
    return replace(made, name=NAMES[side], argv=[*made.argv, *bound])


# -------------------------------------------------------------------------------------------------- keys and requests


def make_keys(file: Path) -> dict[str, str]:
    """Writes a key file with a key for each tenant, as `sluice key create` does; returns the secrets by tenant.

    Their ceiling lets the tenants ask for every class, and they have no quota, which is not what is measured.
    """
    secrets: dict[str, str] = {}
    made = []
    for tenant, weight in WEIGHTS.items():
        at, key_id = now(), new_id()
        secrets[tenant], held = new_secret(key_id, at)
        made.append(
            Key(id=key_id, tenant=tenant, ceiling="interactive", weight=weight, created=at, secrets=(held,))
        )
    with changed(file, create=True) as content:
        content[0] = content[0].model_copy(update={"keys": tuple(made)})
    return secrets


@dataclass(frozen=True, slots=True)
class Forms:
    """How requests for one side are written: the model's name there, whether it gets the priority, and the API keys
    by tenant, of which rivals have none.
    """

    model: str
    priorities: bool
    secrets: Mapping[str, str]

    def form(self) -> Form:
        """Returns the function from a request to its body and further header lines."""

        def form(work: Work) -> tuple[bytes, Sequence[str]]:
            extra = {"priority": PRIORITY[work.request_class]} if self.priorities else {}
            body = body_of(self.model, work.text, work.output_tokens, chat=True, extra=extra)
            head = [f"authorization: Bearer {self.secrets[work.tenant]}"] if self.secrets else []
            return body, head

        return form


@dataclass(frozen=True, slots=True)
class Target:
    """A side that is ready to be started."""

    command: Command
    forms: Forms


def target_of(
    setup: str, side: str, folder: Path, program: Path | None, model: str, capacity_per_s: float | None
) -> Target:
    """Returns a side of a setup; its files lie in `folder`, which is empty.

    `program` is vllm-router and `model` the folder of the model, which only the sides of the respective setup need.
    Raises ValueError for vllm-router without its program.
    """
    if side in (SLUICE, OPEN):
        keys = folder / "keys.json"
        secrets = make_keys(keys)
        if setup == "sim":
            return Target(sim_sluice(side, folder, keys), Forms("sim", True, secrets))
        return Target(vllm_sluice(side, folder, keys), Forms(targets.MODEL, True, secrets))
    if side in (ROUTER, ROUTER_UNBOUNDED):
        if program is None:
            raise ValueError(f"the side {side} needs the program of vllm-router")
        return Target(sim_router(side, program), Forms("source", False, {}))
    if side in (ENGINE, ENGINE_UNBOUNDED):
        forms = Forms(targets.MODEL, side == ENGINE_UNBOUNDED, {})
        return Target(vllm_engine(side, model, capacity_per_s), forms)
    raise ValueError(f"the side {side} is not served")
