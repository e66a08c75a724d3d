"""The environment of a peer: found by its stamp only, and an error where pip finds nothing."""

from pathlib import Path

import pytest

from benchmarks.peers import environment


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the project that is empty."""
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    return tmp_path


def test_an_environment_that_was_not_finished_is_not_there(cache: Path) -> None:
    assert environment.installed() is None
    program = cache / "peers" / "vllm-router-0.1.17" / "bin" / "vllm-router"
    program.parent.mkdir(parents=True)
    program.touch()
    assert environment.installed() is None
    (environment.folder() / environment.STAMP).write_text('{"vllm-router": "0.1.17"}')
    assert environment.installed() == program
    assert environment.install() == program
    assert environment.versions() == {"vllm-router": "0.1.17"}


@pytest.mark.nightly
def test_what_pip_does_not_find_is_an_error_that_says_so_and_leaves_no_stamp(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    left = environment.folder() / "lib" / "of-an-earlier-try"
    left.mkdir(parents=True)
    with pytest.raises(environment.PeerError, match=r"vllm-router 0\.1\.17 cannot be installed here"):
        environment.install()
    assert environment.main() == 1
    assert "vllm-router 0.1.17 cannot be installed here" in capsys.readouterr().err
    assert environment.installed() is None
    assert not left.exists()
    assert (cache / "peers").is_dir()
