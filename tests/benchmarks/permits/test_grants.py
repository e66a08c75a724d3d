"""The benchmark of permits in its short form: every row runs, and its load keeps its number of flows."""

from benchmarks.permits.grants import SHAPES, Load, rows


def test_every_row_makes_calls() -> None:
    made = list(rows(flows=20, calls=10, seed=1))
    assert len(made) == 4 * len(SHAPES) + 4
    assert all(row.n for row in made)


def test_a_load_goes_on_while_its_flows_end() -> None:
    load = Load("mfs", 30, SHAPES[0], 0, journal=True)
    for call in load.chunks(3000):
        call()
    assert len(load) == 30
    assert load.submitted > 30
    assert load.written > 3000
