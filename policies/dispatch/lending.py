"""Prefixes that one worker lends another: whether a chosen prefill worker fetches the prompt's head or computes it.

The lender is the worker of the same group, of any role, that caches the longest head of the prompt, of several such the
one with the least prompt tokens in work. `policies.flow.fetch_or_recompute` compares the two ways. Its inputs:

    lend_s                 (prompt tokens in work at the lender + PROMPT_TOKENS) * its seconds per prompt token
    compute_s_per_token    the prefill worker's seconds per prompt token, as outlier detection measures them
    bytes per token        those of the group's last finished prefill
    ahead                  bytes before a prefix read of this size at the two ports, by the reports of their flow agents
                           (`policies.flow.ahead`); its relative layer index is the number of prompts that wait at the
                           prefill worker
    bytes/s                what the network oracle says of the path, shared with our own transfers there unless `ahead`
                           is known: it counts their bytes, and only of those that go first
    slack_s                TTFT objective - age - (prompt tokens in work at the prefill worker + what it lacks of the
                           prompt + PROMPT_TOKENS) * its seconds per prompt token

Where a speed or the path is not known nothing is fetched. A worker without a speed of its own (a decode worker has
computed no prompt) is taken to be as fast as the prefill worker. A port whose bandwidth its agent does not know yet is
taken to be as fast as the path. Unless the agents of both nodes report, nothing is known of the ports: a read waits for
no permit of a node without an agent. What follows the prefill is left out of the slack: its decode worker is not chosen
yet.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from policies.dispatch.actions import PrefixFetch
from policies.flow.ahead import bytes_ahead, read_place
from policies.flow.base import FlowPolicy
from policies.flow.fetch_or_recompute import Ahead, FetchConfig, Prefix, choose
from policies.flow.registry import flow_policy
from policies.routing.netkv.network_term import NetworkTerm
from policies.state.events import PolicyChoice
from policies.state.reducer import ClusterState
from policies.state.standing import PROMPT_TOKENS
from policies.state.views import PortLoad, Request, RequestId, Snapshot, Worker

OWN_FLOWS = 16
"""Most own transfers that count against a path (NetKV V-C)."""


class Lending:
    """The lending of one dispatcher's workers. It remembers the bytes of a token's KV in each group."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._bytes_per_token: dict[str, float] = {}
        self._policy: tuple[PolicyChoice, FlowPolicy] | None = None
        """The flow policy that was used last."""

    def prefilled(self, attempt_id: RequestId) -> None:
        """Learns from a finished prefill, which may have entered the pool, how large a token's KV is."""
        entry = self._state.find_waiting(attempt_id)
        if entry is not None and entry.kv_bytes:
            self._bytes_per_token[entry.group] = entry.kv_bytes / entry.request.prompt_tokens

    def decide(
        self,
        request: Request,
        reader: Worker,
        lenders: Sequence[Worker],
        snapshot: Snapshot,
        config: FetchConfig,
    ) -> PrefixFetch | None:
        """Returns what is decided about the longest prefix that one of `lenders` holds; None if none holds more of the
        prompt than `reader`, or if too little is known to compare.
        """
        hits = snapshot.hits.tokens(request)
        own = hits.get(reader.id, 0)
        better = [w for w in lenders if w.id != reader.id and hits.get(w.id, 0) > own]
        if not better:
            return None
        lender = min(better, key=lambda w: (-hits[w.id], w.prefilling_tokens, w.id))
        prefix = self._prefix(request, lender, reader, own, hits[lender.id], snapshot)
        if prefix is None:
            return None
        choice = choose(prefix, config)
        return PrefixFetch(
            lender.id,
            hits[lender.id],
            choice.fetch,
            choice.reason,
            choice.fetch_s,
            choice.recompute_s,
            choice.terms,
            choice.patience_s,
        )

    def _prefix(
        self, request: Request, lender: Worker, reader: Worker, own: int, held: int, snapshot: Snapshot
    ) -> Prefix | None:
        """Returns the facts about a prefix of which the lender holds `held` tokens and the reader `own`; None if too
        little is known.
        """
        tokens = held - own
        compute_s = self._state.prefill_s_per_token(reader.id)
        per_token = self._bytes_per_token.get(reader.group)
        if compute_s is None or per_token is None:
            return None
        size = max(1, round(tokens * per_token))
        ports = self._ports(lender.node, reader.node, snapshot.now_s)
        most = None if ports else OWN_FLOWS
        network = NetworkTerm(snapshot, lender.id, [reader], live=True, most=most)
        if not network.known:
            return None
        bytes_per_s = size / max(network.seconds(reader, size), 1e-9)
        slo_s, slack_s = request.terms.ttft_slo_s, math.inf
        if slo_s is not None:
            to_compute = reader.prefilling_tokens + request.prompt_tokens - own + PROMPT_TOKENS
            slack_s = request.ttft_from_s + slo_s - snapshot.now_s - to_compute * compute_s
        lender_s = self._state.prefill_s_per_token(lender.id) or compute_s
        return Prefix(
            tokens=tokens,
            size=size,
            lend_s=(lender.prefilling_tokens + PROMPT_TOKENS) * lender_s,
            compute_s_per_token=compute_s,
            bytes_per_s=bytes_per_s,
            ahead=tuple([self._ahead(port, size, _waiting(reader), bytes_per_s) for port in ports]),
            lender_kv_used=lender.kv_usage,
            slack_s=slack_s,
        )

    def _ports(self, source: str, target: str, now_s: float) -> "tuple[_Port, ...]":
        """Returns the egress of the node `source` and the ingress of `target`, as their flow agents have reported them;
        nothing unless both have.
        """
        leaves, arrives = self._state.flow_report(source, now_s), self._state.flow_report(target, now_s)
        if leaves is None or arrives is None:
            return ()
        return (
            _Port(leaves.policy, leaves.load.egress, now_s - leaves.now_s),
            _Port(arrives.policy, arrives.load.ingress, now_s - arrives.now_s),
        )

    def _ahead(self, port: "_Port", size: int, rli: int, path_bytes_per_s: float) -> Ahead:
        """Returns what goes before a prefix read of `size` bytes at a port, with `rli` requests before its own."""
        if self._policy is None or self._policy[0] != port.choice:
            self._policy = (port.choice, flow_policy(port.choice.name, port.choice.params))
        bytes_per_s = path_bytes_per_s if port.load.bytes_per_s is None else port.load.bytes_per_s
        place = read_place(self._policy[1], size, rli, bytes_per_s)
        return Ahead(bytes_ahead(port.load, place, size, bytes_per_s * port.age_s), bytes_per_s)


class _Port(NamedTuple):
    """A port as its flow agent has reported it `age_s` ago, and the policy by which the agent orders its flows."""

    choice: PolicyChoice
    load: PortLoad
    age_s: float


def _waiting(reader: Worker) -> int:
    """Returns the number of prompts that wait at a prefill worker: those of its last report and those routed there
    since, of all that are in work there.
    """
    if reader.engine_waiting is None:
        return reader.prefilling
    return min(reader.prefilling, reader.engine_waiting + reader.unreported_prefills)
