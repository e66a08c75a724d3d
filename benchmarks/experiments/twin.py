"""One cluster twice, as a live Sluice and in the simulator: both get the same requests, and the live one calibrates the
simulated one.

`Setup` describes both; `replay_live` and `simulated_times` run a workload on each. `calibrate_control` measures the
time that the live control plane takes, `calibrate_engines` the time that its engines take. `validate_live` is the
command.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments import agreement
from benchmarks.experiments.agreement import Stream, Times
from benchmarks.live import openloop
from benchmarks.live.servers import Command
from benchmarks.live.stats import percentile
from benchmarks.live.targets import MODEL, EngineOptions, sluice_app
from benchmarks.sim import metrics, profiles
from benchmarks.sim.calibration import DecodeTime, PrefillTime, fit
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, SimConfig
from benchmarks.workloads.arrivals import Poisson, until
from benchmarks.workloads.record import WorkloadRequest
from policies.admission.registry import DEFAULT as ADMIT
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import SMOLLM2_KV_BYTES_PER_TOKEN, TimingProfile
from policies.state.views import Role

COMPLETIONS = "/v1/completions"
# Prompts are random token ids below this number, so that no two of them share a prefix.
VOCABULARY = 30_000
# Ray's own niceness of 15 would let any other program of the machine into the measurement.
NICENESS = {"RAY_worker_niceness": "0"}
# How the client reports an answer by which the app refuses a request.
REFUSALS = ("status 429", "status 503")
# Seconds to wait for answers after the last request was sent.
PATIENCE_S = 120.0

SIM_PROFILE = TimingProfile(
    source="artificial, for validate_live: steps of 20-30 ms, prefills of 50-280 ms",
    prefill_base_s=0.02,
    prefill_per_token_s=5e-4,
    decode_base_s=0.02,
    decode_per_seq_s=1e-3,
    decode_per_kv_token_s=2e-6,
    kv_bytes_per_token=SMOLLM2_KV_BYTES_PER_TOKEN,
    transfer_bandwidth_bytes_per_s=0.5e9,
    transfer_latency_s=1e-3,
)


class ValidationError(RuntimeError):
    """The error of a live system whose answers are missing or wrong, so that there is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A workload: Poisson arrivals for `seconds`, lengths uniform within the bounds (tokens)."""

    rate_per_s: float
    seconds: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def requests(self, seed: int) -> list[WorkloadRequest]:
        """The workload that `seed` draws."""
        rng = np.random.default_rng(seed)
        times = list(until(Poisson(self.rate_per_s).times(rng), self.seconds))
        prompts = rng.integers(self.prompt_tokens[0], self.prompt_tokens[1], len(times), endpoint=True)
        outputs = rng.integers(self.output_tokens[0], self.output_tokens[1], len(times), endpoint=True)
        columns = zip(times, prompts.tolist(), outputs.tolist(), strict=True)
        return [WorkloadRequest(f"r{i}", at, p, o, max_tokens=o) for i, (at, p, o) in enumerate(columns)]


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster that exists live and simulated.

    `profile` is the timing of sim engines; with vLLM engines only its KV size and bandwidth are used. `policies` are
    pairs of prefill and decode policy, each replayed once. A replay counts as disturbed when the client sent requests
    later than `late_limit_s` (95th percentile); None sets no limit, where the engines themselves keep the cores busy.
    """

    kind: str
    model: str
    prefill: int
    decode: int
    slots: int
    budget_tokens: int
    profile: TimingProfile
    mix: Mix
    policies: tuple[tuple[str, str], ...]
    options: dict[str, Any] = field(default_factory=dict)
    late_limit_s: float | None = None

    def command(self, folder: Path) -> Command:
        """The command that starts the live app."""
        engines = [
            {"name": role, "role": role, "kind": self.kind, "replicas": count, "options": self.options}
            for role, count in (("prefill", self.prefill), ("decode", self.decode))
        ]
        path = "sim" if self.kind == "sim" else MODEL
        args = {"model": {"path": path, "name": self.model}, "engines": engines}
        made = sluice_app(f"Sluice, {self.kind}", folder / "app.yaml", args, 600.0)
        return replace(made, env=NICENESS)

    def simulated(
        self, profile: TimingProfile, control: ControlPlane, policies: tuple[str, str], seed: int
    ) -> SimConfig:
        """The configuration of this cluster in the simulator."""
        specs = tuple(
            EngineSpec(
                role.value, role, count, profile, slots=self.slots, prefill_budget_tokens=self.budget_tokens
            )
            for role, count in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        )
        return SimConfig(
            specs,
            prefill=(policies[0], {}),
            decode=(policies[1], {}),
            admission=(ADMIT, {}),
            dispatch=DispatchConfig(seed=seed),
            control=control,
        )


def sim_setup(policies: tuple[tuple[str, str], ...], seconds: float) -> Setup:
    """Sim engines whose prefill is about 40 % busy and whose decode slots are about 75 % full, so that requests queue
    at both.
    """
    timing = {name: getattr(SIM_PROFILE, name) for name in profiles.FIELDS}
    return Setup(
        kind="sim",
        model="sim",
        prefill=2,
        decode=4,
        slots=4,
        budget_tokens=8192,
        profile=SIM_PROFILE,
        mix=Mix(5.0, seconds, (64, 512), (32, 160)),
        policies=policies or (("join_shortest_queue",) * 2, ("predicted_ttft", "balance_route_0")),
        options={"profile": "tick_1ms", "timing": timing, "slots": 4},
        late_limit_s=5e-3,
    )


def vllm_setup(policies: tuple[tuple[str, str], ...], seconds: float) -> Setup:
    """One prefill and one decode engine of vLLM, lightly loaded. One pair of policies is enough, because there is
    nothing to choose.
    """
    return Setup(
        kind="vllm",
        model=MODEL,
        prefill=1,
        decode=1,
        slots=32,
        budget_tokens=2048,
        profile=profiles.load("cpu_smollm2"),
        mix=Mix(0.5, seconds, (16, 192), (16, 64)),
        policies=policies or (("join_shortest_queue",) * 2,),
        options=asdict(EngineOptions()),
    )


# ------------------------------------------------------------------------------------------------------ the two sides


def refused(answer: openloop.Answer) -> bool:
    """Returns whether the app refused a request for lack of room, at its arrival or while it waited."""
    return answer.problem is not None and answer.problem.startswith(REFUSALS)


def replay_live(
    port: int, setup: Setup, work: Sequence[WorkloadRequest], seed: int, refusals: bool = False
) -> list[openloop.Answer]:
    """Sends `work` at its times, with prompts of its lengths that are new for each `seed`: one seen before would be in
    the engines' prefix caches. Raises ValidationError unless every answer came whole or, with `refusals`, was refused.
    """
    rng = np.random.default_rng(seed)
    plan = []
    for one in work:
        body = {
            "model": setup.model,
            "prompt": rng.integers(1, VOCABULARY, one.prompt_tokens).tolist(),
            "max_tokens": one.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        targets = {"ttft_ms": one.ttft_slo_s, "tpot_ms": one.tpot_slo_s}
        slo = {name: 1e3 * seconds for name, seconds in targets.items() if seconds is not None}
        if slo:
            body["slo"] = slo
        plan.append(openloop.Planned(one.at_s, json.dumps(body).encode()))
    answers = openloop.replay(port, COMPLETIONS, plan, PATIENCE_S)
    problems = [
        f"{one.request_id}: {a.problem}"
        for one, a in zip(work, answers, strict=True)
        if a.problem and not (refusals and refused(a))
    ]
    if problems:
        raise ValidationError(f"{len(problems)} of {len(work)} answers were lost; {'; '.join(problems[:5])}")
    return answers


def live_times(work: Sequence[WorkloadRequest], answers: Sequence[openloop.Answer]) -> list[Times]:
    """Times of the live answers, counted from when each request was really sent."""
    return [
        Times(
            a.first_s - a.sent_s,
            (a.last_s - a.first_s) / (one.output_tokens - 1) if one.output_tokens > 1 else None,
            a.last_s - a.sent_s,
        )
        for one, a in zip(work, answers, strict=True)
    ]


def simulated_outcomes(config: SimConfig, work: Sequence[WorkloadRequest]) -> list[Times | None]:
    """Returns the simulated times of the requests, in the order of `work`; None for one that was refused. Raises
    ValidationError if a request neither finished nor was refused.
    """
    found: list[Times | None] = []
    for record in simulate(config, work).requests:
        ttft_s, jct_s = metrics.ttft_s(record), metrics.jct_s(record)
        if record.rejected is not None:
            found.append(None)
        elif ttft_s is None or jct_s is None:
            raise ValidationError(f"simulated {record.request_id} did not finish")
        else:
            found.append(Times(ttft_s, metrics.tpot_s(record), jct_s))
    return found


def simulated_times(config: SimConfig, work: Sequence[WorkloadRequest]) -> list[Times]:
    """Simulated times of the requests, in the order of `work`. Raises ValidationError if a request did not finish."""
    found = []
    for record in simulate(config, work).requests:
        ttft_s, jct_s = metrics.ttft_s(record), metrics.jct_s(record)
        if ttft_s is None or jct_s is None:
            raise ValidationError(f"simulated {record.request_id} did not finish: {record.rejected}")
        found.append(Times(ttft_s, metrics.tpot_s(record), jct_s))
    return found


# -------------------------------------------------------------------------------------------------------- calibration


def lone_requests(setup: Setup, count: int, output_tokens: int, gap_s: float) -> list[WorkloadRequest]:
    """Requests that come `gap_s` apart, so that each is alone; their prompts are spread over the workload's lengths."""
    lengths = np.linspace(*setup.mix.prompt_tokens, count).astype(int).tolist()
    return [
        WorkloadRequest(f"lone{i}", i * gap_s, p, output_tokens, max_tokens=output_tokens)
        for i, p in enumerate(lengths)
    ]


def calibrate_control(port: int, setup: Setup, seed: int) -> tuple[ControlPlane, dict[str, Any]]:
    """Measures `ingress_s`: the time by which lone requests took longer live than simulated without an ingress's
    time.
    """
    gap_s = 1.5 * setup.profile.step_s(setup.mix.prompt_tokens[1], 8, 0) + 0.5
    work = lone_requests(setup, 24, 8, gap_s)
    live = live_times(work, replay_live(port, setup, work, seed + 1))
    bare = replace(ControlPlane(), ingress_s=0.0)
    modelled = simulated_times(setup.simulated(setup.profile, bare, setup.policies[0], 0), work)
    added = [a.ttft_s - b.ttft_s for a, b in zip(live, modelled, strict=True)]
    ingress_s = max(0.0, statistics.median(added))
    tpot = [a.tpot_s / b.tpot_s for a, b in zip(live, modelled, strict=True) if a.tpot_s and b.tpot_s]
    found = {
        "ingress_s": ingress_s,
        "added_ttft_ms": {f"p{q}": 1e3 * percentile(added, q / 100) for q in (5, 50, 95)},
        "tpot_live_over_modelled_p50": statistics.median(tpot),
    }
    return replace(bare, ingress_s=ingress_s), found


def probes(setup: Setup, repeats: int, gap_s: float) -> list[WorkloadRequest]:
    """Lone requests of one token, one every `gap_s`, beside one (the first) that decodes all the while: the two engines
    share caches and memory, so a prefill beside a decode takes longer than one on an idle machine.
    """
    low, high = setup.mix.prompt_tokens
    lengths = [low, 64, 128, high] * repeats
    begin_s = 2.0
    steps = round((begin_s + gap_s * len(lengths)) / 0.03)
    beside = WorkloadRequest("beside", 0.0, low, steps, max_tokens=steps)
    return [beside] + [
        WorkloadRequest(f"p{i}", begin_s + i * gap_s, length, 1, max_tokens=1)
        for i, length in enumerate(lengths)
    ]


def by_length(work: Sequence[WorkloadRequest], times: Sequence[Times]) -> list[PrefillTime]:
    """The median time to first token of each prompt length."""
    found: dict[int, list[float]] = {}
    for one, time in zip(work, times, strict=True):
        found.setdefault(one.prompt_tokens, []).append(time.ttft_s)
    return [PrefillTime(length, statistics.median(ttft)) for length, ttft in sorted(found.items())]


def calibrate_engines(port: int, setup: Setup, seed: int) -> tuple[TimingProfile, dict[str, Any]]:
    """A profile of the engines: prefill from `probes`, decode from bursts.

    The bursts' requests join one by one as the prefill engine gets through them, so each answer counts with the mean
    batch that it really had (`agreement.decode_load`). The part of a probe's TTFT that is not prefill (control plane,
    transfer, waiting for a decode step, that step) is taken from a simulation with a first fit, and the prefill is then
    fitted to the rest.
    """
    low, high = setup.mix.prompt_tokens
    work = probes(setup, repeats=8, gap_s=1.0)
    alone = by_length(work[1:], live_times(work, replay_live(port, setup, work, seed + 1))[1:])
    decodes = []
    for index, (sequences, prompt) in enumerate((n, p) for p in (low, high // 2) for n in (1, 2, 4, 6)):
        burst = [WorkloadRequest(f"b{i}", 0.0, prompt, 64, max_tokens=64) for i in range(sequences)]
        answers = replay_live(port, setup, burst, seed + 2 + index)
        streams = [Stream(a.first_s, a.last_s, prompt, 64) for a in answers]
        decodes += [DecodeTime(*row) for row in agreement.decode_load(streams)]
    source = "measured by benchmarks.experiments.validate_live; KV size and transfer as in cpu_smollm2"
    first, _ = fit(setup.profile, source, alone, decodes)
    times = simulated_times(setup.simulated(first, ControlPlane(), setup.policies[0], 0), work)
    rest = [
        PrefillTime(p.prompt_tokens, p.ttft_s - (m.ttft_s - first.step_s(p.prompt_tokens, 0, 0)))
        for p, m in zip(alone, by_length(work[1:], times[1:]), strict=True)
    ]
    return fit(setup.profile, source, rest, decodes)
