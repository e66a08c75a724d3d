"""Writes the Grafana boards in deploy/grafana/boards, one JSON file each, from the tables in this file.

python scripts/grafana_boards.py

Queries read what deploy/prometheus records, or scrapes as the job `sluice`. A query that ends with `or vector(0)` shows
a counter that has not counted yet as 0. What comes from a part that is off in the application (autoscaler, flow agents,
predictor, network data) has no data then.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.statetimeline import Panel as Timeline
from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana" / "boards"
JOB = 'job="sluice"'
WIDTH = 24
"""Columns of a board in Grafana."""
SIZES = {"lines": (3, 8), "figure": (6, 4), "times": (1, 12)}
"""Panels beside one another and the rows that one takes, by the shape of a heading's panels."""


class Query(NamedTuple):
    """One query and the name of its lines, in which {{label}} stands for a label's value."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """One panel: its title, the unit of its values by Grafana's names, and what it shows. Its `shape` is "lines" over
    time, "figure" for the last value as a number, or "times" for the times at which there is a value at all, over the
    whole width of the board.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    shape: Literal["lines", "figure", "times"] = "lines"


class Board(NamedTuple):
    """One board, whose file has its name; `rows` are its panels under headings."""

    name: str
    title: str
    rows: dict[str, tuple[Panel, ...]]


def line(title: str, unit: str, *queries: tuple[str, str], help: str = "") -> Panel:  # noqa: A002
    """Returns a panel of lines over time."""
    return Panel(title, unit, tuple(Query(*query) for query in queries), help)


def figure(title: str, unit: str, expr: str, legend: str = "") -> Panel:
    """Returns a panel of one number."""
    return Panel(title, unit, (Query(expr, legend),), shape="figure")


def gauge(name: str, by: str = "") -> str:
    """Returns the query of a router's or engine's gauge, which is the same on all replicas."""
    return f"max by ({by}) ({name}{{{JOB}}})" if by else f"max({name}{{{JOB}}})"


def total(name: str, by: str = "") -> str:
    """Returns the query of the rate of a router's or engine's counter, which is the same on all replicas."""
    rate = f"rate({name}{{{JOB}}}[$__rate_interval])"
    return f"max by ({by}) ({rate})" if by else f"max({rate})"


def counted(name: str, by: str = "") -> str:
    """Returns the query of the rate of what the ingress replicas count, added up; 0 while they have counted nothing."""
    rate = f"rate({name}{{{JOB}}}[$__rate_interval])"
    return f"sum by ({by}) ({rate})" if by else f"sum({rate}) or vector(0)"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the queries of median and 95th percentile by class."""
    return tuple((f"sluice:{name}_seconds:{p}_rate5m", f"{{{{class}}}} {p}") for p in ("p50", "p95"))


SERVING = 'sum(sluice:engine_states:count{duty="active", state="ready"}) or vector(0)'
"""The query of the engines that get requests: warm ones, and those that start, drain or are sick, get none."""

OVERVIEW = Board(
    "overview",
    "Sluice overview",
    {
        "Now": (
            figure("Ingresses that can serve", "short", f"sum(sluice_ready{{{JOB}}})"),
            figure("Ingresses with a router", "short", f"sum(sluice_router_connected{{{JOB}}})"),
            figure("Requests under way", "short", "sluice:in_flight:sum"),
            figure("Queued", "short", "sluice:router_queued:max"),
            figure("In the pool", "short", "sluice:router_pool:max"),
            figure("Engines that serve", "short", SERVING),
        ),
        "Objectives": (
            line(
                "Objectives met, of the last 5 minutes",
                "percentunit",
                ("1 - sluice:slo_missed:ratio_rate5m", "{{class}}"),
            ),
            line(
                "Burn of the budget",
                "short",
                ("sluice:slo_missed:ratio_rate5m / scalar(sluice:slo_budget:ratio)", "{{class}}, 5 minutes"),
                ("sluice:slo_missed:ratio_rate1h / scalar(sluice:slo_budget:ratio)", "{{class}}, 1 hour"),
                ("sluice:slo_missed:ratio_rate6h / scalar(sluice:slo_budget:ratio)", "{{class}}, 6 hours"),
                help="1 spends the budget in its time; alerts come at 14.4 and at 6.",
            ),
            line("Time to first token", "s", *quantiles("ttft")),
            line("Time per output token", "s", *quantiles("tpot")),
            line("Time to the whole answer", "s", *quantiles("e2e")),
            line(
                "Ends of prompts with an objective",
                "ops",
                (counted("sluice_slo_requests_total", "result"), "{{result}}"),
            ),
        ),
        "Traffic": (
            line("Requests by code", "reqps", ("sum by (code) (sluice:requests:rate1m)", "{{code}}")),
            line(
                "Tokens",
                "ops",
                ("sluice:prompt_tokens:rate1m", "prompt"),
                ("sluice:generation_tokens:rate1m", "output"),
            ),
            line(
                "Queue and pool",
                "short",
                ("sluice:router_queued:max", "queued"),
                ("sluice:router_pool:max", "pool"),
            ),
            line(
                "Stages, 95th percentile",
                "s",
                *(
                    (f"sluice:{stage}_seconds:p95_rate5m", stage.replace("_", " "))
                    for stage in ("queue", "prefill", "pool_wait", "transfer", "decode")
                ),
            ),
        ),
        "Trouble": (
            line("Share of answers with 5xx", "percentunit", ("sluice:request_errors:ratio_rate5m", "5xx")),
            line(
                "Retries, migrations, fall-back",
                "ops",
                (counted("sluice_retries_total"), "retries"),
                (counted("sluice_migrations_total"), "migrations"),
                ("sluice:fallback_decisions:rate5m", "decisions without a router"),
            ),
        ),
    },
)

ENGINES = Board(
    "engines",
    "Sluice engines",
    {
        "By role": (
            line("Engines", "short", ("sluice:engine_states:count", "{{role}} {{duty}} {{state}}")),
            line(
                "KV in use",
                "percentunit",
                ("sluice:engine_kv_usage:avg", "{{role}} mean"),
                ("sluice:engine_kv_usage:max", "{{role}} fullest"),
            ),
            line(
                "Requests in engines",
                "short",
                ("sluice:engine_running:sum", "{{role}} running"),
                ("sluice:engine_waiting:sum", "{{role}} waiting"),
            ),
            line(
                "Tokens",
                "ops",
                ("sluice:engine_prefill_tokens:rate1m", "{{role}} prompt"),
                ("sluice:engine_decode_tokens:rate1m", "{{role}} output"),
            ),
            line("Sequences of a decode step", "short", ("sluice:engine_decode_batch:avg", "{{role}}")),
            line("Leases", "short", ("sluice:engine_leases:sum", "leases")),
        ),
        "Each engine": (
            line("KV in use", "percentunit", (gauge("sluice_engine_kv_usage_ratio", "engine"), "{{engine}}")),
            line("Running", "short", (gauge("sluice_engine_running", "engine"), "{{engine}}")),
            line("Waiting", "short", (gauge("sluice_engine_waiting", "engine"), "{{engine}}")),
            line(
                "Output tokens", "ops", (total("sluice_engine_decode_tokens_total", "engine"), "{{engine}}")
            ),
            line("Steps", "ops", (total("sluice_engine_decode_steps_total", "engine"), "{{engine}}")),
            line(
                "Steps of a start",
                "s",
                (gauge("sluice_engine_start_seconds", "engine, step"), "{{engine}} {{step}}"),
            ),
        ),
        "Role, duty and state of each engine": (
            Panel(
                "Role, duty and state",
                "short",
                (
                    Query(
                        gauge("sluice_engine_state", "engine, role, duty, state"),
                        "{{engine}} {{role}} {{duty}} {{state}}",
                    ),
                ),
                "A line for each role, duty and state that an engine has had, marked for as long as it had them.",
                shape="times",
            ),
        ),
        "Trouble": (
            line(
                "Longest silence of an engine",
                "s",
                (gauge("sluice_router_engine_silence_seconds_max"), "silence"),
            ),
            line(
                "Workers in quarantine", "short", (gauge("sluice_engine_quarantined", "engine"), "{{engine}}")
            ),
            line(
                "Stalls and preemptions",
                "ops",
                (f"sum({total('sluice_engine_stalls_total', 'engine')}) or vector(0)", "stalls"),
                (f"sum({total('sluice_engine_preemptions_total', 'engine')}) or vector(0)", "preemptions"),
            ),
            line(
                "Leases that ended unused",
                "ops",
                (total("sluice_engine_leases_expired_total", "engine"), "{{engine}}"),
            ),
        ),
    },
)

TRANSFERS = Board(
    "transfers",
    "Sluice transfers",
    {
        "KV between engines": (
            line("Bytes", "Bps", ("sluice:kv_transfer_bytes:rate1m", "moved")),
            line(
                "Transfers",
                "ops",
                ("sluice:kv_transfers:rate1m", "succeeded"),
                (counted("sluice_kv_transfer_failures_total"), "failed"),
            ),
            line(
                "Time of a transfer, 95th percentile", "s", ("sluice:transfer_seconds:p95_rate5m", "transfer")
            ),
            line("Wait in the pool, 95th percentile", "s", ("sluice:pool_wait_seconds:p95_rate5m", "pool")),
            line(
                "Bytes by reading engine",
                "Bps",
                (total("sluice_engine_transfer_bytes_total", "engine"), "{{engine}}"),
            ),
            line("Share that failed", "percentunit", ("sluice:kv_transfer_failed:ratio_rate5m", "failed")),
            line(
                "Bytes by network tier",
                "Bps",
                (counted("sluice_kv_tier_transfer_bytes_total", "tier"), "tier {{tier}}"),
            ),
            line(
                "Bytes by pair of nodes",
                "Bps",
                (
                    counted("sluice_kv_pair_transfer_bytes_total", "source, target"),
                    "{{source}} to {{target}}",
                ),
            ),
        ),
        "Pool and leases": (
            line("Oldest entry of the pool", "s", (gauge("sluice_router_pool_oldest_seconds"), "oldest")),
            line(
                "Lease used, fullest of the pool",
                "percentunit",
                (gauge("sluice_router_pool_lease_used_ratio"), "used"),
                help="Leases are renewed at a third; from two thirds on a prompt is overdue.",
            ),
            line(
                "Leases",
                "short",
                (gauge("sluice_router_leases"), "router"),
                ("sluice:engine_leases:sum", "engines"),
            ),
            line("Renewals", "ops", (counted("sluice_lease_renewals_total"), "questions")),
        ),
        "Network, where its data are used": (
            line(
                "Best data",
                "short",
                (gauge("sluice_router_network_source"), "0 none, 1 tiers, 2 congestion, 3 pairs"),
            ),
            line(
                "Configured bandwidth",
                "Bps",
                (gauge("sluice_router_network_tier_bytes_per_second", "tier"), "tier {{tier}}"),
            ),
        ),
        "Flows, where they are scheduled": (
            line(
                "Flows",
                "short",
                (gauge("sluice_router_flow_open"), "open"),
                (gauge("sluice_router_flow_held"), "held"),
            ),
            line(
                "Bytes by level",
                "Bps",
                (total("sluice_router_flow_bytes_level_total", "level"), "level {{level}}"),
            ),
            line("Permits", "ops", (total("sluice_router_flow_permits_total"), "permits")),
            line("Time held", "s", (total("sluice_router_flow_held_seconds_total"), "seconds a second")),
            line(
                "Time held by level",
                "s",
                (total("sluice_router_flow_held_seconds_level_total", "level"), "level {{level}}"),
            ),
            line(
                "Share read without permits",
                "percentunit",
                (gauge("sluice_router_flow_unscheduled_share"), "unscheduled"),
            ),
        ),
    },
)

SCALING = Board(
    "scaling",
    "Sluice scaling",
    {
        "Now": (
            figure("Engines that serve", "short", SERVING),
            figure("Engines", "short", "sum(sluice:engines:count)"),
            figure("Replicas wanted", "short", gauge("sluice_router_replicas_wanted")),
            figure("Warm", "short", gauge("sluice_router_warm_engines")),
            figure("Warm wanted", "short", gauge("sluice_router_warm_wanted")),
        ),
        "Engines": (
            line(
                "Engines and replicas",
                "short",
                ("sluice:engines:count", "{{role}}"),
                (gauge("sluice_router_replicas_wanted"), "replicas wanted"),
                (gauge("sluice_router_warm_engines"), "warm"),
                (gauge("sluice_router_warm_wanted"), "warm wanted"),
            ),
            line(
                "Longest start under way", "s", (gauge("sluice_router_replica_start_seconds_max"), "starting")
            ),
            line(
                "Orders to engines",
                "ops",
                (total("sluice_router_assignments_total"), "autoscaler"),
                (total("sluice_router_role_switches_total"), "lent"),
            ),
        ),
        "Load": (
            line(
                "Load score of a role",
                "short",
                (gauge("sluice_router_load_score", "role"), "{{role}}"),
                help="0 is idle, about 1 is full, more means a queue.",
            ),
            line("Load regime", "short", (gauge("sluice_router_load_regime", "regime"), "{{regime}}")),
            line(
                "Queue and pool",
                "short",
                ("sluice:router_queued:max", "queued"),
                ("sluice:router_pool:max", "pool"),
            ),
            line("Decisions", "ops", ("sluice:router_decisions:rate1m", "{{decision}}")),
            line(
                "Time of a decision, 95th percentile",
                "s",
                ("sluice:router_decision_seconds:p95_rate5m", "decision"),
            ),
        ),
        "How long capacity takes": (
            line("Ways to more capacity", "s", (gauge("sluice_router_lead_seconds", "way"), "{{way}}")),
            line("Steps of a start", "s", (gauge("sluice_router_start_step_seconds", "step"), "{{step}}")),
        ),
        "Lengths, where they are predicted": (
            line(
                "Forecasts kept up to date",
                "short",
                (gauge("sluice_router_predictor_running_forecasts"), "running"),
            ),
            line("Outcomes", "ops", (total("sluice_router_predictor_outcomes_total"), "learnt from")),
        ),
    },
)

BOARDS = (OVERVIEW, ENGINES, TRANSFERS, SCALING)


def built(board: Board) -> str:
    """Returns the board as Grafana's JSON."""
    made = (
        Dashboard(board.title)
        .uid(f"sluice-{board.name}")
        .tags(["sluice"])
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(1)  # a common cross-hair over all panels
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    top = 0
    for heading, panels in board.rows.items():
        made.with_row(Row(heading).grid_pos(GridPos(h=1, w=WIDTH, x=0, y=top)))
        top += 1
        beside, height = SIZES[panels[0].shape]
        width = WIDTH // beside
        for number, panel in enumerate(panels):
            at = GridPos(h=height, w=width, x=number % beside * width, y=top + number // beside * height)
            made.with_panel(_panel(panel).grid_pos(at))
        top += -(-len(panels) // beside) * height
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


MAKERS: dict[str, type[Stat | Timeseries | Timeline]] = {
    "lines": Timeseries,
    "figure": Stat,
    "times": Timeline,
}


def _panel(panel: Panel) -> Stat | Timeseries | Timeline:
    made = MAKERS[panel.shape]()
    made.title(panel.title).unit(panel.unit).datasource(
        DataSourceRef(type_val="prometheus", uid="${datasource}")
    )
    if panel.help:
        made.description(panel.help)
    if isinstance(made, Timeseries):
        legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        made.min(0).legend(legend.show_legend(True))
    for number, query in enumerate(panel.queries):
        target = Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        made.with_target(target)
    return made


def main() -> None:
    """Writes all boards."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(built(board))


if __name__ == "__main__":
    main()
