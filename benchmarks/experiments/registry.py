"""The experiments by name, for `python -m benchmarks run NAME`. A module is imported only when it is needed."""

from __future__ import annotations

import importlib
from typing import cast

from benchmarks.experiments.base import Experiment, ExperimentError

EXPERIMENTS: dict[str, str] = {
    "balance_route_tuning": "benchmarks.experiments.balance_route_tuning",
    "balance_route_table1": "benchmarks.experiments.balance_route_table1",
    "balance_route_table2": "benchmarks.experiments.balance_route_table2",
    "balance_route_table3": "benchmarks.experiments.balance_route_table3",
    "balance_route_table7": "benchmarks.experiments.balance_route_table7",
    "balance_route_plain": "benchmarks.experiments.balance_route_plain",
    "balance_route_bypass": "benchmarks.experiments.balance_route_bypass",
    "balance_route_sensitivity": "benchmarks.experiments.balance_route_sensitivity",
    "balance_route_bound": "benchmarks.experiments.balance_route_bound",
    "forecast_value": "benchmarks.experiments.forecast_value",
    "composition_tuning": "benchmarks.experiments.composition_tuning",
    "composition": "benchmarks.experiments.composition",
    "composition_pool": "benchmarks.experiments.composition_pool",
    "overload": "benchmarks.experiments.overload",
    "overload_shedding": "benchmarks.experiments.overload_shedding",
    "fairness": "benchmarks.experiments.fairness",
    "overcommit": "benchmarks.experiments.overcommit",
    "deepflow_colocation": "benchmarks.experiments.deepflow_colocation",
    "deepflow_online": "benchmarks.experiments.deepflow_online",
    "deepflow_heatmap": "benchmarks.experiments.deepflow_heatmap",
    "deepflow_map": "benchmarks.experiments.deepflow_map",
    "deepflow_tuning": "benchmarks.experiments.deepflow_tuning",
    "deepflow_scheduling": "benchmarks.experiments.deepflow_scheduling",
    "deepflow_load_tuning": "benchmarks.experiments.deepflow_load_tuning",
    "deepflow_load": "benchmarks.experiments.deepflow_load",
    "deepflow_locality": "benchmarks.experiments.deepflow_locality",
    "flowkv_hetero": "benchmarks.experiments.flowkv_hetero",
    "flowkv_roles_tuning": "benchmarks.experiments.flowkv_roles_tuning",
    "flowkv_roles": "benchmarks.experiments.flowkv_roles",
    "lend_prefixes": "benchmarks.experiments.lend_prefixes",
    "scale": "benchmarks.experiments.scale",
    "scaling_tuning": "benchmarks.experiments.scaling_tuning",
    "scaling_diurnal": "benchmarks.experiments.scaling_diurnal",
    "scaling_ratio_shift": "benchmarks.experiments.scaling_ratio_shift",
    "scaling_burst": "benchmarks.experiments.scaling_burst",
    "scaling_steady": "benchmarks.experiments.scaling_steady",
    "scaling_fork": "benchmarks.experiments.scaling_fork",
    "scaling_scale": "benchmarks.experiments.scaling_scale",
    "defaults": "benchmarks.experiments.defaults",
    "netkv_tuning": "benchmarks.experiments.netkv_tuning",
    "netkv_load": "benchmarks.experiments.netkv_load",
    "netkv_context": "benchmarks.experiments.netkv_context",
    "netkv_topology": "benchmarks.experiments.netkv_topology",
    "netkv_grid": "benchmarks.experiments.netkv_grid",
    "netkv_staleness": "benchmarks.experiments.netkv_staleness",
    "netkv_prefix": "benchmarks.experiments.netkv_prefix",
    "netkv_ladder": "benchmarks.experiments.netkv_ladder",
    "netkv_contention": "benchmarks.experiments.netkv_contention",
    "netkv_shared": "benchmarks.experiments.netkv_shared",
    "netkv_scale": "benchmarks.experiments.netkv_scale",
    "netkv_whole": "benchmarks.experiments.netkv_whole",
    "netkv_windows": "benchmarks.experiments.netkv_windows",
    "netkv_columns": "benchmarks.experiments.netkv_columns",
    "netkv_flows": "benchmarks.experiments.netkv_flows",
    "netkv_memory": "benchmarks.experiments.netkv_memory",
    "netkv_fit": "benchmarks.experiments.netkv_fit",
    "netkv_predict": "benchmarks.experiments.netkv_predict",
    "mfs_testbed": "benchmarks.experiments.mfs_testbed",
    "mfs_breakdown": "benchmarks.experiments.mfs_breakdown",
    "mfs_permits": "benchmarks.experiments.mfs_permits",
    "mfs_thresholds": "benchmarks.experiments.mfs_thresholds",
    "mfs_moe": "benchmarks.experiments.mfs_moe",
    "mfs_dense": "benchmarks.experiments.mfs_dense",
}

NEEDED = ("SUMMARY", "variants", "run_one", "compare", "plots")


FITTED: dict[str, str] = {
    "netkv_fit": (
        "arrivals, sharing and NICs on the transfer times of the paper's Table II, and T_prefill on its TTFT; what it"
        " is compared with is what it is fitted on"
    ),
    "netkv_predict": (
        "nothing that stands beside it: the constants are those of `netkv_fit`, from Table II and the setup. Of the"
        " three workloads, Table II has RAG only"
    ),
    "netkv_": (
        "the times of a prefill, the rate at 100 %, the paths of a transfer and the lengths of RAG prompts, on the"
        " paper's Tables II to VI (`netkv_common`). TTFT, transfer times and rates agree by construction; what the"
        " schedulers differ by is the test, and no figure is held out"
    ),
    "balance_route_table3": (
        "the share of prompts that recur in the stand-in for the proprietary trace, which was chosen in view of this"
        " table (`workloads/standins.py`)"
    ),
    "balance_route_table": (
        "the time of a decode step per KV token, on the throughput column of the paper's Table 1, and the mean and"
        " deviation of the long contexts, on the imbalances of its Random and JSQ (`workloads/standins.py`). The"
        " imbalance of these two and the throughputs agree partly by construction"
    ),
    "balance_route_sensitivity": "as for Table 1",
    "balance_route_plain": "as for Table 1",
}
"""Sentences on the constants that were fitted on the very figures that an experiment is compared with, by the beginning
of its name.
"""


def fitted(name: str) -> str | None:
    """Returns the sentence on what was fitted on the figures that the experiment `name` is compared with, or None."""
    return next((what for start, what in FITTED.items() if name.startswith(start)), None)


def place(name: str) -> str:
    """Returns the path of an experiment's results file in the folder of all results; its plots lie beside it."""
    for family in ("netkv", "mfs", "scaling"):
        if name.startswith(f"{family}_"):
            return f"{family}/{name}.json"
    return f"{name}.json"


def load(name: str) -> Experiment:
    """Returns the experiment `name`. Raises ExperimentError for an unknown name or a module that lacks a part."""
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS) or "none yet"
        raise ExperimentError(f"no experiment is called {name!r}; there are: {known}")
    return load_module(EXPERIMENTS[name])


def load_module(path: str) -> Experiment:
    """Returns the experiment in the module with the dotted path `path`."""
    module = importlib.import_module(path)
    missing = [part for part in NEEDED if not hasattr(module, part)]
    if missing:
        raise ExperimentError(
            f"{path} lacks {', '.join(missing)}; benchmarks/experiments/base.py says what they are"
        )
    return cast(Experiment, module)
