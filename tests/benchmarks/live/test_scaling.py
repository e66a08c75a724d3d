"""The live measurements of a fleet that scales, without an app: configurations, figures and verdicts by hand."""

import json
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import yaml

from app.config import AppConfig
from app.replicas import start_of as logged_start
from benchmarks.document import OTHERS
from benchmarks.live import kept, scaling, scaling_steps
from benchmarks.live.fleet import Answer
from benchmarks.live.scaling import SMALL, Burst, Setup, burst_plan, pool_size, stream_plans
from benchmarks.live.scaling_report import attainment, draw, harm, mean_steps, scaling_rows, steps_rows
from benchmarks.live.scaling_steps import cached_share, compared, evict, read_whole, start_of, steps_of
from benchmarks.live.servers import ServerError
from benchmarks.sim.starts import load
from benchmarks.steering import first_routes
from policies.dispatch.actions import RouteDecode
from policies.journal.lines import action_line
from policies.network.oracle import TransferIntent
from policies.routing.base import Decision, Reason
from policies.scaling.starts import StartSteps


@pytest.mark.parametrize("setup", [Setup(), SMALL])
def test_every_app_is_a_valid_configuration(setup: Setup, tmp_path: Path) -> None:
    joint = {"policy": "joint", "params": {"limits": {"step": setup.burst.decode_most}}}
    decodes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (scaling.group(setup, "d", 1, 1 + setup.batch, setup.batch), {}),
        (scaling.group(setup, "d", 1, setup.burst.decode_most, setup.burst.warm), joint),
        (scaling.group(setup, "d", 1, 1 + setup.pool, setup.pool), {}),
        (scaling.group(setup, "d", setup.idle_engines, 2 * setup.idle_engines, setup.idle_engines), {}),
        (scaling.group(setup, "d", 2, 5, 1, slots=2 * setup.streams), {}),
        (scaling.group(setup, "d", 1, 1, least=0), {"sleep_after_s": setup.sleep_after_s}),
    ]
    for decode, more in decodes:
        scaling.command(tmp_path, scaling.group(setup, "p", 1, 2), decode, more)
        args = yaml.safe_load((tmp_path / "app.yaml").read_text())["applications"][0]["args"]
        config = AppConfig.model_validate(args)
        assert config.autoscaler.policy().limits.budget == 2 + decode["scaling"]["max"]
        # Ray places all of them on one core
        assert (2 + decode["scaling"]["max"]) * setup.num_cpus < 2.0


def test_every_fleet_of_vllm_engines_is_a_valid_configuration() -> None:
    setup = scaling_steps.Setup()
    fleets = [
        [
            scaling_steps.group(setup, "prefill", 1, 1),
            scaling_steps.group(setup, "decode", 1, 2, 1),
        ],
        [scaling_steps.group(setup, "prefill", 2, 2, slots=48), scaling_steps.group(setup, "decode", 1, 1)],
        [scaling_steps.group(setup, "colocated", 1, 2)],
    ]
    for engines in fleets:
        AppConfig.model_validate(
            {
                "model": {"path": "smollm2-135m-instruct"},
                "engines": engines,
                "scaling": {"enabled": True, "policy": "fixed"},
            }
        ).autoscaler.policy()


def test_the_burst_has_eight_times_the_rate_and_streams_last_for_minutes() -> None:
    setup = Setup()
    times = [planned.at_s for planned in burst_plan(setup)]
    assert burst_plan(setup) == burst_plan(setup)
    rates = {
        phase: sum(setup.burst.phase(at_s) == phase for at_s in times) / seconds
        for phase, seconds in (("before", 60.0), ("burst", 60.0), ("after", 30.0))
    }
    assert rates["burst"] == pytest.approx(24.0, rel=0.1)
    assert rates["before"] == pytest.approx(3.0, rel=0.3)
    halves = stream_plans(setup)
    tokens = sorted(json.loads(planned.body)["max_tokens"] for half in halves for planned in half)
    assert len(tokens) == 200 and len(halves[0]) == 100
    # 3,600 tokens of 50 ms are three minutes
    assert (tokens[0], tokens[-1]) == (100, 3600)
    assert sum(count * setup.stream_step_s >= 60.0 for count in tokens) > 30


def test_the_burst_outlasts_no_patience_and_both_engines_hold_leases_for_long() -> None:
    load, step_s = Setup().burst, Setup().step_s
    # what one engine leaves of the burst, at 8 slots of 1 s: (24 - 8)/s for 60 s, which take it another 120 s
    per_s = load.slots / (load.tokens * step_s)
    late_s = (load.rate_per_s * load.times - per_s) * load.burst_s / per_s
    assert late_s == pytest.approx(120.0)
    assert load.patience_s >= 2.0 * late_s
    for setup in (scaling_steps.Setup(), scaling_steps.SMALL):
        # a third of what each prefill engine gets may be gone before they are counted
        assert setup.drain_requests // 2 >= 1.5 * setup.leases


class Told(ThreadingHTTPServer):
    """An app's API that answers with what a test says: each call of a path gets the next of its answers, and the last
    one stays.
    """

    daemon_threads = True

    def __init__(self, answers: dict[str, list[tuple[int, Any]]]) -> None:
        self.answers, self.called = answers, list[str]()
        super().__init__(("127.0.0.1", 0), _Telling)

    def answer(self, call: str) -> tuple[int, Any]:
        self.called.append(call)
        left = self.answers[call]
        return left.pop(0) if len(left) > 1 else left[0]


class _Telling(BaseHTTPRequestHandler):
    server: Told

    def _tell(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, answer = self.server.answer(f"{self.command} {self.path.rpartition('/')[2]}")
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = _tell

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Callable[..., tuple[scaling.App, Told]]]:
    opened: list[tuple[scaling.App, Told]] = []

    def make(**answers: list[tuple[int, Any]]) -> tuple[scaling.App, Told]:
        api = Told({name.replace("_", " "): listed for name, listed in answers.items()})
        threading.Thread(target=api.serve_forever, daemon=True).start()
        server: Any = SimpleNamespace(command=SimpleNamespace(port=api.server_port), pid=0)
        opened.append((scaling.App(server, tmp_path), api))
        return opened[-1]

    yield make
    for app, api in opened:
        app.close()
        api.shutdown()
        api.server_close()


def engines_told(*ids: str, duty: str = "active") -> dict[str, Any]:
    return {"engines": [{"id": one, "state": "ready", "duty": duty} for one in ids]}


KNOWN, UNKNOWN = {"groups": [{"replicas": 2}]}, {"groups": [{"replicas": None}]}


def test_a_fleet_at_rest_has_an_autoscaler_that_takes_orders(told: Any) -> None:
    none = (404, {"error": {"message": "No autoscaler"}})
    app, api = told(
        GET_status=[(200, engines_told("d-1", "d-2"))], GET_scale=[none, (200, UNKNOWN), (200, KNOWN)]
    )
    app.at_rest({"d active": 2, "d warm": 0}, 30.0)
    assert api.called == ["GET status", *["GET scale"] * 3]


def test_engines_that_came_and_left_are_counted(told: Any) -> None:
    before, after = engines_told("d-1", "d-2", "d-3"), engines_told("d-2", "d-4")
    app, _ = told(
        GET_status=[(200, before), (200, before), (200, after)],
        GET_scale=[(200, KNOWN)],
        PUT_scale=[(200, KNOWN)],
    )
    done = scaling._numbers(app, {"d": 2}, {"d active": 2}, lambda text: None)
    # d-4 came; d-1 and d-3 left
    assert done == {"grown": 1, "drained": 2}


def test_a_measurement_waits_until_every_activated_engine_has_a_request(told: Any, tmp_path: Path) -> None:
    app, _ = told()
    folder = tmp_path / "router"
    folder.mkdir()

    def route(request: str, engine: str) -> None:
        decision = Decision(engine, (), Reason.ONLY_CANDIDATE)
        intent = TransferIntent(request, "p-1", engine, 1, 0)
        line = action_line(RouteDecode(f"{request}-0", decision, 0.0, intent))
        with (folder / "journal-0.jsonl").open("a") as journal:
            journal.write(f"{line}\n")

    # both had requests in an earlier round
    route("a", "d-1")
    route("b", "d-2")
    known = first_routes(folder)
    route("c", "d-1")
    done = threading.Event()
    waiting = threading.Thread(
        target=lambda: (scaling._routed(app, ["d-1", "d-2"], known, 60.0), done.set()), daemon=True
    )
    waiting.start()
    assert not done.wait(1.0)
    route("d", "d-2")
    assert done.wait(30.0)
    # one that gets none is not waited for without end
    scaling._routed(app, ["d-3"], known, 0.1)


@pytest.mark.parametrize("module", [scaling, scaling_steps])
def test_an_error_of_the_api_ends_the_command_and_no_traceback(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(setup: object, say: object) -> dict[str, Any]:
        raise httpx.ReadTimeout("no answer")

    monkeypatch.setattr(module, "PARTS", {"drain": fails})
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    assert module.main(["--parts", "drain", "--out", str(tmp_path)]) == 1


def test_the_pool_is_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = scaling.SPARE_BYTES + 10 * scaling.ENGINE_BYTES + 1

    monkeypatch.setattr(scaling.psutil, "virtual_memory", Memory)
    assert pool_size(Setup()) == (10, Memory.available)
    assert pool_size(Setup(pool=3))[0] == 3


def test_idle_engines_are_measured_by_duty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = {"active": ["d-1", "d-3"], "warm": ["d-2"]}
    fleet = SimpleNamespace(wait_idle=lambda: None, engines=lambda role, duty: engines[duty])
    made: Any = SimpleNamespace(fleet=fleet, pid=7, folder=tmp_path)
    pids = {"d-1": 11, "d-2": 12, "d-3": 13, "p-1": 14}
    monkeypatch.setattr(scaling, "REST_S", 0.0)
    monkeypatch.setattr(scaling, "replicas", lambda pid, folder: pids if folder == tmp_path / "s" else {})
    monkeypatch.setattr(scaling, "idle_cores", lambda found, _: {name: n / 1e3 for name, n in found.items()})
    told: list[str] = []
    found = scaling.idle_by_duty(made, 5.0, told.append)
    assert found == {"seconds": 5.0, "active": [0.011, 0.013], "warm": [0.012]}
    assert told == ["idle: of a core, active 1.20 %, warm 1.20 %"]
    del pids["d-2"]
    with pytest.raises(ServerError, match="d-2"):
        scaling.idle_by_duty(made, 5.0, told.append)


def test_attainment_needs_both_objectives() -> None:
    burst = asdict(Burst(lead_s=10.0, burst_s=10.0, ttft_slo_s=1.0, tpot_slo_s=0.1))
    requests = [
        [1.0, 0.5, 0.05],
        [11.0, 1.5, 0.05],
        [12.0, 0.5, 0.2],
        [13.0, None, None],
        [19.0, 1.0, 0.1],
        [20.0, 0.1, 0.1],
    ]
    assert attainment(requests, burst) == {"before": 1.0, "burst": 0.25, "all": 0.5, "after": 1.0}


def measured(**changed: Any) -> dict[str, Any]:
    """A result of sim engines; `changed` are entries of its parts."""
    pool = {
        "wanted": 2,
        "wanted_pool": 2,
        "first_text_s": [0.5, 9.0],
        "lost": {},
        "used_bytes": 2**30,
        "idle_cores": 0.008,
    }
    streams = {
        "streams": 200,
        "longest_s": 180.0,
        "grown": 5,
        "drained": 4,
        "switches": 4,
        "migrations": 7,
        "lost": {},
        "undisturbed_lost": {},
        "other_texts": 0,
        "open_at_the_last_change": True,
        "probes_lost": {},
        "probes_differ": False,
    }
    parts: dict[str, Any] = {
        "activation": {"rounds": [{"wanted": 2, "first_text_s": [0.1, 0.3], "lost": {}}], "ended_at": "x"},
        "warm": pool,
        "idle": {"seconds": 60.0, "active": [0.018, 0.014], "warm": [0.009, 0.007], "ended_at": "x"},
        "cold": {**pool, "first_text_s": [30.0, 60.0]},
        "burst": {
            "joint": {
                "requests": [[1.0, 0.1, 0.01]],
                "engines": [[0.0, 2, 6], [60.5, 2, 6], [61.0, 3, 6], [63.0, 4, 6]],
                "lost": {},
            },
            "ended_at": "x",
        },
        "zero": {"rounds": 2, "first_text_s": [8.0, 10.0], "lost": {}},
        "streams": streams,
    }
    for name, change in changed.items():
        parts[name] |= change
    return {"config": asdict(Setup()), "parts": parts}


def test_rows_of_sim_engines_have_their_aims() -> None:
    rows = {row.name: row for row in scaling_rows(measured())}
    p99 = rows["activation: order to first text, p99"]
    assert p99.ours == pytest.approx(0.298) and p99.met is True
    assert rows["warm pool: order to first text, last engine"].met is True
    assert rows["cold pool: order to first text, last engine"].met is None
    assert rows["burst, joint: first more engines after the burst's begin"].ours == 1.0
    assert rows["burst, joint: most serving engines after the burst's begin"].ours == 3.0
    assert rows["zero: request to first text, p50"].ours == 9.0
    idle = {duty: rows[f"idle, {duty}: CPU of a replica"] for duty in ("active", "warm")}
    assert idle["active"].ours == pytest.approx(1.6) and idle["active"].met is None
    assert idle["warm"].ours == pytest.approx(0.8) and idle["warm"].met is True
    ratio = rows["idle: CPU of a warm replica, of that of an active one"]
    assert ratio.ours == pytest.approx(50.0) and ratio.met is None
    # six ready engines for a minute and three seconds
    assert rows["burst, joint: engine time"].ours == pytest.approx(6.3)
    assert all(row.met is not False for row in rows.values())
    assert harm(measured()) == 0
    late = {row.name: row for row in scaling_rows(measured(warm={"first_text_s": [0.5, 11.0]}))}
    assert late["warm pool: order to first text, last engine"].met is False
    missing = {row.name: row for row in scaling_rows(measured(warm={"first_text_s": [0.5]}))}
    assert missing["warm pool: order to first text, last engine"].met is False
    ended = {row.name: row for row in scaling_rows(measured(streams={"open_at_the_last_change": False}))}
    assert ended["streams: other texts"].met is ended["streams: cut or failed"].met is False
    busy = {row.name: row for row in scaling_rows(measured(idle={"warm": [0.01]}))}
    assert busy["idle, warm: CPU of a replica"].met is False
    assert list(OTHERS["scaling_live/scaling.json"].read(measured())) == list(scaling_rows(measured()))


def test_the_idle_cpu_of_vllm_engines_has_no_aim() -> None:
    """The aim goes by what a sim replica took."""
    rows = list(steps_rows({"parts": {"idle": {"seconds": 60.0, "active": [0.05], "warm": [0.04]}}}))
    assert [row.ours for row in rows] == pytest.approx([1, 5.0, 1, 4.0, 80.0])
    assert all(row.met is None and not row.aim for row in rows)


@pytest.mark.parametrize(
    "change",
    [
        {"streams": {"lost": {"cut": 1}}},
        {"streams": {"undisturbed_lost": {"cut": 1}}},
        {"streams": {"other_texts": 1}},
        {"streams": {"probes_lost": {"status 503": 1}}},
        {"streams": {"probes_differ": True}},
        {"warm": {"lost": {"cut": 1}}},
        {"zero": {"lost": {"cut": 1}}},
        {"burst": {"joint": {"lost": {"cut": 1}}}},
        {"activation": {"rounds": [{"wanted": 1, "first_text_s": [0.1], "lost": {"cut": 1}}]}},
        {"activation": {"rounds": [{"wanted": 2, "first_text_s": [0.1], "lost": {}}]}},
        {"warm": {"first_text_s": [0.5]}},
        {"cold": {"first_text_s": [0.5]}},
    ],
)
def test_every_lost_request_other_text_and_silent_engine_is_harm(change: dict[str, Any]) -> None:
    assert harm(measured(**change)) == 1


def test_a_request_of_the_burst_that_was_refused_is_late_and_neither_lost_nor_harm() -> None:
    burst = measured()["parts"]["burst"]
    refused = 'status 429: {"error": {"message": "The server is overloaded'
    burst["joint"]["lost"] = {refused: 3, "status 503: no engine": 1, "cut": 1}
    found = measured(burst=burst)
    rows = {row.name: row for row in scaling_rows(found)}
    assert rows["burst, joint: requests refused"].ours == 3
    lost = rows["burst, joint: requests lost"]
    assert lost.ours == 2 and lost.met is False
    assert harm(found) == 2


def test_an_activated_engine_without_a_text_has_missed_the_aim() -> None:
    # 119 of 120 in time: their p99 is within the aim
    rounds = [{"wanted": 4, "first_text_s": [0.1] * 4, "lost": {}}] * 29
    rounds.append({"wanted": 4, "first_text_s": [0.1] * 3, "lost": {}})
    rows = {row.name: row for row in scaling_rows(measured(activation={"rounds": rounds}))}
    assert rows["activation: engines"].ours == 120
    assert rows["activation: engines without a text"].met is False
    p99 = rows["activation: order to first text, p99"]
    assert p99.ours == pytest.approx(0.1) and p99.met is False
    silent = [{"wanted": 1, "first_text_s": [], "lost": {}}]
    rows = {row.name: row for row in scaling_rows(measured(activation={"rounds": silent}))}
    assert rows["activation: engines without a text"].met is False


def test_a_run_goes_on_after_its_finished_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def part(name: str) -> Callable[..., dict[str, Any]]:
        def measure(setup: Setup, say: object) -> dict[str, Any]:
            ran.append(name)
            if len(ran) == 2:
                raise KeyboardInterrupt
            return dict(measured()["parts"][name])

        return measure

    monkeypatch.setattr(scaling, "PARTS", {name: part(name) for name in ("activation", "streams")})
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    arguments = ["--seed", "3", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        scaling.main(arguments)
    assert scaling.main(arguments) == 0
    assert ran == ["activation", "streams", "streams"]
    assert list((tmp_path / "kept").iterdir()) == []
    whole = json.loads((tmp_path / "scaling.json").read_text())
    assert whole["command"] == "python -m benchmarks.live.scaling --seed 3"
    assert whole["machine"]["code_of"] and set(whole["parts"]) == {"activation", "streams"}


# ------------------------------------------------------------------------------------------------------- vLLM engines


def said(*tokens: tuple[str, float, float]) -> Answer:
    """An answer with tokens, each with the logprobs of itself and of the next best."""
    events = [
        {
            "choices": [
                {
                    "text": text,
                    "logprobs": {"tokens": [text], "top_logprobs": [{text: best, "other": second}]},
                }
            ]
        }
        for text, best, second in tokens
    ]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return Answer(problem=None, body=body)


def test_texts_may_part_at_a_near_tie_only() -> None:
    one = said(("a", -0.1, -3.0), ("b", -0.7, -0.705), ("c", -0.1, -3.0))
    assert compared(one, one) == "equal"
    assert compared(one, said(("a", -0.1, -3.0), ("x", -0.7, -0.705))) == "near tie"
    assert compared(one, said(("z", -0.1, -3.0), ("b", -0.7, -0.705))) == "other"
    # one that ends early differs at no token
    assert compared(one, said(("a", -0.1, -3.0))) == "other"


def test_streams_last_as_long_on_any_machine() -> None:
    setup = scaling_steps.Setup(streams=50)
    for step_s in (0.05, 0.15, 0.5):
        tokens = [json.loads(one.body)["max_tokens"] for one in scaling_steps.stream_plan(setup, step_s)]
        assert 9.0 - step_s <= min(tokens) * step_s < 12.0 and 42.0 < max(tokens) * step_s <= 45.0 + step_s
    # the context ends first
    fast = [json.loads(one.body)["max_tokens"] for one in scaling_steps.stream_plan(setup, 0.001)]
    assert set(fast) == {setup.max_model_len - scaling_steps.PROMPT_TOKENS}


def test_the_step_is_that_of_the_whole_streams_sent_at_once() -> None:
    answers = [Answer(first_s=1.0, last_s=1.0 + 16 * step_s, problem=None) for step_s in (0.1, 0.2, 0.9)]
    answers.append(Answer())
    sent: list[int] = []

    def send(plan: list[Any], patience_s: float) -> Any:
        sent.append(len(plan))
        return SimpleNamespace(result=lambda: answers)

    made: Any = SimpleNamespace(
        streams=SimpleNamespace(send=send), fleet=SimpleNamespace(wait_idle=lambda: None)
    )
    assert scaling_steps.measured_step_s(made, scaling_steps.Setup()) == pytest.approx(0.2)
    assert sent == [16]
    answers[:] = [Answer()]
    with pytest.raises(ServerError, match="no probe"):
        scaling_steps.measured_step_s(made, scaling_steps.Setup())


def test_a_stream_is_under_way_at_a_switch_from_before_its_order_until_after_it() -> None:
    whole = [Answer(0.0, first_s, last_s, None) for first_s, last_s in ((1.0, 9.0), (1.0, 5.0), (4.5, 9.0))]
    cut = Answer(0.0, 1.0, 9.0, "cut")
    assert scaling_steps.under_way([*whole, cut], 4.0, 6.0) == 1


SWITCH: dict[str, Any] = {
    "streams": 16,
    "switch_s": [0.1, 0.2],
    "lost": {},
    "undisturbed_lost": {},
    "other_texts": 0,
    "near_ties": 8,
    "equal_texts": 8,
    "open_at_the_last_switch": 1,
}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, set()),
        (
            {"open_at_the_last_switch": 0},
            {"streams under way at the last switch", "streams cut or failed", "other texts"},
        ),
        ({"near_ties": 9, "equal_texts": 7}, {"texts equal to the end"}),
        ({"other_texts": 1}, {"other texts"}),
    ],
)
def test_equal_texts_are_shown_by_streams_under_way_at_the_last_switch_half_of_them_to_the_end(
    change: dict[str, Any], missed: set[str]
) -> None:
    rows = steps_rows({"parts": {"switch": SWITCH | change}})
    assert {row.name for row in rows if row.met is False} == {f"switch: {name}" for name in missed}


def test_steps_of_a_start_add_up_to_the_time_to_the_first_token(tmp_path: Path) -> None:
    phases = {"imports": 9.0, "config": 1.0, "core_spawn": 0.5, "worker_imports": 8.5, "weights": 3.0}
    phases |= {"kv_cache": 0.5, "core_ready": 1.5, "warm_up": 1.0, "ready": 25.0}
    told = {"process_at_s": 101.0, "replica_at_s": 103.0, "ready_at_s": 129.0, "phases": phases}
    (tmp_path / "replica_x.log").write_text(f"INFO 1 -- start of c-ab: {json.dumps(told)}\nother\n")
    assert start_of(tmp_path, "c-ab") == told
    steps = steps_of(told, 100.0, 129.5, 130.0)
    assert steps == {
        "reserve": 1.0,
        "process": 3.0,
        "imports": 9.0,
        "core": 10.0,
        "weights": 3.0,
        "post-load": 3.0,
        "announce": 0.5,
        "first token": 0.5,
    }
    assert sum(steps.values()) == 30.0
    # Ray had an idle process before the order
    assert steps_of({**told, "process_at_s": 50.0}, 100.0, 129.5, 130.0)["reserve"] == 0.0


def test_a_replica_logs_what_the_steps_are_made_of() -> None:
    class Engine:
        phases: ClassVar = {"imports": 1.5, "ready": 2.0}

    told = json.loads(json.dumps(logged_start(Engine(), 5.0)))  # type: ignore[arg-type]
    assert told["replica_at_s"] == 5.0 and told["phases"] == {"imports": 1.5, "ready": 2.0}
    assert 0 < told["process_at_s"] <= told["ready_at_s"]
    assert logged_start(object(), 5.0)["phases"] == {}  # type: ignore[arg-type]


def test_weights_leave_the_page_cache_and_come_back(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(64 * mmap.PAGESIZE + 1))
    read_whole(tmp_path)
    assert cached_share(tmp_path) == 1.0
    evict(tmp_path)
    if cached_share(tmp_path) == 1.0:
        pytest.skip("this file system keeps its pages in memory")
    assert cached_share(tmp_path) == 0.0
    read_whole(tmp_path)
    assert cached_share(tmp_path) == 1.0


def test_rows_and_picture_of_starts(tmp_path: Path) -> None:
    runs = [
        {"way": "cold", "cached_share": 0.0, "steps": {"imports": 10.0, "weights": 8.0}},
        {"way": "page cache", "cached_share": 1.0, "steps": {"imports": 10.0, "weights": 2.0}},
        {"way": "cold", "cached_share": 0.25, "steps": {"imports": 12.0, "weights": 8.0}},
        {"way": "warm", "cached_share": 1.0, "steps": {"first token": 0.5}},
    ]
    assert mean_steps(runs)["cold"] == {"imports": 11.0, "weights": 8.0}
    parts: dict[str, Any] = {
        "starts": {"runs": runs},
        "switch": SWITCH,
        "drain": {
            "leases": 20,
            "requests": 48,
            "lost": {},
            "retries": 0.0,
            "expired": 0.0,
            "stopped_s": 30.0,
        },
    }
    rows = {row.name: row for row in steps_rows({"parts": parts})}
    assert rows["start, cold: order to first token"].ours == 19.0
    # one of the two was not cold
    assert rows["start, cold: weights in the page cache before, most"].ours == 25.0
    assert [name for name in rows if "page cache before" in name] == [
        "start, cold: weights in the page cache before, most"
    ]
    assert rows["start, warm: order to first token"].ours == 0.5
    assert all(row.met is not False for row in rows.values())
    draw(runs, tmp_path, "steps")
    assert (tmp_path / "steps.png").stat().st_size > 1000
    # aims of ways that exist later
    steps: dict[str, Any] = {"process": 2.0, "imports": 10.0, "core": 10.0}
    later = [
        {"way": "page cache", "steps": steps},
        {"way": "overlapped", "steps": {**steps, "core": 2.0}},
    ]
    ratio = next(
        row for row in steps_rows({"parts": {"starts": {"runs": later}}}) if "process and" in row.name
    )
    assert ratio.ours == pytest.approx(14 / 22) and ratio.met is True


def test_measured_starts_are_profiles_of_the_simulator(tmp_path: Path) -> None:
    steps = {"reserve": 1.0, "process": 2.0, "imports": 8.0, "core": 9.0, "weights": 3.0, "post-load": 4.0}
    runs: list[dict[str, Any]] = [
        {"way": "page cache", "steps": {**steps, "announce": 0.25, "first token": 0.5}},
        {"way": "page cache", "steps": {**steps, "announce": 0.75, "first token": 0.5}},
        {"way": "warm", "steps": {"announce": 0.2, "first token": 0.5}},
    ]
    machine = {"cores": 2, "cpu": "a CPU", "commit": "abc"}
    (file,) = scaling_steps.write_profiles(runs, machine, tmp_path)
    assert file.name == "cpu_smollm2_page_cache.yaml"
    # the first token is no part of a start
    assert load(file) == StartSteps(1.0, 19.0, 3.0, 4.0, 0.5)
    assert "2 starts" in file.read_text() and "abc" in file.read_text()
