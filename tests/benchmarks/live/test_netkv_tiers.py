"""The tiers benchmark without a server: its requests, its configurations, and its table."""

import json
from pathlib import Path

import pytest
import yaml

from app.config import parse
from benchmarks.live.netkv_tiers import CASES, Cluster, Row, Scheduler, Workload, application, table


def test_requests_follow_from_the_seed_and_share_prefixes() -> None:
    load = Workload(prefixes=3, prefix_tokens=5, own_tokens=4)
    bodies = load.bodies(1, 40)
    assert bodies == load.bodies(1, 40)
    assert not set(bodies) & set(load.bodies(2, 40))
    words = [json.loads(body)["prompt"].split() for body in bodies]
    assert {len(w) for w in words} == {9}
    assert len({tuple(w[:5]) for w in words}) == 3
    assert len({tuple(w[5:]) for w in words}) == 40


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_is_a_configuration_that_the_application_takes(tmp_path: Path, case: Scheduler) -> None:
    command = application(tmp_path, Cluster(near=2, far=1), case)
    schema = yaml.safe_load(Path(command.argv[command.argv.index("--config") + 1]).read_text())
    config = parse(schema["applications"][0]["args"])
    assert config.router.decode.name == case.policy
    assert config.router.network_config().estimate is case.estimate
    assert (config.router.network_config().file is not None) is case.file
    racks = {group.name: group.topology.rack for group in config.engines}
    assert racks == {"prefill": "r1", "near": "r1", "far": "r2"}
    links = config.engines[0].engine_config("prefill-0", "m", "m").links
    assert links["near-*"].bandwidth_bytes_per_s == 4 * links["far-*"].bandwidth_bytes_per_s


def test_the_table_compares_seed_by_seed() -> None:
    def row(case: str, seed: int, ms: float) -> Row:
        return Row(case, seed, 10, {}, 10, ms, 1.0, 0.5, 20.0, 30.0, 1.0, {})

    rows = [row("cache_load_aware", 1, 100), row("cache_load_aware", 2, 50), row("netkv-file", 1, 50)]
    rows.append(row("netkv-file", 2, 55))
    last = table(rows).splitlines()[-1]
    assert last.startswith("| netkv-file | 52.5 | 0.80 | 1 of 2 seeds |")  # (0.5 + 1.1) / 2
