"""The two comparisons on one GPU, their sides, rows and aims, and the commands that serve them.

`one`   Sluice before one colocated engine, beside vLLM's own server
`pd`    Sluice before one prefill and one decode engine, beside vllm-router between two servers of vLLM's own

All engines of a comparison have the same options. CUDA graphs and `torch.compile` are on, as by vLLM's defaults, and
the engines of vllm-router get the setting of UCX with which Sluice's read KV on one GPU. Both sides are up at the same
time and share the card; an engine without requests launches no kernels.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.live import targets
from benchmarks.live.servers import Command
from benchmarks.live.targets import MODEL, EngineOptions
from benchmarks.peers.real.report import Comparison
from benchmarks.peers.real.rows import Case
from benchmarks.peers.real.sides import router
from benchmarks.peers.rows import RATE, TTFT_P50, Aim

ONE, PD = "one", "pd"
SLUICE_ONE, VLLM = "sluice-one", "vllm"
SLUICE_PD, ROUTER = "sluice-pd", "router"

NAMES: Mapping[str, str] = {
    ONE: "one engine, beside vLLM's own server",
    PD: "one prefill and one decode engine, beside vllm-router",
}
"""The name of each comparison in reports."""

OPTIONS: Mapping[str, EngineOptions] = {
    name: EngineOptions(
        max_model_len=8192,
        # CUDA graphs are captured for batches up to this, more than there are clients
        slots=256,
        kv_space_gib=kv_space_gib,
        dtype="bfloat16",
        device="cuda",
        # vLLM refuses to start with less of the card free than this (`request_memory`), also where the KV's size is
        # given; its default is nearly the whole card, and the engines that started earlier have taken theirs
        gpu_memory_utilization=0.1,
        engine_args={
            "load_format": "dummy",
            "scheduling_policy": "priority",
        },
    )
    for name, kv_space_gib in ((ONE, 24), (PD, 12))
}
"""The options of all engines of a comparison. Four sets of weights lie on the card in `pd`, so there is less for KV."""

_CASES = (
    Case(1, 64, 1000, 8.0, 20),
    Case(8, 128, 1000, 8.0, 40),
    Case(32, 128, 1000, 8.0, 128),
    Case(128, 128, 1000, 8.0, 320),
)
CASES: Mapping[str, Case] = {case.name: case for case in _CASES}
"""All rows by name, in the order in which they are measured. Each prompt is sent once in a row (`measure.BODY_WORDS`).
With 128 clients the requests of `pd` need more KV than an engine has, so some of them wait; they do on both sides.
"""


def aim_one(_case: Case, measure: str) -> Aim | None:
    """Returns the aim of a ratio Sluice / vLLM's own server, or None: what stands before an engine costs little."""
    return {RATE: Aim(least=0.98), TTFT_P50: Aim(most=1.10)}.get(measure)


def aim_pd(_case: Case, measure: str) -> Aim | None:
    """Returns the aim of a ratio Sluice / vllm-router, or None."""
    return {RATE: Aim(least=1.05), TTFT_P50: Aim(most=1.0)}.get(measure)


COMPARISONS: Mapping[str, Comparison] = {
    ONE: Comparison({SLUICE_ONE: "Sluice, one engine", VLLM: "vLLM's own server"}, CASES, aim_one),
    PD: Comparison({SLUICE_PD: "Sluice, 1P1D", ROUTER: "vllm-router, two vLLM servers"}, CASES, aim_pd),
}
"""The comparisons in the order in which they are measured. Their aims stood here before they ran."""


def commands(comparison: str, folder: Path, model: str, program: Path | None) -> dict[str, Command]:
    """Returns the command of each side. Raises ValueError where vllm-router is missing.

    `model` is the model's folder, and `program` is vllm-router.
    """
    options, known = OPTIONS[comparison], {"path": model, "name": MODEL}
    ours = targets.sluice_vllm(folder, options, disaggregated=comparison == PD, model=known)
    if comparison == ONE:
        return {SLUICE_ONE: ours, VLLM: targets.bare_engine(options, model)}
    if program is None:
        raise ValueError("the comparison pd needs vllm-router: give its program with --program")
    return {SLUICE_PD: ours, ROUTER: router(program, model, options)}
