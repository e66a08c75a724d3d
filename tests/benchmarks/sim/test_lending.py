"""Lent prefixes in the simulation. The cluster, its requests and its numbers are in `lending_cluster`."""

import dataclasses
from functools import partial

import pytest

from benchmarks.sim.cluster import Cluster, simulate
from benchmarks.sim.config import EngineSpec, FlowSetup, LayerPlan, Permits
from benchmarks.sim.network.clusters import netkv_cluster
from benchmarks.sim.network.fabric import Fabric
from policies.dispatch.actions import RoutePrefill
from policies.flow.base import Flow
from policies.flow.base import Stage as FlowStage
from policies.journal.lines import parse_action
from policies.journal.replay import replay
from policies.request import events as life_events
from policies.state.views import Role
from tests.benchmarks.sim.lending_cluster import DECODE, PREFILL, PROFILE, WORK, at_rest, config, run

# d's prompt: 1,650 tokens, of which 50 are its own
WHOLE_S, REST_S = 1.66, 0.06
# the prefix is a hit at p-0, so its prefill computes one token; then 1.6 MB move
LEND_S, MOVE_S = 0.011, 0.16


def fails(engine: str, code: str = "engine_dead") -> object:
    def what(cluster: Cluster) -> None:
        cluster.ingress.engine_fails(cluster.workers[engine], code)

    return what


def test_a_prefix_is_lent_read_and_only_the_rest_computed() -> None:
    lines: list[str] = []
    cluster, d, result = run(config(), journal=lines.append)
    assert d.prefill_worker == "p-1"
    assert d.prefill_started_s == pytest.approx(20 + LEND_S + MOVE_S)
    assert d.prefill_done_s == pytest.approx(20 + LEND_S + MOVE_S + REST_S)
    assert (d.prefill_hit_tokens, d.lent_tokens) == (1600, 1600)
    totals = {
        name: result.peaks[name] for name in ("loans", "prefixes_read", "prefixes_failed", "prefix_bytes")
    }
    assert totals == {"loans": 1, "prefixes_read": 1, "prefixes_failed": 0, "prefix_bytes": 1_600_000}
    # three whole prompts, d's rest, and the lender's one token
    assert result.peaks["prefill_tokens"] == 3 * 1616 + 50 + 1
    assert at_rest(cluster)
    # what was read is in p-1's cache, and the router knows it
    assert cluster.workers["p-1"].pool.hits(tuple(range(1000, 1100))) == 100
    steps = list(replay("".join(lines).splitlines()))
    assert steps and all(step.equal for step in steps)
    assert any('"fetch":true' in line.replace(" ", "") for line in lines)


def test_a_whole_prompt_that_is_cached_elsewhere_is_lent_but_for_its_last_block() -> None:
    """d asks what a asked, 1,616 tokens in 101 blocks: the lender computes no token more than the prompt has."""
    work = [*WORK[:3], dataclasses.replace(WORK[0], request_id="d", at_s=20.0)]
    cluster, d, result = run(config(), work=work)
    assert (d.prefill_worker, d.lent_tokens, d.prefill_hit_tokens) == ("p-1", 1600, 1600)
    # p-0 computes the 16 tokens behind the last full block of a head, as it does for any prompt
    assert result.peaks["prefill_tokens"] == 3 * 1616 + 16 + 16
    assert at_rest(cluster)


def test_without_lending_all_of_it_is_computed() -> None:
    cluster, d, result = run(config(lend=False))
    assert d.prefill_done_s == pytest.approx(20 + WHOLE_S)
    assert (d.prefill_hit_tokens, d.lent_tokens, result.peaks["loans"]) == (0, 0, 0)
    assert result.peaks["prefill_tokens"] == 3 * 1616 + 1650
    assert at_rest(cluster)


@pytest.mark.parametrize("code", ["engine_dead", "draining", "bad_request"])
def test_a_lender_that_fails_or_refuses_leads_to_computing_in_the_same_attempt(code: str) -> None:
    cluster, d, result = run(config(), (20.005, fails("p-0", code)))  # type: ignore[arg-type]
    assert d.prefill_done_s == pytest.approx(20.005 + WHOLE_S)
    assert (d.prefill_worker, d.lent_tokens, d.rejected) == ("p-1", 0, None)
    assert (result.peaks["retries"], result.peaks["prefixes_failed"]) == (0, 0)
    assert at_rest(cluster)


def test_a_lender_that_fails_while_its_prefix_is_read_leads_to_computing_in_the_same_attempt() -> None:
    cluster, d, result = run(config(), (20.1, fails("p-0")))  # type: ignore[arg-type]
    assert d.prefill_done_s == pytest.approx(20.1 + WHOLE_S)
    assert (d.prefill_worker, d.lent_tokens, d.prefill_hit_tokens) == ("p-1", 0, 0)
    assert (result.peaks["retries"], result.peaks["prefixes_failed"]) == (0, 1)
    assert at_rest(cluster)


def test_a_lender_that_takes_too_long_is_left() -> None:
    """The decode engine has the prefix too, and is asked, but takes 5 s for a prompt, which nobody knows."""
    slow = dataclasses.replace(PROFILE, prefill_base_s=5.0)
    decode = dataclasses.replace(DECODE, prefix_cache=True, profile=slow)
    cluster, d, result = run(config(engines=(PREFILL, decode)))
    # 1,600 of 1,616 + 128 tokens in 1.626 s, less the move
    patience_s = 1600 * 1.626 / 1744 - MOVE_S
    assert d.prefill_started_s == pytest.approx(20 + patience_s)
    assert d.prefill_done_s == pytest.approx(20 + patience_s + WHOLE_S)
    assert (result.peaks["loans"], result.peaks["prefixes_read"], result.peaks["retries"]) == (1, 0, 0)
    assert at_rest(cluster)


def test_a_borrower_that_can_never_hold_the_prompt_says_so_when_the_loan_is_left() -> None:
    def shrinks(cluster: Cluster) -> None:
        cluster.workers["p-1"].pool.total = 50

    slow = dataclasses.replace(PROFILE, prefill_base_s=5.0)
    decode = dataclasses.replace(DECODE, prefix_cache=True, profile=slow)
    _, d, result = run(config(engines=(PREFILL, decode)), (20.5, shrinks))
    assert (d.rejected, result.peaks["loans"], result.peaks["retries"]) == ("invalid_value", 1, 0)


@pytest.mark.parametrize("at_s", [20.005, 20.1, 20.2])
def test_a_request_that_leaves_gives_the_loan_back(at_s: float) -> None:
    def leaves(cluster: Cluster) -> None:
        request = cluster.ingress.live["d"]
        cluster.ingress.happens(request, life_events.Cancel())
        # simulated clients stay, so the run has to be told
        cluster.ended(request)

    cluster, d, _ = run(config(), (at_s, leaves))
    assert d.finished_s is None
    assert at_rest(cluster)
    # a read that has begun ends, and what it brought stays
    read = at_s > 20.1 - 1e-9
    assert cluster.workers["p-1"].pool.hits(tuple(range(1000, 1100))) == (100 if read else 0)


def test_a_borrower_that_fails_gives_the_loan_back_and_the_next_attempt_borrows_nothing() -> None:
    cluster, d, result = run(config(), (20.1, fails("p-1")))  # type: ignore[arg-type]
    assert d.finished_s is not None and result.peaks["retries"] == 1
    # the next attempt goes to p-0, which has the prefix
    assert (d.prefill_worker, result.peaks["loans"]) == ("p-0", 1)
    assert at_rest(cluster)


def test_a_lender_is_not_asked_for_what_it_could_not_hold_and_the_prompt_is_computed() -> None:
    """p-0 had the prefix, and has only 50 blocks by now, too few to compute it."""

    def shrinks(cluster: Cluster) -> None:
        cluster.workers["p-0"].pool.total = 50

    _, d, result = run(config(), (19.9, shrinks))
    assert d.prefill_done_s == pytest.approx(20 + WHOLE_S)
    assert (result.peaks["loans"], result.peaks["prefixes_read"], d.rejected) == (1, 0, None)


def test_a_scheduled_prefix_is_a_flow_of_stage_1() -> None:
    nodes = tuple(netkv_cluster(64).nodes)
    placed = [
        dataclasses.replace(PREFILL, nodes=nodes[:2]),
        dataclasses.replace(DECODE, nodes=nodes[2:3]),
    ]
    scheduled = config(engines=tuple(placed), network=Fabric(netkv_cluster(64)), flows=FlowSetup(reuse=False))
    cluster, d, result = run(scheduled)
    assert d.lent_tokens == 1600 and result.flows is not None
    stage = result.flows.stages[FlowStage.REUSE]
    assert (stage.flows, stage.bytes) == (1, 1_600_000)
    assert at_rest(cluster)


@pytest.mark.parametrize("permits", [None, Permits()], ids=["ideal", "permits"])
@pytest.mark.parametrize(("due_s", "loans"), [(100.0, 0), (None, 1)], ids=["more urgent", "less urgent"])
def test_a_prefix_is_not_lent_where_urgent_bytes_go_before_it(
    due_s: float | None, loans: int, permits: Permits | None
) -> None:
    """At 18 s KV begins to come to p-1's node for which one of its two NICs needs 40 s. With a deadline 100 s later it
    is in P_1 of MFS, and d's prompt is computed; without one it waits behind any reuse, and d's prefix is lent.
    """
    topology = netkv_cluster(64)
    nodes = tuple(topology.nodes)
    placed = (
        dataclasses.replace(PREFILL, nodes=nodes[:2]),
        dataclasses.replace(DECODE, nodes=nodes[2:3]),
    )
    size = round(40 * topology.class_bytes_per_s["nic"])

    def comes(cluster: Cluster) -> None:
        assert cluster._flows is not None
        flow = Flow(
            flow_id="other",
            request_id="other",
            batch="other",
            stage=FlowStage.P2D,
            source=nodes[3],
            target=nodes[1],
            size=size,
            due_s=due_s,
        )
        cluster._flows.driver.send(flow, lambda: None)

    lines: list[str] = []
    flows = FlowSetup(reuse=False, permits=permits)
    setup = config(engines=placed, network=Fabric(topology), flows=flows)
    _, d, result = run(setup, (18.0, comes), journal=lines.append)
    assert (result.peaks["loans"], d.lent_tokens) == (loans, 1600 * loans)
    steps = list(replay("".join(lines).splitlines()))
    assert steps and all(step.equal for step in steps)
    begin = '{"action":"RoutePrefill","attempt_id":"d",'
    (line,) = [line for step in steps for line in step.recorded if line.startswith(begin)]
    routed = parse_action(line)
    assert isinstance(routed, RoutePrefill) and routed.prefix is not None
    # 38 s by one NIC, or 19 s by both; with permits it is the one that has been learned
    ahead_s = routed.prefix.terms["ahead_s"]
    assert ahead_s > 15 if due_s else ahead_s == 0


def test_engines_with_layers_lend_nothing() -> None:
    layered = EngineSpec("p", Role.PREFILL, 2, PROFILE, block_size_tokens=16, layers=LayerPlan(2))
    with pytest.raises(ValueError, match="lend no prefixes"):
        config(engines=(layered, DECODE))


def test_a_run_with_loans_is_the_same_twice() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        simulate(config(), WORK, journal=partial(list.append, log))
    assert "".join(logs[0]) == "".join(logs[1])
