"""Routers that start one after the other, or at once, get rising generations from Ray's store, and learn the
autoscalers' latest one from it.
"""

import json
import subprocess
import sys

import pytest

from tests.live.serving import ROOT

pytestmark = [pytest.mark.live, pytest.mark.nightly]

SCRIPT = """
import json, tempfile, threading
import ray
from app.replicas import latest_generation, next_generation
from ray.experimental.internal_kv import _internal_kv_list

# Ray's sockets lie below: their paths must be short.
folder = tempfile.TemporaryDirectory(prefix="sluice-ray-")
ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder.name,
         _node_ip_address="127.0.0.1", num_cpus=1, object_store_memory=128 * 2**20)
one_by_one = [next_generation("a") for _ in range(3)]
at_once = []
threads = [threading.Thread(target=lambda: at_once.append(next_generation("a"))) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
other = next_generation("b")
before = latest_generation("a", "autoscaler")
latest = [next_generation("a", "autoscaler"), next_generation("a", "autoscaler")]
latest.append(latest_generation("a", "autoscaler"))
kept = len(_internal_kv_list("router-generation/a/", namespace="sluice"))
later = next_generation("a")
ray.shutdown()
without = [next_generation("a"), latest_generation("a", "router")]
print(json.dumps([one_by_one, sorted(at_once), other, [before, *latest], kept, later, without]))
"""


@pytest.mark.timeout(300)
def test_each_router_has_a_higher_generation_than_those_before_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    one_by_one, at_once, other, autoscalers, kept, later, without = json.loads(done.stdout.splitlines()[-1])
    assert one_by_one == [1, 2, 3]
    assert len(set(at_once)) == 8
    assert min(at_once) > 3
    assert other == 1
    assert autoscalers == [0, 1, 2, 2]
    assert kept <= 8
    assert later > max(at_once)
    # Without Ray there is no number, and the router is not fenced.
    assert without == [0, 0]
