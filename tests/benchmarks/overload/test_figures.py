"""The figures of one side at one load, of outcomes made by hand."""

import pytest

from benchmarks.overload.figures import figures, worst_part
from benchmarks.overload.load import Times
from benchmarks.overload.outcomes import Outcome
from tests.benchmarks.overload.made import answered, cut, refused, work

TIMES = Times(ramp_s=10.0, window_s=10.0, after_s=5.0)


def test_only_what_was_planned_in_the_window_and_came_in_time_is_goodput() -> None:
    # 20 tokens each, of 10 s: in time; too late for 2 s; in time for 5 s; refused; outside on both sides
    outcomes = [
        answered(work(9.9), 0.1),
        answered(work(10.0), 1.9),
        answered(work(12.0), 2.1),
        answered(work(14.0, name="standard"), 4.9),
        refused(work(16.0), 0.004),
        answered(work(20.0), 0.1),
    ]
    found = figures(outcomes, TIMES)
    assert found["requests"] == 4 and found["offered_tokens_per_s"] == 8.0
    assert found["goodput_tokens_per_s"] == 4.0 and found["goodput_per_s"] == 0.2
    assert found["refused_share"] == 0.25 and found["refusal_p50_s"] == pytest.approx(0.004)
    assert found["ends"] == {"whole": 3, "refused ttft_objective": 1}
    assert found["ttft_p99_s/interactive"] == pytest.approx(1.9 + 0.99 * 0.2)
    assert found["ttft_p50_s/standard"] == pytest.approx(4.9) and found["ttft_p50_s/batch"] is None
    assert found["in_time/interactive"] == pytest.approx(1 / 3) and found["in_time/batch"] is None


def test_an_answer_that_was_cut_counts_with_what_it_had_waited() -> None:
    # without text it had waited for 9 s; one that had its text in time and was cut later is good
    outcomes = [cut(work(10.0), 9.0), cut(work(11.0), 9.0, ttft_s=1.0)]
    found = figures(outcomes, TIMES)
    assert found["goodput_tokens_per_s"] == 2.0
    assert found["ttft_p50_s/interactive"] == pytest.approx(5.0)


def test_a_failed_answer_is_neither_good_nor_a_wait_nor_a_refusal() -> None:
    of = work(12.0)
    failed = Outcome(of, 12.0, 12.5, "failed", first_s=12.1, reason="connection ended")
    found = figures([failed], TIMES)
    assert found["failed"] == 1 and found["goodput_tokens_per_s"] == 0.0
    assert found["ttft_p50_s/interactive"] is None and found["refused_share"] == 0.0
    assert found["served_per_s/ant"] == 0.0


def test_refusals_at_the_arrival_are_told_from_those_of_requests_that_became_late() -> None:
    outcomes = [refused(work(11.0), 0.01), refused(work(12.0), 1.5, "late"), refused(work(13.0), 2.0, "late")]
    found = figures(outcomes, TIMES)
    assert found["refusal_p50_s"] == pytest.approx(1.5)
    assert found["refusal_at_arrival_p99_s"] == pytest.approx(0.01)
    # a server without codes refuses at the arrival only
    theirs = figures([refused(work(11.0), 0.2, "status 503")], TIMES)
    assert theirs["refusal_at_arrival_p99_s"] == pytest.approx(0.2)


def test_a_delay_of_the_client_counts_for_the_wait_and_not_for_the_refusal() -> None:
    late = refused(work(11.0), 0.5)
    late.sent_s = 11.4
    answer = answered(work(12.0), 1.0)
    found = figures([late, answer], TIMES)
    assert found["refusal_p50_s"] == pytest.approx(0.1)
    assert found["ttft_p50_s/interactive"] == pytest.approx(1.0)
    assert found["late_sending_p99_s"] == pytest.approx(0.99 * 0.4)


# a request costs 10 + 2 * 20 = 50
def test_parts_are_of_what_was_served_by_weights_and_nobody_has_more_than_it_asked_for() -> None:
    # served: ant 1, cat 2, ox 5 of 8. ant asked for 2, bee for nothing, cat for 2, ox for 9. Shared out by weights
    # 1 : 2 : 1, 8 make 2, 4 and 2 for ant, cat and ox; cat leaves 2 of its 4, so ant has its 2 and ox 4.
    outcomes = [answered(work(11.0), 1.0), refused(work(11.0), 0.0)]
    outcomes += [answered(work(12.0, "cat"), 1.0) for _ in range(2)]
    outcomes += [answered(work(13.0, "ox"), 1.0) for _ in range(5)]
    outcomes += [refused(work(13.0, "ox"), 0.0) for _ in range(4)]
    found = figures(outcomes, TIMES)
    assert found["served_per_s/ox"] == 25.0
    assert found["part_of_share/ant"] == 0.5
    assert found["part_of_share/bee"] is None
    assert found["part_of_share/cat"] == 1.0
    assert found["part_of_share/ox"] == 1.25
    assert worst_part(found) == 0.5


def test_each_class_is_shared_out_for_itself() -> None:
    # interactive: ox alone asks, and gets all 2. standard: 2 are served, both of ox, and ant asked for 1, which is its
    # fair share. So ox has 4 of 3, ant 0 of 1. Over both classes together ant's share would be 1 as well, and ox's 3.
    outcomes = [answered(work(11.0, "ox"), 1.0) for _ in range(2)]
    outcomes += [answered(work(12.0, "ox", "standard"), 1.0) for _ in range(2)]
    outcomes += [refused(work(12.0, "ant", "standard"), 0.0)]
    found = figures(outcomes, TIMES)
    assert found["part_of_share/ant"] == 0.0
    assert found["part_of_share/ox"] == pytest.approx(4 / 3)


def test_what_was_over_before_the_window_or_may_be_served_after_it_was_not_asked_for_in_it() -> None:
    outcomes = [answered(work(11.0), 1.0), answered(work(11.0, "ox"), 1.0)]
    # over before the window begins
    outcomes += [answered(work(9.0), 0.5), refused(work(9.5), 0.1)]
    # of bee: came before the window and is served in it; its objective ends after the window, and it is served later
    outcomes += [answered(work(9.5, "bee"), 1.0), answered(work(19.0, "bee"), 1.5)]
    # of cat: cut without text. The first could have been served in the window, the other could be after it.
    outcomes += [cut(work(15.0, "cat"), 9.0), cut(work(18.5, "cat"), 9.0)]
    found = figures(outcomes, TIMES)
    # served are ant, bee and ox with 1 each, and asked for were these and 1 of cat: 3 by weights 1 : 1 : 2 : 1 make
    # 0.6, 0.6, 1.2 and 0.6; cat leaves 0.2 of its, so the others have 2/3 each
    assert found["part_of_share/ant"] == pytest.approx(1.5)
    assert found["part_of_share/bee"] == pytest.approx(1.5)
    assert found["part_of_share/cat"] == 0.0


def test_a_load_without_requests_has_no_parts() -> None:
    found = figures([], TIMES)
    assert found["requests"] == 0 and found["goodput_tokens_per_s"] == 0.0
    assert worst_part(found) is None
