"""Writes docs/metrics.md from the lists in `app.ingress.metrics` and `app.fleet.figures`.

python scripts/document_metrics.py
"""

from pathlib import Path

from app.fleet.figures import all_metrics
from app.fleet.metric import Metric
from app.ingress.metrics import INGRESS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

HEAD = """# Metrics

`GET /metrics` of an ingress answers in Prometheus's text format. A counter starts at 0 with its process. The figures of
router and engines are those of the router's last report, about a second old; without a router they stand still, and
`sluice_router_connected` is 0. With several ingress replicas on one port a scrape reaches one of them: scrape each
replica by its own metrics port ([operations.md](operations.md#watch)), and add up only the metrics of "This ingress
replica". The dashboard has added them up: there counters and histograms of ingresses have the further label `observer`,
and `sluice_router_connected` and `sluice_ready` are 1 if they are for every replica.

This page is written by `python scripts/document_metrics.py`.
"""

BUCKETS = """
## Buckets of the histograms

"""


def page() -> str:
    """Returns the text of `docs/metrics.md`."""
    sections = {"This ingress replica": INGRESS, **all_metrics()}
    text = HEAD + "".join(_section(heading, metrics) for heading, metrics in sections.items())
    histograms = [metric for metric in INGRESS if metric.buckets]
    return text + BUCKETS + "".join(f"- `{m.name}`: {', '.join(map(str, m.buckets))} s\n" for m in histograms)


def _section(heading: str, metrics: tuple[Metric, ...]) -> str:
    head = [f"\n## {heading}\n", "| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(_row, metrics), ""])


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |"


if __name__ == "__main__":
    PAGE.write_text(page())
