"""Refusals as poison that count apart: those of bystanders of poison, or of two faults that took two engines of a role
in the life of the request.
"""

import pytest

from benchmarks.chaos.harm import Harm
from benchmarks.chaos.run import bystander
from benchmarks.chaos.schedule import READS, Fault, Kind
from benchmarks.chaos.setups import sim_setup, vllm_setup

REFUSED = "500 request_kills_engines"
SENT_S, FAILED_S = 100.0, 110.0


def harm(action: str, part: str, at_s: float, seconds: float = 0.0, hit: str = "") -> Harm:
    fault = Fault(Kind(action, part), seconds, 0)
    return Harm(fault, f"{part} of {at_s:g} s", at_s, at_s + seconds, hit=hit)


@pytest.mark.parametrize(
    ("harms", "of"),
    [
        ([], None),
        ([harm("kill", "decode", 101.0)], None),
        ([harm("kill", "decode", 101.0), harm("stop", "decode", 104.0, 20.0)], "bystander of two faults"),
        ([harm("kill", "core", 101.0), harm("stall", "decode", 104.0, 20.0)], "bystander of two faults"),
        # one of each role: no request has died twice in a row with the same task
        ([harm("kill", "decode", 101.0), harm("kill", "prefill", 104.0)], None),
        # neither takes an engine away from its requests
        ([harm("slow", "decode", 101.0, 9.0), harm("fail", "decode", 104.0, 9.0)], None),
        ([harm("kill", "router", 101.0), harm("kill", "router", 104.0)], None),
        # who comes to a silent engine is no suspect, and what comes later was no cause
        ([harm("stop", "decode", 99.0, 60.0), harm("kill", "decode", 104.0)], None),
        ([harm("kill", "decode", 101.0), harm("kill", "decode", 111.0)], None),
        ([harm("memory", "prefill", 95.0, 20.0), harm("kill", "prefill", 104.0)], "bystander of two faults"),
        # a lender is an engine of its role
        (
            [harm("kill", "lender", 101.0, hit="decode"), harm("kill", "decode", 104.0)],
            "bystander of two faults",
        ),
        ([harm("kill", "lender", 101.0, hit="decode"), harm("kill", "prefill", 104.0)], None),
        ([harm("poison", "decode", 85.0)], "bystander of poison"),
        ([harm("poison", "decode", 75.0)], None),
    ],
)
def test_a_refusal_as_poison_is_explained_by_poison_or_by_two_faults_on_one_role(
    harms: list[Harm], of: str | None
) -> None:
    assert bystander(REFUSED, harms, SENT_S, FAILED_S) == of
    assert bystander("503 retry_budget", harms, SENT_S, FAILED_S) is None


def test_vllm_engines_whose_reads_are_scheduled_have_an_agent_which_fails_as_well() -> None:
    plain, scheduled = vllm_setup(), vllm_setup(flow=True)
    assert {kind.part for kind in scheduled.kinds} - {kind.part for kind in plain.kinds} == {"agent"}
    assert "agent" not in plain.parts
    assert scheduled.parts["agent"] == 1
    assert [setup.args["flow"]["enabled"] for setup in (plain, scheduled)] == [False, True]


def test_reads_of_sim_engines_are_harmed_whether_or_not_they_are_scheduled() -> None:
    for setup in (sim_setup(), sim_setup(bare=True), sim_setup(flow=True)):
        assert set(READS) <= set(setup.kinds)
    assert not set(READS) & set(vllm_setup(flow=True).kinds)
    # the README says how many faults a round has
    assert [sum(kind.times for kind in made().kinds) for made in (sim_setup, vllm_setup)] == [42, 17]
