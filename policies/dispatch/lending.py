"""Prefixes that one worker lends another: whether a chosen prefill worker fetches the prompt's head or computes it.

The lender is the worker of the same group, of any role, that caches the longest head of the prompt, of several such the
one with the least prompt tokens in work. `policies.flow.fetch_or_recompute` compares the two ways. Its inputs:

    lend_s                 (prompt tokens in work at the lender + PROMPT_TOKENS) * its seconds per prompt token
    compute_s_per_token    the prefill worker's seconds per prompt token, as outlier detection measures them
    bytes per token        those of the group's last finished prefill
    bytes/s                what the network oracle says of the path, shared with our own transfers there
    slack_s                TTFT objective - age - (prompt tokens in work at the prefill worker + what it lacks of the
                           prompt + PROMPT_TOKENS) * its seconds per prompt token

Where a speed or the path is not known nothing is fetched. A worker without a speed of its own (a decode worker has
computed no prompt) is taken to be as fast as the prefill worker. What follows the prefill is left out of the slack,
because its decode worker is not chosen yet.
"""

import math
from collections.abc import Sequence

from policies.dispatch.actions import PrefixFetch
from policies.flow.fetch_or_recompute import FetchConfig, Prefix, choose
from policies.routing.netkv.network_term import NetworkTerm
from policies.state.reducer import ClusterState
from policies.state.standing import PROMPT_TOKENS
from policies.state.views import Request, RequestId, Snapshot, Worker

OWN_FLOWS = 16
"""Most own transfers that count against a path (NetKV V-C)."""


class Lending:
    """The lending of one dispatcher's workers. It remembers the bytes of a token's KV in each group."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._bytes_per_token: dict[str, float] = {}

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
        network = NetworkTerm(snapshot, lender.id, [reader], live=True, most=OWN_FLOWS)
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
            lender_kv_used=lender.kv_usage,
            slack_s=slack_s,
        )
