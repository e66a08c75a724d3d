"""A what-if file made of a running application's facts: fleet, network, problems, and what may be read from it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.whatif.build import sim_config, workload
from benchmarks.whatif.changes import variants_of
from benchmarks.whatif.config import WhatIfError, read
from benchmarks.whatif.live.describe import BASE, described
from benchmarks.whatif.live.errors import FromLiveError
from benchmarks.workloads.record import WorkloadError
from policies.admission.by_wait import ByWait
from policies.admission.registry import admission_policy
from policies.journal.codec import dumps, loads
from policies.journal.lines import choice_of
from tests.benchmarks.whatif.live.made import NOTHING_KNOWN, PAIR, POLICIES, engine, live, seen


def test_the_file_has_the_fleet_and_can_be_simulated(tmp_path: Path) -> None:
    warm = engine("decode-c", "decode", duty="warm")
    made = described(live([*PAIR, warm], kv_bytes=(2_304_000.0, 100.0), transfers=(10.0, 1e9, 0.5)))
    question = read(made.write(tmp_path), files_here=True)
    groups = {group.name: group for group in question.cluster.engines}
    assert {name: (g.role, g.count) for name, g in groups.items()} == {
        "prefill": ("prefill", 1),
        "decode": ("decode", 2),
    }
    timing = groups["decode"].timing()
    assert timing.prefill_base_s == pytest.approx(0.002, rel=0.2)
    assert timing.decode_base_s == pytest.approx(0.004, rel=0.1)
    assert (timing.kv_bytes_per_token, timing.transfer_bandwidth_bytes_per_s) == (23_040, pytest.approx(2e9))
    assert question.policies.dispatch == {"max_queue": 99}
    assert (question.workload.ttft_slo_s, question.workload.tpot_slo_s) == (0.2, None)
    base = variants_of(question)["base"]
    sim_config(base, 0)
    requests = workload(base, 0)
    assert [round(one.at_s, 3) for one in requests] == [float(i) for i in range(30)]
    assert "1 engines that are warm" in made.problems[0]
    assert "# problem: " in made.text and "a test" in made.text


def test_admission_and_fairness_are_simulated_as_they_run(tmp_path: Path) -> None:
    """The parameters are those of the router's answer, whose JSON spells infinity."""
    by_wait = choice_of(ByWait(margin=0.5, hold_s=math.inf))
    running = {
        **POLICIES,
        "admission": {"name": by_wait.name, "params": loads(dumps(by_wait.params)), "formula": ""},
        "fairness": {"name": "none", "params": {}, "formula": ""},
    }
    made = described(live(PAIR, policies=running))
    assert "admission by_wait, fairness none" in made.facts["policies"]
    config = sim_config(variants_of(read(made.write(tmp_path), files_here=True))["base"], 0)
    assert admission_policy(*config.admission) == ByWait(margin=0.5, hold_s=math.inf)
    assert config.fairness == ("none", {})


def test_a_policy_that_an_older_server_does_not_tell_is_a_problem(tmp_path: Path) -> None:
    made = described(live(PAIR, policies={**POLICIES, "admission": None, "fairness": None}))
    assert "the server tells of no admission policy" in "\n".join(made.problems)
    assert "the server tells of no fairness policy" in "\n".join(made.problems)
    policies = read(made.write(tmp_path), files_here=True).policies
    assert (policies.admission.name, policies.fairness.name) == ("open", "vtc")


def test_requests_keep_their_class_priority_and_weight_and_tenants_are_told_apart(tmp_path: Path) -> None:
    mine = {"request_class": "interactive", "priority": -1, "tenant": "a secret name", "weight": 4.0}
    requests = [seen(100.0, **mine), seen(101.0), seen(102.0, tenant="another"), seen(103.0, **mine)]
    made = described(live(PAIR, requests=requests))
    assert "secret" not in made.workload + made.text
    base = variants_of(read(made.write(tmp_path), files_here=True))["base"]
    found = workload(base, 0)
    assert [(one.request_class, one.priority, one.client, one.weight) for one in found] == [
        ("interactive", -1, "1", 4.0),
        ("standard", 0, "", 1.0),
        ("standard", 0, "2", 1.0),
        ("interactive", -1, "1", 4.0),
    ]
    # they are judged by the commonest objectives all the same
    assert {one.ttft_slo_s for one in found} == {0.2}


def test_what_a_simulation_leaves_out_of_requests_is_a_problem() -> None:
    requests = [seen(100.0 + i, lost=i < 3) for i in range(30)]
    assert "3 requests have a time limit" in "\n".join(described(live(PAIR, requests=requests)).problems)
    assert "time limit" not in "\n".join(described(live(PAIR)).problems)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 0.5},
        {"priority": True},
        {"weight": 0},
        {"weight": "2"},
        {"client": ""},
        {"request_class": 3},
    ],
)
def test_terms_that_are_none_are_refused_with_their_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    row = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": []}
    file = tmp_path / "own.jsonl"
    file.write_text(f"{json.dumps(row)}\n{json.dumps({**row, **wrong})}\n")
    base = variants_of(read(described(live(PAIR)).write(tmp_path)))["base"]
    changed = base.model_copy(update={"workload": base.workload.model_copy(update={"file": str(file)})})
    with pytest.raises(WorkloadError, match=f"own.jsonl:2: {next(iter(wrong))} must be"):
        workload(changed, 0)


def test_bandwidth_is_what_pairs_have_learnt() -> None:
    pairs = [
        {"sender": "n", "receiver": "n", "bytes_per_s": b, "latency_s": 1e-3, "age_s": 1.0}
        for b in (1e9, 3e9, 9e9)
    ]
    base = yaml.safe_load(described(live(PAIR, {**NOTHING_KNOWN, "pairs": pairs})).text)
    profile = base["cluster"]["engines"][0]["profile"]
    assert (profile["transfer_bandwidth_bytes_per_s"], profile["transfer_latency_s"]) == (3e9, 1e-3)
    assert "network" not in base


def test_several_nodes_become_a_fat_tree_of_the_known_places(tmp_path: Path) -> None:
    engines = [
        engine("prefill-a", "prefill", "a"),
        engine("decode-a", "decode", "b"),
        engine("decode-b", "decode", "c"),
        engine("decode-c", "decode", "c"),
    ]
    network = {
        "tiers": {
            "1": {"bytes_per_s": 12.5e9, "latency_s": 1e-5},
            "3": {"bytes_per_s": 2.5e9, "latency_s": 1e-4},
        },
        "places": {
            "a": {"rack": "r", "pod": "p"},
            "b": {"rack": "r", "pod": "p"},
            "c": {"rack": "s", "pod": "q"},
        },
        "pairs": [{"sender": "a", "receiver": "b", "bytes_per_s": 10e9, "latency_s": None, "age_s": 1.0}],
    }
    made = described(live(engines, network))
    question = read(made.write(tmp_path), files_here=True)
    assert question.network is not None
    topology = question.network.topology
    assert (topology.pods, topology.racks_per_pod, topology.nodes_per_rack, topology.gpus_per_node) == (
        2,
        1,
        2,
        2,
    )
    # 10 GB/s learnt; the far tier has a fifth of the near one
    assert (topology.nic_gbit_per_s, topology.pod_oversubscription) == (80.0, 5.0)
    assert topology.latency_us == (0.0, 10.0, 10.0, 100.0)
    nodes = {group.name: group.nodes for group in question.cluster.engines}
    assert len(set(nodes["decode"])) == 2 and nodes["decode"][1] == nodes["decode"][2]
    sim_config(variants_of(question)["base"], 0)


def test_ranks_are_engines_of_a_barrier() -> None:
    engines = [
        engine("prefill-a", "prefill"),
        engine("decode-a", "decode", dp_ranks=4, barrier=True, slots=64),
    ]
    base = yaml.safe_load(described(live(engines)).text)
    decode = next(group for group in base["cluster"]["engines"] if group["name"] == "decode")
    assert (decode["count"], decode["slots"], decode["kv_blocks"], decode["barrier"]) == (
        4,
        16,
        1_024,
        "decode",
    )


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: live(PAIR, requests=[]), "no request has ended lately"),
        (lambda: live([engine("a-a", "decode", state="draining")]), "no engine is ready and active"),
    ],
)
def test_without_requests_or_engines_there_is_nothing_to_simulate(made: Any, problem: str) -> None:
    with pytest.raises(FromLiveError, match=problem):
        described(made())


def test_guesses_and_different_objectives_are_said() -> None:
    requests = [seen(100.0 + i, slo=0.2 if i < 20 else None) for i in range(30)]
    made = described(live(PAIR, requests=requests))
    said = "\n".join(made.problems)
    assert "that of 20 of 30 requests stands for all" in said
    assert "its bandwidth is a guess" in said and "its size is a guess" in said and "share nothing" in said


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"workload": {"file": "../secret.jsonl"}}, "workload.file: .* beside the configuration"),
        ({"workload": {"file": "/etc/passwd"}}, "workload.file"),
        ({"scaling": {"start": "/etc/passwd"}}, "scaling.start"),
    ],
)
def test_a_page_s_file_reads_no_other_files(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    made = described(live(PAIR))
    made.write(tmp_path)
    (tmp_path / BASE).write_text(yaml.safe_dump({**yaml.safe_load(made.text), **change}))
    with pytest.raises(WhatIfError, match=problem):
        read(tmp_path / BASE, files_here=True)
    base = yaml.safe_load(made.text)
    base["cluster"]["engines"][0]["profile"] = "/etc/passwd.yaml"
    (tmp_path / BASE).write_text(yaml.safe_dump(base))
    with pytest.raises(WhatIfError, match="profile"):
        read(tmp_path / BASE, files_here=True)


def test_aliases_are_refused_in_a_page_s_file(tmp_path: Path) -> None:
    (tmp_path / BASE).write_text("a: &x [1]\nb: *x\n")
    with pytest.raises(WhatIfError, match="aliases"):
        read(tmp_path / BASE, files_here=True)


def test_an_impossible_timing_is_refused(tmp_path: Path) -> None:
    base = yaml.safe_load(described(live(PAIR)).text)
    base["cluster"]["engines"][0]["profile"] |= {"decode_base_s": 0, "decode_per_seq_s": 0}
    (tmp_path / "x.yaml").write_text(json.dumps(base))
    with pytest.raises(WhatIfError, match="a decode step must take time"):
        read(tmp_path / "x.yaml")
