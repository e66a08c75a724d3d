"""Starts vllm-router with its prefill and decode sources (`benchmarks.overload.source`), and ends all together.

    python -m benchmarks.overload.fleet --program PATH --port 8030 --metrics-port 8031 --fleet '{"prefill": ...}'

The sources are up before the router starts, which otherwise looks for them twice a minute only. The router sends each
request to the worker with less under way (`power_of_two`, its policy for requests of varying lengths), and logs nothing
of single requests, since it would log each refusal. A bounded fleet has neither retries nor circuit breakers: a retry
would send a refused request to engines that are full once more, and a breaker would take an engine that is full out for
a while.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.live.servers import python
from benchmarks.overload.source import Timing
from benchmarks.peers.launch import START_S, Servers


@dataclass(frozen=True, slots=True)
class Engines:
    """The sources of one role: their ports, their timing, and how much one takes at once (None: everything)."""

    ports: tuple[int, ...]
    timing: Timing
    slots: int
    most_requests: int | None = None
    most_tokens: int | None = None

    def argv(self, role: str, port: int) -> list[str]:
        """Returns the command line of one source."""
        found = python("-m", "benchmarks.overload.source", role, "--port", str(port))
        found += ["--timing", json.dumps(asdict(self.timing)), "--slots", str(self.slots)]
        for option, value in (("--most-requests", self.most_requests), ("--most-tokens", self.most_tokens)):
            found += [] if value is None else [option, str(value)]
        return found


@dataclass(frozen=True, slots=True)
class Fleet:
    """The sources behind one router."""

    prefill: Engines
    decode: Engines

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of all sources."""
        return (*self.prefill.ports, *self.decode.ports)

    @property
    def bounded(self) -> bool:
        """Whether engines refuse what is too much."""
        return self.prefill.most_tokens is not None or self.decode.most_requests is not None

    @staticmethod
    def read(text: str) -> "Fleet":
        """Returns the fleet that `json.dumps(asdict(fleet))` gave."""
        found = json.loads(text)
        engines = {
            role: Engines(**{**own, "ports": tuple(own["ports"]), "timing": Timing(**own["timing"])})
            for role, own in found.items()
        }
        return Fleet(**engines)


def router_argv(program: str, port: int, metrics_port: int, fleet: Fleet) -> list[str]:
    """Returns the command line of vllm-router before a fleet."""
    found = [program, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"]
    for option, engines in (("--prefill", fleet.prefill), ("--decode", fleet.decode)):
        for own in engines.ports:
            found += [option, f"http://127.0.0.1:{own}"]
    found += ["--policy", "power_of_two", "--log-level", "critical", "--prometheus-port", str(metrics_port)]
    found += ["--worker-startup-check-interval", "1"]
    return [*found, "--disable-retries", "--disable-circuit-breaker"] if fleet.bounded else found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGINT or SIGTERM, or until one of the processes has ended; returns 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload.fleet", description=__doc__)
    parser.add_argument("--program", required=True, help="path of vllm-router")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--fleet", type=Fleet.read, required=True, help="a Fleet as JSON")
    args = parser.parse_args(argv)
    fleet: Fleet = args.fleet
    with Servers() as servers:
        for role, engines in (("prefill", fleet.prefill), ("decode", fleet.decode)):
            for port in engines.ports:
                servers.started.append(subprocess.Popen(engines.argv(role, port)))
        servers.wait(fleet.ports, START_S)
        router = router_argv(args.program, args.port, args.metrics_port, fleet)
        servers.started.append(subprocess.Popen(router))
        servers.watch()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
