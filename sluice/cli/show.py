"""The commands `sluice status`, `sluice models` and `sluice version`."""

from __future__ import annotations

import argparse
import json
import sys
import time

from sluice import ConnectionFailedError, RequestTimeoutError, Sluice, SluiceError
from sluice._version import __version__
from sluice.types import (
    ApiKeysStatus,
    EngineStatus,
    FleetLoad,
    FlowAgent,
    FlowStatus,
    QuarantineStatus,
    RouterStatus,
    Status,
)

from .output import Exit, connect, positive_float, report, table

_CLEAR = "\x1b[H\x1b[2J"


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice status` to `parser`."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=positive_float,
        const=1.0,
        metavar="S",
        help="repeat every S seconds (default 1) until Ctrl-C",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the server's answer as JSON, one line each time"
    )
    parser.set_defaults(run=run_status)


def configure_models(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice models` to `parser`."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run_models)


def configure_version(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice version` to `parser`."""
    parser.add_argument("--json", action="store_true", help="print both versions as JSON")
    parser.set_defaults(run=run_version)


def run_status(args: argparse.Namespace) -> int:
    """Prints the server's status once (exit code 0 if it is ready, 6 if not), or with `--watch` until Ctrl-C."""
    if args.watch is None:
        with connect(args) as client:
            status = client.status()
        print(_shown(status, args))
        return Exit.OK if status.ready else Exit.NOT_READY
    with connect(args, retries=0) as client:
        return _watch(client, args)


def _watch(client: Sluice, args: argparse.Namespace) -> int:
    """Prints the status every `--watch` seconds until Ctrl-C, and returns the exit code.

    An error is reported and the loop goes on, so that a restart of the server can be watched.
    """
    try:
        while True:
            try:
                shown = _shown(client.status(), args)
            except SluiceError as error:
                report(error)
            else:
                clear = _CLEAR if sys.stdout.isatty() and not args.json else ""
                print(clear + shown, flush=True)
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return Exit.OK


def _shown(status: Status, args: argparse.Namespace) -> str:
    return status.model_dump_json(exclude_none=True) if args.json else render_status(status)


def render_status(status: Status) -> str:
    """Returns the status as text; a field that the server left out is shown as `-`."""
    requests = status.requests
    counts = "-"
    if requests is not None:
        queued, pool = _cell(requests.queued), _cell(requests.pool)
        counts = f"{_cell(requests.in_flight)} in flight, {queued} queued, {pool} in the pool"
    lines = [
        f"ready     {'yes' if status.ready else 'NO'}",
        f"model     {_cell(status.model)}",
        f"router    {_router(status.router)}",
        f"requests  {counts}",
        f"load      {_load(status.load)}",
        f"leases    {_cell(status.leases)}",
    ]
    if status.sleep is not None:
        why = status.sleep.reason
        lines.append(f"engines   {status.sleep.phase}{f' ({why})' if why else ''}")
    if status.api_keys is not None:
        lines.append(f"api keys  {_api_keys(status.api_keys)}")
    header = ("ENGINE", "ROLE", "KIND", "STATE", "RUNNING", "WAITING", "SLOTS", "KV BLOCKS", "KV USE")
    rows = [_engine_row(engine) for engine in status.engines]
    shown = [*lines, "", table(header, rows) if rows else "no engines"]
    held = [(engine.id, quarantine) for engine in status.engines for quarantine in engine.quarantine or ()]
    shown += ([""] if held else []) + [_quarantine(*one) for one in held]
    return "\n".join(shown + (_flow(status.flow) if status.flow is not None else []))


def _api_keys(keys: ApiKeysStatus) -> str:
    """Returns the number of keys, and who enforces their limits."""
    limits = "limits are counted for all ingresses together"
    if keys.limits == "share":
        limits = f"each of {_cell(keys.ingresses)} ingresses enforces its share of the limits"
    detail = f" ({keys.detail})" if keys.detail else ""
    return f"{_cell(keys.keys)} of {_cell(keys.tenants)} tenants; {limits}{detail}"


def _load(load: FleetLoad | None) -> str:
    """Returns the regime with the mean load scores from which it follows."""
    if load is None:
        return "-"
    scores = {"prefill": load.prefill, "decode": load.decode}
    shown = ", ".join(f"{role} {score:.2f}" for role, score in scores.items() if score is not None)
    return f"{_cell(load.regime)} ({shown})" if shown else _cell(load.regime)


def _flow(flow: FlowStatus) -> list[str]:
    """Returns the lines on the scheduling of KV transfers: the policy, and a row for each node's agent."""
    counts = f"{_cell(flow.held)} reads held, {_cell(flow.granted)} permits granted"
    header = ("AGENT OF", "OPEN", "HELD", "GRANTED", "UNSCHEDULED", "PORTS MB/S")
    return [
        "",
        f"KV transfers by {_cell(flow.policy)}: {counts}",
        "",
        table(header, [_agent_row(agent) for agent in flow.agents]),
    ]


def _agent_row(agent: FlowAgent) -> tuple[str, ...]:
    share = agent.unscheduled_share
    ports = ", ".join(f"{port} {value / 1e6:.1f}" for port, value in agent.bytes_per_s.items())
    counts = (_cell(value) for value in (agent.node, agent.open, agent.held, agent.granted))
    return (*counts, "-" if share is None else f"{share:.1%}", ports or "-")


def _quarantine(engine_id: str | None, quarantine: QuarantineStatus) -> str:
    """Returns a line that says why an engine gets no work, since when, and when it is tried next."""
    rank = "" if quarantine.rank is None else f" rank {quarantine.rank}"
    reason = _cell(quarantine.reason).replace("_", " ")
    rate = "" if quarantine.failure_rate is None else f" (failure rate {quarantine.failure_rate:.2f})"
    since = "" if quarantine.for_s is None else f" for {quarantine.for_s:.0f} s"
    probe = f"next probe in {quarantine.probe_in_s or 0.0:.0f} s"
    tried = "a probe runs now" if quarantine.probing else probe
    return f"quarantined: {_cell(engine_id)}{rank}, {reason}{rate},{since or ' now'}; {tried}"


def _router(router: RouterStatus | None) -> str:
    if router is None:
        return "-"
    state = {True: "connected", False: "NOT CONNECTED", None: "-"}[router.connected]
    if router.policy is None:
        return state
    return f"{state}; prefill: {_cell(router.policy.prefill)}, decode: {_cell(router.policy.decode)}"


def _engine_row(engine: EngineStatus) -> tuple[str, ...]:
    used, total, usage = engine.kv_blocks_used, engine.kv_blocks_total, engine.kv_usage
    if usage is None and used is not None and total:
        usage = used / total
    state = f"{_cell(engine.state)}, warm" if engine.duty == "warm" else engine.state
    return (
        *(_cell(value) for value in (engine.id, engine.role, engine.kind, state)),
        *(_cell(value) for value in (engine.running, engine.waiting, engine.slots)),
        "-" if used is None and total is None else f"{_cell(used)}/{_cell(total)}",
        "-" if usage is None else f"{usage:.0%}",
    )


def _cell(value: str | int | None) -> str:
    return "-" if value is None else str(value)


def run_models(args: argparse.Namespace) -> int:
    """Prints the served models, and returns the exit code."""
    with connect(args) as client:
        models = client.models()
    if args.json:
        print(json.dumps([model.model_dump(exclude_none=True) for model in models], indent=2))
    else:
        rows = [(model.id, _cell(model.max_model_len), _cell(model.owned_by)) for model in models]
        print(table(("MODEL", "CONTEXT TOKENS", "OWNED BY"), rows))
    return Exit.OK


def run_version(args: argparse.Namespace) -> int:
    """Prints the versions of this package and of the server, and returns the exit code.

    A server that cannot be reached is not a failure here.
    """
    server: dict[str, object] | None
    try:
        with connect(args, retries=0) as client:
            server = client.version().model_dump(exclude_none=True)
            where = client.base_url
    except (ConnectionFailedError, RequestTimeoutError) as error:
        server, where = None, str(error)
    if args.json:
        print(json.dumps({"client": __version__, "server": server}))
    else:
        print(f"sluice {__version__}")
        print(f"server {_server_line(server, where)}")
    return Exit.OK


def _server_line(server: dict[str, object] | None, where: str) -> str:
    if server is None:
        return f"not reached ({where})"
    details = ", ".join(f"{name} {value}" for name, value in server.items() if name != "version")
    return f"{server['version']} at {where}" + (f" ({details})" if details else "")
