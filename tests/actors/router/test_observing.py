"""The observations that the router sends to an autoscaler, on a clock of the test's own."""

from typing import Any

import pytest

from actors.router import observing
from actors.router.observing import FleetObserver
from actors.scaling.server import observation_of
from actors.wire.messages import EngineInfo, Status
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.network.oracle import NodePlace, Oracle
from policies.request.ended import RequestEnd
from policies.request.terms import Terms
from policies.routing.registry import decode_policy, prefill_policy
from policies.scaling.base import Limits
from policies.scaling.joint import Joint
from policies.scaling.observation import Duty, Observation, Room
from policies.scaling.timing_fit import Fit
from policies.state import events as ev
from policies.state.views import Request, Role


class Fleet:
    """The engines as the router knows them."""

    def __init__(self) -> None:
        self.known: dict[str, EngineInfo] = {}
        self.reported: dict[str, Status] = {}
        self.since_s: dict[str, float] = {}
        self.active_s: dict[str, float] = {}
        self.lost: set[str] = set()

    def engine(self, name: str, role: Any = "decode", slots: int = 8, blocks: int = 100, **more: Any) -> None:
        facts = (name, role, "sim", "m", "g", (), slots, blocks, 16, 1024)
        self.known[name] = EngineInfo(*facts, more.pop("node", "n0"), 1, 30.0, **more)
        self.since_s.setdefault(name, 0.0)

    def report(self, name: str, **totals: float) -> None:
        self.reported[name] = Status(name, 3, 2, 10, 0, 0.25, totals=totals)

    def infos(self) -> list[EngineInfo]:
        return sorted(self.known.values(), key=lambda info: info.id)

    def statuses(self) -> list[Status]:
        return list(self.reported.values())

    def is_lost(self, engine_id: str) -> bool:
        return engine_id in self.lost

    def duty_since_s(self, engine_id: str) -> float | None:
        return self.since_s.get(engine_id)

    def active_since_s(self, engine_id: str) -> float | None:
        return self.active_s.get(engine_id)


class Watched:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(observing, "clock_s", lambda: self.now_s)
        self.fleet = Fleet()
        self.dispatcher = Dispatcher(
            DispatchConfig(), prefill_policy("round_robin"), decode_policy("round_robin")
        )
        self.observer = FleetObserver(self.dispatcher, self.fleet)  # type: ignore[arg-type]
        self.ingresses, self.version = 1, 1
        # 6 s later each ingress has left its decisions to the router, and the next window begins at 110 s
        self.seen()
        self.now_s = 110.0

    def arrive(self, name: str, terms: Terms, tokens: int = 10, predicted: float | None = None) -> None:
        request = Request(name, self.now_s, tokens, 8, terms=terms, predicted_tokens=predicted)
        self.observer.arrived(request, with_hits=True)

    def seen(self) -> tuple[Observation, int]:
        message = self.observer.observed(self.ingresses, self.version)
        return observation_of(message), message.fitted_rows

    def window(self, seconds: int = 10) -> Observation:
        """Lets the seconds pass, each with an observation, and returns the last."""
        for _ in range(seconds):
            self.now_s += 1.0
            seen, _ = self.seen()
        return seen


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


SLO = Terms(request_class="interactive", ttft_slo_s=0.5, tpot_slo_s=0.1)


def test_windows_count_requests_by_class_as_their_clients_saw_them(watched: Watched) -> None:
    for n in range(4):
        watched.arrive(f"r{n}", SLO, 10 + n, predicted=20.0)
    watched.arrive("b", Terms(request_class="batch"))
    ends = [
        RequestEnd("finished", "interactive", 0.4, 0.05, 30),
        RequestEnd("finished", "interactive", 0.6, 0.05, 50),
        RequestEnd("rejected", "interactive", None, None, 0),
        RequestEnd("cancelled", "interactive", 0.1, None, 1),
        RequestEnd("failed", "batch", None, None, 0),
    ]
    for n, end in enumerate(ends):
        watched.observer.ended(f"r{n}", end)
    seen = watched.window()
    assert seen.windows is not None
    by_name = {window.name: window for window in seen.windows}
    one = by_name["interactive"]
    assert (one.arrived, one.prompt_tokens, one.forecast_tokens) == (4, 46, 80.0)
    assert (one.met, one.missed, one.refused, one.ended, one.output_tokens) == (1, 2, 1, 2, 80)
    assert (one.ttft_slo_s, one.ttft_p90_s) == (0.5, 0.6)
    assert (by_name["batch"].failed, by_name["batch"].missed) == (1, 1)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_time_of_a_request_that_is_no_number_was_not_measured(watched: Watched, wrong: float) -> None:
    for n, ttft_s in enumerate((0.4, wrong, 0.2)):
        watched.arrive(f"r{n}", SLO)
        watched.observer.ended(f"r{n}", RequestEnd("finished", "interactive", ttft_s, wrong, 30))
    seen = watched.window()
    assert seen.windows is not None
    (window,) = seen.windows
    assert (window.met, window.missed, window.ttft_p90_s, window.tpot_p90_s) == (3, 0, 0.4, None)


def test_no_ingress_is_no_report_and_no_requests_are_a_report(watched: Watched) -> None:
    watched.arrive("r", SLO)
    assert watched.window().windows is not None
    quiet = watched.window()
    assert quiet.windows is not None and quiet.arrived == 0
    watched.ingresses, watched.version = 0, 2
    assert watched.window().windows is None
    assert watched.window().windows is None


def test_a_window_in_which_an_ingress_came_or_went_is_no_report(watched: Watched) -> None:
    watched.arrive("r", SLO)
    number = watched.window().window
    # at 123 s an ingress comes, which leaves its decisions to the router until 129 s: the next window is whole
    watched.window(3)
    watched.ingresses, watched.version = 2, 2
    for seconds, whole in ((1, False), (6, False), (9, False), (1, True)):
        watched.arrive("s", SLO)
        seen = watched.window(seconds)
        assert (seen.windows is not None) == whole, watched.now_s
    # of the four only the two at 130 and 139 s count
    assert (watched.now_s, seen.arrived, seen.window) == (140.0, 2, number + 2)


def test_the_windows_of_a_new_router_go_on_in_number(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = watched.window().window
    later = Watched(monkeypatch)
    later.now_s = watched.now_s + 7.0
    later.version = 0
    seen = later.window(30)
    assert seen.windows is not None and seen.window == number + 3


def test_what_a_new_engine_serves_does_not_count_at_first(watched: Watched) -> None:
    """Of both engines the one that became active later counts, when the request was given to it at 110 s."""
    late = RequestEnd("finished", "interactive", 9.0, 0.05, 5)
    for name, prefill_s, decode_s in (("r0", 50.0, 108.0), ("r1", 108.0, 50.0), ("r2", 50.0, 104.0)):
        watched.fleet.active_s = {"p": prefill_s, "d": decode_s}
        watched.arrive(name, SLO)
        watched.observer.routed(name, "p", decodes=False)
        watched.observer.routed(name, "d", decodes=True)
        # a switch or another activation meanwhile is not asked for
        watched.fleet.active_s["d"] = 110.0
        watched.observer.ended(name, late)
    # whose engines this router did not choose
    watched.arrive("r3", SLO)
    watched.observer.routed("r3", "gone", decodes=True)
    watched.observer.ended("r3", late)
    seen = watched.window()
    assert seen.windows is not None
    (window,) = seen.windows
    # 6 s is longer than an engine settles
    assert (window.ended, window.missed) == (4, 2)


def test_engines_have_the_duty_that_their_state_leaves_them(watched: Watched) -> None:
    watched.fleet.engine("a", "prefill")
    watched.fleet.engine("b", duty="warm")
    for name, state in (
        ("c", "draining"), ("d", "starting"), ("e", "stalled"), ("f", "down"), ("g", "quarantined"),
    ):  # fmt: skip
        watched.fleet.engine(name, state=state)
    watched.fleet.report("a")
    seen, _ = watched.seen()
    assert {e.engine: e.duty for e in seen.engines} == {
        "a": Duty.ACTIVE, "b": Duty.WARM, "c": Duty.DRAINING, "d": Duty.STARTING, "g": Duty.ACTIVE,
    }  # fmt: skip
    assert (seen.engines[0].running, seen.engines[0].waiting, seen.engines[0].kv_usage) == (3, 2, 0.25)


def test_an_engine_whose_connection_has_just_ended_is_not_seen_and_one_that_drains_is(
    watched: Watched,
) -> None:
    """Serve has the replica of the first one, so it counts as starting; the second one goes for good."""
    for name in ("lost", "drains"):
        watched.fleet.engine(name, state="draining")
    watched.fleet.lost.add("lost")
    seen, _ = watched.seen()
    assert [(e.engine, e.duty) for e in seen.engines] == [("drains", Duty.DRAINING)]


def test_the_load_of_an_engine_is_that_of_the_phase_that_it_serves(watched: Watched) -> None:
    """Requests that a lent engine still decodes are no load of a prefill engine (FlowKV's algorithm 1, line 10)."""
    handle, now_s = watched.dispatcher.handle, watched.now_s
    for name, role in (("p", Role.PREFILL), ("lent", Role.DECODE)):
        watched.fleet.engine(name, role.value)
        handle(ev.EngineUp(now_s, name, role, "g", "n0", 8, 1600))
    for number in range(6):
        handle(ev.Arrived(now_s, Request(f"r{number}", now_s, 10, 8)))
        handle(ev.PrefillRouted(now_s, f"r{number}", "p", colocated=False))
        handle(ev.PrefillDone(now_s, f"r{number}", now_s + 30.0, 1000, 0))
        handle(ev.DecodeRouted(now_s, f"r{number}", "lent"))
        handle(ev.Admitted(now_s, f"r{number}"))
    handle(ev.EngineStatus(now_s, "lent", running=6, waiting=0, kv_tokens=60))
    seen, _ = watched.seen()
    assert next(e.score for e in seen.engines if e.engine == "lent") > 0.15
    handle(ev.EngineUp(now_s, "lent", Role.PREFILL, "g", "n0", 8, 1600))
    watched.fleet.engine("lent", "prefill")
    seen, _ = watched.seen()
    # the KV of six requests is left
    assert 0.0 < next(e.score for e in seen.engines if e.engine == "lent") < 0.02


def test_the_warm_engine_that_is_nearest_to_its_peers_has_the_least_distance(watched: Watched) -> None:
    for name, node, duty in (
        ("p", "n0", "active"), ("d", "n1", "active"), ("near", "n0", "warm"), ("far", "n2", "warm"),
    ):  # fmt: skip
        watched.fleet.engine(name, node=node, duty=duty)
    places = {"n0": NodePlace("r0", "p0"), "n1": NodePlace("r0", "p0"), "n2": NodePlace("r1", "p0")}
    bandwidth = {0: 4e9, 1: 3e9, 2: 2e9, 3: 1e9}
    watched.dispatcher.handle(ev.OracleRefreshed(100.0, Oracle(bandwidth, places=places)))
    seen, _ = watched.seen()
    # from n0: tiers 0 and 1 to p and d; from n2: tier 2 to both
    assert {e.engine: e.distance for e in seen.engines} == {"p": 0.5, "d": 0.5, "near": 0.5, "far": 2.0}


def test_the_profile_is_fitted_to_what_the_engines_have_done(watched: Watched) -> None:
    watched.fleet.engine("d")
    seen, rows = watched.seen()
    assert (rows, seen.capability.profile) == (0, observing.PRIOR)
    assert (seen.capability.slots, seen.capability.kv_tokens) == (8, 1600)
    work = {"prefill_steps": 0.0, "prefill_step_tokens": 0.0, "decode_steps": 0.0}
    work |= {"decode_step_seqs": 0.0, "decode_step_kv_tokens": 0.0, "step_s": 0.0}
    for n in range(60):
        batch, context, prompts = 1 + n % 8, 100 * (1 + n % 5), n % 3
        work["prefill_steps"] += prompts
        work["prefill_step_tokens"] += prompts * 50 * (1 + n % 4)
        work["decode_steps"] += 10
        work["decode_step_seqs"] += 10 * batch
        work["decode_step_kv_tokens"] += 10 * batch * context
        # 10 ms and 1 ms a token for prompts; 20 ms, 2 ms a sequence and 10 us a KV token for a decode step
        work["step_s"] += prompts * (0.01 + 0.001 * 50 * (1 + n % 4))
        work["step_s"] += 10 * (0.02 + 0.002 * batch + 1e-5 * batch * context)
        watched.fleet.report("d", **work)
        watched.now_s += 1.0
        seen, rows = watched.seen()
    assert rows == 59
    profile = seen.capability.profile
    for n, context in ((2, 200), (8, 500)):
        true_s = 0.02 + 0.002 * n + 1e-5 * n * context
        assert profile.step_s(0, n, n * context) == pytest.approx(true_s, rel=0.1)
    assert profile.step_s(200, 0, 0) == pytest.approx(0.21, rel=0.1)


WORK = ("prefill_steps", "prefill_step_tokens", "decode_steps", "decode_step_seqs", "decode_step_kv_tokens")


class Worked:
    """The totals of engines that take 5 ms and 0.1 ms a token for prompts, and 8 ms, 0.1 ms a sequence and 0.1 us a KV
    token for a decode step. A prompt token takes 4.8 ms by the guess.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.totals: dict[str, dict[str, float]] = {}
        self.seconds = 0

    def report(self, prefill: str = "", decode: str = "") -> None:
        """Has the engine `prefill` compute prompts, and the engine `decode` decode, for a while."""
        n, self.seconds = self.seconds, self.seconds + 1
        steps, tokens = 5 + n % 7, 1_000 * (1 + n % 4)
        seqs, kv = 40 * (1 + n % 5), 40 * (1 + n % 5) * 500 * (1 + n % 3)
        if prefill:
            self.add(prefill, steps * (0.005 + 1e-4 * tokens), steps, steps * tokens)
        if decode:
            self.add(decode, 20 * (0.008 + 1e-4 * seqs + 1e-7 * kv), 0, 0, 20, 20 * seqs, 20 * kv)

    def add(self, engine: str, step_s: float, *work: float) -> None:
        totals = self.totals.setdefault(engine, dict.fromkeys((*WORK, "step_s"), 0.0))
        totals["step_s"] += step_s
        for name, more in zip(WORK, work, strict=False):
            totals[name] += more
        self.fleet.report(engine, **totals)


def pair(watched: Watched) -> Worked:
    """Returns the work of two prefill engines of 64 slots and two decode engines of 256, as in `deploy/gpu-node.yaml`.
    They have been seen before they do any.
    """
    worked = Worked(watched.fleet)
    for name in ("p0", "p1"):
        watched.fleet.engine(name, "prefill", slots=64, blocks=2_000)
    for name in ("d0", "d1"):
        watched.fleet.engine(name, slots=256, blocks=1_500)
    for name in ("p0", "d0"):
        worked.add(name, 0.0)
    watched.seen()
    return worked


def test_engines_of_all_roles_are_fitted_together_and_each_role_keeps_its_slots(watched: Watched) -> None:
    """Decode engines compute no prompts, so a profile of theirs alone would have the guess for prompts."""
    worked = pair(watched)
    for _ in range(60):
        worked.report("p0", "d0")
        watched.now_s += 1.0
        seen, rows = watched.seen()
    assert rows == 120
    assert seen.fitted
    profile = seen.capability.profile
    assert profile.step_s(2_000, 0, 0) == pytest.approx(0.205, rel=0.1)
    assert profile.step_s(0, 100, 100_000) == pytest.approx(0.028, rel=0.1)
    assert (seen.capability.slots, seen.capability.kv_tokens) == (256, 24_000)


def test_a_role_that_has_nothing_to_do_for_long_is_not_forgotten(watched: Watched) -> None:
    """10,000 rows of decode alone; each makes the rows before it weigh a thousandth less."""
    worked = pair(watched)
    for _ in range(60):
        worked.report("p0", "d0")
        watched.seen()
    for _ in range(10_000):
        worked.report(decode="d0")
        watched.observer._fit(watched.fleet.infos(), watched.fleet.reported)
    seen, _ = watched.seen()
    assert seen.capability.profile.step_s(2_000, 0, 0) == pytest.approx(0.205, rel=0.1)


def test_slots_and_kv_are_those_of_the_engines_that_decode_as_they_were_last(watched: Watched) -> None:
    watched.fleet.engine("p", "prefill", slots=64, blocks=2_000)
    seen, _ = watched.seen()
    # nothing has decoded yet
    assert (seen.capability.slots, seen.capability.kv_tokens) == (64, 32_000)
    watched.fleet.engine("c", "colocated", slots=32, blocks=500)
    seen, _ = watched.seen()
    assert (seen.capability.slots, seen.capability.kv_tokens) == (32, 8_000)
    watched.fleet.engine("d", slots=256, blocks=1_500)
    seen, _ = watched.seen()
    assert (seen.capability.slots, seen.capability.colocated) == (256, Room(32, 8_000))
    # the only decode engine is replaced: prefill engines do not stand for it meanwhile
    del watched.fleet.known["d"]
    seen, _ = watched.seen()
    assert (seen.capability.slots, seen.capability.colocated) == (256, Room(32, 8_000))


def test_no_plan_depends_on_work_that_no_engine_has_done(watched: Watched) -> None:
    """Only decode engines report: what a prompt takes is a guess still, so the observation is not fitted."""
    worked = pair(watched)
    for _ in range(20):
        worked.report(decode="d0")
        seen, rows = watched.seen()
    assert rows > 0
    assert not seen.fitted
    worked.report("p0", "d0")
    seen, _ = watched.seen()
    assert seen.fitted


def test_joint_plans_a_pair_of_unequal_slots_by_what_its_engines_do(watched: Watched) -> None:
    """Two prompts of 2,000 tokens a second take 0.2 s each, so one prefill engine has the time. By the guess a prompt
    takes 9.5 s, longer than its TTFT, and prefill would grow to its bound.
    """
    worked = pair(watched)
    policy = Joint(limits=Limits(prefill_max=16, decode_max=16, budget=32))
    state = policy.initial()
    terms = Terms(request_class="chat", ttft_slo_s=2.0, tpot_slo_s=0.05)
    for second in range(120):
        worked.report("p0", "d0")
        watched.now_s += 1.0
        for n in range(2):
            watched.arrive(f"r{second}.{n}", terms, 2_000, predicted=100.0)
            watched.observer.ended(f"r{second}.{n}", RequestEnd("finished", "chat", 0.3, 0.03, 100))
        seen, _ = watched.seen()
        step = policy.step(seen, state)
        state = step.state
    assert step.plan.serving == (2, 2, 0)
    assert not any("more engines do not help" in reason for reason in step.reasons)


def test_an_engine_that_does_not_count_its_steps_is_fitted_to_nothing(watched: Watched) -> None:
    watched.fleet.engine("d")
    for n in range(3):
        watched.fleet.report("d", prefill_tokens=float(n))
        assert watched.seen()[1] == 0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_report_that_is_no_number_is_left_out_and_the_fleet_is_seen_all_the_same(
    watched: Watched, wrong: float
) -> None:
    watched.fleet.engine("d")
    work = dict.fromkeys(("prefill_steps", "prefill_step_tokens", "decode_step_kv_tokens"), 0.0)
    fitted = []
    for n in range(6):
        busy_s = wrong if n == 2 else 0.02 * n
        watched.fleet.report("d", **work, decode_steps=float(n), decode_step_seqs=float(n), step_s=busy_s)
        fitted.append(watched.seen()[1])
    # the differences to the third report and from it are lost
    assert fitted == [0, 1, 1, 1, 2, 3]


def test_the_routers_loop_does_not_solve_for_the_profile(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Solving takes milliseconds; the sums are sent instead, and the autoscaler solves."""
    watched.fleet.engine("d")
    solved: list[int] = []
    real = Fit.profile
    monkeypatch.setattr(Fit, "profile", lambda fit: (solved.append(fit.rows), real(fit))[1])
    for n in range(4):
        totals = dict.fromkeys(("prefill_steps", "prefill_step_tokens", "decode_step_kv_tokens"), 0.0)
        watched.fleet.report("d", **totals, decode_steps=1.0 * n, decode_step_seqs=1.0 * n, step_s=0.02 * n)
        message = watched.observer.observed(1, 1)
    assert solved == []
    assert message.fitted_rows == 3
    seen = observation_of(message)
    assert solved == [3]
    assert seen.capability.profile.source == "fitted to 3 reports"
