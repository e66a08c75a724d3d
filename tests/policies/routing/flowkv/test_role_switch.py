"""When engines are lent to the other role and when they come back. Times are in seconds; scores are given."""

from dataclasses import replace
from typing import Any

import pytest

from policies.routing.flowkv.regimes import RegimeThresholds, RegimeWatch, assess
from policies.routing.flowkv.role_switch import Engine, RoleSwitchConfig, RoleSwitcher, Switch
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import Health, Quarantine, Request, Role, Snapshot, Worker

P, D = Role.PREFILL, Role.DECODE
# busy above 0.5, overloaded above 0.9, idle below 0.2
THRESHOLDS = RegimeThresholds()
CONFIG = RoleSwitchConfig(switch_s=10.0, after_s=2.0)


class Fleet:
    """Engines of one worker each, whose present roles and load scores a test sets."""

    def __init__(self, config: RoleSwitchConfig = CONFIG, **homes: Role) -> None:
        self.homes, self.roles = homes, dict(homes)
        self.scores = dict.fromkeys(homes, 0.6)
        self.switcher = RoleSwitcher(config, THRESHOLDS)
        self.workers = {
            name: Worker(name, role, "g", "n", Health.READY, 4, 1000) for name, role in homes.items()
        }
        self.engines = {name: Engine(role, (name,)) for name, role in homes.items()}

    def look(self, now_s: float, obey: bool = True) -> list[tuple[str, Role]]:
        """The orders at a time; engines that `obey` have their new role at the next look."""
        workers = {name: replace(w, role=self.roles[name]) for name, w in self.workers.items()}
        p, d = ({n: self.scores[n] for n, role in self.roles.items() if role is wanted} for wanted in (P, D))
        seen = assess(p, d, THRESHOLDS, now_s, None)
        orders = self.switcher.look(Snapshot(now_s, workers, (), {}), seen, self.engines)
        assert all(isinstance(order, Switch) and order.reason for order in orders)
        if obey:
            self.roles |= {order.engine_id: order.role for order in orders}
        return [(order.engine_id, order.role) for order in orders]


def busy_prefill(config: RoleSwitchConfig = CONFIG) -> Fleet:
    """One busy prefill engine, and three decode engines, of which two are idle."""
    fleet = Fleet(config, p0=P, d0=D, d1=D, d2=D)
    fleet.scores = {"p0": 0.8, "d0": 0.6, "d1": 0.1, "d2": 0.1}
    return fleet


def test_an_idle_engine_is_lent_after_the_role_has_been_busy_for_a_while_and_comes_back() -> None:
    fleet = busy_prefill()
    assert [fleet.look(t) for t in (0.0, 1.0)] == [[], []]
    assert fleet.look(2.0) == [("d1", P)]
    # the loan has shown its effect: C^p is (0.8 + 0.1) / 2 = 0.45, so prefill is not busy any more
    assert [fleet.look(t) for t in (3.0, 11.0)] == [[], []]
    assert fleet.look(12.0) == [("d1", D)]
    # prefill is busy again from 13 on, for `after_s`; then d1 still rests
    assert [fleet.look(t) for t in (13.0, 14.0)] == [[], []]
    assert fleet.look(15.0) == [("d2", P)]


def test_one_engine_is_lent_at_a_time_and_a_busy_role_keeps_it() -> None:
    fleet = busy_prefill()
    # C^p = 3.1 / 2 with d1, 3.2 / 3 with d2, both above 0.5
    fleet.scores["p0"] = 3.0
    fleet.look(0.0)
    assert fleet.look(2.0) == [("d1", P)]
    assert fleet.look(3.0) == []
    assert fleet.look(4.0) == [("d2", P)]
    # both loans would end, at 12 and 14; prefill is still the busier role, so they are renewed
    assert [fleet.look(float(t)) for t in range(5, 22)] == [[]] * 17
    fleet.scores["p0"] = 0.1
    assert fleet.look(23.0) == [("d1", D)]
    assert fleet.look(24.0) == [("d2", D)]


def test_an_engine_goes_back_at_once_when_its_home_role_is_overloaded() -> None:
    fleet = busy_prefill()
    fleet.look(0.0)
    fleet.look(2.0)
    fleet.scores |= {"d0": 1.5, "d2": 0.5}  # C^d = 1.0 > 0.9
    assert fleet.look(3.0) == [("d1", D)]


def test_a_burst_lends_nothing() -> None:
    fleet = busy_prefill()
    orders = []
    for t in range(20):
        fleet.scores["p0"] = 0.8 if t % 2 else 0.3
        orders += fleet.look(float(t))
    assert orders == []


def test_the_last_engine_of_a_role_in_its_group_is_never_lent() -> None:
    fleet = Fleet(p0=P, d0=D)
    fleet.scores = {"p0": 0.8, "d0": 0.1}
    assert [fleet.look(float(t)) for t in range(10)] == [[]] * 10
    fleet = busy_prefill()
    # d1 and d2 are idle, but d1 is the only decode engine of its group
    fleet.workers["d1"] = replace(fleet.workers["d1"], group="other")
    fleet.look(0.0)
    assert fleet.look(2.0) == [("d2", P)]


def test_engines_that_are_quarantined_or_not_ready_and_colocated_ones_are_not_lent() -> None:
    fleet = Fleet(p0=P, d0=D, d1=D, d2=D, c0=Role.COLOCATED)
    fleet.scores = {"p0": 0.8, "d0": 0.6, "d1": 0.1, "d2": 0.1, "c0": 0.1}
    fleet.workers["d1"] = replace(fleet.workers["d1"], quarantine=Quarantine("failing", 0.0, 9.0))
    fleet.workers["d2"] = replace(fleet.workers["d2"], health=Health.DRAINING)
    assert [fleet.look(float(t)) for t in range(10)] == [[]] * 10


def test_an_order_that_is_lost_is_given_again() -> None:
    fleet = busy_prefill()
    fleet.look(0.0)
    assert fleet.look(2.0, obey=False) == [("d1", P)]
    # d1 rests by its unfinished loan, so d2 is asked once `after_s` has passed
    assert fleet.look(4.0) == [("d2", P)]
    fleet.scores["p0"] = 0.1
    assert fleet.look(14.0, obey=False) == [("d2", D)]
    assert fleet.look(15.0) == [("d2", D)]


UNWELL = {
    "not ready": {"health": Health.DRAINING},
    "quarantined": {"quarantine": Quarantine("failing", 0.0, 99.0)},
    "forgotten by the router": None,
}


@pytest.mark.parametrize("why", UNWELL)
def test_a_lent_engine_that_is_away_for_a_moment_has_not_come_home(why: str) -> None:
    fleet = busy_prefill()
    fleet.look(0.0)
    assert fleet.look(2.0) == [("d1", P)]
    well, engine, change = fleet.workers["d1"], fleet.engines["d1"], UNWELL[why]
    fleet.scores["p0"] = 0.1
    fleet.look(3.0)
    if change is None:
        del fleet.workers["d1"], fleet.engines["d1"], fleet.roles["d1"]
    else:
        fleet.workers["d1"] = replace(well, **change)
    assert [fleet.look(t) for t in (4.0, 5.0)] == [[], []]
    fleet.workers["d1"], fleet.engines["d1"], fleet.roles["d1"] = well, engine, P
    # its loan ends at 12, as if nothing had been
    assert [fleet.look(t) for t in (6.0, 11.0)] == [[], []]
    assert fleet.look(12.0) == [("d1", D)]
    assert fleet.look(13.0) == []
    # and it rests from then on
    fleet.scores["p0"] = 0.8
    fleet.scores["d2"] = 0.6
    assert [fleet.look(float(t)) for t in range(14, 23)] == [[]] * 9
    assert fleet.look(23.0) == [("d1", P)]


def test_an_engine_that_cannot_be_ordered_is_called_home_when_it_can() -> None:
    fleet = busy_prefill()
    fleet.look(0.0)
    assert fleet.look(2.0) == [("d1", P)]
    well = fleet.workers["d1"]
    fleet.scores["p0"] = 0.1
    fleet.workers["d1"] = replace(well, health=Health.STALLED)
    assert [fleet.look(float(t)) for t in range(3, 20)] == [[]] * 17
    fleet.workers["d1"] = well
    assert fleet.look(20.0) == [("d1", D)]


def test_an_engine_that_never_comes_again_is_forgotten() -> None:
    fleet = busy_prefill()
    fleet.look(0.0)
    assert fleet.look(2.0) == [("d1", P)]
    del fleet.workers["d1"], fleet.engines["d1"], fleet.roles["d1"]
    fleet.scores["p0"] = 0.1
    for t in range(3, 23):
        fleet.look(float(t))
    assert not fleet.switcher._away and not fleet.switcher._until_s


def test_a_new_router_calls_lent_engines_home() -> None:
    fleet = busy_prefill()
    fleet.roles["d1"] = P
    fleet.scores["p0"] = 0.1
    assert [fleet.look(t) for t in (0.0, 9.0, 10.0)] == [[], [], [("d1", D)]]
    fleet = busy_prefill(RoleSwitchConfig())
    fleet.roles["d1"] = P
    assert fleet.look(0.0) == [("d1", D)]


def test_without_switch_s_nothing_is_lent() -> None:
    fleet = busy_prefill(RoleSwitchConfig())
    assert [fleet.look(float(t)) for t in range(10)] == [[]] * 10


def test_engines_of_several_ranks_switch_as_one() -> None:
    fleet = busy_prefill()
    fleet.engines = {"p0": Engine(P, ("p0",)), "d0": Engine(D, ("d0",)), "d": Engine(D, ("d1", "d2"))}
    fleet.scores["d2"] = 0.6
    assert [fleet.look(float(t)) for t in range(5)] == [[]] * 5
    fleet.scores["d2"] = 0.1
    assert fleet.look(5.0, obey=False) == [("d", P)]


class Cluster:
    """Engines of 32 slots as the router's state knows them, with requests whose stage a test sets. Each of `requests`
    has a prompt of 1,000 tokens.
    """

    def __init__(self, config: RoleSwitchConfig, kv_capacity_tokens: int, **homes: Role) -> None:
        self.state, self.requests, self.kv = ClusterState(), 0, kv_capacity_tokens
        self.thresholds = RegimeThresholds(prefill_low=0.05, prefill_high=0.6, decode_low=0.3, idle=0.1)
        self.watch, self.switcher = RegimeWatch(self.thresholds), RoleSwitcher(config, self.thresholds)
        self.engines = {name: Engine(role, (name,)) for name, role in homes.items()}
        for name, role in homes.items():
            self.serves(name, role, 0.0)

    def serves(self, name: str, role: Role, now_s: float) -> None:
        self.state.apply(ev.EngineUp(now_s, name, role, "g", "n", slots=32, kv_capacity_tokens=self.kv))

    def prompts(self, worker: str, count: int) -> list[str]:
        """Requests whose prompt is computed on a worker."""
        names = [f"r{self.requests + n}" for n in range(count)]
        self.requests += count
        for name in names:
            self.state.apply(ev.Arrived(0.0, Request(name, 0.0, 1_000, 64)))
            self.state.apply(ev.PrefillRouted(0.0, name, worker, colocated=False))
        return names

    def to_send(self, worker: str, count: int) -> list[str]:
        """Requests whose prompt is computed, and whose KV a worker holds."""
        names = self.prompts(worker, count)
        for name in names:
            self.state.apply(ev.PrefillDone(0.0, name, 600.0, 1, 0))
        return names

    def decoded(self, sender: str, worker: str, count: int) -> None:
        for name in self.to_send(sender, count):
            self.state.apply(ev.DecodeRouted(0.0, name, worker))
            self.state.apply(ev.Progressed(0.0, name, 1))

    def look(self, now_s: float, **running: int) -> list[tuple[str, Role]]:
        """The orders at a time, which the engines obey, after reports of running requests by engine."""
        for name in self.engines:
            self.state.apply(ev.EngineStatus(now_s, name, running.get(name, 0), 0, 0))
        snapshot = self.state.snapshot(now_s, ())
        self.seen = self.watch.look(snapshot)
        orders = self.switcher.look(snapshot, self.seen, self.engines)
        for order in orders:
            self.serves(order.engine_id, order.role, now_s)
        return [(order.engine_id, order.role) for order in orders]


def test_the_sequences_of_a_lent_engine_do_not_make_prefill_busy_and_its_loan_ends() -> None:
    """d1 decodes 30 requests when it is lent. Counted as prompts, 30 of 32 slots of one in two prefill nodes would give
    C^p = (0 + 30/32/5) / 2 = 0.09 > 0.05, and renew the loan.
    """
    cluster = Cluster(RoleSwitchConfig(10.0), 10**9, p0=P, d0=D, d1=D)
    cluster.decoded("p0", "d1", 30)
    cluster.serves("d1", P, 0.0)
    assert cluster.look(0.0, d1=30) == []
    assert cluster.seen.prefill_mean == pytest.approx(0.0, abs=1e-4)
    assert [cluster.look(float(t), d1=30) for t in range(1, 10)] == [[]] * 9
    assert cluster.look(10.0, d1=30) == [("d1", D)]
    # at home they are its queue again: (30/32 running + its KV) / 5 of one in two decode nodes
    assert cluster.look(11.0, d1=30) == []
    assert cluster.seen.decode_mean == pytest.approx(30 / 32 / 5 / 2, abs=1e-4)


def test_prefills_that_a_full_decode_cannot_take_make_prefill_busy() -> None:
    """Decode is full: 32 of 32 slots and all KV, C^d = (1 + 1) / 5 = 0.4 above 0.3. The prefill nodes compute nothing
    and hold 28 finished prefills each: C^p = (28/32 + 28/32) / 5 = 0.35 above 0.05.
    """
    cluster = Cluster(RoleSwitchConfig(10.0, after_s=0.0), 32_000, p0=P, p1=P, d0=D, d1=D)
    for d in ("d0", "d1"):
        cluster.decoded("p0", d, 32)
    for p in ("p0", "p1"):
        cluster.to_send(p, 28)
    assert cluster.look(0.0, d0=32, d1=32) == []
    assert cluster.seen.decode_mean == pytest.approx(0.4, abs=1e-3)
    assert (cluster.seen.prefill_mean, cluster.switcher._busy) == (pytest.approx(0.35), P)


@pytest.mark.parametrize("options", [{"switch_s": -1.0}, {"after_s": float("nan")}])
def test_impossible_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"role_switch: {next(iter(options))} is"):
        RoleSwitchConfig(**options)
