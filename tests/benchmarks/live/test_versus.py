"""Two checkouts in turn: the paired ratio, its interval, what is marked, and what is served."""

import math
from pathlib import Path

import pytest
import yaml

from app.config import parse
from app.ingress.tenants.key_file import read
from app.ingress.tenants.keys import KeyBook
from benchmarks.live.servers import ROOT
from benchmarks.live.versus import Share, ratio_of, ratios, served_by, shares, table


def test_the_ratio_is_paired_by_round() -> None:
    """Rounds differ by a factor of ten and ours costs 2 % more in each: the spread of the rounds drops out."""
    base = [1.0, 10.0, 3.0, 0.3]
    found = ratio_of("c=1", "CPU", base, [1.02 * value for value in base])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.02, 1.02, 1.02))
    assert not found.worse


def test_the_interval_is_that_of_student() -> None:
    """Logs 0 and ln 1.21: mean ln 1.1, deviation ln(1.21)/sqrt 2, half width 12.706 * deviation / sqrt 2."""
    found = ratio_of("c=1", "CPU", [1.0, 1.0], [1.0, 1.21])
    half = 12.7062 * math.log(1.21) / 2
    assert found.ratio == pytest.approx(1.1)
    assert math.log(found.high) == pytest.approx(math.log(1.1) + half, rel=1e-4)


def test_a_row_is_marked_only_where_its_whole_interval_is_above_the_limit() -> None:
    samples = [
        {"round": number, "row": row, "side": side, "failures": {}, "CPU": value * (1 + number)}
        for number in range(3)
        for row, ours in (("dear", 1.05), ("fair", 1.01))
        for side, value in (("base", 1.0), ("ours", ours))
    ]
    found = ratios(samples)
    assert [(r.row, r.worse) for r in found] == [("dear", True), ("fair", False)]
    assert [line.endswith("above 1.02 |") for line in table(found).splitlines()[2:]] == [True, False]


def test_a_row_that_one_checkout_lacks_is_left_out_and_one_round_is_too_few() -> None:
    lone = [{"round": number, "row": "new", "side": "ours", "CPU": 1.0} for number in range(3)]
    assert ratios(lone) == []
    with pytest.raises(ValueError, match="two or more"):
        ratio_of("c=1", "CPU", [1.0], [1.0])


def test_processes_are_medians_over_rounds_and_those_that_spend_little_are_left_out() -> None:
    """The median of base's ingress is 2 although one round took 9; the raylet spends 1 % of each row."""
    samples = [
        {
            "round": number,
            "row": "c=1",
            "side": side,
            "failures": {},
            "cpu": {"ingress": value, "raylet": 0.03},
        }
        for side, values in (("base", (1.0, 2.0, 9.0)), ("ours", (3.0, 3.0, 3.0)))
        for number, value in enumerate(values)
    ]
    assert shares(samples) == [Share("c=1", "ingress", 2.0, 3.0)]


def test_a_process_that_one_checkout_lacks_spends_nothing_there() -> None:
    samples = [
        {"round": 0, "row": "c=1", "side": "base", "cpu": {"ingress": 1.0}},
        {"round": 0, "row": "c=1", "side": "ours", "cpu": {"ingress": 1.0, "flow agent": 0.5}},
    ]
    assert shares(samples) == [Share("c=1", "ingress", 1.0, 1.0), Share("c=1", "flow agent", 0.0, 0.5)]


def test_with_keys_a_checkout_has_a_key_file_and_its_requests_that_key(tmp_path: Path) -> None:
    command = served_by(ROOT, tmp_path / "served", keys=True)
    args = yaml.safe_load((tmp_path / "served" / "sim.yaml").read_text())["applications"][0]["args"]
    file = Path(parse(args).ingress.options["key_file"])
    (line,) = command.head
    name, _, secret = line.partition(": Bearer ")
    found = KeyBook.of(read(file)[0]).find(secret)
    assert name == "authorization" and found is not None
    key = found.key
    assert (key.requests_per_min, key.tokens_per_min, key.parallel, found.expires_s) == (
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize("keys", [False, True])
def test_a_checkout_that_knows_no_keys_and_one_without_keys_are_served_as_before(
    tmp_path: Path, keys: bool
) -> None:
    checkout = tmp_path / "older" if keys else ROOT
    checkout.mkdir(exist_ok=True)
    command = served_by(checkout, tmp_path / "served", keys=keys)
    args = yaml.safe_load((tmp_path / "served" / "sim.yaml").read_text())["applications"][0]["args"]
    assert not parse(args).ingress.options.get("key_file")
    assert not command.head
    assert [file.name for file in (tmp_path / "served").iterdir()] == ["sim.yaml"]
