"""The autoscaler's process over real sockets: a real router, sim engines, and a Serve in memory."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from actors.router import autoscaler as sides
from actors.router.server import RouterServer
from actors.scaling import server
from actors.scaling.control import Controller
from actors.scaling.fleet import Deployed, Fleet, Group, Replica
from actors.scaling.journal import ScalingJournal, ScalingJournalConfig
from actors.scaling.server import Autoscaler
from actors.wire.channel import Identity
from actors.wire.messages import Admin, AdminAnswer, Status
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.registry import decode_policy, prefill_policy
from policies.scaling.journal import replay
from policies.scaling.observation import Observation
from policies.scaling.registry import make
from policies.scaling.rivals.fixed import Fixed
from policies.state.views import Role
from tests.actors.engine.rig import until
from tests.actors.router.test_roles import Cluster, cluster  # noqa: F401  (a fixture)

GROUPS = {
    "p": Group("p", Role.PREFILL, 1, 2, 1),
    "d": Group("d", Role.DECODE, 1, 3, 1, warm=1),
}


class Memory:
    """A store and a Serve in memory; with `away` every call of Serve fails."""

    def __init__(self) -> None:
        self.saved: str | None = None
        self.order: list[str] = []
        self.fleet = Fleet(
            {
                "p": Deployed(1, (Replica("0", "n", 0.0),)),
                "d": Deployed(2, (Replica("0", "n", 0.0), Replica("1", "n", 1.0))),
            }
        )
        self.away = False
        self.answer_s = 0.0

    async def load(self) -> str | None:
        return self.saved

    async def save(self, memory: str) -> None:
        self.saved = memory
        self.order.append("save")

    async def read(self) -> Fleet:
        await asyncio.sleep(self.answer_s)
        if self.away:
            raise ConnectionError("no Serve")
        return self.fleet

    async def set(self, targets: Mapping[str, int]) -> None:
        if self.away:
            raise ConnectionError("no Serve")
        self.order.append(f"set {dict(targets)}")
        groups = {
            name: dataclasses.replace(deployed, target=targets.get(name, deployed.target))
            for name, deployed in self.fleet.groups.items()
        }
        self.fleet = dataclasses.replace(self.fleet, groups=groups)


async def autoscaler(
    cluster: Cluster,  # noqa: F811
    memory: Memory,
    generation: int = 1,
    journal: Path | None = None,
    start_limit_s: float | None = None,
    starts: bool = True,
) -> Autoscaler:
    async def find() -> tuple[str, ...]:
        return cluster.router.addresses

    limits = {"prefill_max": 2, "decode_max": 3, "warm_min": 1, "warm_max": 1, "budget": 5}
    policy = make("fixed", {"limits": limits})
    controller = Controller(lambda groups: policy, GROUPS, "test", await memory.load(), start_limit_s)
    me = Identity("autoscaler", f"a{generation}", None, generation)
    written = None if journal is None else ScalingJournal(ScalingJournalConfig(str(journal)), "test")
    made = Autoscaler(me, find, controller, memory, memory, written)
    if starts:
        made.start()
    return made


@pytest.fixture
async def fleet(cluster: Cluster) -> Cluster:  # noqa: F811
    await cluster.engine("p-0", "prefill")
    await cluster.engine("d-0", "decode")
    await cluster.engine("d-1", "decode", duty="warm")
    return cluster


def duty(fleet: Cluster, engine: str) -> str | None:
    return next((info.duty for info in fleet.router.engines.infos() if info.id == engine), None)


async def ask(fleet: Cluster, **asked: Any) -> tuple[int, Any]:
    """An administrator's call, over a connection of an ingress."""
    from tests.actors.router.test_server import peer

    ingress = await peer(fleet.router, "ingress", "i")
    ingress.channel.send(Admin(1, "scale", json.dumps(asked).encode()))
    answer = await ingress.get(AdminAnswer)
    assert isinstance(answer, AdminAnswer)
    ingress.channel.close()
    return answer.status, json.loads(answer.body)


async def test_a_warm_engine_is_activated_and_the_pool_is_refilled_by_serve(fleet: Cluster) -> None:
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0, "a round")
    status, told = await ask(fleet, counts={"d": 2})
    assert (status, told["mode"]) == (200, "manual")
    await until(lambda: duty(fleet, "d-1") == "active", "the warm engine is active")
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    # what is about to be set is saved first
    assert memory.order[memory.order.index("set {'d': 3}") - 1] == "save"
    await scaler.stop()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The autoscaler's own: a test before may have left a thread that still logs."""
    named = [record for record in caplog.records if record.name == server.log.name]
    return [record.getMessage() for record in named if record.levelname == "WARNING"]


async def test_an_operator_is_warned_again_when_serve_knows_why_a_replica_does_not_start(
    fleet: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    waiting = Replica("2", None, time.time() - 50.0, running=False)
    group = memory.fleet.groups["d"]

    def says(message: str) -> None:
        late = Deployed(3, (*group.replicas, waiting), message)
        memory.fleet = dataclasses.replace(memory.fleet, groups={**memory.fleet.groups, "d": late})

    def warnings() -> list[str]:
        return [warning.partition("; Serve says: ")[2] for warning in warnings_of(caplog)]

    says("")
    scaler = await autoscaler(fleet, memory, start_limit_s=0.5)
    await until(lambda: scaler.rounds > 0, "a round")
    await ask(fleet, counts={"d": 2})
    await until(lambda: warnings() == [""], "a warning before Serve knows the reason")
    says("A replica failed to start with exception. Retrying. Error: no port is free, pid 1")
    await until(lambda: len(warnings()) == 2, "a warning with the reason")
    assert warnings()[1].endswith("Error: no port is free, pid 1")
    says("A replica failed to start with exception. Retrying. Error: no port is free, pid 2")
    rounds = scaler.rounds
    await until(lambda: scaler.rounds >= rounds + 2, "further rounds")
    # the next attempt is no news
    assert len(warnings()) == 2
    await scaler.stop()


async def test_an_operator_is_warned_once_of_a_replica_that_does_not_start(
    fleet: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    waiting = Replica("2", None, time.time() - 50.0, running=False)
    group = memory.fleet.groups["d"]
    late = Deployed(3, (*group.replicas, waiting), "Resources required: {'GPU': 1.0},\n available: {}.")
    memory.fleet = dataclasses.replace(memory.fleet, groups={**memory.fleet.groups, "d": late})
    with caplog.at_level("INFO", "ray.serve.autoscaler"):
        scaler = await autoscaler(fleet, memory, start_limit_s=0.5)
        await until(lambda: scaler.rounds > 0, "a round")
        # three are wanted, the warm one among them, and Serve does not place the third
        await ask(fleet, counts={"d": 2})
        await until(lambda: scaler.controller.overdue == {"d-2"}, "a replica is overdue")
        rounds = scaler.rounds
        await until(lambda: scaler.rounds >= rounds + 2, "further rounds")
        (warned,) = warnings_of(caplog)
        assert warned.startswith("d: 1 of 3 replicas have not started within 0.5 s (scaling.start_limit_s)")
        assert warned.endswith("; Serve says: Resources required: {'GPU': 1.0}, available: {}.")
        # the alert on long starts goes on, though the replica does not count as starting
        assert fleet.router.status().gauges["replica_start_seconds_max"] >= 50.0
        await ask(fleet, counts={"d": 1})
        await until(lambda: memory.fleet.groups["d"].target == 2, "it is taken back")
        await until(lambda: "d: no replica is overdue any more" in caplog.text, "the end is told")
    await scaler.stop()


async def test_the_steps_of_real_starts_become_leads_and_metrics(fleet: Cluster) -> None:
    """Sim engines start in milliseconds, and Serve made their replicas three seconds before."""
    memory = Memory()
    group = memory.fleet.groups["d"]
    made = tuple(r._replace(started_s=time.time() - 3.0) for r in group.replicas)
    memory.fleet = dataclasses.replace(
        memory.fleet, groups={**memory.fleet.groups, "d": dataclasses.replace(group, replicas=made)}
    )
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.controller.start_steps is not None, "steps")
    steps = scaler.controller.start_steps
    assert steps is not None
    # began before the replica was made by this test's clock: the two engines started first
    assert steps.reserve_s < 3.0
    assert 0.0 < steps.process_s < 60.0
    assert (steps.weights_s, steps.post_load_s) == (0.0, 0.0)
    assert steps.announce_s > 0.0
    await until(lambda: "start_step_seconds_process" in fleet.router.status().gauges, "gauges")
    gauges = fleet.router.status().gauges
    assert gauges["start_step_seconds_process"] == steps.process_s
    assert gauges["lead_seconds_start"] != 60.0
    _, told = await ask(fleet)
    assert told["start_steps"]["process_s"] == steps.process_s
    await scaler.stop()


async def test_a_later_autoscaler_goes_on_and_the_earlier_one_does_nothing(fleet: Cluster) -> None:
    memory = Memory()
    first = await autoscaler(fleet, memory)
    await until(lambda: first.rounds > 0, "a round")
    await ask(fleet, counts={"d": 2})
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    second = await autoscaler(fleet, memory, 2)
    await until(lambda: second.rounds > 0, "a round of the second")
    rounds = first.rounds
    await until(lambda: second.rounds > 2, "rounds of the second")
    assert first.rounds <= rounds + 1
    status, told = await ask(fleet)
    assert (status, told["mode"], told["by"]) == (200, "manual", "an administrator")
    await first.stop()
    await second.stop()


async def test_what_the_earlier_autoscaler_does_until_the_later_one_is_connected_is_not_lost(
    fleet: Cluster,
) -> None:
    """The later one has read the memory, and the earlier one is still obeyed: it takes an order and sets a number."""
    memory = Memory()
    first = await autoscaler(fleet, memory)
    await until(lambda: first.rounds > 0 and memory.saved is not None, "a round that is saved")
    second = await autoscaler(fleet, memory, 2, starts=False)
    assert (await ask(fleet, counts={"d": 2}))[0] == 200
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    second.start()
    await until(lambda: second.rounds > 1, "rounds of the second")
    status, told = await ask(fleet)
    assert (status, told["mode"], told["by"]) == (200, "manual", "an administrator")
    assert [group["wanted"] for group in told["groups"]] == [1, 2]
    await first.stop()
    await second.stop()


async def test_an_earlier_autoscaler_that_is_obeyed_again_goes_on_where_the_later_one_was(
    fleet: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one is stopped for good after it has taken orders and set numbers. They are nobody else's to the
    earlier one, which does not go on from its own memory.
    """
    memory = Memory()
    first = await autoscaler(fleet, memory)
    await until(lambda: first.rounds > 0, "a round")
    assert (await ask(fleet, counts={"d": 1}))[0] == 200
    second = await autoscaler(fleet, memory, 2)
    await until(lambda: second.rounds > 0, "a round of the second")
    assert (await ask(fleet, counts={"d": 2}))[0] == 200
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    assert (await ask(fleet, mode="auto"))[0] == 200
    rounds = second.rounds
    await until(lambda: second.rounds > rounds + 1, "rounds by the policy")
    await second.stop()
    monkeypatch.setattr(sides, "GONE_S", 0.0)
    rounds = first.rounds
    await until(lambda: first.rounds > rounds + 1, "rounds of the first")
    _, told = await ask(fleet)
    assert (told["mode"], told["by"], told["notes"]) == ("auto", None, [])
    assert first.controller.manual is None
    await first.stop()


async def test_a_router_that_is_replaced_leaves_the_autoscaler_what_it_has_not_saved(
    fleet: Cluster, tmp_path: Path
) -> None:
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0 and memory.saved is not None, "a round that is saved")
    controller = scaler.controller
    await new_router(fleet, tmp_path)
    rounds = scaler.rounds
    await until(lambda: scaler.rounds > rounds, "a round with the new router")
    assert scaler.controller is controller
    await scaler.stop()


async def test_an_order_before_the_first_round_with_a_new_router_is_one_to_give_again(
    fleet: Cluster, tmp_path: Path
) -> None:
    """The memory that another autoscaler may have saved would replace the order."""
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0 and memory.saved is not None, "a round that is saved")
    memory.away = True
    await new_router(fleet, tmp_path)
    async with asyncio.timeout(60):
        while (await ask(fleet))[0] != 200:
            await asyncio.sleep(0.01)
    status, told = await ask(fleet, counts={"d": 2})
    assert (status, scaler.controller.manual) == (503, None)
    assert "try again" in told["message"]
    memory.away = False
    rounds = scaler.rounds
    await until(lambda: scaler.rounds > rounds, "a round with the new router")
    assert (await ask(fleet, counts={"d": 2}))[0] == 200
    await scaler.stop()


async def new_router(fleet: Cluster, directory: Path) -> None:
    """Ends the router and starts another one."""
    await fleet.router.stop()
    dispatcher = Dispatcher(DispatchConfig(), prefill_policy("round_robin"), decode_policy("round_robin"))
    fleet.router = RouterServer(Identity("router", "r2"), dispatcher, generation=2)
    await fleet.router.start([f"unix:{directory}/router2.sock"])


class HeldStore(Memory):
    """A store in which a note of numbers that are about to be set takes until `go` is set; `held` while one does."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.held = asyncio.Event(), False

    async def save(self, memory: str) -> None:
        if json.loads(memory)["tried"]:
            self.held = True
            await self.go.wait()
        await super().save(memory)


async def test_no_number_is_set_once_the_router_is_lost(fleet: Cluster) -> None:
    """The router may obey another autoscaler by then, which would take the number for somebody else's."""
    memory = HeldStore()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0, "a round")
    assert (await ask(fleet, counts={"d": 2}))[0] == 200
    await until(lambda: memory.held, "a number is about to be set")
    rounds = scaler.rounds
    await fleet.router.stop()
    await until(lambda: scaler._observed() is None, "the loss of the router")
    memory.go.set()
    await until(lambda: scaler.rounds > rounds, "the end of the round")
    assert not any(order.startswith("set") for order in memory.order)
    await scaler.stop()


async def test_a_number_of_somebody_else_is_saved_when_it_is_adopted(fleet: Cluster) -> None:
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0 and memory.saved is not None, "a round that is saved")
    group = dataclasses.replace(memory.fleet.groups["d"], target=3)
    memory.fleet = dataclasses.replace(memory.fleet, groups={**memory.fleet.groups, "d": group})
    await until(lambda: scaler.controller.manual is not None, "it is adopted")
    rounds = scaler.rounds
    await until(lambda: scaler.rounds > rounds, "the end of the round")
    assert memory.saved is not None
    assert json.loads(memory.saved)["manual"] == {"counts": {"p": 1, "d": 2}, "by": "somebody else"}
    await scaler.stop()


async def test_without_serve_or_a_router_nothing_is_done_and_then_it_goes_on(fleet: Cluster) -> None:
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0, "a round")
    memory.away = True
    await ask(fleet, counts={"d": 2})
    rounds = scaler.rounds
    await asyncio.sleep(1.5)
    assert scaler.rounds <= rounds + 1
    scaler.check()
    memory.away = False
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    await scaler.stop()


async def test_an_order_before_the_first_round_is_one_to_give_again(fleet: Cluster) -> None:
    memory = Memory()
    memory.away = True
    scaler = await autoscaler(fleet, memory)
    async with asyncio.timeout(60):
        while (await ask(fleet))[0] == 404:
            await asyncio.sleep(0.01)
    status, told = await ask(fleet, counts={"d": 2})
    assert (status, scaler.controller.manual) == (503, None)
    assert "try again" in told["message"]
    memory.away = False
    await until(lambda: scaler.rounds > 0, "a round")
    assert (await ask(fleet, counts={"d": 2}))[0] == 200
    await scaler.stop()


async def test_a_question_without_an_autoscaler_says_what_to_set(fleet: Cluster, tmp_path: Path) -> None:
    status, told = await ask(fleet)
    assert status == 404
    assert "scaling" in told["message"]


# ------------------------------------------------------------------------------------------------------------- faults


async def test_a_router_that_is_killed_mid_plan_is_replaced_and_the_plan_and_the_streams_go_on(
    fleet: Cluster, tmp_path: Path
) -> None:
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0, "a round")
    decoding = next(node for node in fleet.rig.nodes if node.engine.info().id == "d-0")
    decoding.client.decode("s", list(range(10, 60)), max_tokens=400)
    await until(lambda: decoding.client.outs("s"), "first token")
    scaler.controller.scale({"d": 2})
    rounds = scaler.rounds
    await new_router(fleet, tmp_path)
    await until(lambda: scaler.rounds > rounds, "a round with the new router")
    await until(lambda: duty(fleet, "d-1") == "active", "the warm engine is active")
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    await until(lambda: duty(fleet, "p-0") is not None, "the last engine is back")
    assert (duty(fleet, "p-0"), duty(fleet, "d-0")) == ("active", "active")
    await decoding.client.text("s")
    for node in fleet.rig.nodes:
        await node.rests()
    await scaler.stop()


async def test_an_engine_that_dies_as_it_is_activated_is_replaced_by_serves_next_one(fleet: Cluster) -> None:
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0, "a round")
    await ask(fleet, counts={"d": 2})
    await until(lambda: duty(fleet, "d-1") == "active", "the warm engine is active")
    await fleet.reporters[2].stop()
    # Serve makes another replica in its place, and the one more that was ordered
    replicas = tuple(Replica(own, "n", float(own)) for own in ("0", "2", "3"))
    memory.fleet = dataclasses.replace(
        memory.fleet, groups={**memory.fleet.groups, "d": Deployed(3, replicas)}
    )
    await fleet.engine("d-2", "decode", duty="warm")
    await until(lambda: duty(fleet, "d-2") == "active", "the replacement is active")
    await fleet.engine("d-3", "decode", duty="warm")
    rounds = scaler.rounds
    await until(lambda: scaler.rounds > rounds + 2, "rounds after it")
    assert [duty(fleet, f"d-{n}") for n in (0, 2, 3)] == ["active", "active", "warm"]
    assert memory.fleet.groups["d"].target == 3
    await scaler.stop()


async def test_no_replica_is_asked_for_in_the_place_of_one_whose_connection_has_just_ended(
    fleet: Cluster,
) -> None:
    """Serve still has it, and replaces it if it is dead. One more would cost a pre-warmed process, or a node."""
    memory = Memory()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0, "a round")
    await fleet.reporters[1].stop()
    await until(lambda: duty(fleet, "d-1") == "active", "the warm engine is active")
    await until(lambda: duty(fleet, "d-0") is None, "the router has forgotten the other one")
    rounds = scaler.rounds
    await until(lambda: scaler.rounds > rounds + 1, "rounds after it")
    assert not any(order.startswith("set") for order in memory.order)
    await scaler.stop()


async def test_a_report_that_is_no_number_ends_neither_observations_nor_plans(fleet: Cluster) -> None:
    from tests.actors.router.test_server import engine

    memory = Memory()
    broken = await engine(fleet.router, "d-7", "decode")
    nan = float("nan")
    names = ("step_s", "prefill_steps", "prefill_step_tokens", "decode_steps", "decode_step_seqs")
    totals = dict.fromkeys((*names, "decode_step_kv_tokens"), nan)
    scaler = await autoscaler(fleet, memory)
    for _ in range(4):
        broken.channel.send(Status("d-7", 0, 0, 0, 0, nan, totals=totals))
        rounds = scaler.rounds
        await until(lambda rounds=rounds: scaler.rounds > rounds, "a round")  # type: ignore[misc]
    assert fleet.router.status().totals["internal_errors"] == 0
    await ask(fleet, counts={"d": 2})
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    await scaler.stop()


async def test_a_late_observation_is_not_acted_on_and_the_next_one_in_time_is(
    fleet: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    memory.answer_s = 0.2
    monkeypatch.setattr(server, "STALE_S", 0.1)
    scaler = await autoscaler(fleet, memory)
    # Serve answers when the observation is too old
    await until(lambda: scaler._latest is not None, "an observation")
    await asyncio.sleep(1.5)
    assert scaler.rounds == 0 and scaler.controller.last is None
    memory.answer_s = 0.0
    monkeypatch.setattr(server, "STALE_S", 5.0)
    await until(lambda: scaler.rounds > 0, "a round")
    await scaler.stop()


class SlowStore(Memory):
    """A store that saves only while `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.saving = asyncio.Event(), 0

    async def save(self, memory: str) -> None:
        self.saving += 1
        await self.open.wait()
        await super().save(memory)


async def test_an_order_is_answered_only_after_it_has_been_saved(fleet: Cluster) -> None:
    memory = SlowStore()
    memory.open.set()
    scaler = await autoscaler(fleet, memory)
    await until(lambda: scaler.rounds > 0 and memory.saving > 0, "a round")
    memory.open.clear()
    before = memory.saving
    first = asyncio.create_task(ask(fleet, counts={"d": 2}))
    await until(lambda: memory.saving > before, "the order is being saved")
    second = asyncio.create_task(ask(fleet, counts={"d": 1}))
    await until(
        lambda: scaler.controller.manual and scaler.controller.manual.counts["d"] == 1, "the other order"
    )
    # what changes nothing is answered at once
    assert (await ask(fleet))[0] == 200
    done, _ = await asyncio.wait({first, second}, timeout=1.0)
    assert not done
    memory.open.set()
    assert (await first)[0] == (await second)[0] == 200
    assert memory.saved is not None and json.loads(memory.saved)["manual"]["counts"]["d"] == 1
    await scaler.stop()


async def test_an_error_of_the_policy_is_told_and_journalled_and_questions_and_orders_go_on(
    fleet: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    scaler = await autoscaler(fleet, memory, journal=tmp_path / "journal")
    await until(lambda: scaler.rounds > 0, "a round")
    decides = Fixed.step

    def fails(policy: Fixed, seen: Observation, state: Any) -> Any:
        raise KeyError("demand")

    monkeypatch.setattr(Fixed, "step", fails)
    rounds = scaler.rounds
    await until(lambda: scaler.rounds > rounds + 1, "rounds with a broken policy")
    for asked in ({}, {"plan": True}, {"counts": {"d": 2}, "plan": True}):
        status, told = await ask(fleet, **asked)
        assert (status, told["plan"] is not None) == (200, True)
    status, told = await ask(fleet, counts={"d": 2})
    assert (status, told["held"]) == (200, "the policy failed: KeyError('demand')")
    await until(lambda: memory.fleet.groups["d"].target == 3, "one more replica")
    monkeypatch.setattr(Fixed, "step", decides)
    await until(
        lambda: scaler.controller.last is not None and scaler.controller.last.held is None, "it recovers"
    )
    await scaler.stop()
    (file,) = (tmp_path / "journal").iterdir()
    steps = list(replay(file.read_text().splitlines()))
    failed = [step for step in steps if step.written == "KeyError('demand')"]
    assert 0 < len(failed) < len(steps)
    # the policy that replays it is whole: only these differ
    assert [step.same for step in steps].count(False) == len(failed)
