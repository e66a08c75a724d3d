"""The prior of the timing of engines that were asked for their totals."""

import pytest

from benchmarks.whatif.live.ask import scaled
from policies.engine_model.timing import CPU_SMOLLM2
from policies.scaling.timing_fit import Totals


def test_a_prior_has_the_engines_seconds_and_the_known_proportions() -> None:
    p = CPU_SMOLLM2
    # an engine that only prefills, a tenth as long as the known one, and one that only decodes, a fiftieth
    prefills = Totals(0.1 * (30 * p.prefill_base_s + 9_000 * p.prefill_per_token_s), 30, 9_000)
    decodes = Totals(0.02 * (500 * p.decode_base_s + 4_000 * p.decode_per_seq_s), 0, 0, 500, 4_000)
    found = scaled([prefills, decodes])
    assert found.prefill_per_token_s == pytest.approx(0.1 * p.prefill_per_token_s)
    assert found.decode_base_s == pytest.approx(0.02 * p.decode_base_s)
    assert found.decode_per_seq_s == pytest.approx(0.02 * p.decode_per_seq_s)
    # one of them alone leaves the other's seconds as they are known; no engine leaves both
    assert scaled([decodes]).prefill_base_s == p.prefill_base_s
    assert scaled([]).decode_base_s == scaled([Totals()]).decode_base_s == p.decode_base_s
