"""Model references: what each kind resolves to, and what is said where one cannot be served."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.model_cache import ModelError, damage
from app.models import BUILTINS, GgufSource, cache_root, main, resolve

BUILTIN = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    """The real built-in model from the default cache; the first test run on a machine converts it (half a minute)."""
    pytest.importorskip("gguf", reason="the built-in model needs the extra `cpu` (`make setup`)")
    return resolve(BUILTIN)


def hugging_face_directory(root: Path) -> Path:
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"")
    return root


def test_local_directory_is_used_as_it_is(tmp_path: Path) -> None:
    model = hugging_face_directory(tmp_path / "model")
    before = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    assert resolve(str(model), cache=tmp_path / "cache") == model.resolve()
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == before
    assert not (tmp_path / "cache").exists()


def test_relative_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hugging_face_directory(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("./model") == model.resolve()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"no config\.json"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda d: (d / "model.safetensors").unlink(), r"no \*\.safetensors"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_incomplete_directory_is_named(tmp_path: Path, harm, message: str) -> None:
    model = hugging_face_directory(tmp_path / "model")
    harm(model)
    with pytest.raises(ModelError, match=message):
        resolve(str(model))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(file))


@pytest.mark.parametrize(
    "reference",
    ["no-such-model", "", "/no/such/directory", "../nowhere/x", "a/b/c", "own er/name", "~/nope/x"],
)
def test_nonsense_is_refused_and_the_choices_named(reference: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=BUILTIN):
        resolve(reference)


def test_hub_name_that_is_not_cached_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "app.models", "some-owner/some-model"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "could not be downloaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_package_says_how_to_install_it() -> None:
    source = GgufSource("x", "no-such-distribution", "no_such_package", "x.gguf", 1)
    with pytest.raises(ModelError, match=r"make setup.*no-such-distribution"):
        source.locate()


def test_package_without_its_file_says_so() -> None:
    source = GgufSource("x", "pytest", "pytest", "x.gguf", 1)
    with pytest.raises(ModelError, match=r"x\.gguf is missing"):
        source.locate()


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("SLUICE_CACHE", "")
    assert cache_root() == Path.home() / ".cache" / "sluice"


@pytest.mark.nightly
def test_unconvertible_source_shows_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion's child process fails for real, on a file that is no GGUF."""
    pytest.importorskip("gguf")
    package = tmp_path / "broken_model"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "x.gguf").write_bytes(b"this is no GGUF file")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(BUILTINS, "broken", GgufSource("broken", "pytest", "broken_model", "x.gguf", 1))
    with pytest.raises(ModelError, match=r"converting .*x\.gguf failed with status 1"):
        resolve("broken", cache=tmp_path / "cache")
    assert [entry.name[0] for entry in (tmp_path / "cache" / "models").iterdir()] == ["."]


def test_importing_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "huggingface_hub", "ray", "numpy"}
    code = f"import sys, app.models; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_builtin_model_is_intact_and_small_enough(builtin_model: Path) -> None:
    assert damage(builtin_model, full=True) is None
    config = json.loads((builtin_model / "config.json").read_text())
    shape = {
        key: config[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size")
    }
    # SmolLM2-135M: 30 layers, 3 KV heads of 64; b_r per token in bfloat16 = 2 * 30 * 3 * 64 * 2 = 23,040 bytes
    assert shape == {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152}
    assert "quantization_config" not in config


def test_builtin_model_chats(builtin_model: Path) -> None:
    """The saved tokenizer and template load with transformers and give the model's own chat format."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_model)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 12 in Grüße 🙂"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nSay 12 in Grüße 🙂<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # <|im_start|> is one token, not its characters.
    assert ids[0] == 1
    assert ids.count(2) == 2  # <|im_end|>
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 2


def test_command_prints_the_directory_alone(builtin_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([BUILTIN]) == 0
    assert capsys.readouterr().out == f"{builtin_model}\n"


def test_command_reports_an_error_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-model"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: model 'no-such-model' is neither")
