"""The learned bandwidth B(1-rho) of a port: it converges, divides own concurrency out, and never exceeds the port."""

import random

import pytest

from policies.flow.arbiter import Arbiter
from policies.flow.base import Port, Side, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.events import Bandwidth, Done, Submitted
from policies.flow.registry import flow_policy
from tests.policies.flow.link import Link, flow

TRUE = 5e7
"""400 Mbit/s, in bytes/s."""


def link(window: int, assumed: float, whole: bool = False) -> Link:
    config = ArbiterConfig(
        window=window, port_bytes_per_s=assumed, whole_read_when_alone=whole, least_chunk_bytes=1000
    )
    return Link(Arbiter(flow_policy("fair"), config), bytes_per_s=TRUE)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("assumed", [1e6, 1.25e9])
def test_it_converges_to_the_port_whatever_was_assumed_and_posted_at_once(
    window: int, assumed: float
) -> None:
    made = link(window, assumed)
    rng = random.Random(1)
    for number in range(40):
        made.submit(flow(f"f{number}", rng.randint(1_000_000, 20_000_000)), at_s=number * 0.1)
    made.run(until_s=3.0)
    learned = made.arbiter.ports.rate("a", "b")
    assert learned == pytest.approx(TRUE, rel=0.05)
    assert learned <= TRUE * (1 + 1e-9)


def test_it_never_exceeds_the_port_on_the_way_there() -> None:
    made = link(3, 1e6)
    for number in range(10):
        made.submit(flow(f"f{number}", 3_000_000 + number), at_s=number * 0.01)
    port = made.arbiter.ports.at(Port("a", Side.EGRESS))
    for step in range(1, 100):
        made.run(until_s=step * 0.01)
        assert (port.learned() or 0.0) <= TRUE * (1 + 1e-9)


def test_it_follows_a_port_that_becomes_slower() -> None:
    made = link(2, TRUE)
    for number in range(4):
        made.submit(flow(f"f{number}", 40_000_000))
    made.run(until_s=1.0)
    made.bytes_per_s = TRUE / 4  # others use three quarters of it
    made.run(until_s=3.0)
    assert made.arbiter.ports.rate("a", "b") == pytest.approx(TRUE / 4, rel=0.05)


def test_a_late_report_does_not_make_a_port_look_faster() -> None:
    made = Arbiter(flow_policy("fair"), ArbiterConfig(port_bytes_per_s=TRUE, whole_read_when_alone=False))
    now_s = 0.0
    made.apply(Submitted(flow("x", 100_000_000)), now_s)
    # two chunks of 10 ms are on their way; both reports are read after 20 ms
    for _ in range(20):
        now_s += 0.02
        made.apply(Done("x", 500_000, 0.01), now_s)
        made.apply(Done("x", 500_000, 0.02), now_s)
    assert made.ports.rate("a", "b") <= TRUE * (1 + 1e-9)


def test_a_chunk_alone_counts_without_the_delay_of_its_permit() -> None:
    made = Arbiter(
        flow_policy("fair"), ArbiterConfig(window=1, port_bytes_per_s=TRUE, whole_read_when_alone=False)
    )
    now_s = 0.0
    size = made.apply(Submitted(flow("x", 100_000_000)), now_s)[0].size
    for _ in range(40):
        seconds = size / (TRUE / 2)
        now_s += seconds + 0.005  # 5 ms from permit to posting
        size = made.apply(Done("x", size, seconds), now_s)[0].size
    assert made.ports.rate("a", "b") == pytest.approx(TRUE / 2, rel=0.05)


def test_a_named_bandwidth_bounds_what_is_learned() -> None:
    made = link(2, 1e6)
    made.tell(Bandwidth(Port("a", Side.EGRESS), TRUE / 10))
    for number in range(4):
        made.submit(flow(f"f{number}", 4_000_000))
    made.run()
    assert made.arbiter.ports.rate("a", "b") <= TRUE / 10


@pytest.mark.parametrize("pairs", [3, 200])
def test_the_first_flow_that_suits_is_found_among_few_and_many_pairs(pairs: int) -> None:
    rng = random.Random(pairs)
    made = Arbiter(flow_policy("sjf"), ArbiterConfig(window=1, least_chunk_bytes=1))
    sizes: dict[str, int] = {}
    for number in range(400):
        name = f"f{number}"
        sizes[name] = rng.randint(1, 10**6)
        made.apply(Submitted(flow(name, sizes[name], target=f"t{rng.randrange(pairs)}")), 0.0)
    port = made.ports.at(Port("a", Side.EGRESS))
    waiting = {name: sizes[name] for name in made.flow_ids() if not made.view(name, 0.0).posted}
    for least in (1, 10_000, 500_000):
        heads = [pair.head for pair in port.pairs.values() if pair.head is not None]
        suiting = [head for head in heads if head.flow.size >= least]
        expected = min(suiting, key=lambda state: state.rank, default=None)
        assert port.first_with(lambda state, least=least: state.flow.size >= least) is expected  # type: ignore[misc]
    assert port.first_with(lambda state: False) is None
    first = port.first()
    assert first is not None
    assert first.flow.size == min(waiting.values())


def test_heaps_keep_no_more_than_a_bounded_share_of_void_entries() -> None:
    made = Arbiter(
        flow_policy("mfs"), ArbiterConfig(window=1, port_bytes_per_s=TRUE, whole_read_when_alone=False)
    )
    posted = made.apply(Submitted(flow("x", 10**12, due_s=1e6)), 0.0)
    for number in range(20):
        made.apply(Submitted(flow(f"y{number}", 10**12, stage=Stage.REUSE, rli=3)), 0.0)
    for step in range(1, 3000):
        [permit] = posted
        posted = made.apply(Done(permit.flow_id, permit.size, 0.01), step * 0.01)
    port = made.ports.at(Port("a", Side.EGRESS))
    entries = [len(port._heads), *(len(pair._heap) for pair in port.pairs.values())]
    assert max(entries) <= 4 * 21 + 64 + 1
