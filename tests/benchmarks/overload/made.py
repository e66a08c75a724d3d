"""Requests and outcomes of the overload benchmark, made by hand."""

from benchmarks.overload.load import Work
from benchmarks.overload.outcomes import Outcome


def work(
    at_s: float,
    tenant: str = "ant",
    name: str = "interactive",
    prompt_tokens: int = 10,
    output_tokens: int = 20,
) -> Work:
    return Work(at_s, name, tenant, prompt_tokens, output_tokens, "a prompt")


def answered(of: Work, ttft_s: float) -> Outcome:
    """A whole answer, whose last token comes a second after the first."""
    first_s = of.at_s + ttft_s
    return Outcome(of, of.at_s, first_s + 1.0, "whole", first_s)


def refused(of: Work, after_s: float, reason: str = "ttft_objective") -> Outcome:
    return Outcome(of, of.at_s, of.at_s + after_s, "refused", reason=reason)


def cut(of: Work, after_s: float, ttft_s: float | None = None) -> Outcome:
    return Outcome(of, of.at_s, of.at_s + after_s, "cut", None if ttft_s is None else of.at_s + ttft_s)
