"""The options of the engines are those that vLLM engines take; nothing is started."""

import pytest

from actors.engine.registry import engine_config
from benchmarks.mfs.engines import Sizes, engine_options, sim_options
from benchmarks.mfs.workload import Workload

AGENT = "unix:/tmp/agent.sock"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_take_the_options(role: str) -> None:
    options = engine_options(role, "10.79.0.1", "/models/m", Sizes(), (0,), AGENT)
    config = engine_config("vllm", {"engine_id": f"{role}-0", "role": role}, options)
    assert (config.role, config.side_channel_host) == (role, "10.79.0.1")
    assert config.connector_args["flow_node"] == role
    # only who reads asks for permits, and only the lender keeps prompts
    assert config.connector_args["flow_agent"] == (AGENT if role == "decode" else "")
    assert config.engine_args == {"enable_prefix_caching": role == "prefill"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sim_engines_take_theirs(role: str) -> None:
    config = engine_config("sim", {"engine_id": f"{role}-0", "role": role}, sim_options(role, Sizes(), AGENT))
    assert (config.flow_node, config.flow_agent) == (role, AGENT if role == "decode" else "")
    # the one link is the sender's
    assert list(config.links) == (["decode-*"] if role == "prefill" else [])


def test_the_longest_prompt_fits_into_the_context() -> None:
    assert Workload().loose_tokens < Sizes().max_model_len
