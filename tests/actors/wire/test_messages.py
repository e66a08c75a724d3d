"""The messages as a whole: a channel can carry each of them, in the encoding that is promised."""

import importlib
import pkgutil
from typing import Any, get_args

import msgspec
import pytest

from actors.wire import messages as wire
from actors.wire.frames import DECODER, ENCODER
from policies.request.ended import RequestEnd
from policies.state.standby import Abilities
from policies.state.views import NodeLoad, PortBand, PortLoad

PARTS = {
    "FleetLoad",
    "FlowRecord",
    "FlowAgentStatus",
    "Part",
    "WeightsRead",
    "Wire",
    "Out",
    "KvChange",
    "EngineInfo",
    "Hints",
    "PromptSignals",
    "Grown",
    "Transfer",
    "Resume",
    "Quarantined",
    "Started",
    "Figures",
    "Note",
    "ObserverInfo",
    "PathSeen",
}
"""The bases and the parts of messages."""


def _defined() -> dict[str, type]:
    """Returns all messages and parts of the package's modules, by name."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(wire.__path__, f"{wire.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and value.__module__ == module.name:
                assert name not in found, f"{name} is defined twice: on the wire they would be one"
                found[name] = value
    return found


def test_every_message_of_the_modules_can_be_carried_and_imported_from_the_package() -> None:
    defined = _defined()
    carried = {kind.__name__ for kind in get_args(wire.Message)}
    assert set(defined) - carried == PARTS
    assert set(wire.__all__) >= set(defined) - {"Part", "Wire"}


def test_a_message_is_an_array_that_begins_with_its_name() -> None:
    raw = msgspec.msgpack.encode(wire.Sent("r", 0.5))
    assert msgspec.msgpack.decode(raw) == ["Sent", "r", 0.5, 0]
    assert msgspec.msgpack.decode(raw, type=wire.Message) == wire.Sent("r", 0.5)


def test_defaults_that_can_be_changed_are_not_shared() -> None:
    one, other = wire.Status("a", 0, 0, 0, 0, 0.0), wire.Status("b", 0, 0, 0, 0, 0.0)
    one.totals["x"] = 1.0
    assert other.totals == {} and one.ranks is not other.ranks


READ = wire.WeightsRead("disk", 5, 0.5, "p1", "it died")
END = RequestEnd("finished", "interactive", 0.25, 0.02, 17)
LOAD = NodeLoad("n", PortLoad(None), PortLoad(1e9, (PortBand(2, (0.0, 3.0, float("inf")), 2, 2**40),)))


@pytest.mark.parametrize(
    "message",
    [
        wire.FleetObserved(b'{"now_s":1.0}', 12, starts={"p0": wire.Started(5.5, 1.0, 2.0, 3.0)}),
        wire.FleetObserved(b"{}", 0, starts={"p0": wire.Started(5.5, 1.0, 2.0, 3.0, weights=READ)}),
        wire.FindWeights("n", "m"),
        wire.WeightsAt((("unix:/a", "tcp:h:1"), ("unix:/b",))),
        wire.AskWeights("f", "c", ("unix:/a",)),
        wire.WeightsLent(b"agent", "n", (("x.safetensors", 2**40),), 2**24, "f", "c", ("a", "b")),
        wire.WeightsRefused("busy", (("unix:/a",),)),
        wire.PieceLent(3, 2**47, b"pages", b"d" * 16),
        wire.LeadsTold({"lead_seconds_start": 60.0, "warm_engines": 1.0}),
        wire.FleetObserved(b"{}", 0, abilities=Abilities(4096, ("tools",))),
        wire.Standby("failed", ("prefill", "decode"), 30.0, "no node", Abilities(4096, ("tools",))),
        wire.Fleet([], "a", "b", standby=wire.Standby("asleep")),
        wire.Assign("p0", "decode", "warm"),
        wire.SetLogs("DEBUG", "actors.router", None),
        wire.ScaleAsked(3, b"{}"),
        wire.ScaleAnswered(3, 409, b'{"message":"no"}'),
        wire.SetRole("prefill", "warm", True),
        wire.Closed("r-1", "finished", 9, ended=END),
        wire.Hello(wire.PROTOCOL_VERSION, "autoscaler", "a", b"n" * 16, 4),
        wire.RouteDecode("r-1", "d", None, None, 3),
        wire.FlowReport("n", "mfs", {}, {}, (), b'{"levels":2}'),
        wire.FlowReport("n", "mfs", {}, {}, loads=(LOAD,)),
    ],
)
def test_a_message_with_newer_fields_comes_back_as_it_was(message: Any) -> None:
    assert DECODER.decode(ENCODER.encode([message])) == [message]


SUBMIT = wire.Submit("a", wire.MAX_COUNT, 0)
DONE = wire.PrefillDone("a", b"h", 1, 0, 1.0, 0.0, 0.0, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.structs.replace(SUBMIT, max_tokens=-1),
        msgspec.structs.replace(SUBMIT, prompt_tokens=2**64 - 1),
        msgspec.structs.replace(SUBMIT, slots=wire.MAX_COUNT + 1),
        msgspec.structs.replace(DONE, kv_bytes=-1),
        wire.PrefillReported("a", 1.0, 2**64 - 1, 0),
        wire.Progress([], [wire.Grown("a", -1)]),
        wire.Status("e", 2**63, 0, 0, 0, 0.0),
        wire.Tokens([wire.Out("a", "", 1, token_ids=[-1])]),
        wire.Decode("a", [1], {}, None, 1.0, resume=wire.Resume(-1, 1, [], 0)),
        wire.RouteDecode("a", "d", tier=4),
    ],
)
def test_an_impossible_count_is_refused_on_the_wire(wrong: Any) -> None:
    """Sums of such counts are no 64-bit integers, and what a router or an ingress made of them could not be sent."""
    assert DECODER.decode(ENCODER.encode([SUBMIT, DONE])) == [SUBMIT, DONE]
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(ENCODER.encode([wrong]))


def test_a_decision_without_a_tier_is_that_of_a_network_without_tiers() -> None:
    assert DECODER.decode(ENCODER.encode([["RouteDecode", "r-1", "d", None, 2.5]])) == [
        wire.RouteDecode("r-1", "d", None, 2.5, None)
    ]


def test_an_order_without_a_duty_is_to_serve_for_good() -> None:
    order = wire.SetRole("decode")
    assert (order.duty, order.lent) == ("active", False)


@pytest.mark.parametrize("wrong", [["Assign", "p0", "decode", "idle"], ["Assign", "p0", "both", "active"]])
def test_an_unknown_role_or_duty_is_refused_on_the_wire(wrong: list[Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(ENCODER.encode([wrong]))


def test_the_loads_of_ports_are_arrays_that_come_back_as_records() -> None:
    report = wire.FlowReport("n", "mfs", {}, {}, loads=(LOAD,))
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(report))
    inf = float("inf")
    assert raw[-1] == [["n", [None, []], [1e9, [[2, [0.0, 3.0, inf], 2, 2**40]]]]]
    (back,) = DECODER.decode(ENCODER.encode([report]))
    assert isinstance(back, wire.FlowReport)
    assert isinstance(back.loads[0].ingress.bands[0], PortBand)


def test_a_report_without_loads_tells_of_no_port() -> None:
    assert DECODER.decode(ENCODER.encode([["FlowReport", "n", "mfs", {}, {}]])) == [
        wire.FlowReport("n", "mfs", {}, {})
    ]


@pytest.mark.parametrize(
    "load",
    [
        ["n", [None, []]],
        ["n", [None, []], ["fast", []]],
        ["n", [None, []], [1e9, [[1.5, [0.0], 1, 1]]]],
        ["n", [None, []], [1e9, [[1, [0.0], 1]]]],
    ],
)
def test_a_load_of_another_shape_is_refused_on_the_wire(load: list[Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(ENCODER.encode([["FlowReport", "n", "mfs", {}, {}, [], b"{}", [load]]]))
