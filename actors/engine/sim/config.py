"""The configuration of a sim engine, and what it announces."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.engine.sim.links import SimLink
from actors.engine.watchdog import StallLimits
from actors.flow.reader import SILENT_S
from actors.wire.messages import KV_EVENTS, EngineInfo, Role
from policies.engine_model.leases import MAX_LEASE_S
from policies.engine_model.timing import PROFILES, TimingProfile


@dataclass(frozen=True, slots=True)
class SimEngineConfig:
    """Configuration of one sim engine. The constructor raises ValueError that names an option with an impossible value.

    `profile` names a timing profile of `policies.engine_model.timing`; `timing` replaces single fields of it
    (`decode_base_s`, `transfer_bandwidth_bytes_per_s`, ...). With `mean_output_tokens` None every answer runs to its
    max_tokens. With a number answers may end earlier: their lengths are geometric with this mean, and the same in every
    run. A lease lasts for `lease_s`, and with renewals for `max_lease_s` at most (if that is not longer, no lease is
    renewed). `hold_transfers_s` delays every KV transfer (chaos tests). `links` are the links over which this engine's
    KV is sent, by pattern of the reading engine's id, which begins with the name of its group. With `vocab_size` None
    any token id is accepted. With `group` "" the compatibility group is derived. `kv_events` says whether the engine
    reports its prefix cache to the router. `dp_ranks` is the number of data-parallel ranks, each with `slots` and
    `kv_blocks` of its own; with `barrier` they step together. `faults` is a folder of orders to fail, for tests of
    failures only (`actors.engine.sim.faults`). With `flow_agent`, the address of its node's flow agent, reads wait for
    permits; `flow_node` is the node's name there. Reads whose agent is silent for `flow_silent_s`, in seconds of the
    engine's own running time, go on without permits; beats come every 5 ms. Steps that stand still for `stall_s` are a
    stall, and after `replace_after_stalls` times as long the engine is replaced, as one of vLLM is
    (`actors.engine.watchdog`).

    `span` are further nodes over which the instance lies, each with the address of its flow agent ("" is that of
    `flow_agent`): a request's KV lies on one of all these nodes, each of which has the `links`. With `layer_groups`
    above 1 a step computes this many groups of layers one after another, and a lent prefix is read group by group while
    the prompt is computed (MFS stage 1). With `collective_bytes_per_token` the nodes exchange this many bytes for each
    prompt token after each group, over their links to the engine's own id (MFS stage 2). They wait for permits with
    `collectives_by_permit`; without it they do not, as those of a real engine, which nobody can hold.
    """

    engine_id: str
    role: Role = "colocated"
    model: str = "sim"
    group: str = ""
    slots: int = 256
    kv_blocks: int = 32_768
    block_size_tokens: int = 16
    max_model_len: int = 8_192
    prefill_budget_tokens: int = 8_192
    chunked_prefill: bool = True
    lease_s: float = 30.0
    max_lease_s: float = MAX_LEASE_S
    profile: str = "tick_1ms"
    timing: Mapping[str, float] = field(default_factory=dict)
    mean_output_tokens: float | None = None
    vocab_size: int | None = None
    hold_transfers_s: float = 0.0
    pull_timeout_s: float = 30.0
    kv_events: bool = True
    links: Mapping[str, SimLink] = field(default_factory=dict)
    dp_ranks: int = 1
    barrier: bool = False
    faults: str | None = None
    flow_agent: str = ""
    flow_node: str = ""
    flow_silent_s: float = SILENT_S
    span: Mapping[str, str] = field(default_factory=dict)
    layer_groups: int = 1
    collective_bytes_per_token: float = 0.0
    collectives_by_permit: bool = True
    stall_s: float = 5.0
    replace_after_stalls: float = 3.0

    def __post_init__(self) -> None:
        for name in (
            "slots",
            "kv_blocks",
            "block_size_tokens",
            "max_model_len",
            "prefill_budget_tokens",
            "dp_ranks",
            "layer_groups",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("lease_s", "max_lease_s", "pull_timeout_s", "flow_silent_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0 seconds")
        if not self.hold_transfers_s >= 0:
            raise ValueError(f"hold_transfers_s is {self.hold_transfers_s}: it must be at least 0 seconds")
        if self.mean_output_tokens is not None and not self.mean_output_tokens >= 1:
            raise ValueError(
                f"mean_output_tokens is {self.mean_output_tokens}: it must be at least 1, or null"
            )
        if self.kv_blocks * self.block_size_tokens < self.max_model_len:
            raise ValueError(
                f"{self.kv_blocks} KV blocks of {self.block_size_tokens} tokens cannot hold a request of max_model_len "
                f"{self.max_model_len}: set kv_blocks to {-(-self.max_model_len // self.block_size_tokens)} or more"
            )
        if self.barrier and self.dp_ranks == 1:
            raise ValueError("barrier is on, but there is one rank only: set dp_ranks to 2 or more")
        if self.flow_agent and not self.flow_node:
            raise ValueError(
                "flow_agent is set, but flow_node is not: give the name of the node to which it belongs"
            )
        self._check_stages()
        self.timing_profile()
        self.stall_limits()

    def _check_stages(self) -> None:
        if self.span and (not self.flow_node or self.flow_node in self.span or "" in self.span):
            raise ValueError(
                f"span has the nodes {sorted(self.span)}: name the further nodes there and another one as flow_node"
            )
        if not 0 <= self.collective_bytes_per_token < math.inf:
            raise ValueError(
                f"collective_bytes_per_token is {self.collective_bytes_per_token}: it must be at least 0 and finite"
            )
        if self.collective_bytes_per_token and not self.span:
            raise ValueError("collective_bytes_per_token is set, but span is not: one node exchanges nothing")
        if self.barrier and self.staged:
            raise ValueError(
                "ranks behind a barrier have no layer groups and no collectives: turn barrier off"
            )

    @property
    def staged(self) -> bool:
        """Whether a step is a chain of layer groups with flows between them."""
        return self.layer_groups > 1 or self.collective_bytes_per_token > 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the instance by their names at the flow agents, its own first; it may have no name ("")."""
        return (self.flow_node, *self.span)

    @property
    def step_hold_s(self) -> float:
        """Seconds for which a flow within a step may be held at most: half of what counts as a stall of the steps."""
        return self.stall_s / 2.0

    def agent_of(self, node: str) -> str:
        """Returns the address of the flow agent of one of the `nodes`; "" without agents."""
        return (self.span.get(node, "") or self.flow_agent) if self.flow_agent else ""

    def stall_limits(self) -> StallLimits:
        """Returns the limits of the watch over the steps; nothing is compiled in the first ones."""
        return StallLimits(self.stall_s, self.replace_after_stalls, first_steps_s=self.stall_s)

    def timing_profile(self) -> TimingProfile:
        """Returns the profile with its replaced fields. Raises ValueError for an unknown profile or field."""
        if self.profile not in PROFILES:
            raise ValueError(
                f"profile {self.profile!r} is unknown: choose one of {', '.join(sorted(PROFILES))}"
            )
        allowed = [f.name for f in dataclasses.fields(TimingProfile) if f.name != "source"]
        for name in self.timing:
            if name not in allowed:
                raise ValueError(f"timing.{name} is unknown: the fields are {', '.join(allowed)}")
        base = PROFILES[self.profile]
        if not self.timing:
            return base
        changed = ", ".join(f"{name}={value}" for name, value in sorted(self.timing.items()))
        source = f"{base.source}; set by configuration: {changed}"
        # Numbers from a file arrive as floats; a field that counts (bytes, tokens) stays an integer.
        given: dict[str, Any] = {
            n: int(v) if isinstance(getattr(base, n), int) else v for n, v in self.timing.items()
        }
        return dataclasses.replace(base, source=source, **given)

    def compatibility_group(self) -> str:
        """Returns the name of the group of engines between which KV may move. Derived, it holds model, block size and
        bytes per token.
        """
        derived = f"sim:{self.model}:{self.block_size_tokens}:{self.timing_profile().kv_bytes_per_token}"
        return self.group or derived

    def info(self, addresses: tuple[str, ...], role: Role) -> EngineInfo:
        """Returns the engine's announcement while it serves `role`. The server fills in its node and replica."""
        return EngineInfo(
            id=self.engine_id,
            role=role,
            kind="sim",
            model=self.model,
            group=self.compatibility_group(),
            addresses=addresses,
            slots=self.slots,
            kv_blocks=self.kv_blocks,
            block_size_tokens=self.block_size_tokens,
            max_model_len=self.max_model_len,
            node="",
            pid=os.getpid(),
            lease_s=self.lease_s,
            max_lease_s=self.max_lease_s,
            features=(
                "n",
                "stop",
                "logprobs",
                "prompt_logprobs",
                *((KV_EVENTS,) if self.kv_events else ()),
            ),
        )
