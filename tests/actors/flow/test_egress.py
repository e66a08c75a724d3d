"""Ports across nodes: each read takes the source's egress and the target's ingress, from two agents."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.wire.messages import AdvanceFlow
from policies.flow.base import Flow, Port, Side, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.registry import FLOW
from tests.actors.flow.nodes import Net

NAMES = "abcd"
CONFIG = ArbiterConfig(window=2, least_chunk_bytes=100, chunk_s=0.01, port_bytes_per_s=10_000.0)

CHUNKS = dataclasses.replace(CONFIG, whole_read_when_alone=False)


def flow(name: str, source: str, target: str, size: int = 500, due_s: float | None = 1.0) -> Flow:
    return Flow(
        flow_id=name,
        request_id=f"r-{name}",
        batch=f"b-{name}",
        stage=Stage.P2D,
        source=source,
        target=target,
        size=size,
        due_s=due_s,
    )


@st.composite
def reads(draw: st.DrawFn) -> list[tuple[Flow, float]]:
    count = draw(st.integers(1, 25))
    made = []
    for number in range(count):
        source = draw(st.sampled_from(NAMES))
        target = draw(st.sampled_from([name for name in NAMES if name != source]))
        due_s = draw(st.one_of(st.none(), st.floats(0.01, 5.0)))
        size = draw(st.integers(1, 1500))
        made.append((flow(f"f{number}", source, target, size, due_s), draw(st.floats(0.0, 0.3))))
    return made


def net(
    given_reads: list[tuple[Flow, float]],
    seed: int,
    policy: str = "mfs",
    silent_s: float = 1e9,
    config: ArbiterConfig = CONFIG,
) -> Net:
    made = Net(NAMES, seed, config, policy, silent_s=silent_s)
    # agents meet before the first read, as they do where a read of another time has gone before
    for target in NAMES:
        for source in NAMES:
            if source != target:
                assert not made.nodes[target].egresses.gates(source)
    for each, at_s in given_reads:
        made.read(each, 0.1 + at_s)
    return made


@settings(max_examples=30, deadline=None)
@given(reads(), st.integers(0, 2**16), st.sampled_from(sorted(FLOW)), st.sampled_from([0.02, 1e9]))
def test_no_port_of_any_node_has_more_than_its_window_and_every_read_ends(
    given_reads: list[tuple[Flow, float]], seed: int, policy: str, silent_s: float
) -> None:
    made = net(given_reads, seed, policy, silent_s)
    made.run(until_s=20.0)
    assert not made.left, f"{sorted(made.left)} are not over: {made.posted}"
    assert max(made.most.values()) <= CONFIG.window
    made.drain()
    for node in made.nodes.values():
        assert not len(node.desk.arbiter)
        assert not len(node.desk)
        assert {name for name in node.desk.totals if name.startswith("alone")} == set()


def test_many_readers_of_one_sender_share_its_window() -> None:
    made = net([(flow(f"f{n}", "a", "bcd"[n % 3], 2000), 0.0) for n in range(30)], seed=1)
    made.run(until_s=20.0)
    assert not made.left
    assert made.most["a", "out"] == CONFIG.window
    lent = made.nodes["a"].desk.totals
    assert lent["lent_submitted"] >= 30
    assert lent["submitted"] == 0


def test_a_full_ingress_gives_permits_back_so_that_a_third_node_is_served() -> None:
    # b, c and d all send to a, which takes two chunks at a time; b also sends to c, whose ingress is free
    into_a = [(flow(f"a{n}", "bcd"[n % 3], "a", 8_000, due_s=0.5), 0.0) for n in range(12)]
    made = net([*into_a, (flow("free", "b", "c", 2_000, due_s=5.0), 0.2)], seed=3)
    made.run(until_s=1.5)
    assert "free" not in made.left
    assert len(made.left) > 3
    assert made.nodes["a"].desk.totals["returned_permits"] > 0
    made.run(until_s=30.0)
    assert not made.left


def test_lone_senders_to_one_reader_post_chunks_there_and_no_whole_reads() -> None:
    # each of the sources is alone and permits 300 bytes at a time; a's chunks are of 100
    config = dataclasses.replace(CONFIG, learn=False, whole_at_most_s=0.03)
    made = net([(flow(f"f{n}", "bcd"[n], "a", 6_000, due_s=9.0), 0.0) for n in range(3)], 2, config=config)
    made.run(until_s=0.2)
    # the first read may be alone when its permit comes
    made.most_bytes.clear()
    made.run(until_s=0.8)
    assert 100 < made.most_bytes["a", "in"] <= CONFIG.window * 100
    made.run(until_s=20.0)
    assert not made.left


@pytest.mark.parametrize("faults", [0, 3])
def test_a_sources_bandwidth_is_not_learned_from_permits_that_wait_for_a_full_ingress(faults: int) -> None:
    # a reads from three nodes; c sends little, so most of the time its permits are parked at a
    config = dataclasses.replace(CONFIG, whole_read_when_alone=False)
    made = net(
        [(flow(f"f{n}", "bcd"[n % 3], "a", 20_000, due_s=99.0), 0.0) for n in range(9)], 2, config=config
    )
    for number in range(faults):
        made.at(0.5 + number, lambda: made.cut("a", "c"))
    made.run(until_s=8.0)
    assert made.left
    for name in "bcd":
        learned = made.nodes[name].desk.arbiter.ports.at(Port(name, Side.EGRESS)).learned()
        assert learned is not None
        # a chunk takes half to one and a half of its time at 10,000 bytes/s
        assert 6_000 < learned < 20_000


def test_a_source_that_was_given_all_permits_back_is_not_taken_for_silent() -> None:
    # b's one read waits unasked for a long time, while c and d fill the ingress with reads that are due before it
    into_a = [(flow(f"a{n}", "cd"[n % 2], "a", 6_000, due_s=2.0), 0.0) for n in range(8)]
    last = flow("last", "b", "a", 6_000, due_s=200.0)
    made = net([*into_a, (last, 0.0)], seed=3, silent_s=0.02, config=CHUNKS)
    unasked = 0
    for _ in range(40):
        made.run(until_s=made.now_s + 0.05)
        unasked += made.nodes["b"].desk.totals["lent_submitted"] > 0 and not len(made.nodes["b"].desk)
    assert unasked >= 10
    made.run(until_s=60.0)
    assert not made.left
    assert made.nodes["a"].desk.totals["alone_reads_silent"] == 0
    assert max(made.most.values()) <= CHUNKS.window


def test_a_chunk_that_is_short_of_its_permit_leaves_the_rest_to_the_whole_permit_behind_it() -> None:
    # the source permits 165 bytes and 124, all that is left; of 164 and 124 that arrive, 1 is left for another chunk
    made = net([(flow(f"f{n}", "a", "b" if n == 0 else "c", 1294), 0.0) for n in range(4)], seed=6)
    made.run(until_s=20.0)
    assert not made.left


def test_a_read_ends_where_the_connection_is_cut_with_several_chunks_in_flight() -> None:
    made = net([(flow("f", "a", "c", 1294), 0.0)], seed=40)
    made.at(0.15, lambda: made.cut("c", "a"))
    made.run(until_s=20.0)
    assert not made.left


def test_bytes_that_were_permitted_and_never_posted_hold_no_slot_after_a_new_connection() -> None:
    # chunks that are short of their permits are in flight while both connections to the source end
    made = net([(flow(f"f{n}", "a", "cd"[n % 2], 1400), 0.0) for n in range(4)], seed=25)
    made.at(0.15, lambda: made.cut("c", "a"))
    made.at(0.16, lambda: made.cut("d", "a"))
    made.run(until_s=20.0)
    assert not made.left


def test_permits_that_are_given_back_after_their_connection_has_ended() -> None:
    into_a = [(flow(f"a{n}", "bcd"[n % 3], "a", 8_000, due_s=0.5), 0.0) for n in range(12)]
    made = net(into_a, seed=4)
    for number in range(6):
        made.at(0.15 + 0.05 * number, lambda source="bcd"[number % 3]: made.cut("a", source))  # type: ignore[misc]
    made.run(until_s=30.0)
    assert not made.left
    assert made.nodes["a"].desk.totals["returned_permits"] > 0


@settings(max_examples=30, deadline=None)
@given(reads(), st.integers(0, 2**16), st.data())
def test_reads_end_whatever_agents_and_connections_do(
    given_reads: list[tuple[Flow, float]], seed: int, data: st.DataObject
) -> None:
    made = net(given_reads, seed, silent_s=0.02)
    faults = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["restart", "cut", "abort"]), st.sampled_from(NAMES), st.sampled_from(NAMES)
            ),
            max_size=8,
        )
    )
    for number, (kind, one, other) in enumerate(faults):
        at_s = 0.12 + 0.04 * number
        if kind == "restart":
            made.at(at_s, lambda one=one: made.restart(one))  # type: ignore[misc]
        elif kind == "cut":
            made.at(at_s, lambda one=one, other=other: made.cut(one, other))  # type: ignore[misc]
        else:
            made.at(at_s, lambda number=number: made.abort(f"f{number}"))  # type: ignore[misc]
    made.run(until_s=20.0)
    assert not made.left, f"{sorted(made.left)} are not over: {made.posted}"
    made.drain()
    for node in made.nodes.values():
        assert not len(node.desk.arbiter), f"{node.name} keeps {node.desk.arbiter.flow_ids()}"


@pytest.mark.parametrize(("still", "source", "target"), [("a", "b", "c"), ("c", "a", "d")])
def test_a_node_that_stands_still_does_not_stop_reads_between_others(
    still: str, source: str, target: str
) -> None:
    """Reads from a to c come first and do not move, because the lender stands still, or the reader does. The others
    share the ingress of c, or the egress of a, with them.
    """
    stuck = {f"s{n}": flow(f"s{n}", "a", "c", 2_000, due_s=1.0) for n in range(6)}
    others = [flow(f"o{n}", source, target, 2_000, due_s=9.0) for n in range(6)]
    config = dataclasses.replace(CHUNKS, late_s=0.1)
    made = net([(each, 0.001 * n) for n, each in enumerate([*stuck.values(), *others])], 7, config=config)
    made.still.add(still)
    made.run(until_s=10.0)
    assert made.left.keys() == stuck.keys()


@pytest.mark.parametrize("reason", ["silent", "agent_lost", "no_agent"])
def test_a_source_without_a_living_agent_is_read_from_alone(reason: str) -> None:
    # no read is posted whole
    made = net([], seed=5, silent_s=0.02, config=dataclasses.replace(CONFIG, whole_read_when_alone=False))
    made.drain()
    lender, reader = made.nodes["a"], made.nodes["b"]
    if reason == "no_agent":
        lender.runs = False
        made.cut("b", "a")
    made.read(flow("f", "a", "b", 5_000), 0.0)
    made.read(flow("g", "a", "b", 5_000), 0.0)
    made.run(until_s=made.now_s + 0.02)
    if reason != "no_agent":
        assert reader.egresses.gates("a")
    lender.runs = False
    if reason == "agent_lost":
        made.cut("b", "a")
    made.run(until_s=made.now_s + 3.0)
    made.drain()
    assert not made.left
    assert reader.desk.totals[f"alone_reads_{reason}"] == 2
    assert reader.desk.totals["ended"] == 2


def test_a_lower_layer_index_reaches_the_agents_of_both_ends() -> None:
    """Of two reads that wait at node a, the later one is needed sooner after its computation has come nearer."""
    one_slot = dataclasses.replace(CONFIG, window=1)
    reuse = {
        name: dataclasses.replace(flow(name, "a", "b", due_s=None), stage=Stage.REUSE, rli=rli)
        for name, rli in (("now", 0), ("far", 3), ("near", 2))
    }
    made = net([(each, 0.001 * n) for n, each in enumerate(reuse.values())], 0, config=one_slot)
    made.run(0.11)
    assert {"far", "near"} <= made.left.keys()
    made.nodes["b"].from_worker(AdvanceFlow("far", 1))
    made.run(made.now_s + 0.01)
    for name in ("a", "b"):
        arbiter = made.nodes[name].desk.arbiter
        ranks = {key.split("/")[-1].split("#")[0]: arbiter.rank(key) for key in arbiter.flow_ids()}
        assert ranks["far"] < ranks["near"], name
    made.run(60.0)
    assert not made.left
