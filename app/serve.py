"""`python -m app.serve`: runs a Serve config file in the foreground, with its own Ray, until Ctrl-C (`make serve`).

It starts a Ray cluster that lives on 127.0.0.1 only and ends with this process, deploys the file's application, says
how far it is, and prints a command to try when the application is ready. If Ray breaks it is mended, or this program
starts over (`app.own_ray`). `serve run FILE` and `serve deploy FILE` do
the same on a cluster that exists already. With --address (or RAY_ADDRESS) it joins that cluster and leaves it running.
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import yaml

from actors.options import ConfigError, from_options
from app.admin_key import LOOPBACK_HOSTS, KeyFile
from app.config import parse
from app.dashboard.store import RunsConfig
from app.ingress.config import check_options
from app.own_ray import END_TIMEOUT_S, OwnRay, restarts

READY_TIMEOUT_S = 600.0


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Returns 0 after Ctrl-C, 1 if it could not start, and 2 for a wrong config or arguments."""
    parser = argparse.ArgumentParser(prog="python -m app.serve", description=__doc__)
    configure(parser)
    return run(parser.parse_args(argv))


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to `parser`."""
    parser.add_argument(
        "--config", default="deploy/cpu.yaml", help="a Serve config file (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, help="public port, instead of the file's")
    parser.add_argument("--http-port", type=int, help="port of Ray Serve's own proxy, instead of the file's")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help="join this Ray cluster")


class ServeCommand:
    """The subcommand `sluice serve`."""

    name = "serve"
    help = "run a Serve config file in the foreground, with its own Ray, until Ctrl-C"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments to `parser`."""
        configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Serves until Ctrl-C and returns the exit status, which `main` documents."""
        return run(args)


command = ServeCommand()


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C and returns the exit status, which `main` documents."""
    try:
        schema = load(args.config, args.port, args.http_port)
    except OSError as error:
        print(
            f"sluice: {args.config}: {error.strerror}: give a Serve config file with --config",
            file=sys.stderr,
        )
        return 2
    except (ConfigError, yaml.YAMLError, KeyError) as error:
        print(f"sluice: {args.config}: {error}", file=sys.stderr)
        return 2
    taken = _taken(_ports(schema), patience_s=END_TIMEOUT_S if restarts() else 0.0)
    if taken:
        option = '--port 8010 --http-port 8011, say (make serve PORT=8010 ARGS="--http-port 8011")'
        print(f"sluice: port {taken[0]} is in use. Choose others: {option}", file=sys.stderr)
        return 1
    _tell_of_dashboard_port(schema)
    return _run(schema, args)


def _tell_of_dashboard_port(schema: dict[str, Any]) -> None:
    """Says that the dashboard's port is in use, if it is. Nothing of serving needs that port."""
    config = parse(schema["applications"][0]["args"])
    port = config.dashboard_port
    if port and not _free(port):
        print(
            f"sluice: port {port} is in use, so there is no dashboard until it is free. Choose another with"
            " dashboard.port in the configuration (0: none).",
            file=sys.stderr,
        )


def load(path: str, port: int | None = None, http_port: int | None = None) -> dict[str, Any]:
    """Returns the Serve config in the file at `path`, with its args validated and its ports replaced.

    Raises ConfigError, and OSError or yaml.YAMLError for a file that cannot be read.
    """
    with open(path) as file:
        schema: dict[str, Any] = yaml.safe_load(file)
    if not isinstance(schema, dict) or not schema.get("applications"):
        raise ConfigError("no `applications`: this is not a Serve config file")
    args = schema["applications"][0].setdefault("args", {})
    if port is not None:
        args.setdefault("ingress", {})["port"] = port
    if http_port is not None:
        schema.setdefault("http_options", {})["port"] = http_port
    config = parse(args, Path(path).resolve().parent)
    check_options(config.ingress.options)
    from_options(RunsConfig, config.dashboard.experiments, "dashboard.experiments")
    _check_exposure(schema.get("http_options") or {}, config)
    router = config.router
    heatmap = router.prefill.params.get("heatmap")
    if heatmap is not None:
        # `parse` has replaced a file's name by its content, so that the deployment does not depend on this folder.
        args["router"]["prefill"]["params"]["heatmap"] = heatmap
    return schema


def _check_exposure(http: dict[str, Any], config: Any) -> None:
    """Raises ConfigError if Serve's own port would give other hosts in plain HTTP what the ingress gives over TLS."""
    host = http.get("host") or "127.0.0.1"
    if config.ingress.tls_cert and not http.get("ssl_certfile") and host not in LOOPBACK_HOSTS:
        raise ConfigError(
            f"http_options.host is {host}, where Serve's own port answers in plain HTTP what the ingress answers over"
            " TLS: set it to 127.0.0.1, or give http_options the same ssl_certfile and ssl_keyfile"
        )


def _ports(schema: dict[str, Any]) -> list[int]:
    config = parse(schema["applications"][0]["args"])
    return [port for port in (config.ingress.port, schema.get("http_options", {}).get("port", 8000)) if port]


def _taken(ports: list[int], patience_s: float) -> list[int]:
    """Returns the ports that are in use, and still are after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while (taken := [port for port in ports if not _free(port)]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return taken


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _run(schema: dict[str, Any], args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    say = _Progress(started_s)
    stop = threading.Event()
    _end_on_signals(stop)
    own = None if args.address else OwnRay(say, stop)
    try:
        if own is None:
            say(f"joining Ray at {args.address}")
            _join(args.address)
        else:
            say("starting Ray" if not restarts() else f"starting Ray, after {restarts()} restarts")
            _environment()
            own.start()
        # Ray has replaced our handlers by its own.
        _end_on_signals(stop)
        return _deploy_and_wait(schema, say, stop)
    finally:
        stop.set()
        if own is not None:
            own.unwatch()
        if own is None or not own.broken:
            _shutdown(say, own is not None)
            config = parse(schema["applications"][0]["args"])
            KeyFile(config.ingress.port).remove()
            KeyFile(config.dashboard_port).remove()
        if own is not None:
            own.remove()


def _end_on_signals(stop: threading.Event) -> None:
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())


def _environment() -> None:
    """Sets what Ray reads from the environment when it starts."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # keeps a single-node Ray on 127.0.0.1
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A thread that still deploys when this program ends Ray must fail, and not start another Ray with its next call.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    # Ray would run its workers, and so our router and engines, at nice 15: any other program would come first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray gives up a node that stays silent, here the only one: a laptop may sleep, or a machine may be overloaded.
    os.environ.setdefault("RAY_health_check_timeout_ms", "60000")
    # Serve's controller looks at every replica ten times a second, which costs more CPU at rest than all of ours do. A
    # replica that has ended is replaced by up to half a second later, of the many that its successor's start takes.
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
    # Each Serve replica, and each handle to another, such as an engine's to the router, would wake ten times a second
    # to pass Serve's own figures on to Ray, which exports them every ten seconds.
    os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "5000")


def _join(address: str) -> None:
    _environment()
    import ray

    ray.init(address=address, log_to_driver=False, namespace="serve")


def _deploy_and_wait(schema: dict[str, Any], say: "_Progress", stop: threading.Event) -> int:
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    from app.graph import build

    deploy = ServeDeploySchema.model_validate(schema)
    http = deploy.http_options
    say("starting Ray Serve")
    serve.start(proxy_location=deploy.proxy_location, http_options={"host": http.host, "port": http.port})
    application = deploy.applications[0]
    config = parse(application.args)
    say(
        f"deploying {application.name}: {', '.join(f'{g.replicas} {g.role} ({g.kind})' for g in config.engines)}"
    )
    failure: list[BaseException] = []
    worker = threading.Thread(
        target=_deploy, args=(serve, build(application.args), application, failure), daemon=True
    )
    worker.start()
    if not _wait_ready(config, serve, say, stop, failure):
        return 0 if stop.is_set() else 1
    _greet(config, http.port, say)
    stop.wait()
    return 0


def _deploy(serve: Any, app: Any, application: Any, failure: list[BaseException]) -> None:
    try:
        serve.run(
            app, name=application.name, route_prefix=application.route_prefix, external_scaler_enabled=True
        )
    except BaseException as error:
        # The main thread reports the error.
        failure.append(error)


def _wait_ready(config: Any, serve: Any, say: "_Progress", stop: threading.Event, failure: list[Any]) -> bool:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    last = ""
    while time.monotonic() < deadline_s and not stop.is_set():
        if failure:
            say(f"failed: {failure[0]}")
            return False
        states = _states(serve)
        if states != last:
            say(states)
            last = states
        if _ready(config):
            return True
        stop.wait(0.5)
    if not stop.is_set():
        say(f"not ready after {READY_TIMEOUT_S:.0f} s; the logs of Ray Serve say why")
    return False


def _states(serve: Any) -> str:
    apps = serve.status().applications
    parts = []
    for app in apps.values():
        for name, deployment in app.deployments.items():
            running = deployment.replica_states.get("RUNNING", 0)
            total = sum(deployment.replica_states.values())
            parts.append(f"{name} {running}/{total}")
    return "  ".join(parts)


def _ready(config: Any) -> bool:
    if not config.ingress.port or config.ingress.tls_cert:
        import ray

        return bool(ray.is_initialized()) and _all_running()
    try:
        with urllib.request.urlopen(f"{config.ingress.url}/health/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # not there yet, or another server
        return False


def _all_running() -> bool:
    from ray import serve

    return all(app.status == "RUNNING" for app in serve.status().applications.values())


def _greet(config: Any, http_port: int, say: "_Progress") -> None:
    say(f"ready: {config.model.served_name} on {config.ingress.url} (Serve's own port: {http_port})")
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
    body += '"temperature": 0, "max_tokens": 64, "stream": true}'
    print(
        f"\n  curl -N {config.ingress.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
    )
    if (key_file := KeyFile(config.ingress.port).path).exists():
        print(f"  The admin key is in {key_file}; `sluice` reads it there by itself.")
    _greet_dashboard(config)
    print("  Ctrl-C ends it.\n", flush=True)


def _greet_dashboard(config: Any) -> None:
    """Prints the address of the dashboard, and where its key is."""
    dashboard = config.dashboard.resolved(config.ingress)
    if not dashboard.port:
        return
    key_file = KeyFile(dashboard.port).path
    where = f"; its key is in {key_file}" if key_file.exists() else ""
    print(f"  The dashboard is at {dashboard.url}{where}.")


def _shutdown(say: "_Progress", own: bool) -> None:
    import ray

    if not ray.is_initialized():
        return
    from ray import serve

    say("stopping")
    try:
        serve.shutdown()
    finally:
        ray.shutdown()
    say("stopped; no process is left" if own else "stopped; the Ray cluster goes on")


class _Progress:
    """Prints a line with the seconds since the start, so that a cold start shows its phases."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
