"""A process that has started gets another environment, and its title can still be set."""

import json
import os
import subprocess
import sys
from pathlib import Path

from actors.environment import FIRST, changeable

ROOT = Path(__file__).parents[2]

CODE = """
import json, os, sys
from actors.environment import change
change(json.loads(sys.argv[1]))
import setproctitle
setproctitle.setproctitle("a title")
with open("/proc/self/cmdline") as file: title = file.read().strip(chr(0))
print(json.dumps([dict(os.environ), title]))
"""


def test_an_environment_is_replaced() -> None:
    before = {"PYTHONPATH": str(ROOT), "GONE": "1", "STAYS": "1", "CHANGES": "1"}
    after = {"PYTHONPATH": str(ROOT), "STAYS": "1", "CHANGES": "2", "NEW": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(after)],
        capture_output=True,
        text=True,
        env=changeable(before),
        check=True,
    )
    environment, title = json.loads(done.stdout)
    # Python itself may add the locale
    environment.pop("LC_CTYPE", None)
    assert environment == {**after, FIRST: "1"}
    assert title == "a title"


def test_the_variable_that_stays_is_the_first_also_where_it_was_another() -> None:
    assert list(changeable({"A": "1", FIRST: "other"}).items()) == [(FIRST, "1"), ("A", "1")]
    assert FIRST not in os.environ
