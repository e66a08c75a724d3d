"""The configuration of an agent."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from actors.options import ConfigError, from_options
from policies.flow.arbiter import Arbiter
from policies.flow.base import FlowPolicy
from policies.flow.config import ArbiterConfig
from policies.flow.registry import flow_policy
from policies.routing.params import Number, check


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """`policy` with `params` orders the flows; `arbiter` holds fields of `ArbiterConfig`. With a `journal`, a folder,
    all events and permits are written there for `sluice replay`. Raises ValueError or ConfigError for a value that
    cannot be used.
    """

    policy: str = "mfs"
    params: dict[str, Any] = field(default_factory=dict)
    arbiter: dict[str, Any] = field(default_factory=dict)
    beat_s: Annotated[float, Number(above=0.0, unit="s")] = 0.005
    """Period of the beats to each worker that has open flows."""
    silent_s: Annotated[float, Number(above=0.0, unit="s")] = 0.020
    """Own running time after which the silent agent of a source is no longer waited for: four missing beats. A read
    from a node that is looked up waits as long for the directory.
    """
    lost_s: Annotated[float, Number(above=0.0, unit="s")] = 0.5
    """Own running time after which another node's agent that is silent loses what it holds here. ASSUMPTION: longer
    than a busy machine keeps a process waiting; until then the slots that it holds at this egress are idle.
    """
    gone_s: Annotated[float, Number(above=0.0, unit="s")] = 60.0
    """Period of the looks at connections to other nodes' agents. One that is down is given up if nothing is read
    from its node. ASSUMPTION: a node that is gone costs no more than some attempts to connect.
    """
    report_s: Annotated[float, Number(above=0.0, unit="s")] = 1.0
    """Period of the reports to the router."""
    coordinator: str = ""
    """Address of the coordinator of several nodes; without it the agent orders its own requests."""
    drop_share: Annotated[float, Number(0.0, 1.0)] = 0.1
    """Share of the requests that Algorithm 1 may move to the scavenger level. ASSUMPTION: MFS names no drop budget."""
    journal: str | None = None

    def __post_init__(self) -> None:
        check(self, "flow agent")
        self.made_policy()
        self.arbiter_config()

    def made_policy(self) -> FlowPolicy:
        """Returns the policy."""
        return flow_policy(self.policy, self.params)

    def arbiter_config(self) -> ArbiterConfig:
        """Returns the configuration of the arbiter."""
        made = from_options(ArbiterConfig, self.arbiter, "flow.options.arbiter")
        assert isinstance(made, ArbiterConfig)
        return made

    def made_arbiter(self) -> Arbiter:
        """Returns a new arbiter."""
        return Arbiter(self.made_policy(), self.arbiter_config())


__all__ = ["AgentConfig", "ConfigError"]
