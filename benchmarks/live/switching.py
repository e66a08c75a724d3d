"""Switches a live app through every policy under load, and asks for an explanation of a request under each.

    python -m benchmarks.live.switching                    16 decode and 2 prefill sim engines, about 2 minutes
    python -m benchmarks.live.switching --engines vllm     2 decode and 1 prefill vLLM engines with little KV, SmolLM2

During a closed-loop load, prefill and decode policy are switched together until each policy has been used. Under every
pair one more request is sent, and its `explain` is read. Every answer is checked. The exit status is 1 if an answer was
lost, cut or refused, or if the explanation of a decision does not name the policy that was set.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.live.load import Load, LoadResult, body_of, drive
from benchmarks.live.machine import command as said
from benchmarks.live.machine import facts, save
from benchmarks.live.servers import ROOT, Command, ServerError, administrator, running
from benchmarks.live.targets import MODEL, EngineOptions, sluice_app
from benchmarks.progress import teller

OUT = ROOT / "benchmarks" / "results" / "switching"
TOKENS = 24


def sim_command(folder: Path) -> Command:
    """Returns the command that starts an app with 16 decode engines of only 4 slots each, so that requests wait."""
    options = {"profile": "tick_1ms", "timing": {"decode_base_s": 0.02}, "slots": 4}
    engines = [
        {"name": "prefill", "role": "prefill", "kind": "sim", "replicas": 2, "options": {"slots": 64}},
        {"name": "decode", "role": "decode", "kind": "sim", "replicas": 16, "options": options},
    ]
    args = {"model": {"path": "sim", "name": "sim"}, "engines": engines}
    return sluice_app("Sluice, 16 decode sim engines", folder / "sim.yaml", args, 400.0)


def vllm_command(folder: Path) -> Command:
    """Returns the command that starts an app with one prefill and two decode engines of vLLM, which share the cores.

    Each has KV memory for a few requests.
    """
    options = asdict(EngineOptions(max_model_len=512, slots=4))
    options["kv_space_gib"] = 0.25
    engines: list[dict[str, Any]] = [
        {"name": "prefill", "role": "prefill", "kind": "vllm", "options": options},
        {"name": "decode", "role": "decode", "kind": "vllm", "replicas": 2, "options": options},
    ]
    args = {"model": {"path": MODEL}, "engines": engines}
    return sluice_app("Sluice, vLLM 1P2D", folder / "vllm.yaml", args, 600.0)


class Run:
    """A run that switches one app under load through all its policies.

    `rows` has the policies that were set, and what `explain` answered.
    """

    def __init__(self, command: Command, model: str, connections: int, say: Callable[[str], None]) -> None:
        self.model, self.connections, self.say = model, connections, say
        self.client = administrator(command.port, 120.0)
        self.port = command.port
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def go(self, hold_s: float) -> LoadResult:
        """Keeps each pair of policies for `hold_s` seconds under load and returns the load's result.

        Raises ServerError if the load does not end.
        """
        available = self.client.get("/sluice/admin/policy").raise_for_status().json()["available"]
        prefill, decode = list(available["prefill"]), list(available["decode"])
        pairs = list(islice(zip(cycle(prefill), cycle(decode), strict=False), max(len(prefill), len(decode))))
        bodies = [self._body(f"number {i}") for i in range(64)]
        load = Load(self.port, "/v1/completions", bodies, self.connections, 10**9, 3600.0)
        stop, results = threading.Event(), []
        thread = threading.Thread(target=lambda: results.append(drive(load, stop.is_set)), daemon=True)
        thread.start()
        for names in pairs:
            self._hold(dict(zip(("prefill", "decode"), names, strict=True)), hold_s)
        stop.set()
        thread.join(timeout=180)
        if not results:
            raise ServerError("the load did not end")
        return results[0]

    def _body(self, what: str) -> bytes:
        shared = "Tell me about the sea, its tides and the ships that cross it. " * 3
        return body_of(self.model, f"{shared} This is {what}.", TOKENS, chat=False)

    def _hold(self, names: dict[str, str], hold_s: float) -> None:
        self.client.put("/sluice/admin/policy", json=names).raise_for_status()
        time.sleep(hold_s)
        asked = {"model": self.model, "prompt": f"Asked under {names}", "max_tokens": 4}
        answer = self.client.post("/v1/completions", json=asked).raise_for_status().json()
        shown = self.client.get(f"/sluice/admin/explain/{answer['id']}").raise_for_status().json()
        row: dict[str, Any] = {"id": answer["id"]}
        for made in shown["decisions"]:
            stage = "prefill" if made["action"] == "RoutePrefill" else "decode"
            row[stage] = {
                "policy": made["policy"]["name"],
                "formula": made["policy"]["formula"],
                "worker": made["decision"]["worker"],
                "reason": made["decision"]["reason"],
                "best": made["decision"]["ranking"][:1],
            }
        self.rows.append(row)
        for stage, name in names.items():
            found = row.get(stage, {}).get("policy")
            if found != name:
                self.problems.append(f"{stage}: {name} was set, {answer['id']} was decided by {found}")
        self.say(
            "; ".join(
                f"{s} {row[s]['policy']} -> {row[s]['worker']} ({row[s]['reason']})"
                for s in names
                if s in row
            )
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if nothing was lost and every decision was explained by the policy that was set."""
    parser = argparse.ArgumentParser(prog="benchmarks.live.switching", description=__doc__)
    parser.add_argument("--engines", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--hold-s", type=float, help="seconds under each pair of policies (3, vllm: 8)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result (default %(default)s)")
    args = parser.parse_args(argv)
    sim = args.engines == "sim"
    machine, say = facts("benchmarks.live.switching"), teller()

    with tempfile.TemporaryDirectory(prefix="sluice-switching-") as name:
        command = (sim_command if sim else vllm_command)(Path(name))
        with running(command, say):
            run = Run(command, "sim" if sim else MODEL, 96 if sim else 12, say)
            load = run.go(args.hold_s or (3.0 if sim else 8.0))
    print(f"{len(run.rows)} pairs of policies; {load.served} answers, {sum(load.failures.values())} lost")
    for problem in [*run.problems, *map(str, load.failures.items())]:
        print(problem)
    result = {"command": said("benchmarks.live.switching", argv), "engines": args.engines, "machine": machine}
    result |= {"served": load.served, "rows": run.rows}
    result |= {"lost": dict(load.failures), "problems": run.problems}
    unchanged = save(args.out / f"switching-{args.engines}.json", result)
    return 1 if load.failures or run.problems or not unchanged else 0


if __name__ == "__main__":
    sys.exit(main())
