"""The counters of processes that come and go are added up once."""

from benchmarks.chaos.watch import Watch

TEXT = """
sluice_migrations_total{{code="stalled",model="m"}} {stalled}
sluice_migrations_total{{code="engine_lost",model="m"}} {lost}
sluice_router_requests_total 1000
"""


def test_only_growth_of_a_process_counts_whatever_becomes_of_the_connection_to_it() -> None:
    watch = Watch(1, list)
    watch.count(7, TEXT.format(stalled=3, lost=1))
    # another connection to the same process shows the same counters, a little later
    watch.seen.clear()
    watch.count(7, TEXT.format(stalled=4, lost=1))
    # the process that replaces it begins at 0
    watch.count(8, TEXT.format(stalled=2, lost=0))
    name = "sluice_migrations_total"
    assert watch.totals == {f'{name}{{code="stalled"}}': 6, f'{name}{{code="engine_lost"}}': 1}
