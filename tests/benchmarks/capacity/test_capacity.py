"""The benchmark of a router's capacity: ladder, cells and aims made by hand, and a live run of its short form."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import AppConfig, parse
from app.serve import load
from benchmarks.capacity.__main__ import cells_of, files_needed, main
from benchmarks.capacity.application import PER_PROCESS, Packed, shares
from benchmarks.capacity.measure import (
    FALLBACKS,
    SHIPPED,
    SLOTS,
    TOKENS,
    Cell,
    Ladder,
    application,
    climb,
    fallbacks_in,
    ingresses_of,
    measured,
    wait_whole,
    whole,
)
from benchmarks.capacity.report import best_rung, bound_per_s, draw, rows, rows_of
from benchmarks.experiments.base import Row
from benchmarks.live import measure
from benchmarks.live.proctree import snapshot
from benchmarks.live.servers import running
from benchmarks.provenance import MISSING

LADDER = Ladder()


@pytest.mark.parametrize(
    ("rates", "climbed", "best"),
    [
        # each rung has at least 1.05 times the highest before
        ([100, 200, 400, 800, 1000], 5, 512),
        # 256 clients give 1.04 times as much as 128: the ladder ends there, and that is the most
        ([100, 200, 400, 416, 1000], 4, 256),
        # nothing grows after 64, but the common rung of 128 is measured in any case
        ([100, 200, 150, 800, 1000], 3, 64),
        ([100, 90, 80, 70, 60], 3, 32),
    ],
)
def test_a_ladder_ends_where_requests_per_s_no_longer_grow(
    rates: list[float], climbed: int, best: int
) -> None:
    asked: list[int] = []

    def rate_of(clients: int) -> float:
        asked.append(clients)
        return rates[len(asked) - 1]

    assert climb(LADDER, rate_of) == best
    assert asked == list(LADDER.rungs[:climbed])


@pytest.mark.parametrize(
    "wrong", [{"rungs": (64, 32), "common": 64}, {"common": 100}, {"repeats": 0}, {"rungs": (128, 128)}]
)
def test_a_ladder_without_its_common_rung_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rungs ascend"):
        Ladder(**wrong)


@pytest.mark.parametrize(
    ("engines", "expected"), [(1, [1]), (64, [64]), (65, [33, 32]), (128, [64, 64]), (130, [44, 43, 43])]
)
def test_engines_share_few_processes(engines: int, expected: list[int]) -> None:
    assert shares(engines) == expected


def test_cells_that_are_compared_come_one_after_the_other() -> None:
    cells = cells_of(["a", "b"], [1, 2], [2, 64])
    assert cells[:3] == [Cell("a", 1, 2), Cell("a", 1, 64), Cell("a", 2, 2)]
    assert len(cells) == len(set(cells)) == 8
    assert [cell.name for cell in cells[1:3]] == ["a, 1 ingress, 64 engines", "a, 2 ingresses, 2 engines"]
    # 64 engines of a process, each with 128 peers, 4 ingresses, the router and its listener; and the spare
    spare = files_needed([Cell("a", 1, 2)], 1) - 4
    assert files_needed([Cell("a", 1, 256), Cell("a", 4, 2)], 512) == 64 * (128 + 4 + 2) + spare


def config_of(cell: Cell, folder: Path) -> AppConfig:
    made = application(cell, folder / "app", 512)
    argv = list(made.argv)
    assert "benchmarks.capacity.application" in argv and "app.serve" not in argv
    return parse(load(argv[argv.index("--config") + 1], made.port, None)["applications"][0]["args"])


def test_the_application_has_real_parts_and_few_processes(tmp_path: Path) -> None:
    config = config_of(Cell(SHIPPED, 4, 256), tmp_path)
    titles = [slot.title for slot in Packed(config).slots()]
    assert titles == ["Router", *["PrefillEngine"] * 2, *["DecodeEngine"] * 2, *["Ingress"] * 4]
    assert [group.replicas for group in config.engines] == [128, 128] == [2 * PER_PROCESS] * 2
    assert all(group.kind == "sim" and group.options["slots"] == SLOTS for group in config.engines)
    limits = config.ingress.options
    assert all(limits[name] > 512 for name in ("max_connections_per_address", "max_in_flight"))


def test_the_policies_are_those_that_the_rows_name(tmp_path: Path) -> None:
    """`composition` is what is there without configuration."""
    shipped = config_of(Cell(SHIPPED, 1, 2), tmp_path / "shipped").router
    assert shipped.decode.name == SHIPPED
    written = yaml.safe_load((tmp_path / "shipped/app/app.yaml").read_text())["applications"][0]["args"]
    assert written["router"] == {}
    shortest = config_of(Cell("join_shortest_queue", 1, 2), tmp_path / "shortest").router
    assert (shortest.prefill.name, shortest.decode.name) == ("join_shortest_queue",) * 2


def status(**more: Any) -> dict[str, Any]:
    router = {"connected": True, "fallback": False} | more.pop("router", {})
    return {"ready": True, "router": router, "engines": [{"state": "ready"}] * 2} | more


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"ready": False}, False),
        ({"router": {"connected": False}}, False),
        ({"router": {"fallback": True}}, False),
        ({"engines": [{"state": "ready"}]}, False),
        ({"engines": [{"state": "ready"}, {"state": "stalled"}]}, False),
    ],
)
def test_an_ingress_is_whole_with_its_router_and_all_engines(more: dict[str, Any], expected: bool) -> None:
    assert whole(status(**more), 2) is expected


def test_decisions_without_the_router_are_counted() -> None:
    text = (
        f'# TYPE {FALLBACKS} counter\n{FALLBACKS}{{task="prefill"}} 2.0\n{FALLBACKS}{{task="decode"}} 1.0\n'
    )
    assert fallbacks_in(text) == 3
    assert fallbacks_in("sluice_requests_total 5.0\n") == 0


def rung(clients: int, rate: float, router_us: float, ingress_us: float = 200.0) -> dict[str, Any]:
    cpu_us = {"router": router_us, "ingress": ingress_us, "prefill": 30.0, "decode": 50.0, "launcher": 7.0}
    return {
        "client": "wrk",
        "concurrency": clients,
        "requests_per_s": rate,
        "cpu_us": cpu_us,
        "router_cores": router_us * rate / 1e6,
        "ttft_ms": None,
        "failures": {},
    }


def one(engines: int = 2, ingresses: int = 1, router_us: float = 250.0, **more: Any) -> dict[str, Any]:
    timed = {**rung(256, 900.0, 1.0), "client": "python", "ttft_ms": {"p50": 20.0, "p99": 60.0}}
    found: dict[str, Any] = {"policy": SHIPPED, "ingresses": ingresses, "engines": engines, "best": 256}
    found |= {"rungs": [rung(128, 1500.0, 300.0), rung(256, 2000.0, router_us)], "timed": timed}
    found |= {"common": [rung(128, 1500.0, router_us)] * 3, "decided_by_ingresses": 0}
    return found | more


def by_name(found: list[Row]) -> dict[str, Row]:
    return {row.name.partition("engines")[2].lstrip(": "): row for row in found}


def test_a_full_router_is_extrapolated_from_its_cpu_time_a_request() -> None:
    """At the best rung 2,000 requests/s of 250 us take half a core, and 1 / 250 us is 4,000 requests/s."""
    assert bound_per_s(best_rung(one())) == pytest.approx(4000.0)
    found = by_name(list(rows_of(one())))
    assert found["requests/s"].ours == 2000.0 and "256 clients" in found["requests/s"].note
    assert found["CPU of router, share of a core"].ours == pytest.approx(50.0)
    assert found["CPU of router, share of a core"].note == "other processes fill the cores"
    extrapolated = found["requests/s of a full router, extrapolated"]
    assert extrapolated.ours == pytest.approx(4000.0) and "not measured" in extrapolated.note
    assert found["CPU of engines a request"].ours == pytest.approx(80.0)
    assert [found[f"TTFT {q}"].ours for q in ("p50", "p99")] == [20.0, 60.0]
    assert found["requests that failed"].met and found["requests that no router decided"].met


def test_a_router_without_a_core_to_spare_is_full() -> None:
    found = by_name(list(rows_of(one(router_us=460.0))))
    assert found["CPU of router, share of a core"].note == "the router is full"
    # the ticks of the process clock saw nothing of the router
    assert "requests/s of a full router, extrapolated" not in by_name(list(rows_of(one(router_us=0.0))))


def test_failures_of_any_load_are_counted() -> None:
    failing = {**rung(128, 1500.0, 250.0), "failures": {"status": 2}}
    found = by_name(list(rows_of(one(common=[rung(128, 1500.0, 250.0), failing], decided_by_ingresses=4))))
    failed, decided = found["requests that failed"], found["requests that no router decided"]
    assert (failed.ours, failed.met) == (2, False)
    assert (decided.ours, decided.met) == (4, False)


@pytest.mark.parametrize(
    ("router_us", "dearer", "met"),
    [
        # ingress and router take 200 + 250 us with 2 engines; (200 + 290) / 450 is 8.9 % more, and 350 is 22.2 %
        (290.0, 8.8889, True),
        (350.0, 22.2222, False),
    ],
)
def test_many_engines_may_add_a_tenth_to_the_price_of_a_request(
    router_us: float, dearer: float, met: bool
) -> None:
    found = list(rows({"cells": [one(), one(64, router_us=router_us), one(16), one(64, ingresses=2)]}))
    judged = [row for row in found if "against 2" in row.name]
    assert [row.name for row in judged] == [
        f"{SHIPPED}, 1 ingress, 64 engines against 2: CPU of ingress and router a request"
    ]
    assert judged[0].ours == pytest.approx(dearer, abs=1e-3)
    assert (judged[0].met, judged[0].verdict) == (met, met)


def test_only_one_ingress_is_judged_by_the_price_of_engines() -> None:
    found = list(rows({"cells": [one(ingresses=2), one(64, ingresses=2)]}))
    assert [row.aim for row in found if "against 2" in row.name] == [""]


def test_an_interval_on_both_sides_of_the_aim_leaves_it_open() -> None:
    """The means are 10 % apart, and single loads 0 to 20 %."""
    several = [rung(128, 1500.0, us) for us in (250.0, 295.0, 340.0)]
    found = list(rows({"cells": [one(), one(64, common=several)]}))
    assert [row.met for row in found if "against 2" in row.name] == [None]


def test_the_picture_has_a_line_for_each_number_of_ingresses(tmp_path: Path) -> None:
    cells = [one(engines, ingresses) for ingresses in (1, 2) for engines in (2, 64)]
    draw(cells, tmp_path / "capacity.png")
    assert (tmp_path / "capacity.png").stat().st_size > 1000


def test_an_application_without_two_engines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engines", "1"])
    assert ended.value.code == 2 and "one engine to prefill and one to decode" in capsys.readouterr().err


def test_the_result_is_expected() -> None:
    assert "capacity/capacity.json" in MISSING


@pytest.mark.live
@pytest.mark.timeout(300)
def test_two_ingresses_and_sixteen_engines_are_measured_in_the_short_form() -> None:
    """All processes and engines are there and all requests are answered; no time is judged."""
    lines: list[str] = []
    cell = Cell(SHIPPED, 2, 16)
    ladder = Ladder(rungs=(8, 16), seconds=1, common=16, repeats=1, ttft_requests=50)
    # a unix socket's path is short, and pytest's folders are deep
    with (
        tempfile.TemporaryDirectory(prefix="sluice-") as folder,
        running(application(cell, Path(folder) / "app", 16), lines.append) as server,
    ):
        wait_whole(server, cell)
        seen = ingresses_of(server, cell)
        roles = sorted(usage.role for usage in snapshot(server.pid))
        usage = measure.probe(server, "sim", TOKENS)
        found = measured(server, cell, ladder, None, 0, lines.append)
    assert len(seen) == 2 and all(len(status["engines"]) == 16 for status, _ in seen.values())
    # 8 engines of each role share a process
    assert [roles.count(role) for role in ("router", "ingress", "prefill", "decode")] == [1, 2, 1, 1]
    assert usage["completion_tokens"] == TOKENS
    loads = [*found["rungs"], found["timed"]]
    assert [one["concurrency"] for one in found["rungs"]] == [8, 16]
    assert all(one["requests"] > 0 and not one["failures"] for one in loads), lines
    assert all({"ingress", "router", "prefill", "decode"} <= set(one["cpu_us"]) for one in loads)
    assert found["timed"]["ttft_ms"]["p99"] >= found["timed"]["ttft_ms"]["p50"] > 0
    names = [row.name for row in rows_of(found)]
    assert f"{cell.name}: requests/s" in names and f"{cell.name}: TTFT p99" in names
