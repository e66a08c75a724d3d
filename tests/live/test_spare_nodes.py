"""Spare nodes that were asked for at Ray's own autoscaler are given back; what somebody else has asked for is not."""

import json
import subprocess
import sys

import pytest

from tests.live.serving import ROOT

pytestmark = [pytest.mark.live, pytest.mark.nightly]

SCRIPT = """
import asyncio, json, tempfile
import ray
from actors.scaling.fleet import Deployed, Fleet
from app.counts import ServeCounts
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.autoscaler.sdk import request_resources
from ray.experimental.internal_kv import _internal_kv_get

# Ray's sockets lie below: their paths must be short.
folder = tempfile.TemporaryDirectory(prefix="sluice-ray-")
ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder.name,
         _node_ip_address="127.0.0.1", num_cpus=1, object_store_memory=128 * 2**20)
seen = {}

def asked():
    told = _internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
    return None if told is None else json.loads(told)

def counts(spare):
    return ServeCounts("a", {"d": "DEngine"}, {"d": spare}, {"d": [{"GPU": 1.0}]})

fleet = Fleet({"d": Deployed(1)})
request_resources(bundles=[{"CPU": 7.0}])
counts(0)._keep_spare(fleet)
seen["others"] = asked()
first = counts(2)
first._keep_spare(fleet)
seen["spare"] = asked()
# a process that was killed: its successor wants none
counts(0)._keep_spare(fleet)
seen["successor"] = asked()
second, third = counts(1), counts(1)
second._keep_spare(fleet)
asyncio.run(second.close())
seen["closed"] = asked()
second._keep_spare(fleet)
third._keep_spare(fleet)
asyncio.run(second.close())
seen["taken over"] = asked()
print(json.dumps(seen))
"""


@pytest.mark.timeout(300)
def test_spare_nodes_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "others": [{"CPU": 7.0}],
        "spare": [{"GPU": 1.0}] * 3,
        "successor": [],
        "closed": [],
        "taken over": [{"GPU": 1.0}] * 2,
    }
