"""How far the simulator has been compared with measurement, for a base of which nothing was measured."""

import json
from pathlib import Path

ENGINES = {"sim": "sim engines", "vllm": "vLLM on CPU"}
COMMANDS = ("truth", "validate_live")
"""Folders of the results that compare simulator and live app; the first that is there for a kind of engine speaks."""


def committed(results: Path | None = None) -> str:
    """Returns a sentence with the largest error that the committed results judge, for each kind of engine.

    `results` is the folder of the results (None: that of this checkout).
    """
    from benchmarks.document import OTHERS, RESULTS

    folder, said = RESULTS if results is None else results, []
    for kind, engines in ENGINES.items():
        files = [f"experiments/{name}/{kind}.json" for name in COMMANDS]
        file = next((one for one in files if (folder / one).exists()), None)
        if file is None:
            continue
        rows = OTHERS[file].read(json.loads((folder / file).read_text("utf-8")))
        errors = [(abs(row.ours), row) for row in rows if row.aim and row.ours is not None]
        if errors:
            _, worst = max(errors, key=lambda pair: pair[0])
            name = worst.name.removesuffix(", simulated against live")
            said.append(f"on {engines} {worst.ours:+.1f} % ({name}; {file})")
    if not said:
        return "This base was not compared with a measurement, and no comparison of the simulator is at hand"
    return (
        "This base was not compared with a measurement. The largest errors of the simulator against live apps: "
        f"{'; '.join(said)}"
    )
