"""The server's metrics (Prometheus text exposition format 0.0.4) as typed samples."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ._errors import InvalidResponseError

_SAMPLE = re.compile(
    r"""^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
        (?:\{(?P<labels>(?:[^"}]|"(?:\\.|[^"\\])*")*)\})?
        \s+(?P<value>[^\s#]+)""",
    re.VERBOSE,
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:\\.|[^"\\])*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Sample:
    """One sample, which is a line of the scrape. A histogram appears as `_bucket`, `_sum` and `_count` samples."""

    name: str
    labels: dict[str, str]
    value: float

    def matches(self, name: str, labels: dict[str, str]) -> bool:
        """Returns whether the name is equal and every given label has the given value."""
        return self.name == name and labels.items() <= self.labels.items()


@dataclass(frozen=True)
class Metrics:
    """All samples of one scrape, and the text from which they were read."""

    samples: tuple[Sample, ...]
    text: str

    def select(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """Returns the samples called `name` that carry these label values."""
        return tuple(sample for sample in self.samples if sample.matches(name, labels))

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum over `select(...)`. Raises KeyError if no such sample exists: a missing metric is not 0."""
        found = self.select(name, **labels)
        if not found:
            raise KeyError(f"no metric {name!r} with labels {labels!r} in this scrape")
        return sum(sample.value for sample in found)


def parse_metrics(text: str) -> Metrics:
    """Returns the samples of an exposition. Raises InvalidResponseError naming the first line that is not one."""
    samples = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            samples.append(_sample(stripped, number))
    return Metrics(samples=tuple(samples), text=text)


def _sample(line: str, number: int) -> Sample:
    match = _SAMPLE.match(line)
    try:
        if match is None:
            raise ValueError("no metric name and value")
        value = float(match["value"])
    except ValueError as error:
        raise InvalidResponseError(
            f"/metrics, line {number} is not a sample ({error}): {line[:200]!r}"
        ) from error
    labels = {name: _unescape(raw) for name, raw in _LABEL.findall(match["labels"] or "")}
    return Sample(name=match["name"], labels=labels, value=value)


def _unescape(raw: str) -> str:
    return re.sub(r'\\[\\"n]', lambda found: _ESCAPES[found[0]], raw)
