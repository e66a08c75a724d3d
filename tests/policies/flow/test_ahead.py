"""Bytes that go before a prefix read at a port: bands and places by hand, for each flow policy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.flow import events as ev
from policies.flow.ahead import MOST_BANDS, bands_of, bytes_ahead, read_place
from policies.flow.arbiter import Arbiter
from policies.flow.base import WEIGHTS_LEVEL, Port, Side, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.mfs import SWEPT
from policies.flow.registry import flow_policy
from policies.state.views import PortBand, PortLoad
from tests.policies.flow.link import flow
from tests.policies.flow.test_late import stuck

MB = 10**6
RATE = 100.0 * MB

FLOWS = (
    # 50 MB in 1 s of a port of 100 MB/s: MLU 0.5, P_1 of MFS
    flow("urgent", 50 * MB, due_s=1.0),
    # MLU 0.004, between Q_4 = 0.00195 and Q_3 = 0.0078: P_4
    flow("lax", 400 * MB, due_s=1000.0),
    # P_2 and P_5
    flow("reuse", 30 * MB, stage=Stage.REUSE),
    flow("later", 20 * MB, stage=Stage.REUSE, rli=3),
    flow("weights", 5 * MB, stage=Stage.WEIGHTS),
)


def load(policy: str, **params: float) -> PortLoad:
    """The ingress of node b, to which FLOWS were submitted just now."""
    arbiter = Arbiter(flow_policy(policy, params), ArbiterConfig(port_bytes_per_s=RATE))
    for each in FLOWS:
        arbiter.apply(ev.Submitted(each), 0.0)
    return arbiter.load_of("b").ingress


def ahead(policy: str, size_mb: int, rli: int, gone_mb: int = 0, **params: float) -> float:
    place = read_place(flow_policy(policy, params), size_mb * MB, rli, RATE)
    return bytes_ahead(load(policy, **params), place, size_mb * MB, gone_mb * MB) / MB


@pytest.mark.parametrize(
    ("policy", "size_mb", "rli", "ahead_mb"),
    [
        # P_2: urgent, and reuse, which was there before
        ("mfs", 10, 0, 50 + 30),
        # P_4: within a level reuse goes before what has a deadline
        ("mfs", 10, 2, 50 + 30),
        # P_5
        ("mfs", 10, 3, 50 + 30 + 400 + 20),
        # all of one level share the port: each of the four has moved 10 MB when the read has
        ("fair", 10, 0, 40),
        # the flows of a band count as equally large, so that one of 20 MB counts for 25 here
        ("fair", 25, 0, 4 * 25),
        # the shortest first
        ("sjf", 10, 0, 0),
        ("sjf", 40, 0, 20 + 30),
        # deadlines first; the others share
        ("edf", 10, 0, 50 + 400 + 2 * 10),
        # deadlines first; then the shortest
        ("karuna", 10, 0, 50 + 400),
        ("karuna", 25, 0, 50 + 400 + 20),
    ],
)
def test_what_goes_before_a_read_is_what_the_policy_serves_first(
    policy: str, size_mb: int, rli: int, ahead_mb: int
) -> None:
    assert ahead(policy, size_mb, rli) == pytest.approx(ahead_mb)


def test_with_the_shipped_thresholds_a_read_goes_before_all_that_can_wait() -> None:
    """Q_1 = 1 and two levels: none of the deadlines presses yet, so all stand in P_2, reuse before the rest."""
    assert ahead("mfs", 10, 0, **SWEPT) == pytest.approx(30)
    assert ahead("mfs", 10, 3, **SWEPT) == pytest.approx(30 + 20)


@pytest.mark.parametrize(
    ("gone_mb", "ahead_mb"),
    [(0, 80), (20, 60), (60, 20), (80, 0), (500, 0), (10_000, 0)],
)
def test_what_has_left_since_the_report_goes_before_nothing(gone_mb: int, ahead_mb: int) -> None:
    """The first in the order leave first, and there is never less than nothing."""
    assert ahead("mfs", 10, 0, gone_mb) == pytest.approx(ahead_mb)


def test_what_has_left_of_a_shared_level_shortens_its_flows() -> None:
    """Of 500 MB 495 have left: what is left is less than the read's size for each of the flows."""
    assert ahead("fair", 10, 0, 495) == pytest.approx(5)


def test_flows_of_equal_rank_are_one_band_and_those_without_bytes_none() -> None:
    flows = [((1.0, 2.0), 5), ((2.0, 0.0), 1), ((1.0, 2.0), 7), ((2.0, 1.0), 0)]
    assert bands_of(flows) == (PortBand(1, (2.0,), 2, 12), PortBand(2, (0.0,), 1, 1))


def test_many_flows_make_few_bands_that_keep_levels_and_stages_apart() -> None:
    urgent = [((1.0, 1.0, float(n), 0.0), 10) for n in range(500)]
    reuse = [((2.0, 0.0, float(rli), math.inf), 1) for rli in range(5)]
    lax = [((2.0, 1.0, float(n), 0.0), 100) for n in range(995)]
    bands = bands_of([*lax, *urgent, *reuse])
    assert len(bands) <= MOST_BANDS
    place = read_place(flow_policy("mfs"), 1, 0, RATE)._replace(key=(0.0, 2.0, math.inf))
    assert bytes_ahead(PortLoad(None, bands), place, 1, 0.0) == 500 * 10 + 3


def test_a_band_of_many_ranks_goes_before_a_read_if_all_of_it_does() -> None:
    """1,000 flows of 1 to 1,000 bytes by SJF, in bands of 32: up to 500 bytes are 15 bands of 480 flows."""
    bands = bands_of([((1.0, float(n)), n) for n in range(1, 1001)])
    assert len(bands) == MOST_BANDS
    place = read_place(flow_policy("sjf"), 500, 0, RATE)
    assert bytes_ahead(PortLoad(None, bands), place, 500, 0.0) == sum(range(1, 481))


@given(
    st.lists(
        st.tuples(
            st.tuples(
                st.integers(1, WEIGHTS_LEVEL).map(float), st.sampled_from([0.0, 1.0]), st.floats(0.0, 1e6)
            ),
            st.integers(0, 10**12),
        ),
        max_size=300,
    )
)
def test_bands_keep_the_order_the_levels_and_all_bytes(flows: list[tuple[tuple[float, ...], int]]) -> None:
    bands = bands_of(flows)
    some = [(rank, size) for rank, size in flows if size]
    assert len(bands) <= max(MOST_BANDS, WEIGHTS_LEVEL)
    assert list(bands) == sorted(bands, key=lambda band: (band.level, band.key))
    for level in {int(rank[0]) for rank, _ in some}:
        at_level = [band for band in bands if band.level == level]
        assert sum(band.size for band in at_level) == sum(size for rank, size in some if rank[0] == level)
        assert sum(band.flows for band in at_level) == sum(1 for rank, _ in some if rank[0] == level)
    assert sum(band.flows for band in bands) == len(some)


def test_a_flow_that_is_withdrawn_counts_for_what_is_on_its_way() -> None:
    """Chunks of 10 ms at 1,000 bytes/s; the port's bandwidth is not known before somebody says it."""
    config = ArbiterConfig(
        port_bytes_per_s=1000.0, least_chunk_bytes=10, whole_read_when_alone=False, chunk_s=0.01
    )
    arbiter = Arbiter(flow_policy("mfs"), config)
    (first, *_) = arbiter.apply(ev.Submitted(flow("f", 100)), 0.0)
    assert first.size == 10
    egress = arbiter.load_of("a").egress
    assert (egress.bytes_per_s, [band.size for band in egress.bands]) == (None, [100])
    assert arbiter.load_of("a").ingress == PortLoad(None) == arbiter.load_of("b").egress
    arbiter.apply(ev.Withdrawn("f", 10), 0.0)
    arbiter.apply(ev.Bandwidth(Port("a", Side.EGRESS), 500.0), 0.0)
    egress = arbiter.load_of("a").egress
    assert (egress.bytes_per_s, [band.size for band in egress.bands]) == (500.0, [10])


def test_flows_between_engines_that_stand_still_go_before_nothing() -> None:
    """The chunks of `x`, from c, are late, and others pass it; of `y`, from a, 1,000 bytes are left."""
    made = stuck()
    assert [(band.flows, band.size) for band in made.load_of("b").ingress.bands] == [(1, 1000)]
    assert made.load_of("c").egress.bands == ()
    assert [band.size for band in made.load_of("a").egress.bands] == [1000]
