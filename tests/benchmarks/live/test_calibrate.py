"""calibrate against a real ingress, router and sim engine over HTTP; how near the numbers come it prints itself."""

from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.live.calibrate import Plan, calibrate, measure
from benchmarks.sim import profiles
from policies.engine_model.timing import CPU_SMOLLM2
from tests.app.ingress.rig import rig, until
from tests.app.ingress.test_with_sim import Sim

PLAN = Plan(
    prompts=(16, 64), repeats=2, concurrency=(1, 3), decode_prompts=(16, 64), output_tokens=8, vocabulary=60
)


async def test_a_profile_of_a_running_server(tmp_path: Path) -> None:
    async with rig(tmp_path, []) as made:
        sim = await Sim.start(made, tmp_path, "c", "colocated", timing={"decode_base_s": 0.02})
        await until(lambda: len(made.connections.engines()) == 1 and made.connections.ready() is None)
        out = tmp_path / "mine.yaml"
        await calibrate(made.client, PLAN, "cpu_smollm2", "http://here", out)
        await sim.stop()
    profile = profiles.load(out)
    assert profile.source.startswith(
        "measured by benchmarks.live.calibrate on http://here, Plan(prompts=(16, 64)"
    )
    assert profile.kv_bytes_per_token == CPU_SMOLLM2.kv_bytes_per_token
    written = yaml.safe_load(out.read_text())
    measured = written["fit"]["measured"]
    assert [row[0] for row in measured["prefill_tokens_and_ttft_s"]] == [16, 64]
    assert [row[:2] for row in measured["decode_sequences_kv_tokens_step_s"]] == [
        [1, 20.0],
        [3, 60.0],
        [1, 68.0],
        [3, 204.0],
    ]
    # a step takes 20 ms; a first token that is read late on a busy machine makes the mean of seven look shorter
    assert all(row[2] >= 0.01 for row in measured["decode_sequences_kv_tokens_step_s"])


async def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, text="no engine is ready")

    transport = httpx.MockTransport(refuse)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        with pytest.raises(RuntimeError, match="503: b'no engine is ready'"):
            await measure(client, PLAN)
