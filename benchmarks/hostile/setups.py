"""The application that hostile clients attack, once with the limits as shipped and once with limits that let all in."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from app.ingress.config import IngressConfig
from benchmarks.live.servers import Command
from benchmarks.live.targets import sluice_app

STEP_S = 0.05
"""Time between two tokens of a stream."""
PREFILL, DECODE, SLOTS = 2, 2, 640
"""Engines of each role, and slots of each. Slow readers hold 1,000 of the decode slots, and room is left for others."""

# ASSUMPTION: 4 MB of English are a million tokens of SmolLM2, which must fit the context to be admitted.
LONG_CONTEXT = 1_200_000

RAISED: Mapping[str, int] = {
    "max_connections": 14_000,
    "max_connections_per_address": 14_000,
    "max_waiting_bytes": 2**30,
    "max_tokenising_chars": 2**30,
    "max_in_flight": 8192,
}
"""Ingress options with which all hostile clients get in. No more prompts are under way than as shipped, since 200 of a
million tokens would take ten times as much memory.
"""

SETUPS: Mapping[str, Mapping[str, int]] = {"shipped": {}, "raised": RAISED}

CONNECTION_BYTES = 32 * 2**10
"""Bytes of a connection beside what the budgets count: its objects, and unread output below the 16 KiB from which it is
counted (`app.ingress.http.protocol.HIGH_WATER_BYTES`). ASSUMPTION: the objects take as much as that output.
"""


def limits(setup: str) -> IngressConfig:
    """Returns the configuration of the ingress in a setup."""
    return IngressConfig(served_names=("sim",), **SETUPS[setup])  # type: ignore[arg-type]


def shown_limits(setup: str) -> dict[str, int]:
    """Returns the limits of a setup that hostile clients meet, by the name of their option."""
    config = limits(setup)
    names = (*RAISED, "max_prompt_bytes", "max_body_bytes", "max_unread_bytes", "slow_client_bytes")
    return {item.name: getattr(config, item.name) for item in fields(config) if item.name in names}


def budget_bytes(config: IngressConfig, clients: int) -> int:
    """Returns the bytes by which the ingress may grow while `clients` hostile clients are there.

    These are the budgets of its configuration: requests that arrive, answers that nobody reads, prompts that wait to
    be tokenised (all is ASCII here, a byte a character), prompts under way, and a fixed part for each connection that
    may be open.
    """
    connections = min(clients, config.max_connections, config.max_connections_per_address)
    arriving = config.max_waiting_bytes + config.max_tokenising_chars
    shared = arriving + config.max_unread_bytes + config.max_prompt_bytes
    return shared + CONNECTION_BYTES * connections


def application(setup: str, model: str, folder: Path) -> Command:
    """Returns the command that serves the application without Ray; its files are in `folder`.

    `model` names the tokenizer as in a configuration: a model, or "sim" for words.
    """
    (folder / "orders").mkdir(parents=True)
    timing = {"prefill_base_s": 0.002, "prefill_per_token_s": 1e-7, "decode_base_s": STEP_S}
    options: dict[str, Any] = {"slots": SLOTS, "timing": timing}
    if setup == "raised":
        options |= {"max_model_len": LONG_CONTEXT, "kv_blocks": 2 * LONG_CONTEXT // 16}
    args = {
        "model": {"path": model, "name": "sim"},
        "engines": [
            {"name": name, "role": name, "kind": "sim", "replicas": count, "options": options}
            for name, count in (("prefill", PREFILL), ("decode", DECODE))
        ],
        "wire": {"socket_dir": str(folder / "sockets")},
        "ingress": {"replicas": 1, "options": dict(SETUPS[setup])},
    }
    made = sluice_app(f"{setup} limits", folder / "app.yaml", args, 120.0)
    argv = list(made.argv)
    argv[argv.index("app.serve")] = "benchmarks.chaos.bare"
    return replace(made, argv=[*argv, "--orders", str(folder / "orders")])
