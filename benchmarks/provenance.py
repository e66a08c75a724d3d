"""Says which code made the runs of a results file, and whether the file may be committed.

Every run keeps its origin (`benchmarks.checkout.Origin`). A committed file must have runs of one state of the code
only, and that must be the code of a commit. So nobody has to believe that a figure is of the code beside which it
stands: the digest can be computed again from the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.checkout import DIGEST, Origin
from benchmarks.live.machine import HOT_PATH
from benchmarks.results_io import Stored, Verified

UNTRACED: frozenset[str] = frozenset()
"""Committed files that were written before runs kept their origin, or the folders of which their digests are, or whose
digests are computed in another way now, relative to `benchmarks/results`.

The set only shrinks: a file leaves it when it is measured again, and no file may enter it.
"""

MISSING = frozenset(
    {
        "capacity/capacity.json",
        "experiments/balance_route_plain.json",
        "experiments/composition_pool.json",
        "experiments/deepflow_load.json",
        "experiments/deepflow_locality.json",
        "experiments/forecast_value.json",
        "experiments/truth/sim.json",
        "experiments/truth/vllm.json",
        "fuzz/fuzz.json",
        "hostile/hostile.json",
        "overload/sim.json",
        "overload/vllm.json",
        "peers/gpu.json",
        "peers/peers.json",
        "peers/real.json",
        "streams/streams.json",
        "watching/page.json",
        "watching/walk.json",
    }
)
"""Results that have not been measured yet, relative to `benchmarks/results`.

A file enters with the code that measures it, and leaves when it is committed.
"""

LOST: frozenset[str] = frozenset()
"""Committed files of which the commit is in no history any more, relative to `benchmarks/results`: what came into the
history was one commit of all that was changed after it, too. Their runs were made and their digests are true, but
nobody can find the code again, and the documents say so.

A file enters only when its commit is lost, and leaves when it is measured again.
"""


def of_experiment(stored: Stored) -> list[Origin]:
    """Returns the different origins of an experiment's runs; none if the file does not know them."""
    made = stored.results.origins.values()
    return list(dict.fromkeys(origin for by_seed in made for origin in by_seed.values()))


def of_other(whole: Mapping[str, Any]) -> list[Origin]:
    """Returns the different origins of the runs in another results file; none if the file does not know them.

    The file has `origin`, or the facts of `benchmarks.live.machine` in `machine`, or several `runs` that each have
    `code`, `commit` and `clean` (`benchmarks.chaos`); earlier runs have a `+` behind the commit instead of `clean`.
    """
    if "origin" in whole:
        return [Origin.of(whole["origin"])]
    runs = [
        {"clean": not str(run.get("commit", "+")).endswith("+")} | run | {"machine": run.get("machine", {})}
        for run in whole.get("runs", ())
        if isinstance(run, dict)
    ]
    found = (
        [_from_facts(run["machine"], run) for run in runs]
        if runs
        else [_from_facts(whole.get("machine"), {})]
    )
    return [] if None in found else list(dict.fromkeys(origin for origin in found if origin is not None))


def paths_of_other(whole: Mapping[str, Any]) -> list[str] | None:
    """Returns the files and folders of which the digests in another results file are.

    None means that one of its runs does not say so, or that they do not all say the same.
    """
    runs = whole.get("runs") or [whole]
    found: list[Any] = []
    for run in runs if isinstance(runs, list) else [whole]:
        machine = run.get("machine") if isinstance(run, dict) else None
        found.append((machine if isinstance(machine, dict) else {}).get("code_of", run.get("code_of")))
    same = all(isinstance(one, list) and one and one == found[0] for one in found)
    return found[0] if same else None


def traced(origins: Iterable[Origin]) -> bool:
    """Returns whether the code of the runs is known by digests that are computed as digests are now."""
    digests = [origin.code for origin in origins]
    return bool(digests) and all(digest.startswith(f"{DIGEST}:") for digest in digests)


def commands(whole: Mapping[str, Any]) -> list[str]:
    """Returns the different commands that made the runs in another results file; none if it does not know them."""
    runs: list[Mapping[str, Any]] = [run for run in whole.get("runs", ()) if isinstance(run, dict)]
    runs = runs or [whole]
    return list(dict.fromkeys(str(run["command"]) for run in runs if run.get("command")))


def commits(origins: Iterable[Origin]) -> str:
    """Returns the commits of the runs as text; an empty text where they are not known."""
    made = dict.fromkeys(f"{origin.commit}{'' if origin.clean else ' and changes'}" for origin in origins)
    return ", ".join(made)


def codes(origins: Iterable[Origin]) -> str:
    """Returns the digests of the code that ran as text; an empty text where they are not known."""
    return ", ".join(dict.fromkeys(origin.code for origin in origins))


def since(file: str, origins: Iterable[Origin], present: str, verified: Verified | None = None) -> str:
    """Returns whether the code of the runs in `file` is that with the digest `present`: same or changed, or unknown
    (`traced`).

    Behind these stands whether its commit is lost (`LOST`), and the outcome of the runs that were computed again, if
    any were (`benchmarks.verify`).
    """
    made = list(origins)
    if not present or not traced(made):
        found = "unknown"
    else:
        found = "same" if {origin.code for origin in made} == {present} else "changed"
    if file in LOST and found != "same":
        found = f"{found}, its commit is lost"
    return found if verified is None or found == "same" else f"{found}; {verified.shown}"


def _from_facts(machine: Any, run: Mapping[str, Any]) -> Origin | None:
    facts = {
        **(machine if isinstance(machine, dict) else {}),
        **{k: v for k, v in run.items() if k != "machine"},
    }
    if not {"code", "commit", "clean", "cpu", "cores", "python"} <= set(facts):
        return None
    where = f"{facts['cpu']}, {facts['cores']} cores; Python {facts['python']}"
    # files that were written before runs kept it do not know it
    where += f"; hot path {facts[HOT_PATH]}" if HOT_PATH in facts else ""
    return Origin(facts["code"], facts["commit"], facts["clean"], where)


def shown(origins: Iterable[Origin]) -> str:
    """Returns the origins as text, or an empty text where there are none."""
    made = list(origins)
    codes = dict.fromkeys((origin.commit, origin.code, origin.clean) for origin in made)
    texts = [
        f"commit {commit}{'' if clean else ' and changes'}, code {code}" for commit, code, clean in codes
    ]
    machines = dict.fromkeys(origin.machine for origin in made)
    traces = dict.fromkeys(trace for origin in made for trace in origin.traces)
    return "; ".join([" and ".join(texts), *machines, *traces]) if made else ""


def problems(file: str, origins: list[Origin], command: str, code_of_known: bool = True) -> Iterator[str]:
    """Yields a sentence for each reason for which the file should not be committed as it is.

    `code_of_known` says whether it is known of which files and folders its digests are.
    """
    if not traced(origins) or not code_of_known:
        missing = "of which files its digest is (`code_of`)"
        if not origins:
            missing = "which code made its runs"
        elif not traced(origins):
            missing = f"which code made its runs in the present way ({DIGEST})"
        if file not in UNTRACED:
            yield f"{file} does not say {missing}: measure it again"
        return
    if not command:
        yield f"{file} does not say which command made it: measure it again"
    if file in UNTRACED:
        yield f"{file} says which code made its runs: take it off UNTRACED (benchmarks/provenance.py)"
    if "--keep-stale" in command:
        yield f"{file} was written with --keep-stale: run it without"
    digests = dict.fromkeys(origin.code for origin in origins)
    if len(digests) > 1:
        yield f"{file} has runs of {len(digests)} states of the code: run it again, finished runs of one state are kept"
    if not all(origin.clean for origin in origins):
        yield f"{file} has runs of code that was in no commit: commit first, then run it again"
