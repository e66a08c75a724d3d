"""`sluice simulate`: what is refused, what a variant changes, and an answer that can be worked out."""

import argparse
import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.whatif import build, table
from benchmarks.whatif.build import run_one
from benchmarks.whatif.changes import changed, variants_of
from benchmarks.whatif.cli import EXAMPLES, command, example
from benchmarks.whatif.config import Base, Variant, WhatIfError, read, validated
from benchmarks.whatif.live.describe import Described
from predictors.memorise import Memorised
from predictors.oracle import Oracle
from predictors.survival import EmpiricalSurvival

PROFILE = "netkv_llama3_70b_tp4_h100"
TOPOLOGY = {
    "pods": 2,
    "racks_per_pod": 1,
    "nodes_per_rack": 2,
    "gpus_per_node": 4,
    "nics_per_node": 2,
    "nvlink_gbyte_per_s": 450,
    "nic_gbit_per_s": 100,
    "rack_oversubscription": 2,
    "core_link_gbit_per_s": 40,
}


def raw(**changes) -> dict:
    made = {
        "cluster": {
            "engines": [
                {"name": "prefill", "role": "prefill", "count": 1, "profile": PROFILE, "gpus": 2},
                {"name": "decode", "role": "decode", "count": 2, "profile": PROFILE, "gpus": 2},
            ]
        },
        "network": {"topology": dict(TOPOLOGY)},
        "policies": {"decode": {"name": "round_robin"}},
        "workload": {"name": "synthetic-chat", "requests": 60, "rate_per_s": 2.0},
        "run": {"seeds": 2},
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        node = made
        for part in way:
            node = node[int(part)] if part.isdigit() else node[part]
        node[last] = value
    return made


def written(folder: Path, content: dict) -> Path:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def base(**changes) -> Base:
    return validated(Base, raw(**changes), "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": {}}, "clusters: no such key"),
        ({"cluster__engines__0__slot": 3}, "cluster.engines.0.slot: no such key"),
        (
            {"cluster__engines__1__count": 0},
            "cluster.engines.1.count: Input should be greater than or equal to 1",
        ),
        ({"cluster__engines__1__role": "both"}, "cluster.engines.1.role: "),
        ({"cluster__engines__1__name": "prefill"}, "share a name"),
        ({"cluster__engines__0__profile": "h200"}, "engines.prefill.profile: .*shipped are"),
        ({"network__topology__pods": 0}, "network.topology.pods: "),
        (
            {"network__topology__pod_oversubscription": 2},
            "network.topology: give either pod_oversubscription",
        ),
        ({"network__core_bandwidth_scale": 0}, "network.core_bandwidth_scale: "),
        ({"network__background": 1.0}, "network.background: "),
        ({"policies__decode": {"name": "netkv2"}}, "policies: decode: decode policy 'netkv2' is not known"),
        ({"policies__decode": {"name": "netkv", "params": {"w": 1}}}, "has no parameter 'w'"),
        ({"policies__dispatch": {"max_queu": 1}}, "policies.dispatch: no option 'max_queu'"),
        ({"policies__dispatch": {"max_queue": 0}}, "policies.dispatch: .*max_queue is 0: it must be"),
        ({"policies__predictor": "magic"}, "policies.predictor: "),
        ({"workload__name": "toolagent"}, "workload: no workload is called 'toolagent'"),
        ({"workload__compression": 2.0}, "compression or rate_per_s, not both"),
        ({"workload__rate_per_s": float("nan")}, "workload.rate_per_s: "),
        ({"run__seeds": 0}, "run.seeds: "),
        ({"what_if": [{"name": "base"}]}, "two variants share a name"),
        ({"what_if": [{"name": "a", "sets": {}}]}, "what_if.0.sets: no such key"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_path(tmp_path, changes, message):
    with pytest.raises(WhatIfError, match=message):
        read(written(tmp_path, raw(**changes)))


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00"])
def test_what_is_no_mapping_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(WhatIfError, match=r"c\.yaml: "):
        read(tmp_path / "c.yaml")
    with pytest.raises(WhatIfError, match="No such file"):
        read(tmp_path / "none.yaml")


def test_several_wrong_keys_are_all_named(tmp_path):
    with pytest.raises(WhatIfError) as caught:
        read(written(tmp_path, raw(run__seeds=0, network__background=2.0)))
    assert str(caught.value).count("c.yaml: ") == 2


def test_changes_set_add_and_multiply():
    whole = base().model_dump()
    variant = Variant(
        name="v",
        set={"policies.decode.name": "netkv", "policies.dispatch.max_queue": 9},
        add={"cluster.engines.decode.count": 2},
        scale={"network.core_bandwidth_scale": 0.5, "workload.rate_per_s": 3},
    )
    made = validated(Base, changed(whole, variant), "v")
    assert made.policies.decode.name == "netkv"
    assert made.policies.dispatch == {"max_queue": 9}
    assert [e.count for e in made.cluster.engines] == [1, 4]
    assert made.network.core_bandwidth_scale == 0.5
    assert made.workload.rate_per_s == 6.0
    assert whole == base().model_dump()  # the base stays as it was


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"set": {"policies.decod.name": "netkv"}}, "policies.decod: no such key; there are prefill, decode"),
        (
            {"set": {"policies.decode.nam": "netkv"}},
            "policies.decode.nam: no such key; there are name, params",
        ),
        (
            {"add": {"cluster.engines.decoders.count": 1}},
            "engines.decoders: no such key; there are prefill, decode",
        ),
        (
            {"add": {"policies.decode.name": 1}},
            "policies.decode.name is 'round_robin' in the base, not a number",
        ),
        ({"scale": {"workload.end_s": 2}}, "workload.end_s is None in the base, not a number"),
        ({"set": {"workload.sharing.p_share": 0.5}}, "workload.sharing has no value in the base"),
        ({"set": {"policies.decode.name": "nothing"}}, "what_if 'v': policies: decode: .*not known"),
        ({"scale": {"cluster.engines.decode.count": 0.3}}, "what_if 'v': cluster.engines.1.count: "),
        ({"add": {"cluster.engines.decode.count": -2}}, "what_if 'v': cluster.engines.1.count: "),
    ],
)
def test_an_impossible_change_names_variant_and_path(tmp_path, variant, message):
    question = read(written(tmp_path, raw(what_if=[{"name": "v", **variant}])))
    with pytest.raises(WhatIfError, match=message):
        variants_of(question)


def test_engines_are_placed_node_by_node_with_their_nics():
    made = build.sim_config(base(), seed=0)
    prefill, decode = made.engines
    # nodes of four GPUs and two NICs, engines of two: two on a node, each with a NIC of its own
    assert (prefill.nodes, prefill.nics) == (("node0",), (0,))
    assert (decode.nodes, decode.nics) == (("node0", "node1"), (1, 0))


def test_nodes_may_be_named_and_full_ones_are_refused():
    named = base(cluster__engines__1__nodes=["node3", "node3"])
    assert build.sim_config(named, 0).engines[1].nics == (0, 1)
    for changes, message in (
        ({"cluster__engines__1__nodes": ["node3"]}, "1 nodes for 2 engines"),
        ({"cluster__engines__1__nodes": ["node0", "node0"]}, "no room for engine 1 of 2 GPUs on node0"),
        ({"cluster__engines__1__count": 8}, "no room for engine 7"),
        ({"cluster__engines__1__nodes": ["node3", "node9"]}, "node9"),
    ):
        with pytest.raises(ValueError, match=message):
            build.sim_config(base(**changes), 0)


def test_a_scale_halves_what_a_level_carries():
    half = {"network__core_bandwidth_scale": 0.5, "network__rack_bandwidth_scale": 0.5}
    plain, halved = (build.sim_config(base(**c), 0).network.topology for c in ({}, half))
    for level in ("rack", "core"):
        assert halved.class_bytes_per_s[level] == plain.class_bytes_per_s[level] / 2
    assert halved.class_bytes_per_s["nic"] == plain.class_bytes_per_s["nic"]


@pytest.mark.parametrize(
    ("kind", "expected"), [("oracle", Oracle), ("survival", EmpiricalSurvival), ("exact_match", Memorised)]
)
def test_predictors_are_made_fresh_for_each_run(kind, expected):
    wanted = build.sim_config(base(policies__predictor=kind, network=None), 0).forecasts
    one, two = wanted.source({}), wanted.source({})
    assert isinstance(one, expected) and one is not two
    assert build.sim_config(base(), 0).forecasts is None


def test_half_the_core_bandwidth_doubles_a_transfer_across_it():
    """Prompts of 1,024 tokens are 320 KiB x 1,024 = 335.5 MB: 67 ms over a core link of 40 Gbit/s, 134 ms over half."""
    far = {
        "cluster__engines__1__count": 1,
        "cluster__engines__1__nodes": ["node3"],
        "workload": {"name": "synthetic-chat", "requests": 6, "prompt_tokens": 1_024, "rate_per_s": 0.2},
    }
    plain = run_one(base(**far).model_dump(mode="json"), 0)
    halved = run_one(base(**far, network__core_bandwidth_scale=0.5).model_dump(mode="json"), 0)
    assert plain["transfer_mean_s"] == pytest.approx(0.0671, rel=0.01)
    assert halved["transfer_mean_s"] == pytest.approx(2 * plain["transfer_mean_s"], rel=0.01)
    assert plain["requests"] == plain["finished"] == 6
    assert plain == run_one(base(**far).model_dump(mode="json"), 0)


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(given)


def test_the_command_answers_side_by_side(tmp_path, capsys):
    question = raw(
        network=None,
        workload={"name": "synthetic-chat", "requests": 40, "rate_per_s": 2.0, "ttft_slo_s": 1.0},
        what_if=[{"name": "twice the load", "scale": {"workload.rate_per_s": 2}}],
    )
    path, answer, page = written(tmp_path, question), tmp_path / "a.json", tmp_path / "a.html"
    assert command.run(arguments(str(path), "--jobs", "1", "--json", str(answer), "--html", str(page))) == 0
    printed = capsys.readouterr()
    assert "2 variants of 40 requests, 2 seeds" in printed.err
    header, *lines = printed.out.splitlines()
    assert header.split("  ")[-1].strip() == "twice the load"
    assert any(line.startswith("TTFT mean, ms") and "%" in line for line in lines)
    assert (
        lines[-1].startswith("This base was not compared with a measurement")
        and lines[-1] in page.read_text()
    )
    whole = json.loads(answer.read_text())
    assert set(whole["variants"]) == {"base", "twice the load"}
    assert whole["variants"]["twice the load"]["config"]["workload"]["rate_per_s"] == 4.0
    assert set(whole["variants"]["base"]["runs"]) == {"0", "1"}
    means = [r["ttft_mean_s"] for r in whole["variants"]["base"]["runs"].values()]
    assert whole["comparison"]["ttft_mean_s"]["base"]["value"] == pytest.approx(sum(means) / 2)
    assert {"commit", "command", "date"} <= set(whole)
    assert "twice the load" in page.read_text() and "<table>" in page.read_text()


@pytest.fixture
def from_live(tmp_path) -> Path:
    """A base of four requests that was made from what ran, with what was measured beside it."""
    lines = [
        json.dumps({"timestamp": 500.0 * i, "input_length": 64, "output_length": 8, "hash_ids": []})
        for i in range(4)
    ]
    workload = "".join(line + "\n" for line in lines)
    text = yaml.safe_dump(raw(network=None, workload={"file": "workload.jsonl"}, run={"seeds": 1}))
    return Described(text, workload, {"ttft_mean_s": 1e6}, {}, []).write(tmp_path)


def judged(path: Path, *given: str) -> dict | None:
    answer = path.with_name("a.json")
    assert command.run(arguments(str(path), "--jobs", "1", "--json", str(answer), *given)) == 0
    return json.loads(answer.read_text()).get("trust")


def test_what_was_measured_stands_beside_the_base_that_was_measured(from_live, capsys):
    trust = judged(from_live)
    assert trust is not None and not trust["ok"] and "measured 1e+06" in trust["text"]
    assert "measured" in capsys.readouterr().out.splitlines()[0]
    # variants, comments and seeds leave the base what it is, and so does another name of the file
    variants = [{"name": "v", "set": {"policies.decode.name": "join_shortest_queue"}}]
    more = {**yaml.safe_load(from_live.read_text()), "what_if": variants}
    other = from_live.with_name("question.yaml")
    other.write_text("# a comment\n" + yaml.safe_dump({**more, "run": {"seeds": 2}}))
    assert judged(other) == trust


@pytest.mark.parametrize("what", ["base", "workload", "measured by an older release"])
def test_what_was_measured_of_another_base_judges_nothing(from_live, capsys, what):
    folder = from_live.parent
    if what == "base":
        changed = yaml.safe_load(from_live.read_text())
        changed["cluster"]["engines"][1]["count"] = 3
        from_live.write_text(yaml.safe_dump(changed))
    elif what == "workload":
        workload = (folder / "workload.jsonl").read_text()
        (folder / "workload.jsonl").write_text("".join(workload.splitlines(True)[:3]))
    else:
        (folder / "measured.json").write_text(json.dumps({"measured": {"ttft_mean_s": 1.0}, "facts": {}}))
    assert judged(from_live) is None
    printed = capsys.readouterr()
    assert "is of another base" in printed.err and "measured" not in printed.out.splitlines()[0]


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        (raw(policies__decode={"name": "x"}), [], "decode policy 'x'"),
        (raw(cluster__engines__1__count=40), [], "base: cluster.engines.decode: no room"),
        (raw(workload={"name": "mooncake-conversation"}), [], "set SLUICE_TRACES"),
        (raw(), ["--seeds", "0"], "at least 1"),
    ],
)
def test_the_command_refuses_before_it_runs(tmp_path, capsys, monkeypatch, content, given, message):
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    assert command.run(arguments(str(written(tmp_path, content)), *given)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.yaml")))
def test_shipped_examples_can_be_run(name, monkeypatch):
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    question = read(example(name))
    for variant in variants_of(question).values():
        build.sim_config(variant, 0)
        assert build.workload(variant, 0)


def test_there_are_examples_and_help_names_them():
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert {"small", "fat-tree"} <= {p.stem for p in EXAMPLES.glob("*.yaml")}
    assert "fat-tree, small" in parser.format_help()


def test_a_comparison_by_hand():
    runs = {
        "base": {0: {"ttft_mean_s": 1.0, "rejected": 0.0}, 1: {"ttft_mean_s": 3.0, "rejected": 0.0}},
        "ours": {0: {"ttft_mean_s": 0.5, "rejected": 0.0}, 1: {"ttft_mean_s": 2.5, "rejected": 0.0}},
        "none": {0: {"ttft_mean_s": None}, 1: {"ttft_mean_s": None}},
    }
    assert table.rows(runs) == [["TTFT mean, ms", "2,000", "1,500 (-25.0 %)", "–"]]
    runs["ours"][1]["ttft_mean_s"] = 3.4
    assert table.rows(runs)[0][2] == "1,950 (-2.5 % ?)"
    runs["ours"][1]["rejected"] = 2.0
    assert table.rows(runs)[1][0] == "rejected"


def test_shares_differ_in_points():
    runs = {"base": {0: {"slo_share": 0.8}}, "ours": {0: {"slo_share": 0.9}}}
    assert table.rows(runs) == [["SLO attainment, %", "80.0", "90.0 (+10.0 pts)"]]


SCALING = {
    "policy": "joint",
    "params": {"limits": {"prefill_max": 2, "decode_max": 4, "warm_max": 1, "budget": 5}, "calm_s": 60.0},
    "start": {"process_s": 3.0, "weights_s": 2.0},
    "warm": 1,
}


def test_a_fleet_that_scales_is_simulated_within_its_bounds_and_the_free_gpus() -> None:
    """Four nodes of four GPUs have room for eight engines of two; three of them are the configuration's."""
    made = build.sim_config(validated(Base, raw(scaling=SCALING), "it"), seed=0)
    assert made.scaling is not None
    assert made.scaling.start.total_s == 5.0
    assert len(made.scaling.places) == 5
    found = run_one(raw(scaling=SCALING, workload__rate_per_s=20.0), 0)
    assert found["finished"] == 60.0
    assert found["fleet/engine_s"] is not None and found["fleet/engine_s"] > 3 * (found["measured_s"] or 0.0)
    assert "fleet/engine_s" not in run_one(raw(), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling": {"policy": "magic"}}, "no scaling policy is called 'magic'"),
        ({"scaling": {"start": "lukewarm"}}, "cold"),
        ({"scaling": {"start": {"coffee_s": 1.0}}}, "coffee_s"),
        ({"scaling": {"params": {"limits": {"warm_min": 2}}}}, "warm_min is 2, above warm_max 0"),
        ({"scaling": {"drain_s": 0.0}}, "drain_s"),
        ({"scaling": SCALING, "cluster__engines__0__gpus": 1}, "the same `gpus`"),
        ({"scaling": SCALING, "cluster__engines__0__slots": 7}, "must be alike"),
    ],
)
def test_a_scaling_section_that_cannot_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build.sim_config(validated(Base, raw(**changes), "it"), seed=0)


def test_a_variant_may_add_or_change_the_scaling() -> None:
    added = Variant(name="scaled", set={"scaling": SCALING})
    assert changed(validated(Base, raw(), "it").model_dump(), added)["scaling"]["warm"] == 1
    whole = validated(Base, raw(scaling=SCALING), "it").model_dump()
    made = changed(whole, Variant(name="more", add={"scaling.warm": 1.0}, set={"scaling.params.calm_s": 5.0}))
    assert made["scaling"]["warm"] == 2 and made["scaling"]["params"]["calm_s"] == 5.0
