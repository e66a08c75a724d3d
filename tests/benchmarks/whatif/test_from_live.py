"""A what-if file made of a running application's facts: requests from events, fleet, network, trust."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.whatif.build import sim_config, workload
from benchmarks.whatif.changes import variants_of
from benchmarks.whatif.config import WhatIfError, read
from benchmarks.whatif.from_live import (
    BASE,
    FromLiveError,
    Live,
    Seen,
    described,
    kind_of,
    measured,
    requests_of,
    scaled,
    trust,
)
from policies.engine_model.timing import CPU_SMOLLM2
from policies.request.ended import RequestEnd
from policies.request.terms import Terms
from policies.scaling.timing_fit import Fit, Totals
from policies.state import events as ev
from policies.state.views import Request


def arrived(attempt_id: str, at_s: float, prompt: int = 100, **keys: Any) -> ev.Arrived:
    terms = Terms(ttft_slo_s=0.2)
    return ev.Arrived(at_s, Request(attempt_id, at_s, prompt, 50, terms=terms, **keys))


def closed(
    attempt_id: str, at_s: float, outcome: Any = "finished", tokens: int = 11, told: bool = True
) -> ev.Closed:
    end = RequestEnd(outcome, "standard", 0.1, 0.01, tokens) if told else None
    return ev.Closed(at_s, attempt_id, outcome, tokens, end)


def test_requests_are_read_from_events() -> None:
    events = [
        arrived("a-1", 10.0),
        arrived("b-1", 11.0, slots=2),
        # a goes on in another attempt, and ends with it
        closed("a-1", 12.0, "failed", told=False),
        arrived("a-2", 12.0),
        ev.PrefillDone(12.5, "a-2", 40.0, 2_000, 0),
        closed("a-2", 13.0),
        closed("b-1", 14.0),
        closed("unknown-1", 15.0),
        arrived("c-1", 16.0),
        closed("c-1", 17.0, "rejected", 0),
        arrived("d-1", 18.0),
        closed("d-1", 19.0, "cancelled"),
        arrived("open-1", 20.0),
    ]
    found, kv_bytes, left_out = requests_of(events)
    assert [(one.at_s, one.ended_s, one.outcome, one.output_tokens) for one in found] == [
        (10.0, 13.0, "finished", 11),
        # what was refused would have had up to its limit
        (16.0, 17.0, "rejected", 50),
    ]
    assert kv_bytes == (2_000.0, 100.0)
    # two choices, and a client that left
    assert left_out == 2


def test_blocks_of_512_tokens_are_named_by_the_last_small_block_in_them() -> None:
    hashes = tuple(range(1, 69))
    [one], _, _ = requests_of(
        [arrived("a-1", 1.0, 1_100, block_hashes=hashes, block_tokens=16), closed("a-1", 2.0)]
    )
    # 1,100 tokens have two full blocks, of 32 small ones each
    assert one.hash_ids == (32, 64)
    [odd], _, _ = requests_of(
        [arrived("a-1", 1.0, 1_100, block_hashes=hashes, block_tokens=48), closed("a-1", 2.0)]
    )
    assert odd.hash_ids == ()


def seen(at_s: float, ttft_s: float | None = 0.1, outcome: str = "finished", **keys: Any) -> Seen:
    return Seen(at_s, at_s + 1.0, 100, 11, outcome, ttft_s, 0.01, keys.pop("slo", 0.2), None, **keys)


def test_what_was_measured_is_judged_by_one_pair_of_objectives() -> None:
    requests = [seen(float(i)) for i in range(8)] + [seen(8.0, 0.5), seen(9.0, None, "rejected")]
    found = measured(requests, (0.2, None))
    # from the first arrival to the last end there are ten seconds
    assert found["slo_share"] == pytest.approx(0.8)
    assert found["goodput_per_s"] == pytest.approx(0.8)
    assert found["throughput_tok_s"] == pytest.approx(9 * 11 / 10)
    assert found["ttft_mean_s"] == pytest.approx((8 * 0.1 + 0.5) / 9)
    assert found["tpot_p95_s"] == pytest.approx(0.01)
    assert measured(requests, (None, None))["slo_share"] is None


def engine(name: str, role: str, node: str = "n", **keys: Any) -> dict[str, Any]:
    facts = {
        "id": name, "role": role, "kind": "sim", "group": "g", "node": node, "state": "ready", "duty": "active",
        "slots": 32, "kv_blocks": 4_096, "block_size_tokens": 16, "max_model_len": 8_192, "lease_s": 30.0,
        "max_lease_s": 600.0, "dp_ranks": 1, "barrier": False, "totals": {},
    }  # fmt: skip
    return {**facts, **keys}


POLICIES = {
    "prefill": {"name": "join_shortest_queue", "params": {}, "formula": ""},
    "decode": {"name": "round_robin", "params": {}, "formula": ""},
    "dispatch": {"max_queue": 99, "seed": 3},
    "flow": None,
}
NOTHING_KNOWN: dict[str, Any] = {"tiers": {}, "places": {}, "pairs": []}


def live(engines: list[dict[str, Any]], network: dict[str, Any] | None = None, **keys: Any) -> Live:
    # 2 ms a prefill step, 4 ms a decode step, in two reports of different shares
    fit = Fit(CPU_SMOLLM2)
    at = Totals()
    for i in range(1, 40):
        prefills, decodes = 10.0 * (i % 5), 100.0 * (1 + i % 3)
        now = Totals(
            at.busy_s + 0.002 * prefills + 0.004 * decodes,
            at.prefill_steps + prefills,
            at.prefill_tokens,
            at.decode_steps + decodes,
            at.decode_seqs,
            at.decode_kv_tokens,
        )
        fit, at = fit.added(at, now), now
    fits = {kind_of(one): fit for one in engines}
    requests = keys.pop("requests", [seen(100.0 + i) for i in range(30)])
    return Live(engines, network or NOTHING_KNOWN, POLICIES, None, fits, requests, "a test", **keys)


def test_a_prior_has_the_engines_seconds_and_the_known_proportions() -> None:
    p = CPU_SMOLLM2
    # an engine that only prefills, a tenth as long as the known one, and one that only decodes, a fiftieth
    prefills = Totals(0.1 * (30 * p.prefill_base_s + 9_000 * p.prefill_per_token_s), 30, 9_000)
    decodes = Totals(0.02 * (500 * p.decode_base_s + 4_000 * p.decode_per_seq_s), 0, 0, 500, 4_000)
    found = scaled([prefills, decodes])
    assert found.prefill_per_token_s == pytest.approx(0.1 * p.prefill_per_token_s)
    assert found.decode_base_s == pytest.approx(0.02 * p.decode_base_s)
    assert found.decode_per_seq_s == pytest.approx(0.02 * p.decode_per_seq_s)
    # one of them alone leaves the other's seconds as they are known; no engine leaves both
    assert scaled([decodes]).prefill_base_s == p.prefill_base_s
    assert scaled([]).decode_base_s == scaled([Totals()]).decode_base_s == p.decode_base_s


PAIR = [engine("prefill-a", "prefill"), engine("decode-a", "decode"), engine("decode-b", "decode")]


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
    ("found", "simulated", "ok", "text"),
    [
        ({"ttft_mean_s": 1.0}, {"ttft_mean_s": 1.14}, True, "agree within 15%"),
        ({"ttft_mean_s": 1.0}, {"ttft_mean_s": 1.16}, False, "do not trust"),
        ({"ttft_mean_s": 1.0}, {"ttft_mean_s": 0.84}, False, "do not trust"),
        # shares differ by points: 0.05 against 0.01 is five times as much, and four points
        ({"slo_share": 0.01}, {"slo_share": 0.05}, True, "agree"),
        ({"slo_share": 0.5}, {"slo_share": 0.7}, False, "do not trust"),
        ({"ttft_mean_s": 0.0}, {"ttft_mean_s": 0.1}, False, "do not trust"),
        ({"goodput_per_s": 0.0}, {"goodput_per_s": 0.0}, True, "agree"),
        ({"ttft_p95_s": 1.0}, {"ttft_p95_s": 9.0}, False, "nothing was measured"),
        (
            {"ttft_mean_s": 1.0, "tpot_mean_s": None},
            {"ttft_mean_s": 1.0, "tpot_mean_s": 3.0},
            True,
            "1 figures",
        ),
    ],
)
def test_trust(found: Any, simulated: Any, ok: bool, text: str) -> None:
    told = trust(found, simulated)
    assert told["ok"] is ok and text in told["text"]
    assert not math.isnan(len(told["text"]))


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
