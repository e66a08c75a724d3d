"""The catalogue of workloads. `build` turns a `WorkloadSpec`, which can be written into a result, into requests.

Published traces are read from the directory that SLUICE_TRACES or an argument names; `python -m benchmarks traces` says
where they are published. The project ships the first rows of one trace in `excerpts/`. The excerpt has a name of its
own, so that its results cannot be mistaken for results of the whole trace. Workloads named `synthetic-...` are
generated and need no file.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.checkout import ROOT
from benchmarks.workloads import standins, transform
from benchmarks.workloads.azure2024 import load_azure2024
from benchmarks.workloads.prefixes import Sharing, ideal_hit_share, share_prefixes
from benchmarks.workloads.record import WorkloadError, WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from benchmarks.workloads.traces import load_trace
from predictors.protocol import Arrival, Outcome
from predictors.servegen import load_clients, sample
from predictors.traces import TraceError, finish_time_s

EXCERPTS = Path(__file__).parent / "excerpts"
MOONCAKE = "https://github.com/kvcache-ai/Mooncake, FAST25-release/traces"
AZURE = "https://github.com/Azure/AzurePublicDataset, data"
SERVEGEN = "https://github.com/alibaba/ServeGen, data/reason/deepseek-r1, as one tar (Apache-2.0)"
# Seconds between ticks of the conversation trace's clock; the synthetic one has Poisson times.
MOONCAKE_TICK_S = 3.0
SAMPLED = 20_000
"""Requests that a sampler gives where no number is asked for."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A published trace: its file, the function that reads it, and where it is published.

    `file` is the file's name without .xz. `read` takes the path, the greatest number of requests (None: no limit) and a
    seed. `tick_s` is the step of the trace's clock in seconds, or None where its times are fine enough. A `shipped`
    file lies in `excerpts/`.
    """

    summary: str
    file: str
    read: Callable[[Path, int | None, int], list[WorkloadRequest]]
    tick_s: float | None = None
    origin: str = ""
    shipped: bool = False


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """A workload that is generated: `make` returns its generator, which needs no files."""

    summary: str
    make: Callable[[], Synthetic]


def _rows(path: Path, requests: int | None, seed: int) -> list[WorkloadRequest]:
    """Reads the first `requests` rows of a published trace. The `seed` is not used."""
    return load_trace(path)[:requests]


def _servegen(path: Path, requests: int | None, seed: int) -> list[WorkloadRequest]:
    return from_outcomes(sample(load_clients(path), requests or SAMPLED, seed))


def _servegen_long(path: Path, requests: int | None, seed: int) -> list[WorkloadRequest]:
    return list(standins.with_long_context(_servegen(path, requests, seed), seed))


def _azure2024(path: Path, requests: int | None, seed: int) -> list[WorkloadRequest]:
    return list(islice(load_azure2024(path).stream(seed), requests or SAMPLED))


WORKLOADS: dict[str, TraceSource | SyntheticSource] = {
    "mooncake-conversation": TraceSource(
        "Mooncake production conversations (FAST'25)",
        "mooncake_conversation_trace.jsonl",
        _rows,
        MOONCAKE_TICK_S,
        f"{MOONCAKE}/conversation_trace.jsonl (Apache-2.0)",
    ),
    "mooncake-conversation-excerpt": TraceSource(
        "its first 4,000 rows, shipped with the project",
        "mooncake_conversation_first_4000.jsonl",
        _rows,
        MOONCAKE_TICK_S,
        shipped=True,
    ),
    "mooncake-synthetic": TraceSource(
        "Mooncake, from public data, Poisson times",
        "mooncake_synthetic_trace.jsonl",
        _rows,
        origin=f"{MOONCAKE}/synthetic_trace.jsonl (Apache-2.0)",
    ),
    "azure2023-conversation": TraceSource(
        "Azure conversations, November 2023",
        "azure2023_AzureLLMInferenceTrace_conv.csv",
        _rows,
        origin=f"{AZURE}/AzureLLMInferenceTrace_conv.csv (CC-BY-4.0)",
    ),
    "azure2023-code": TraceSource(
        "Azure code completion, November 2023",
        "azure2023_AzureLLMInferenceTrace_code.csv",
        _rows,
        origin=f"{AZURE}/AzureLLMInferenceTrace_code.csv (CC-BY-4.0)",
    ),
    "azure2024-sample": TraceSource(
        "sampled from Azure's published plots of May 2024",
        "azure2024_digitised.tar",
        _azure2024,
        origin="no file: the plots of the week of May 2024, digitised (azure2024.py has the format)",
    ),
    "servegen-reasoning": TraceSource(
        "sampled from ServeGen's clients of a reasoning model, over one day",
        "servegen_deepseek-r1.tar",
        _servegen,
        origin=SERVEGEN,
    ),
    "servegen-reasoning-long-context": TraceSource(
        "the same behind prompts of tens of thousands of tokens (synthetic prompts)",
        "servegen_deepseek-r1.tar",
        _servegen_long,
        origin=SERVEGEN,
    ),
    "synthetic-heavy-tail": SyntheticSource(
        "reasoning requests with ServeGen's margins", standins.heavy_tail
    ),
    "synthetic-heavy-tail-recurring": SyntheticSource(
        "the same, most prompts recur", standins.heavy_tail_recurring
    ),
    "synthetic-heavy-tail-long-context": SyntheticSource(
        "the same behind prompts of tens of thousands of tokens", standins.heavy_tail_long_context
    ),
    "synthetic-qwen-a": SyntheticSource("stand-in for Qwen-Bailian A (chat)", standins.qwen_a),
    "synthetic-qwen-b": SyntheticSource("stand-in for Qwen-Bailian B (API, agents)", standins.qwen_b),
    "synthetic-chat": SyntheticSource("conversations, for trying things out", standins.chat),
    "synthetic-rag": SyntheticSource("questions over a document collection", standins.rag),
}


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload, described by the steps that make it. They are applied in this order:

    1. The source is read: the workload `name`, or the trace file `path`. At most `requests` requests are taken; None
       takes all of a trace and 20,000 of a sampler.
    2. `part` selects by time: "all", "train" (the first 80 %) or "held_out" (the last 20 %).
    3. With `spread_ticks`, requests that share a coarse clock tick are spread over it at random.
    4. Only requests whose token counts `lengths` allows are kept.
    5. Every prompt gets `prompt_tokens` tokens.
    6. Times are divided by `compression`, or by the factor that makes the mean rate `rate_per_s`.
    7. The window [start_s, end_s) is cut out.
    8. `sharing` replaces the prefixes that the source's prompts share.
    9. Every request gets the class and the SLOs.

    A step whose field is None is left out.
    """

    name: str | None = None
    path: str | None = None
    requests: int | None = None
    part: str = "all"
    spread_ticks: bool = True
    lengths: transform.LengthFilter | None = None
    prompt_tokens: int | None = None
    compression: float | None = None
    rate_per_s: float | None = None
    start_s: float = 0.0
    end_s: float | None = None
    sharing: Sharing | None = None
    request_class: str = "standard"
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.path is None):
            raise WorkloadError("a workload has either a name or a path")
        if self.name is not None and self.name not in WORKLOADS:
            raise WorkloadError(f"no workload is called {self.name!r}; there are {', '.join(WORKLOADS)}")
        if self.part not in ("all", "train", "held_out"):
            raise WorkloadError(f"part {self.part!r}: give all, train or held_out")
        if self.compression is not None and self.rate_per_s is not None:
            raise WorkloadError("give compression or rate_per_s, not both")


def build(spec: WorkloadSpec, seed: int, traces: Path | None = None) -> list[WorkloadRequest]:
    """Returns the requests that `spec` describes, in order of time. Raises WorkloadError or TraceError.

    `seed` seeds sampling, the spreading of ticks, and the sharing of prefixes. The rows of a trace do not depend on it.
    """
    requests, tick_s = _source(spec, seed, traces)
    if spec.part != "all":
        train, held_out = transform.split_by_time(requests)
        requests = train if spec.part == "train" else transform.rebase(held_out)
    if spec.spread_ticks and tick_s is not None:
        requests = list(transform.spread_ticks(requests, tick_s, seed))
    made: Iterable[WorkloadRequest] = requests
    if spec.lengths is not None:
        made = transform.select(made, spec.lengths)
    if spec.prompt_tokens is not None:
        made = transform.with_prompt_tokens(made, spec.prompt_tokens)
    if spec.compression is not None:
        made = transform.compress(made, spec.compression)
    if spec.rate_per_s is not None:
        made = transform.at_rate(list(made), spec.rate_per_s)
    if spec.start_s > 0 or spec.end_s is not None:
        made = transform.window(made, spec.start_s, float("inf") if spec.end_s is None else spec.end_s)
    if spec.sharing is not None:
        made = share_prefixes(made, spec.sharing, seed)
    made = transform.with_class(made, spec.request_class, spec.ttft_slo_s, spec.tpot_slo_s)
    found = list(transform.checked(made))
    if not found:
        raise WorkloadError(
            f"no request is left of {spec.name or spec.path}: widen the window or the lengths"
        )
    return found


def _source(spec: WorkloadSpec, seed: int, traces: Path | None) -> tuple[list[WorkloadRequest], float | None]:
    if spec.path is not None:
        return load_trace(Path(spec.path))[: spec.requests], None
    source = WORKLOADS[spec.name or ""]
    if isinstance(source, SyntheticSource):
        return list(islice(source.make().stream(seed), spec.requests or SAMPLED)), None
    return source.read(file_of(source, traces), spec.requests, seed), source.tick_s


def is_sampled(path: Path) -> bool:
    """Returns whether `path` is a folder or an archive, which has distributions to sample from and no rows."""
    return path.is_dir() or ".tar" in path.suffixes


def read_file(path: Path, sampled: int, seed: int, drop_empty: bool = False) -> list[WorkloadRequest]:
    """Returns all requests of a trace file in any published format, as its content tells.

    From an archive or folder of ServeGen's, or of the Azure plots, about `sampled` requests are sampled with `seed`.
    `drop_empty` leaves out rows without a prompt or an output token. Raises TraceError or WorkloadError.
    """
    if not is_sampled(path):
        return load_trace(path, drop_empty=drop_empty)
    names = _names_in(path)
    if any(name.startswith("chunk-") for name in names):
        return _servegen(path, sampled, seed)
    if any("input_cdf" in name for name in names):
        return _azure2024(path, sampled, seed)
    raise TraceError(
        f"{path}: holds neither ServeGen's chunk-N-trace.csv nor the digitised curves of Azure 2024; give such an"
        " archive or folder, or a file of rows (Mooncake, Azure, BurstGPT)"
    )


def _names_in(path: Path) -> list[str]:
    try:
        if path.is_dir():
            return [one.name for one in path.rglob("*")]
        with tarfile.open(path, "r:*") as archive:
            return [Path(name).name for name in archive.getnames()]
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path}: cannot read the archive: {error}") from error


def file_of(source: TraceSource, traces: Path | None = None) -> Path:
    """Returns the path of the trace's file. Raises WorkloadError where the file is not on this machine."""
    return find_trace(source.file, EXCERPTS if source.shipped else traces)


def or_excerpt(name: str) -> str:
    """Returns `name` where that workload's file is available, else the name of its shipped excerpt.

    The returned name goes into the config of a run, so the result says which of the two it used.
    """
    return name if available(name) else f"{name}-excerpt"


def stand_in(name: str) -> str | None:
    """Returns the remark that a result on the workload `name` must carry, or None for a whole published trace."""
    source = WORKLOADS.get(name)
    if isinstance(source, TraceSource) and not source.shipped:
        return None
    return "not a published trace" if source is None else source.summary


def traces_dir() -> Path | None:
    """Returns the directory that SLUICE_TRACES names, or None where the variable is not set."""
    found = os.environ.get("SLUICE_TRACES")
    return Path(found) if found else None


def find_trace(file: str, traces: Path | None = None) -> Path:
    """Returns the path of `file` or `file`.xz in the directory `traces` (default: SLUICE_TRACES).

    Raises a WorkloadError that says what to do where there is neither.
    """
    folder = traces or traces_dir()
    if folder is None:
        raise WorkloadError(
            f"{file} is not shipped: set SLUICE_TRACES (or give --traces) to the directory that holds it, or use a "
            "synthetic-... workload; `python -m benchmarks traces` says where the originals are published"
        )
    for path in (folder / file, folder / f"{file}.xz"):
        if path.exists():
            return path
    raise WorkloadError(f"{folder} holds neither {file} nor {file}.xz")


def traces_of(files: Iterable[str], root: Path = ROOT) -> tuple[str, ...]:
    """Returns the published traces on this machine that the source `files` name, each with a digest of its content."""
    return tuple(
        sorted({digest_of(file_of(source)) for name, source in _named(files, root) if available(name)})
    )


def missing_traces(files: Iterable[str], traces: Iterable[str], root: Path = ROOT) -> list[str]:
    """Returns the files of the published traces that the source `files` name and that are not among `traces`, which
    `traces_of` gave.
    """
    had = {trace.partition(" ")[0].removesuffix(".xz") for trace in traces}
    return sorted({source.file for _, source in _named(files, root)} - had)


def _named(files: Iterable[str], root: Path) -> Iterator[tuple[str, TraceSource]]:
    """Yields the published traces that the source `files`, relative to `root`, name.

    Those that are shipped with the project are part of the digest of the code. A trace that is named and not read
    counts too. The catalogue itself does not name any.
    """
    own = Path(__file__).resolve().relative_to(ROOT)
    sources = [root / file for file in files if file.endswith(".py") and Path(file) != own]
    texts = [path.read_text("utf-8") for path in sources if path.is_file()]
    for name, source in WORKLOADS.items():
        if isinstance(source, SyntheticSource) or source.shipped:
            continue
        if any(f'"{name}"' in text for text in texts):
            yield name, source


def digest_of(path: Path) -> str:
    """Returns the name of a trace's file and a digest of its content."""
    seen = path.stat()
    return f"{path.name} sha256:{_sha256(path, seen.st_mtime_ns, seen.st_size)[:16]}"


@lru_cache(maxsize=64)
def _sha256(path: Path, mtime_ns: int, size: int) -> str:
    """Returns the digest of a file; a file that was touched since is read again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def as_if_present() -> Iterator[None]:
    """Within this context all workloads count as available, so that experiments name the variants of a machine that has
    all traces. Nothing may be built in it.
    """
    _assumed.append(True)
    try:
        yield
    finally:
        _assumed.pop()


_assumed: list[bool] = []


def available(name: str, traces: Path | None = None) -> bool:
    """Returns whether the workload `name` can be built on this machine: it is generated, or its file is present."""
    source = WORKLOADS[name]
    if _assumed or isinstance(source, SyntheticSource):
        return True
    try:
        file_of(source, traces)
    except WorkloadError:
        return False
    return True


def describe(requests: Sequence[WorkloadRequest]) -> dict[str, float | None]:
    """Returns statistics of a workload by name, None where one is not defined.

    They are the number of requests, clients and sessions, the span (s), the mean rate (1/s), the coefficient of
    variation of the gaps, mean, p50, p95 and p99 of the token counts, and the share of prompt tokens that a cache of
    unlimited size would have held.
    """
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


def from_outcomes(outcomes: Iterable[Outcome]) -> list[WorkloadRequest]:
    """Returns requests made from the `outcomes` that the predictors' samplers draw.

    Times count from the first outcome. A length of 0 tokens becomes 1.
    """
    made = [
        WorkloadRequest(
            request_id=o.arrival.request_id,
            at_s=o.arrival.arrival_s,
            prompt_tokens=max(o.arrival.prompt_tokens, 1),
            output_tokens=max(o.output_tokens, 1),
            client=o.arrival.client or "",
            session=o.arrival.session or "",
            prompt_key=o.arrival.prompt_key or "",
            max_tokens=o.arrival.max_tokens,
        )
        for o in outcomes
    ]
    return transform.rebase(made)


def outcomes_of(requests: Iterable[WorkloadRequest]) -> list[Outcome]:
    """Returns the outcomes that a predictor learns from once `requests` have ended.

    They serve to fit a predictor on the earlier part of a workload.
    """
    return [
        Outcome(
            Arrival(
                request_id=r.request_id,
                arrival_s=r.at_s,
                prompt_tokens=r.prompt_tokens,
                client=r.client or None,
                session=r.session or None,
                prompt_key=r.prompt_key or None,
                traffic_class=r.request_class,
                max_tokens=r.max_tokens,
            ),
            r.output_tokens,
            finish_time_s(r.at_s, r.output_tokens),
        )
        for r in requests
    ]
