"""Writes docs/request-life.md from the table of a request's life.

python scripts/document_life.py
"""

from pathlib import Path

from policies.request.life import TABLE, Row
from policies.request.stage import Stage

PAGE = Path(__file__).parents[1] / "docs" / "request-life.md"

_HEAD = """# The life of a request

<!-- Written by `python scripts/document_life.py`; a test compares. -->

One state machine (`policies/request/life.py`) runs live in the ingress and in virtual time in the simulator. An event
comes in, effects go out, and the next stage is one of those that the table lists. An event that the table does not list
for a stage changes nothing and is counted (`sluice_refused_events_total`).

A request may be cancelled, pass its deadline, or be without a further token for too long, in every stage but DONE.
These events lead to DONE and are left out of the picture, and so are events that change no stage. A failed attempt
leads to the next one, in QUEUED. While there is no router, the ingress has one of its own (`app/ingress/fallback.py`),
so there is always a router that decides. At each change of routers, the request tells the new one of itself (Unknown).

"""

ROWS = [(stage, event, row) for stage, rows in TABLE.items() for event, row in rows.items()]

_EVERYWHERE = {"Cancel", "DeadlinePassed", "IdleTooLong"}

_HELD = {
    Stage.QUEUED: "nothing",
    Stage.LENDING: "work or a lease at the lender, which a cancellation ends",
    Stage.PREFILLING: "work on the prefill engine (colocated: on the one engine)",
    Stage.POOLED: "a lease on the prefill engine",
    Stage.TRANSFERRING: "the lease, and work on the decode engine",
    Stage.DECODING: "work on the decode engine",
    Stage.DONE: "nothing",
}


def _name(stage: Stage | None) -> str:
    return "[*]" if stage is None else stage.name


def _event(event: type, row: Row) -> str:
    return (
        event.__name__ if row.when is None else f"{event.__name__} [{row.when.__name__.removeprefix('is_')}]"
    )


def picture() -> str:
    """Returns the table as a Mermaid state diagram; an arrow between two stages names the events that cause it."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for stage, event, row in ROWS:
        for to in row.leads_to:
            if to is not stage and event.__name__ not in _EVERYWHERE:
                arrows.setdefault((_name(stage), _name(to)), []).append(_event(event, row))
    lines = [f"    {source} --> {to}: {', '.join(events)}" for (source, to), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, f"    {Stage.DONE.name} --> [*]", "```", ""])


def table() -> str:
    """Returns the table as Markdown, with one row for each stage and event."""
    lines = ["| stage | event | what is done | leads to |", "|---|---|---|---|"]
    for stage, event, row in ROWS:
        done = " ".join((row.action.__doc__ or "").split())
        leads_to = ", ".join(to.name for to in row.leads_to)
        lines.append(f"| {_name(stage)} | {_event(event, row)} | {done} | {leads_to} |")
    return "\n".join(lines) + "\n"


def held() -> str:
    """Returns what a request holds in each stage, as a Markdown table."""
    lines = ["| stage | held |", "|---|---|", *(f"| {stage.name} | {_HELD[stage]} |" for stage in Stage)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Returns the text of `docs/request-life.md`."""
    return f"{_HEAD}{picture()}\n## What is held\n\n{held()}\n## Every row\n\n{table()}"


if __name__ == "__main__":
    PAGE.write_text(page())
