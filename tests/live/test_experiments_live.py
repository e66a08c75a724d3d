"""Experiments on a running application without Ray: measured, put back whatever ends them, refused in words.

Real processes throughout: the application, the command, its guardian.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from app.dashboard.run_marks import RunMarks
from app.dashboard.store import BEFORE, RunStore
from benchmarks.live.experiment.guardian import remember
from benchmarks.live.servers import ROOT
from benchmarks.whatif.live.ask import collect
from benchmarks.whatif.live.describe import described
from tests.benchmarks.live.experiment.bare_app import KEY, Bare, bare_app
from tests.benchmarks.live.experiment.commands import (
    PATIENCE_S,
    decode_policy,
    plan,
    start,
    told,
    until,
    wait,
)
from tests.processes import command_line

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    folder = tmp_path_factory.mktemp("bare")
    with bare_app(folder, router={"journal": {"folder": str(folder / "journal")}}) as made:
        with made.client() as client:
            # an application is ready with fewer
            wait("three engines", lambda: [e.state for e in client.status().engines] == ["ready"] * 3)
        yield made


def decode_steps(app: Bare) -> tuple[float, ...]:
    """Decode steps of all engines, and the sums over them of sequences and of their KV tokens."""
    answer = httpx.get(f"{app.url}/sluice/admin/facts", headers={"authorization": f"Bearer {app.key}"})
    totals = [engine["totals"] for engine in answer.json()["engines"] if engine["role"] == "decode"]
    names = ("decode_steps", "decode_step_seqs", "decode_step_kv_tokens")
    return tuple(sum(one[name] for one in totals) for name in names)


def test_a_burst_is_run_and_measured(app: Bare, tmp_path: Path) -> None:
    process = start(app, tmp_path, plan())
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    ended = told(out.splitlines()[-1])
    summary = ended["summary"]
    assert (ended["event"], ended["state"], summary["failed"]) == ("ended", "done", 0), ended
    assert summary["requests"] == told(out.splitlines()[0])["plan"]["requests"] > 30
    assert summary["attainment"] == 1.0
    # prefill 5 ms, transfer, one step of 5 ms, and what the processes add on a busy machine
    assert 0.010 < summary["ttft_p50_s"] < 0.5
    assert 0.0049 < summary["tpot_mean_s"] < 0.1
    # two of three engines for four seconds would be less
    assert summary["engine_hours"] == pytest.approx(3 * 4 / 3600)
    store = RunStore(tmp_path / "runs")
    [run] = store.all()
    folder = store.path(run["id"])
    assert not (folder / BEFORE).exists()
    rows = [told(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == summary["requests"] and {row["output_tokens"] for row in rows} == {20}
    samples = [told(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 4 and {s["engines_active"] for s in samples} == {3}
    assert sum(s["kv_bytes_per_s"] or 0 for s in samples) > 0
    # what the client has sent is what the server has counted
    with app.client() as client:
        decision = client.explain(rows[0]["id"]).decisions
        assert {one.action for one in decision} == {"RoutePrefill", "RouteDecode"}
    shown = subprocess.run(
        [sys.executable, "-m", "sluice.cli", "experiment", "list", "--runs", str(tmp_path / "runs")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert run["id"] in shown and "0 failed, 100.0 % of SLOs met" in shown


CHANGES = {"actions": [{"at_s": 1, "policy": {"decode": "round_robin", "dispatch": {"max_queue": 77}}}]}


@pytest.mark.nightly
def test_policies_are_put_back_after_the_end(app: Bare, tmp_path: Path) -> None:
    before = decode_policy(app)
    process = start(app, tmp_path, plan(3, **CHANGES))
    until(process, "action", "round_robin")
    # what is put back is only what differs at the end of the load
    until(process, "action", "put back: policy")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and decode_policy(app) == before
    with app.client() as client:
        assert client.policies().dispatch["max_queue"] != 77


def test_policies_are_put_back_after_a_kill_of_the_runner(app: Bare, tmp_path: Path) -> None:
    before = decode_policy(app)
    marks = RunMarks([RunStore(tmp_path / "runs")], app.url, lambda at, happened: None)
    assert marks.look() == []
    process = start(app, tmp_path, plan(60, **CHANGES))
    until(process, "action", "round_robin")
    assert decode_policy(app) == "round_robin"
    assert [happened.text.split(" (")[0] for _, happened in marks.look()] == ["experiment a burst began"]
    process.kill()
    process.wait()
    assert [happened.text.split(" (")[0] for _, happened in marks.look()] == [
        "experiment a burst ended: failed"
    ]
    wait("the guardian puts back", lambda: decode_policy(app) == before)
    store = RunStore(tmp_path / "runs")
    [run_id] = store.ids()
    wait("the end is noted", lambda: "put back: policy" in (store.read(run_id)["message"] or ""))
    assert store.read(run_id)["state"] == "failed"
    assert not (store.path(run_id) / BEFORE).exists()


@pytest.mark.nightly
def test_what_a_killed_guardian_leaves_is_put_back_by_the_next_command(app: Bare, tmp_path: Path) -> None:
    before = decode_policy(app)
    process = start(app, tmp_path, plan(60, **CHANGES))
    until(process, "action", "round_robin")
    guardians = [p for p in psutil.Process(process.pid).children() if "guardian" in command_line(p)]
    assert len(guardians) == 1
    # it is not asked to end, but killed before the runner is
    guardians[0].kill()
    process.kill()
    process.wait()
    assert decode_policy(app) == "round_robin"
    argv = [
        sys.executable,
        "-m",
        "sluice.cli",
        "experiment",
        "restore",
        "--runs",
        str(tmp_path / "runs"),
        "--json",
    ]
    done = subprocess.run(
        argv, cwd=ROOT, env=os.environ | {"SLUICE_ADMIN_KEY": KEY}, capture_output=True, text=True, check=True
    )
    [one] = json.loads(done.stdout)
    assert one["problem"] is None and decode_policy(app) == before


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "leash"])
@pytest.mark.nightly
def test_a_run_that_is_stopped_puts_back(app: Bare, tmp_path: Path, how: Any) -> None:
    before = decode_policy(app)
    process = start(app, tmp_path, plan(60, **CHANGES), *(["--until-input-ends"] if how == "leash" else []))
    until(process, "action", "round_robin")
    assert process.stdin is not None
    if how == "leash":
        process.stdin.close()
    else:
        process.send_signal(how)
    ended = until(process, "ended")
    assert ended["state"] == "stopped" and process.wait(PATIENCE_S) == 130
    assert decode_policy(app) == before


def test_a_full_disk_is_named_and_puts_back(app: Bare, tmp_path: Path) -> None:
    """No file of the runner may be longer than 300 kB: then the disk is full for it."""
    before = decode_policy(app)

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    process = start(app, tmp_path, plan(60, rate=120, **CHANGES), preexec_fn=full)
    ended = until(process, "ended")
    assert ended["state"] == "failed" and "the disk takes no more" in ended["message"], ended
    process.wait(PATIENCE_S)
    assert decode_policy(app) == before
    [run] = RunStore(tmp_path / "runs").all()
    assert run["state"] == "failed" and "make room" in run["message"]


@pytest.mark.nightly
def test_the_bound_of_bytes_ends_a_run(app: Bare, tmp_path: Path) -> None:
    process = start(app, tmp_path, plan(30, rate=100), "--most-bytes", str(300 << 10))
    ended = until(process, "ended")
    assert ended["state"] == "failed" and "have reached their bound" in ended["message"]
    process.wait(PATIENCE_S)


def test_arms_are_compared_on_the_same_requests(app: Bare, tmp_path: Path) -> None:
    before = decode_policy(app)
    arms = {name: {"policy": {"decode": name}} for name in ("round_robin", "join_shortest_queue")}
    process = start(app, tmp_path, plan(3, arms=arms, repeats=2, pause_s=0))
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert decode_policy(app) == before
    whats = [told(line)["what"] for line in out.splitlines() if told(line)["event"] == "action"]
    order = [what.partition(":")[0] for what in whats if not what.startswith("put back")]
    assert order == ["round_robin 1", "join_shortest_queue 1", "join_shortest_queue 2", "round_robin 2"]
    run_id = RunStore(tmp_path / "runs").ids()[0]
    argv = [
        sys.executable,
        "-m",
        "sluice.cli",
        "experiment",
        "compare",
        run_id,
        "--runs",
        str(tmp_path / "runs"),
    ]
    found = json.loads(
        subprocess.run([*argv, "--json"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    assert [name.rpartition(" / ")[2] for name in found["columns"]] == ["round_robin", "join_shortest_queue"]
    assert {line["basis"] for line in found["table"]} == {"repeats"}
    text = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "TTFT p95, ms" in text


@pytest.mark.nightly
def test_an_engine_is_killed_only_where_that_is_allowed(app: Bare, tmp_path: Path) -> None:
    text = plan(6, rate=20, actions=[{"at_s": 1, "kill": "decode"}])
    process = start(app, tmp_path, text)
    refused = until(process, "refused")
    assert "kill is not allowed" in refused["problems"][0] and process.wait(PATIENCE_S) == 2
    with app.client() as client:
        before = {engine.id for engine in client.status().engines}
    process = start(app, tmp_path, text, "--may-kill")
    killed = until(process, "action", "kill decode-")["what"].split()[1]
    ended = until(process, "ended")
    process.wait(PATIENCE_S)
    assert killed in before
    # the streams of the engine went on at the other one
    assert (ended["state"], ended["summary"]["failed"]) == ("done", 0), ended
    with app.client() as client:

        def ready() -> set[str | None]:
            return {engine.id for engine in client.status().engines if engine.state == "ready"}

        # the killed engine is known for a while after its end
        wait("a new engine", lambda: len(ready() - {killed}) == 3)
        wait("the killed one is forgotten", lambda: killed not in {e.id for e in client.status().engines})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"actions": [{"at_s": 1, "policy": {"decode": "no_such"}}]},
            "there is no decode policy 'no_such'; there are",
        ),
        ({"actions": [{"at_s": 1, "scale": {"decode": 3}}]}, "numbers of engines cannot be changed"),
        ({"actions": [{"at_s": 1, "drain": "decode"}]}, "give its address with --dashboard"),
    ],
)
def test_what_the_application_cannot_do_is_refused_before_anything_is_sent(
    app: Bare, tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    process = start(app, tmp_path, plan(**keys))
    assert problem in until(process, "refused")["problems"][0]
    assert process.wait(PATIENCE_S) == 2
    assert RunStore(tmp_path / "runs").ids() == []


def test_a_wrong_key_and_no_server_are_refused_in_words(app: Bare, tmp_path: Path) -> None:
    process = start(Bare(app.url, "wrong-key"), tmp_path, plan(**CHANGES))
    assert "SLUICE_ADMIN_KEY" in until(process, "refused")["problems"][0]
    process.wait(PATIENCE_S)
    process = start(Bare("http://127.0.0.1:9"), tmp_path, plan())
    assert "check that the server runs" in until(process, "refused")["problems"][0]
    process.wait(PATIENCE_S)


def test_parameters_that_the_policy_refuses_end_the_run(app: Bare, tmp_path: Path) -> None:
    before = decode_policy(app)
    change = {"decode": {"name": "netkv", "params": {"no_such": 1}}}
    process = start(app, tmp_path, plan(5, actions=[{"at_s": 1, "policy": change}]))
    ended = until(process, "ended")
    assert ended["state"] == "failed" and "no_such" in ended["message"]
    process.wait(PATIENCE_S)
    assert decode_policy(app) == before


def test_a_restore_without_a_server_keeps_what_is_to_be_put_back(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    run_id, folder = store.new("x")
    remember(
        folder, {"url": "http://127.0.0.1:9", "policy": {"decode": {"name": "round_robin", "params": {}}}}
    )
    argv = [sys.executable, "-m", "sluice.cli", "experiment", "restore", "--runs", str(store.folder)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and run_id in done.stdout
    assert (folder / BEFORE).exists()


@pytest.mark.nightly
def test_what_runs_is_described_and_simulated_beside_what_was_measured(app: Bare, tmp_path: Path) -> None:
    process = start(app, tmp_path, plan(8, rate=20))
    until(process, "progress")
    made = described(collect(app.url, app.key, watch_s=3.0))
    process.communicate(timeout=PATIENCE_S)
    base = yaml.safe_load(made.text)
    groups = {group["name"]: group for group in base["cluster"]["engines"]}
    assert {name: (g["role"], g["count"], g["slots"]) for name, g in groups.items()} == {
        "prefill": ("prefill", 1, 32), "decode": ("decode", 2, 32),
    }  # fmt: skip
    # the engines' own timing is 5 ms a step, and a busy machine adds to it; by the fit their steps take that long on
    # the average of the batches seen; a KV token has 30 layers x 2 x 3 heads x 64 x 2 bytes
    steps, seqs, kv_tokens = decode_steps(app)
    fit = groups["decode"]["profile"]
    fitted_s = (
        fit["decode_base_s"] * steps
        + fit["decode_per_seq_s"] * seqs
        + fit["decode_per_kv_token_s"] * kv_tokens
    )
    assert 0.0045 < fitted_s / steps < 0.1
    for group in groups.values():
        assert group["profile"]["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert base["policies"]["decode"]["name"] == decode_policy(app)
    with app.client() as client:
        running = client.policies()
    assert running.admission is not None and running.fairness is not None
    assert base["policies"]["admission"]["name"] == running.admission.name
    assert base["policies"]["fairness"]["name"] == running.fairness.name
    assert "the journal's last 5 minutes" in made.facts["workload"]
    rows = [told(line) for line in made.workload.splitlines()]
    assert len(rows) > 20 and {row["output_length"] for row in rows[-20:]} == {20}
    assert {row["request_class"] for row in rows[-20:]} == {"interactive"}
    assert made.measured["ttft_mean_s"] is not None and made.measured["tpot_mean_s"] is not None
    made.write(tmp_path / "mine")
    changes = [
        {
            "name": "slow network",
            "set": {"cluster.engines.decode.profile.transfer_bandwidth_bytes_per_s": 1e6},
        }
    ]
    (tmp_path / "changes.json").write_text(json.dumps(changes))
    answer = tmp_path / "answer.json"
    argv = [
        sys.executable,
        "-m",
        "sluice.cli",
        "simulate",
        str(tmp_path / "mine" / "base.yaml"),
        "--seeds",
        "1",
    ]
    argv += [
        "--changes",
        str(tmp_path / "changes.json"),
        "--json",
        str(answer),
        "--files-here",
        "--jobs",
        "1",
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "measured" in done.stdout.splitlines()[0] and "simulated" in done.stdout
    whole = json.loads(answer.read_text())
    assert whole["trust"]["text"] in done.stdout
    means = whole["means"]
    assert means["base"]["tpot_mean_s"] > 0.0045
    # both are of the same seconds, however busy the machine was
    assert 1 / 3 < means["base"]["tpot_mean_s"] / made.measured["tpot_mean_s"] < 3
    # 40 tokens of 23 kB over 1 MB/s take most of a second
    assert means["slow network"]["ttft_mean_s"] > means["base"]["ttft_mean_s"] + 0.5
