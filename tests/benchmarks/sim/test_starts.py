"""Start profiles: every shipped file loads and says where it comes from; broken ones are refused by file and key."""

from pathlib import Path

import pytest
import yaml

from benchmarks.sim.fleet_setup import STARTS
from benchmarks.sim.profiles import ProfileError
from benchmarks.sim.starts import dump, load, names
from policies.scaling.starts import StartSteps

GOOD = {"reserve_s": 1.0, "process_s": 2.0, "weights_s": 3.0, "post_load_s": 4.0, "announce_s": 0.5}


def test_the_simulators_starts_are_the_shipped_files() -> None:
    assert names() == sorted(STARTS)
    assert STARTS["cold"] == StartSteps(1.0, 28.0, 16.0, 9.0, 1.0)


def test_measured_steps_that_are_written_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    dump(path, StartSteps(**GOOD), "a test", {"announce_s": "a guess"})
    assert load(path) == StartSteps(1.0, 2.0, 3.0, 4.0, 0.5)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "must be a mapping"),
        ({"values": GOOD}, "`source` must say"),
        ({"source": "x", "values": {**GOOD, "coffee_s": 1.0}}, "coffee_s"),
        ({"source": "x", "values": {"reserve_s": 1.0}}, "values lack"),
        ({"source": "x", "values": {**GOOD, "weights_s": "long"}}, "weights_s is 'long'"),
        ({"source": "x", "values": {**GOOD, "weights_s": -1.0}}, "weights_s is -1"),
        ({"source": "x", "values": GOOD, "assumptions": {"coffee_s": "?"}}, "'coffee_s', which is no value"),
        ({"source": "x", "values": GOOD, "fit": {}}, "unknown key 'fit'"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, data: object, says: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ProfileError, match="broken") as error:
        load(path)
    assert says in str(error.value)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ProfileError, match=f"shipped are {', '.join(names())}, or"):
        load("lukewarm")
