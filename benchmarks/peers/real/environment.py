"""The environment of Ray Serve LLM: a layer over the one that runs this, with what `ray.serve.llm` imports beside it.

So Ray, vLLM and torch are the same files on both sides, and no version of Sluice's own dependencies changes.
"""

import json
import shutil
import sys
import sysconfig
from pathlib import Path

from app.models import cache_root
from benchmarks.peers.environment import run

REQUIREMENTS = ("pyarrow==26.0.1", "jsonref==1.1.0")
NAME = "Ray Serve LLM"
STAMP = "installed.json"


def folder() -> Path:
    """Returns the folder of the environment, which need not exist."""
    return cache_root() / "peers" / "ray-serve-llm"


def install() -> Path:
    """Returns the environment's interpreter, and makes the environment first if necessary. Raises PeerError.

    It is made anew for another interpreter than before, or other requirements.
    """
    where = folder()
    interpreter, stamp = where / "bin" / "python", where / STAMP
    below = sysconfig.get_paths()["purelib"]
    wanted = json.dumps({"below": below, "requirements": REQUIREMENTS})
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return interpreter
    shutil.rmtree(where, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(where), peer=NAME)
    run(str(interpreter), "-m", "pip", "install", "--quiet", "--no-input", *REQUIREMENTS, peer=NAME)
    own = next(where.glob("lib/python*/site-packages"))
    (own / "zz-below.pth").write_text(below + "\n")
    run(str(interpreter), "-c", "import ray.serve.llm", peer=NAME)
    stamp.write_text(wanted)
    return interpreter
