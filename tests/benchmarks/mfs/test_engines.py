"""The options of the engines are those that vLLM engines take; nothing is started."""

import pytest

from actors.engine.registry import engine_config
from actors.flow.config import AgentConfig
from benchmarks.mfs.engines import AGENTS, Sizes, engine_options, sim_options
from benchmarks.mfs.workload import Workload
from policies.flow.mfs import MFS
from policies.flow.rmlq import thresholds

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


def test_agents_take_their_configuration_and_mfs_runs_with_a_first_threshold_of_one_as_well() -> None:
    made = {name: AgentConfig(**options, arbiter={"window": 3}) for name, options in AGENTS.items()}
    assert all(config.arbiter_config().window == 3 for config in made.values())
    first = {}
    for name in ("mfs", "mfs-u4"):
        policy = made[name].made_policy()
        assert isinstance(policy, MFS)
        first[name] = thresholds(policy.levels, policy.scale, policy.base)[0]
    # U / E: 0.5 / 4 and 4 / 4
    assert first == {"mfs": 0.125, "mfs-u4": 1.0}
