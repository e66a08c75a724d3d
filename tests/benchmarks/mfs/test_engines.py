"""The options of the engines are those that vLLM engines take; nothing is started."""

import pytest

from actors.engine.registry import engine_config
from actors.flow.config import AgentConfig
from benchmarks.mfs.engines import AGENTS, OneMachine, Sizes, engine_options, sim_nodes, sim_options
from benchmarks.mfs.workload import BLOCK_TOKENS, Workload
from policies.flow.mfs import MFS
from policies.flow.rmlq import thresholds

AGENT = "unix:/tmp/agent.sock"
SIZES = Sizes(decodes=2, others=1)
HOLD_SHARE = 2 / 3
"""The longest hold of a read as a share of a lease (`actors.engine.vllm.connector.worker`)."""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_take_the_options(role: str) -> None:
    options = engine_options(role, "10.79.0.1", "/models/m", Sizes(silent_s=0.05), (0,), AGENT)
    config = engine_config("vllm", {"engine_id": f"{role}-0", "role": role}, options)
    assert (config.role, config.side_channel_host) == (role, "10.79.0.1")
    # only who reads asks for permits, and only the lender keeps prompts
    assert (config.flow_node, config.flow_agent) == (role, AGENT if role == "decode" else "")
    assert config.engine_args == {"enable_prefix_caching": role == "prefill"}
    # vLLM's CPU default of 128 would leave up to half of a short prompt to be computed
    assert config.block_size_tokens == BLOCK_TOKENS
    assert config.flow_silent_s == 0.05


def test_a_read_may_be_held_until_the_end_of_a_run() -> None:
    """A read that cannot be in time waits for all others, which above the link's capacity end with the run."""
    workload = Workload()
    # 46 kB a token in float32, in blocks of 32 tokens: 31.6 MB on average, and 240 of them at 47.5 MB/s take 160 s
    mean_bytes = workload.mean_bytes({"tight": 288 * 46_080, "loose": 2_016 * 46_080})
    assert workload.requests * mean_bytes / 47.5e6 < Sizes().lease_s * HOLD_SHARE


@pytest.mark.parametrize("name", SIZES.names)
def test_sim_engines_take_theirs(name: str) -> None:
    role = name.partition("-")[0]
    config = engine_config("sim", {"engine_id": name, "role": role}, sim_options(name, SIZES, AGENT))
    assert config.flow_agent == AGENT
    # the agent knows every node
    assert set(config.nodes) <= set(sim_nodes(SIZES))
    assert len(config.nodes) == (2 if role == "prefill" else 1)
    assert list(config.links) == (["*"] if role == "prefill" else [])
    assert config.staged == (role == "prefill")
    # the sender computes nothing but its steps' base; the others need 2 x 23,040 bytes / 50 MB/s a token
    token_s = {"prefill-0": 0.0, "prefill-1": 2 * 23_040 / 50e6}.get(name)
    assert role == "decode" or config.timing_profile().prefill_per_token_s == token_s


def test_lent_prefixes_and_collectives_count_as_bytes_of_the_sender() -> None:
    workload = Workload(tight_tokens=320, prefix_share=0.5, cold_share=0.25)
    # Three quarters move their KV, and a quarter of the half that is computed; the others move half of it as a prefix.
    assert OneMachine(SIZES).sent_share(workload, "tight") == 0.75 * (1 + 0.25 * 0.5) + 0.25 * 0.5


def test_the_longest_prompt_fits_into_the_context() -> None:
    assert Workload().loose_tokens < Sizes().max_model_len


def test_agents_take_their_configuration_and_mfs_runs_with_a_first_threshold_of_one_as_well() -> None:
    made = {name: AgentConfig(**options, arbiter={"window": 3}) for name, options in AGENTS.items()}
    assert all(config.arbiter_config().window == 3 for config in made.values())
    first = {}
    for name in ("mfs", "mfs-swept"):
        policy = made[name].made_policy()
        assert isinstance(policy, MFS)
        first[name] = thresholds(policy.levels, policy.scale, policy.base)[0]
    # U / E: 0.5 / 4 and 4 / 4
    assert first == {"mfs": 0.125, "mfs-swept": 1.0}
