"""Facts, events and requests of a running application, made by hand."""

from typing import Any

from benchmarks.whatif.live.ask import Live, kind_of
from benchmarks.whatif.live.requests import Seen
from policies.engine_model.timing import CPU_SMOLLM2
from policies.request.ended import RequestEnd
from policies.request.terms import Terms
from policies.scaling.timing_fit import Fit, Totals
from policies.state import events as ev
from policies.state.views import Request

ASKED = Terms(ttft_slo_s=0.2)


def arrived(attempt_id: str, at_s: float, prompt: int = 100, terms: Terms = ASKED, **keys: Any) -> ev.Arrived:
    return ev.Arrived(at_s, Request(attempt_id, at_s, prompt, 50, terms=terms, **keys))


def closed(
    attempt_id: str, at_s: float, outcome: Any = "finished", tokens: int = 11, told: bool = True
) -> ev.Closed:
    end = RequestEnd(outcome, "standard", 0.1, 0.01, tokens) if told else None
    return ev.Closed(at_s, attempt_id, outcome, tokens, end)


def seen(at_s: float, ttft_s: float | None = 0.1, outcome: str = "finished", **keys: Any) -> Seen:
    return Seen(at_s, at_s + 1.0, 100, 11, outcome, ttft_s, 0.01, keys.pop("slo", 0.2), None, **keys)


def engine(name: str, role: str, node: str = "n", **keys: Any) -> dict[str, Any]:
    facts = {
        "id": name, "role": role, "kind": "sim", "group": "g", "node": node, "state": "ready", "duty": "active",
        "slots": 32, "kv_blocks": 4_096, "block_size_tokens": 16, "max_model_len": 8_192, "lease_s": 30.0,
        "max_lease_s": 600.0, "dp_ranks": 1, "barrier": False, "totals": {},
    }  # fmt: skip
    return {**facts, **keys}


POLICIES = {
    "prefill": {"name": "join_shortest_queue", "params": {}, "formula": ""},
    "decode": {"name": "round_robin", "params": {}, "formula": ""},
    "admission": {"name": "open", "params": {}, "formula": ""},
    "fairness": {"name": "vtc", "params": {}, "formula": ""},
    "dispatch": {"max_queue": 99, "seed": 3},
    "flow": None,
}
NOTHING_KNOWN: dict[str, Any] = {"tiers": {}, "places": {}, "pairs": []}


def live(engines: list[dict[str, Any]], network: dict[str, Any] | None = None, **keys: Any) -> Live:
    # 2 ms a prefill step, 4 ms a decode step, in two reports of different shares
    fit = Fit(CPU_SMOLLM2)
    at = Totals()
    for i in range(1, 40):
        prefills, decodes = 10.0 * (i % 5), 100.0 * (1 + i % 3)
        now = Totals(
            at.busy_s + 0.002 * prefills + 0.004 * decodes,
            at.prefill_steps + prefills,
            at.prefill_tokens,
            at.decode_steps + decodes,
            at.decode_seqs,
            at.decode_kv_tokens,
        )
        fit, at = fit.added(at, now), now
    fits = {kind_of(one): fit for one in engines}
    requests = keys.pop("requests", [seen(100.0 + i) for i in range(30)])
    policies = keys.pop("policies", POLICIES)
    return Live(engines, network or NOTHING_KNOWN, policies, None, fits, requests, "a test", **keys)


PAIR = [engine("prefill-a", "prefill"), engine("decode-a", "decode"), engine("decode-b", "decode")]
