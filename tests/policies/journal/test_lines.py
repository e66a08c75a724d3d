"""Tests that every event and action, written as a journal line and read back, gives the same value and bytes."""

import dataclasses
import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.base import Judgement, Verdict
from policies.admission.registry import admission_policy
from policies.dispatch.actions import PrefixFetch
from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, RouteDecode
from policies.fairness.base import Turn
from policies.fairness.registry import fairness_policy
from policies.flow.fetch_or_recompute import FetchReason
from policies.journal.codec import CodecError, decoder, dumps, encoder, loads
from policies.journal.lines import (
    action_line,
    choice_of,
    event_line,
    header_line,
    parse_action,
    parse_event,
    parse_header,
)
from policies.network.contention import FORMS, Curve
from policies.network.oracle import NodePlace, Oracle, PairEstimate, TransferIntent
from policies.routing.base import Decision, Ranked, Reason
from policies.routing.deepflow.heatmap import Heatmap
from policies.routing.deepflow.pd_heatmap import Combined
from policies.routing.params import BadParameter
from policies.routing.registry import DECODE, PREFILL, decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.prefix_index import Removed, Stored
from policies.state.views import Role

FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
st.register_type_strategy(
    ev.PolicyChoice, st.builds(ev.PolicyChoice, st.text(), st.dictionaries(st.text(), PLAIN))
)
st.register_type_strategy(
    ev.PoliciesChanged,
    st.builds(
        ev.PoliciesChanged,
        st.floats(),
        st.none() | st.from_type(ev.PolicyChoice),
        st.none() | st.from_type(ev.PolicyChoice),
        st.dictionaries(st.text(), PLAIN),
        st.none() | st.from_type(ev.PolicyChoice),
        st.none() | st.from_type(ev.PolicyChoice),
    ),
)
st.register_type_strategy(
    Turn,
    st.builds(
        Turn, st.text(), st.floats(), st.floats(), st.integers(), st.dictionaries(st.text(), st.floats())
    ),
)
st.register_type_strategy(
    Ranked, st.builds(Ranked, st.text(), st.floats(), st.dictionaries(st.text(), st.floats()))
)
st.register_type_strategy(
    PrefixFetch,
    st.builds(
        PrefixFetch,
        st.text(),
        st.integers(),
        st.booleans(),
        st.sampled_from(FetchReason),
        st.floats(),
        st.floats(),
        st.dictionaries(st.text(), st.floats()),
        st.floats(),
    ),
)
st.register_type_strategy(
    Judgement,
    st.builds(
        Judgement,
        st.sampled_from(Verdict),
        st.text(),
        st.none() | st.floats(),
        st.dictionaries(st.text(), st.floats()),
        st.floats(),
        st.text(),
    ),
)
TIER = st.integers(0, 3)
PAIR = st.tuples(st.text(), st.text())
RATE = st.floats(1.0, 1e12)
st.register_type_strategy(
    Oracle,
    st.builds(
        Oracle,
        st.dictionaries(TIER, RATE).map(
            lambda rates: dict(
                zip(sorted(rates), sorted(rates.values(), reverse=True), strict=True)
            )  # nearer is not slower
        ),
        st.dictionaries(TIER, st.floats(0, 1e3)),
        st.just({}),
        st.dictionaries(st.text(), st.builds(NodePlace, st.text(), st.text())),
        st.dictionaries(TIER, st.floats(0, 0.99)),
        st.none() | FINITE,
        st.dictionaries(PAIR, st.builds(PairEstimate, RATE, FINITE)),
        st.floats(0.1, 1e6),
        st.booleans(),
        st.dictionaries(TIER, st.integers(1, 64)),
        st.dictionaries(
            st.sampled_from(FORMS),
            st.dictionaries(TIER, st.builds(Curve, FINITE, st.lists(FINITE, max_size=2).map(tuple))),
        ),
        st.lists(TIER, unique=True).map(tuple),
    ),
)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, including their types and the order of mappings; nan equals nan."""
    return type(a) is type(b) and repr(a) == repr(b)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(get_args(ev.Event)).flatmap(st.from_type))
def test_every_event_comes_back_as_it_was(event: Any) -> None:
    line = event_line(7, 2, event)
    assert "\n" not in line and line.isascii()
    back = parse_event(loads(line))
    assert same(back, event)
    assert event_line(7, 2, back) == line


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(get_args(Action)).flatmap(st.from_type))
def test_every_action_comes_back_as_it_was(action: Any) -> None:
    line = action_line(action)
    back = parse_action(line)
    assert same(back, action) and action_line(back) == line


def test_lines_are_readable_json_in_field_order() -> None:
    decision = Decision(
        "d1", (Ranked("d1", 0.1, {"queue_s": 0.1}), Ranked("d2", 1 / 3, {})), Reason.LEAST_COST
    )
    line = action_line(RouteDecode("r1", decision, 0.25, TransferIntent("r1", "p1", "d1", 9, 0)))
    assert json.loads(line)["decision"]["ranking"][1]["cost"] == 1 / 3
    assert line.startswith(
        '{"action":"RouteDecode","attempt_id":"r1","decision":{"worker":"d1","ranking":'
        '[{"worker":"d1","cost":0.1,"terms":{"queue_s":0.1}}'
    )


def test_changes_of_the_prefix_index_keep_their_kind() -> None:
    batch = ev.KvBatch(1.0, "d1", "e", 4, (Stored((2**64 + 1, 7), 3), Removed((9,))))
    line = event_line(0, 0, batch)
    assert (
        '"changes":[{"type":"Stored","hashes":[18446744073709551617,7],"parent":3},{"type":"Removed"' in line
    )
    assert parse_event(loads(line)) == batch


def test_numbers_without_a_json_form_are_spelled() -> None:
    line = event_line(0, 0, ev.ForecastMade(-math.inf, "r", 0, math.nan))
    assert '"now_s":"-inf"' in line and '"finishes_in_tokens":"nan"' in line


@pytest.mark.parametrize("table", [PREFILL, DECODE])
def test_every_policy_is_made_again_from_its_description(table: dict[str, Any]) -> None:
    make = prefill_policy if table is PREFILL else decode_policy
    for name in table:
        policy = make(name)
        choice = choice_of(policy)
        assert make(choice.name, loads(dumps(choice.params))) == policy


def test_a_heatmap_is_part_of_the_description() -> None:
    policy = Combined(heatmap=Heatmap((128.0, 512.0), (0.5,), ((0.1,), (-1 / 3,)), 2), bound=0.25)
    choice = choice_of(policy)
    assert prefill_policy(choice.name, loads(dumps(choice.params))) == policy


def test_the_header_holds_what_the_decisions_depend_on() -> None:
    config = DispatchConfig(max_queue=3, seed=42)
    dispatcher = Dispatcher(config, prefill_policy("power_of_two", {"choices": 3}), decode_policy("netkv"))
    header = parse_header(loads(header_line(dispatcher, "1.2.3")))
    assert (header.dispatch, header.version, header.first) == (config, "1.2.3", 0)
    assert header.prefill == ev.PolicyChoice("power_of_two", {"choices": 3})
    assert header.decode.params["step_base_s"] == 0.02


def test_a_header_from_before_a_limit_was_there_has_its_default() -> None:
    dispatcher = Dispatcher(DispatchConfig(), prefill_policy("power_of_two"), decode_policy("netkv"))
    line = loads(header_line(dispatcher, "1.2.3"))
    assert line["dispatch"].pop("prefix_index_bytes") == 1 << 30
    assert parse_header(line).dispatch == DispatchConfig()


def test_a_header_from_before_a_policy_was_there_has_none_whatever_the_default_is() -> None:
    dispatcher = Dispatcher(
        DispatchConfig(),
        prefill_policy("power_of_two"),
        decode_policy("netkv"),
        admission_policy("by_wait"),
        fairness_policy("vtc"),
    )
    line = loads(header_line(dispatcher, "1.2.3"))
    assert (line.pop("admission")["name"], line.pop("fairness")["name"]) == ("by_wait", "vtc")
    header = parse_header(line)
    assert (header.admission, header.fairness) == (ev.PolicyChoice("open"), ev.PolicyChoice("none"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"worker": "w"}, "EngineDown: 'now_s' is missing"),
        ({"now_s": 1.0, "worker": "w", "why": 1}, "EngineDown: 'why' is unknown"),
        ({"now_s": "soon", "worker": "w"}, "EngineDown: 'soon' is no float"),
        ({"now_s": 1.0, "worker": 7}, "EngineDown: 7 is no str"),
        ({"now_s": True, "worker": "w"}, "EngineDown: True is no float"),
    ],
)
def test_what_does_not_fit_the_type_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decoder(ev.EngineDown)(data)


def test_enums_and_literals_are_checked() -> None:
    with pytest.raises(CodecError, match="'chef' is not a valid Role"):
        decoder(Role)("chef")
    with pytest.raises(CodecError, match="'lost' is none of finished, cancelled"):
        parse_event({"event": "Closed", "now_s": 1.0, "attempt_id": "r", "outcome": "lost"})


def test_a_parameter_that_is_no_plain_data_is_refused_when_written() -> None:
    for value in (math.inf, object(), {1: 2}):
        event = ev.PoliciesChanged(0.0, ev.PolicyChoice("random", {"x": value}))
        with pytest.raises(CodecError, match="no plain JSON value"):
            event_line(0, 0, event)


def test_a_field_that_an_older_version_did_not_write_takes_its_default() -> None:
    event = ev.EngineUp(1.0, "w", Role.DECODE, "g", "n", 4, 100, barrier="b")
    encode = encoder(ev.EngineUp)
    assert encode is not None
    data = encode(event)
    del data["barrier"]
    assert decoder(ev.EngineUp)(data) == dataclasses.replace(event, barrier="")


@pytest.mark.parametrize(
    ("made", "policy"),
    [
        (admission_policy, admission_policy("by_wait", {"hold_s": math.inf, "ahead_s": math.inf})),
        (fairness_policy, fairness_policy("vtc", {"ahead_tokens": math.inf, "ahead_s": math.inf})),
    ],
)
def test_an_endless_parameter_of_a_policy_is_read_back_from_a_header(made: Any, policy: Any) -> None:
    choice = loads(dumps(choice_of(policy).params))
    assert "inf" in choice.values()
    assert made(policy.name, choice) == policy


def test_a_parameter_that_must_be_finite_takes_no_infinity_from_a_header() -> None:
    with pytest.raises(BadParameter, match="margin"):
        admission_policy("by_wait", {"margin": "inf"})
