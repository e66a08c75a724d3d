"""The fairness policies by name, and the cost of a request."""

import pytest

from policies.fairness.none import NoFairness
from policies.fairness.registry import UnknownFairnessPolicy, fairness_policy
from policies.fairness.vtc import VirtualTokenCounter
from policies.request.terms import Terms
from policies.routing.params import BadParameter
from policies.state.views import Request

REQUEST = Request("r", 0.0, 10, 10, terms=Terms(tenant="acme"))


def test_a_request_costs_its_tokens_by_the_papers_weights() -> None:
    # 1 for each of 300 tokens of a prompt, 2 for each of 50 of an output
    assert VirtualTokenCounter().cost(300, 50) == 400.0
    assert VirtualTokenCounter(w_p=0.5, w_q=3.0).cost(300, 50) == 300.0
    assert VirtualTokenCounter().tenant(REQUEST) == "acme"
    assert VirtualTokenCounter().class_ratio is NoFairness().class_ratio is None


def test_without_fairness_all_are_one_tenant_that_is_never_charged() -> None:
    none = NoFairness()
    assert (none.tenant(REQUEST), none.cost(300, 50), none.gang_slots) == ("", 0.0, None)


def test_policies_are_made_by_name_and_wrong_ones_are_refused() -> None:
    assert fairness_policy("vtc", {"w_q": 4}) == VirtualTokenCounter(w_q=4)
    assert fairness_policy("none") == NoFairness()
    with pytest.raises(UnknownFairnessPolicy, match="'fcfs' is not known: choose one of none, vtc"):
        fairness_policy("fcfs")
    with pytest.raises(UnknownFairnessPolicy, match="no parameter 'w': it takes ahead_s, ahead_tokens, "):
        fairness_policy("vtc", {"w": 1})
    with pytest.raises(UnknownFairnessPolicy, match="'none' has no parameter 'w_p': it takes none"):
        fairness_policy("none", {"w_p": 1})
    for wrong in (
        {"w_q": 0},
        {"gang_slots": 0},
        {"slack_tokens": -1},
        {"ahead_tokens": 0},
        {"class_ratio": 0.5},
    ):
        with pytest.raises(BadParameter):
            fairness_policy("vtc", wrong)
