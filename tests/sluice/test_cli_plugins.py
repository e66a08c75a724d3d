"""Server-side subcommands: found by entry point, loaded only when asked for, missed with good advice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sluice.cli import main, plugins

MODULE = """
class Hello:
    name = "hello"
    help = "say hello"

    def configure(self, parser):
        parser.add_argument("--times", type=int, default=1)

    def run(self, args):
        print("hello " * args.times)
        return 40 + args.times

hello = Hello()
half = object()
"""

ENTRIES = """[sluice.commands]
hello = sluice_test_plugin:hello
half = sluice_test_plugin:half
broken = sluice_test_absent:command
serve = sluice_test_absent:command
chat = sluice_test_plugin:hello
"""

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution as pip leaves one."""
    info = tmp_path / "server_side-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: server-side\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "sluice_test_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sluice_test_plugin", raising=False)


def test_an_entry_point_is_a_subcommand(capsys: Captured) -> None:
    assert main(["hello", "--times", "2"]) == 42
    assert capsys.readouterr().out == "hello hello \n"


def test_its_help_is_its_own(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["hello", "--help"])
    assert caught.value.code == 0
    assert "--times" in capsys.readouterr().out


def test_help_lists_commands_without_loading_them(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in (*plugins.KNOWN, "hello", "from server-side"):
        assert name in out
    assert "sluice_test_plugin" not in sys.modules


@pytest.mark.parametrize("arguments", [["serve"], ["serve", "--help"], ["serve", "x", "--port", "1"]])
def test_a_known_command_without_its_packages_names_the_server(
    capsys: Captured, arguments: list[str]
) -> None:
    assert main(arguments) == 7
    err = capsys.readouterr().err
    assert "sluice_test_absent" in err
    assert "sluice-server" in err


def test_a_known_command_that_nobody_registers_names_the_server(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plugins.KNOWN, "unregistered", "nothing provides this")
    assert main(["unregistered"]) == 7
    assert "sluice-server" in capsys.readouterr().err


def test_another_command_that_does_not_import_names_its_distribution(capsys: Captured) -> None:
    assert main(["broken"]) == 7
    err = capsys.readouterr().err
    assert "server-side" in err
    assert "sluice-server" not in err


def test_an_entry_point_that_is_no_command_is_named(capsys: Captured) -> None:
    assert main(["half"]) == 7
    assert "sluice_test_plugin:half" in capsys.readouterr().err


def test_a_plugin_cannot_replace_a_command_of_the_sdk(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert "--interactive" in capsys.readouterr().out
