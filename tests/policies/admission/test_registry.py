"""The registry of admission policies, and what `open` does."""

import pytest

from policies.admission.base import ADMITTED, Case, Moment, Outlook
from policies.admission.by_wait import ByWait
from policies.admission.open import Open
from policies.admission.registry import ADMISSION, DEFAULT, OPEN, UnknownAdmissionPolicy, admission_policy
from policies.request.terms import Terms
from policies.state.views import Request


def test_policies_are_made_by_name() -> None:
    assert admission_policy("by_wait", {"margin": 0.5}) == ByWait(margin=0.5)
    assert admission_policy(DEFAULT) == ByWait() and admission_policy(OPEN) == Open()
    assert all(admission_policy(name).name == name for name in ADMISSION)


def test_unknown_names_and_parameters_say_what_there_is() -> None:
    with pytest.raises(UnknownAdmissionPolicy, match="'closed' is not known: choose one of by_wait, open"):
        admission_policy("closed")
    with pytest.raises(
        UnknownAdmissionPolicy, match="no parameter 'z': it takes ahead_s, deviations, hold_at_most_s, hold_s"
    ):
        admission_policy("by_wait", {"z": 1})


def test_open_takes_what_cannot_be_in_time() -> None:
    late = Request("r", 0.0, 10, 10, terms=Terms(ttft_slo_s=1e-9))
    assert Open().judge(Case(late, Moment.ARRIVAL, 100.0, 0.0), Outlook()) is ADMITTED
