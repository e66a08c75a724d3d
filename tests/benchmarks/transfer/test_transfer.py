"""Block pools that grow old, and reads between two processes."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
pytest.importorskip("nixl", reason="NIXL is not installed; `make setup` installs it")

from benchmarks.live import kept  # noqa: E402
from benchmarks.transfer import __main__ as program  # noqa: E402
from benchmarks.transfer.__main__ import VARIANTS, aged, counted, made, main, rows_of  # noqa: E402
from benchmarks.transfer.pools import Load, Read, reads  # noqa: E402
from benchmarks.transfer.report import comparison, figures  # noqa: E402
from benchmarks.transfer.wire import Shape, Wire  # noqa: E402

SMALL = Load(
    requests=60,
    pool_blocks=240,
    block_tokens=16,
    prompts=(160, 320),
    prefix_lengths=(40, 120),
    chunk=128,
    held=2,
)


@pytest.mark.parametrize("caching", [True, False])
def test_all_variants_read_the_same_requests(caching: bool) -> None:
    load = Load(requests=60, pool_blocks=240, block_tokens=16, prompts=(160, 320), prefix_lengths=(40, 120), chunk=128,
                held=2, caching=caching)  # fmt: skip
    old = {name: aged(name, load, 1, 5) for name in VARIANTS}
    assert {len(last) for _, last in old.values()} == {5}
    rows = {name: row for name, (row, _) in old.items()}
    assert {sum(age["reads"] for age in row["ages"]) for row in rows.values()} == {60 - 2}
    # sorting changes no allocation
    assert rows["sorted"]["prefix_hits"] == rows["stock"]["prefix_hits"]
    for name in ("segments", "flowkv"):
        assert rows[name]["ages"][-1]["pieces"] < rows["sorted"]["ages"][-1]["pieces"] / 2
        assert rows["sorted"]["ages"][-1]["pieces"] <= rows["stock"]["ages"][-1]["pieces"]
    assert (rows["stock"]["prefix_hits"] > 0) is caching


def test_the_same_seed_gives_the_same_reads() -> None:
    first, second = ([read for read, _, _ in reads("segments", SMALL, 3)] for _ in range(2))
    assert first == second
    assert first != [read for read, _, _ in reads("segments", SMALL, 4)]


def test_a_read_pairs_what_the_decode_engine_lacks() -> None:
    for read, _, decode in itertools.islice(reads("stock", SMALL, 0), 20):
        assert len(read.local) == len(read.remote) > 0
        assert len(set(read.local)) == len(read.local)
        assert decode.manager.block_pool.get_num_free_blocks() < SMALL.pool_blocks


def test_a_pool_that_is_too_small_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="give it more blocks"):
        list(reads("stock", Load(requests=9, pool_blocks=40), 0))


def test_the_comparison_is_with_stock() -> None:
    rows = [
        {
            "variant": name,
            "prefix_cache": caching,
            "prefix_hits": hits,
            "ages": [{"pieces": 7.0}, {"pieces": pieces}],
        }
        for caching in (True, False)
        for name, hits, pieces in (("stock", 0.30, 50.0), ("segments", 0.29, 2.0))
    ]
    assert comparison(rows) == [
        "segments, prefix cache on: -96.0 % pieces, -1.00 points of prefix hits",
        "segments, prefix cache off: -96.0 % pieces",
    ]


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with Wire(Shape(layers=3, blocks=40, block_bytes=64)) as wire:
        yield wire


def test_nixl_makes_as_many_descriptors_as_are_counted(wire: Wire) -> None:
    descending = Read(0.0, [9, 8, 7, 6], [29, 28, 27, 26])
    gap = Read(0.0, [1, 2, 3, 4], [11, 12, 14, 15])
    for read, sort, expected in (
        (descending, False, 4),
        (descending, True, 1),
        (gap, False, 2),
        (gap, True, 2),
    ):
        cost = wire.read(read.local, read.remote, sort)
        assert counted(read, sort) == expected
        assert cost.descriptors == 3 * expected
        assert cost.bytes == 3 * 4 * 64
        assert cost.seconds >= 0
        assert cost.post_cpu_s > 0


def test_variants_take_turns_and_each_counts_its_own_reads(wire: Wire) -> None:
    lasts = {"stock": [Read(0.0, [9, 8], [29, 28])] * 3, "segments": [Read(0.0, [1, 2], [11, 12])]}
    costs = made(lasts, wire)
    assert {name: (cost["reads"], cost["descriptors"]) for name, cost in costs.items()} == {
        "stock": (3, 3 * 2), "segments": (1, 3 * 1),
    }  # fmt: skip
    assert all(0.0 <= cost["sort_cpu_ms"] < cost["post_cpu_ms"] for cost in costs.values())


def test_a_short_run_writes_its_result_and_goes_on_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    out = tmp_path / "transfer.json"
    arguments = ["--requests", "8", "--layers", "2", "--block-bytes", "64", "--reads", "2", "--out", str(out)]
    loads: list[bool] = []

    def interrupted(load: Load, *rest: Any) -> dict[str, Any]:
        loads.append(load.caching)
        if len(loads) == 2:
            raise KeyboardInterrupt
        return rows_of(load, *rest)

    monkeypatch.setattr(program, "rows_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert main(arguments) == 0
    # the part with the cache was measured once
    assert loads == [True, False, False] and "prefix cache on: kept already" in capsys.readouterr().out
    assert not list((tmp_path / "kept").iterdir())
    whole = json.loads(out.read_text())
    assert list(whole["parts"]) == ["prefix cache on", "prefix cache off"]
    assert [row["variant"] for row in whole["rows"]] == [*VARIANTS, *VARIANTS]
    assert all(row["made"]["reads"] == 2 for row in whole["rows"])
    assert whole["machine"]["code_of"]
    assert str(tmp_path) not in whole["command"]
    shown = list(figures(whole))
    assert sum(row.met is not None for row in shown) == 2 + 2 + 1
    assert len({row.name for row in shown}) == len(shown)
    assert main([*arguments[:-2]]) == 0
    assert "segments, prefix cache on" in capsys.readouterr().out
