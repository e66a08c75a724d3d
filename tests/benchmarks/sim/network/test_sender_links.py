"""The links of sim engines in virtual time: closed forms, worked by hand, and against the live engines' own model."""

import random

import pytest

from actors.engine.sim.links import SharedLink
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.sender_links import SenderLinkNetwork, SenderLinks
from policies.network.oracle import NodePlace

RACKS = {"p0": "r1", "p1": "r1", "near": "r1", "far": "r2", "far2": "r2"}
PLACES = {node: NodePlace(rack) for node, rack in RACKS.items()}
LINKS = SenderLinks({1: 400.0, 3: 100.0}, {1: 0.5, 3: 1.0}, PLACES)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def network(kernel: Kernel) -> SenderLinkNetwork:
    return LINKS.build(kernel, 0)[0]


def start(
    network: SenderLinkNetwork, kernel: Kernel, ends: dict[str, float], name: str, path: str, n_bytes: int
) -> object:
    source, target = path.split(">")

    def done(flow: object) -> None:
        ends[name] = kernel.now_s

    return network.start(source, target, n_bytes, 0, done)


def test_a_lone_transfer_has_its_tier_s_bandwidth_and_latency(
    kernel: Kernel, network: SenderLinkNetwork
) -> None:
    ends: dict[str, float] = {}
    start(network, kernel, ends, "near", "p0>near", 200)  # 200 / 400 + 0.5
    start(network, kernel, ends, "far", "p0>far", 200)  # 200 / 100 + 1.0
    start(network, kernel, ends, "other", "p1>far", 200)  # another sender's link
    kernel.run()
    assert ends == pytest.approx({"near": 1.0, "far": 3.0, "other": 3.0})
    assert [network.tier("p0", node) for node in ("near", "far")] == [1, 3]


def test_transfers_of_one_sender_into_a_tier_share_its_link(
    kernel: Kernel, network: SenderLinkNetwork
) -> None:
    """a alone for 1 s (100 of 200 bytes), then half each: a's last 100 take 2 s; b has 150 then, alone for 0.5 s."""
    ends: dict[str, float] = {}
    start(network, kernel, ends, "a", "p0>far", 200)
    kernel.after(1.0, lambda: start(network, kernel, ends, "b", "p0>far2", 150))
    kernel.run()
    assert ends == pytest.approx({"a": 3.0 + 1.0, "b": 3.5 + 1.0})


def test_a_cancelled_transfer_leaves_its_share_to_the_others(
    kernel: Kernel, network: SenderLinkNetwork
) -> None:
    ends: dict[str, float] = {}
    flow = start(network, kernel, ends, "a", "p0>far", 500)
    start(network, kernel, ends, "b", "p0>far", 200)
    kernel.after(2.0, lambda: network.cancel(flow))  # type: ignore[arg-type]  # b has 100 left, and the link
    kernel.run()
    assert ends == pytest.approx({"b": 3.0 + 1.0})


def test_one_cancelled_after_its_last_byte_does_not_arrive(
    kernel: Kernel, network: SenderLinkNetwork
) -> None:
    ends: dict[str, float] = {}
    flow = start(network, kernel, ends, "a", "p0>far", 100)
    kernel.after(1.5, lambda: network.cancel(flow))  # type: ignore[arg-type]
    kernel.run()
    assert ends == {}


def test_use_is_the_share_of_time_in_which_a_link_carries(kernel: Kernel, network: SenderLinkNetwork) -> None:
    ends: dict[str, float] = {}
    network.mark()
    start(network, kernel, ends, "a", "p0>far", 100)
    kernel.run(4.0)
    kernel.at(4.0, lambda: None)
    kernel.run()
    assert network.link_use() == pytest.approx({"tier 3": 0.25})


def test_they_are_the_live_sim_engines_links(kernel: Kernel, network: SenderLinkNetwork) -> None:
    """Equal transfers through `actors.engine.sim.links.SharedLink`."""
    rng, ends, link = random.Random(1), dict[str, float](), SharedLink(100.0)
    begun = sorted((rng.uniform(0.0, 20.0), str(i), rng.randint(1, 300)) for i in range(60))
    expected: dict[str, float] = {}

    def until(now_s: float) -> None:
        while (end_s := link.next_end_s()) is not None and end_s <= now_s:
            key, at_s = link.end_next()
            expected[key] = at_s + 1.0

    for at_s, name, n_bytes in begun:
        kernel.at(at_s, lambda n=name, b=n_bytes: start(network, kernel, ends, n, "p0>far", b))  # type: ignore[misc]
        until(at_s)
        link.begin(name, n_bytes, at_s)
    until(1e9)
    kernel.run()
    assert ends == pytest.approx(expected)


def test_tiers_need_both_figures() -> None:
    with pytest.raises(ValueError, match="latency for each"):
        SenderLinks({1: 1.0, 3: 1.0}, {1: 0.0}, {})
