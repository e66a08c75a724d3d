"""Loans of prefixes in a run: who lends and who borrows at a moment, and what became of all loans.

Engines lend for parts of a second, so `lender` and `borrower`, which faults name like other parts, are other engines at
each look. Whoever lends is read from the status of the ingresses, whose prompts the loans are for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chaos.processes import Member
from benchmarks.chaos.schedule import ENGINES

PARTS = ("lender", "borrower")

AWAITED_S = 5.0
"""Seconds for which a fault of a lender or a borrower waits, when its turn has come, until a loan is under way."""

COUNTER = "sluice_prefix_loans_total"
RESULTS = ("used", "recomputed", "failed", "dropped")
"""The values of the counter's label `result`: how a loan ended (`policies.request.stage.LoanEnd`)."""


def at_loans(
    statuses: Sequence[Mapping[str, Any]], well: Mapping[str, Sequence[Member]]
) -> dict[str, list[Member]]:
    """Returns the engines that lend a prefix and those that borrow one, as the `statuses` of ingresses show them, by
    part. Only well engines are among them, and none that is the last well one of its role.
    """
    roles = [well.get(role, ()) for role in ENGINES]
    engines = [member for those in roles if len(those) >= 2 for member in those]
    found: dict[str, list[Member]] = {}
    for part in PARTS:
        ids = {loan[part] for status in statuses for loan in status["replica"]["loans"]}
        found[part] = [member for member in engines if member.engine_id in ids]
    return found


def ends_of(totals: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of loans that have ended, by their results, from the increases of all counters of a run. Each
    loan that begins ends with one of them; only those of an ingress that dies are not counted. The sum is `begun`.
    """
    ends = {result: totals.get(f'{COUNTER}{{result="{result}"}}', 0) for result in RESULTS}
    return {"begun": sum(ends.values()), **ends}
