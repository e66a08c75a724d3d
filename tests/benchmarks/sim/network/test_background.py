"""Other traffic takes its share of a link, also while flows run."""

import random

import pytest

from benchmarks.sim.network.background import Background, OnOff, Piecewise, Static
from benchmarks.sim.network.topology import TopologyError

from .nets import network, noting, rate_bytes_per_s, start_at

GB = 10**9


@pytest.mark.parametrize(
    ("where", "target", "seconds"),
    [
        ("all", "node1", 1 / 0.8),
        ("core", "node4", 4 / 0.8),
        ("core", "node1", 1.0),
        # 0.8 * 5e8 is still more than a core link has
        ("rack", "node4", 4.0),
        ("node0/nic0/up", "node1", 1 / 0.8),
        ("all", "node0", 0.01),
    ],
)
def test_a_static_share_is_not_there(where, target, seconds):
    net, kernel, done = network(background=(Background(where, Static(0.2)),))
    net.start("node0", target, GB, 0, noting(done, "f"))
    kernel.run()
    assert done["f"] == pytest.approx(seconds)


def test_a_schedule_changes_rates_mid_flow():
    """1e9 bytes: until 0.5 at 1 (0.5 left), until 1.5 at 0.25 (0.25 left), then at 1: 1.75. Repeated after 2 s."""
    steps = Piecewise(((0.0, 0.0), (0.5, 0.75), (1.5, 0.0)), period_s=2.0)
    net, kernel, done = network(background=(Background("nic", steps),))
    net.start("node0", "node1", GB, 0, noting(done, "first"))
    start_at(kernel, 10.0, net, "node0", "node1", GB, 0, noting(done, "later"))
    kernel.run()
    assert done == pytest.approx({"first": 1.75, "later": 11.75})
    # the endless schedule keeps no kernel alive
    assert kernel.now_s == done["later"]


def test_loads_add_up():
    net, _, _ = network(background=(Background("nic", Static(0.2)), Background("node0/nic0/up", Static(0.3))))
    assert net.background_share("node0/nic0/up") == pytest.approx(0.5)
    assert net.background_share("node0/nic0/down") == pytest.approx(0.2)
    flow = net.start("node0", "node1", GB, 0, None)
    assert rate_bytes_per_s(net, flow) == pytest.approx(0.5 * GB)


def test_on_off_is_seeded_by_link_and_keeps_its_means():
    load = OnOff(0.5, on_s=1.0, off_s=3.0)
    steps = load.steps(random.Random(3))
    on_s, last = 0.0, next(steps)
    for _ in range(8000):
        step = next(steps)
        on_s += (step[0] - last[0]) if last[1] > 0 else 0.0
        last = step
    assert on_s / last[0] == pytest.approx(0.25, abs=0.02)

    def shares(seed: int, link: str) -> list[float]:
        net, kernel, _ = network(seed=seed, background=(Background("all", load),))
        seen: list[float] = []
        for i in range(50):
            kernel.at(i * 1.0, lambda: seen.append(net.background_share(link)))
        kernel.run()
        return seen

    assert shares(1, "node0/nic0/up") == shares(1, "node0/nic0/up")
    assert shares(1, "node0/nic0/up") != shares(2, "node0/nic0/up")
    assert shares(1, "node0/nic0/up") != shares(1, "node0/nic0/down")


def test_on_off_slows_a_flow_by_the_time_it_is_on():
    net, kernel, done = network(background=(Background("node0/nic0/up", OnOff(0.5, 0.1, 0.1)),))
    flow = net.start("node0", "node1", 20 * GB, 0, noting(done, "f"))
    used: list[float] = []
    for i in range(1, 1001):
        kernel.at(i / 100, lambda: used.append(rate_bytes_per_s(net, flow)))
    kernel.run()
    assert set(used) == {0.5 * GB, 1.0 * GB}
    assert done["f"] == pytest.approx(20 / 0.75, rel=0.1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Static(1.0), r"share 1.0 must be in \[0, 1\)"),
        (lambda: Static(-0.1), "share -0.1"),
        (lambda: Piecewise(((0.5, 0.1),)), "must begin with 0"),
        (lambda: Piecewise(((0.0, 0.1), (0.0, 0.2))), "rise"),
        (lambda: Piecewise(((0.0, 0.1), (2.0, 0.2)), period_s=2.0), "period_s"),
        (lambda: OnOff(0.5, 0.0, 1.0), "on_s"),
        (lambda: network(background=(Background("aggregation", Static(0.1)),)), "unknown link 'aggregation'"),
        (
            lambda: network(background=(Background("nic", Static(0.6)), Background("all", OnOff(0.4, 1, 1)))),
            "node0/nic0/up reach 1 of its capacity",
        ),
    ],
)
def test_impossible_loads_are_refused(make, says):
    with pytest.raises(TopologyError, match=says):
        make()
