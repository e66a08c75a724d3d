"""A workload in a dozen numbers, to see that it is the one that was meant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.workloads.prefixes import ideal_hit_share
from benchmarks.workloads.record import WorkloadRequest


def describe(requests: Sequence[WorkloadRequest]) -> dict[str, float | None]:
    """Count, span, rate, burstiness, token counts (mean, p50, p95, p99) and the hit share of an unlimited cache."""
    at_s = np.array([r.at_s for r in requests])
    gaps_s = np.diff(at_s)
    span_s = float(at_s[-1] - at_s[0]) if at_s.size else 0.0
    found: dict[str, float | None] = {
        "requests": float(at_s.size),
        "span_s": span_s,
        "rate_per_s": gaps_s.size / span_s if span_s > 0 else None,
        "cv of the gaps": float(gaps_s.std() / gaps_s.mean()) if span_s > 0 else None,
    }
    for name in ("prompt_tokens", "output_tokens"):
        counts = np.array([getattr(r, name) for r in requests], dtype=np.float64)
        if counts.size:
            found[f"{name} mean"] = float(counts.mean())
            found.update({f"{name} p{q}": float(np.percentile(counts, q)) for q in (50, 95, 99)})
    found["clients"] = float(len({r.client for r in requests if r.client}))
    found["sessions"] = float(len({r.session for r in requests if r.session}))
    found["ideal_hit_share"] = ideal_hit_share(requests)
    return found
