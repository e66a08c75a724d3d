"""`sluice explain REQUEST_ID` and `sluice policy show|set`: how the router decides, and why it decided as it did."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.types import Choice, Decision, Explanation, KvFlow, KvTransfer, Policies, Policy, Ranked, Way

from .output import Exit, UsageError, connect, natural_int, table

STAGES = ("prefill", "decode", "admission", "fairness", "flow")
BAR = 48
"""Characters of the bars of a waterfall, all together."""
BARS = {"work": "=", "wait": ".", "wire": "-"}
"""The character of each kind of hop."""
_NAME = re.compile(r"\bw\.(?P<weight>\w+)|\b(?P<name>[A-Za-z_]\w*)\b")


# ------------------------------------------------------------------------------------------------------------- explain


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice explain` to `parser`."""
    parser.add_argument(
        "request_id",
        metavar="REQUEST_ID",
        help="the id of an answer (chatcmpl-...), its x-request-id header, or an attempt_id of the router's log",
    )
    parser.add_argument(
        "--top",
        type=natural_int,
        default=3,
        metavar="N",
        help="formula with numbers for the N best (default 3)",
    )
    parser.add_argument(
        "--times",
        action="store_true",
        help="where the time to the first token went, hop by hop, of a request that had the header x-sluice-times: on",
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    parser.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Prints every decision made for the request, and returns the exit code."""
    if not args.request_id.strip():
        raise UsageError("REQUEST_ID is empty: give the id of an answer (chatcmpl-...) or its x-request-id")
    with connect(args) as client:
        explanation = client.explain(args.request_id)
    if args.json:
        print(_json(explanation))
    else:
        print(render_times(explanation) if args.times else render_explanation(explanation, args.top))
    return Exit.OK


def render_times(explanation: Explanation) -> str:
    """Returns the way of each attempt as text: a line for each hop, with its time and a bar at its place."""
    if not explanation.times:
        return (
            f"request {explanation.id}: no times are known. They are noted of a request with the header"
            " x-sluice-times: on (extra_headers in the SDK), and of one whose trace is sampled"
        )
    return "\n\n".join(_way(way) for way in explanation.times)


def _way(way: Way) -> str:
    whole_s = max((hop.until_s for hop in way.hops), default=0.0)
    rows = []
    for hop in way.hops:
        start, end = (round(BAR * at_s / whole_s) if whole_s else 0 for at_s in (hop.since_s, hop.until_s))
        bar = " " * min(start, BAR - 1) + BARS.get(hop.kind, "#") * max(1, end - start)
        took_ms, since_ms = 1e3 * (hop.until_s - hop.since_s), 1e3 * hop.since_s
        rows.append((hop.name, hop.process, hop.kind, f"{since_ms:.3f}", f"{took_ms:.3f}", bar[:BAR]))
    sums = [
        f"{kind} {1e3 * sum(hop.until_s - hop.since_s for hop in way.hops if hop.kind == kind):.3f}"
        for kind in dict.fromkeys(hop.kind for hop in way.hops)
    ]
    head = f"attempt {way.attempt_id}: {1e3 * whole_s:.3f} ms to the first token ({', '.join(sums)})"
    return head + "\n" + table(("HOP", "AT", "KIND", "AFTER MS", "MS", "=work .wait -wire"), rows)


def render_explanation(explanation: Explanation, top: int) -> str:
    """Returns the decisions as text, each with policy, reason, waits, ranking, and formula.

    The formula is also shown with the numbers of the `top` best workers.
    """
    made = explanation.decisions
    count = f"{len(made)} decision{'s' if len(made) != 1 else ''}"
    parts = [f"request {explanation.id}: {count}"]
    parts += [_decision(number, decision, top) for number, decision in enumerate(made, start=1)]
    parts += [_transfer(transfer) for transfer in explanation.transfers]
    parts += [_flow(flow) for flow in explanation.flows]
    return "\n\n".join(parts)


def _decision(number: int, made: Decision, top: int) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(made.at_s)) + f"{made.at_s % 1:.3f}"[1:]
    if made.decision is None:
        again = f", try again in {made.retry_after_s:g} s" if made.retry_after_s is not None else ""
        line = f"{number}. {at}  rejected with {made.status}: {made.reject_reason}{again}  (attempt {made.attempt_id})"
        return "\n".join([line, *_admission(made), *_turn(made), *_quarantined(made)])
    chosen = made.decision
    waited = "" if made.waited_s is None else f", waited {1000 * made.waited_s:.1f} ms"
    due = "" if made.kv_due_s is None else f", KV due in {1000 * made.kv_due_s:.1f} ms"
    lines = [
        f"{number}. {at}  {_stage(made)} -> {chosen.worker}  (attempt {made.attempt_id})",
        f"   reason   {chosen.reason}{waited}{due}",
        *_admission(made),
        *_turn(made),
        *_quarantined(made),
    ]
    if made.policy is not None:
        lines += [f"   policy   {made.policy.name}", f"   formula  {made.policy.formula}"]
        filled = [_numbers(ranked, made.policy) for ranked in _valued(chosen, made.policy)[:top]]
        lines += [f"   {'numbers' if i == 0 else '':9}{line}" for i, line in enumerate(filled)]
    lines += ["   " + line for line in _ranking(chosen.ranking, chosen.worker).splitlines()]
    return "\n".join(lines)


def _transfer(moved: KvTransfer) -> str:
    ms, held_ms = 1000 * moved.seconds, 1000 * moved.held_s
    size = f"{moved.n_bytes / 1e6:.3f} MB in {moved.descriptors} descriptors"
    return f"KV moved: {size}, {ms:.1f} ms, held back for {held_ms:.1f} ms  (attempt {moved.attempt_id})"


def _flow(flow: KvFlow) -> str:
    levels = f"level {flow.first_level}"
    if flow.last_level != flow.first_level:
        levels += f", then {flow.last_level}"
    mlu = "no deadline" if flow.mlu is None else f"MLU {flow.mlu:.3g}"
    size = f"{flow.size / 1e6:.3f} MB in {flow.chunks} chunks"
    how = f"; without permits ({flow.unscheduled.replace('_', ' ')})" if flow.unscheduled else ""
    return (
        f"KV flow {flow.source} -> {flow.target}: {levels} ({mlu}), {size}, "
        f"held {1000 * flow.held_s:.1f} ms, moved {1000 * flow.moved_s:.1f} ms{how}"
    )


def _admission(made: Decision) -> list[str]:
    """Returns a line with the sum that the admission policy has compared with the objective, and one with what it says
    in words, as far as there are any.
    """
    judged = made.admission
    if judged is None or not judged.terms:
        return []
    named = " + ".join(f"{name.removesuffix('_s')} {value:.3f}" for name, value in judged.terms.items())
    limit = "no objective" if judged.budget_s is None else f"objective {judged.budget_s:g} s"
    each = "a token" if "token_s" in judged.terms else "first token"
    line = f"   admission {each} expected after {sum(judged.terms.values()):.3f} s = {named}; {limit}"
    return [line, *([f"   because  {judged.detail}"] if judged.detail else [])]


def _turn(made: Decision) -> list[str]:
    """Returns lines with the counters of the classes and tenants that waited, and with a priority that was raised, as
    far as there are any.
    """
    lines = _classes(made)
    turn = made.turn
    if turn is None or (turn.classes and turn.tenants < 2):
        return lines
    before = [name for name, counter in turn.others.items() if counter < turn.counter]
    others = ", ".join(f"{name or '(no name)'} {counter:.0f}" for name, counter in turn.others.items())
    ahead = f"{len(before)} or more ahead" if before else "none ahead"
    return [
        *lines,
        f"   turn     tenant {turn.tenant or '(no name)'} at {turn.counter:.0f} weighted tokens, charged"
        f" {turn.cost:.0f}; {turn.tenants} tenants waited, {ahead}: {others}",
    ]


def _classes(made: Decision) -> list[str]:
    """Returns a line for a priority that was raised, and one with the counters of the classes that waited."""
    lines = []
    if made.aged is not None:
        lines.append(f"   aged     from priority {made.aged.asked} to {made.aged.served_as}: it waited long")
    if made.turn is not None and made.turn.classes:
        (own, counter), *others = made.turn.classes.items()
        named = ", ".join(f"{name} {other:.0f}" for name, other in others)
        lines.append(f"   class    priority {own} at {counter:.0f} weighted tokens; others: {named}")
    return lines


def _quarantined(made: Decision) -> list[str]:
    """Returns a line that names the workers which the policy could not choose, or nothing."""
    held = ", ".join(f"{worker} ({reason.replace('_', ' ')})" for worker, reason in made.quarantined.items())
    return [f"   without  {held}: quarantined"] if held else []


def _stage(made: Decision) -> str:
    if made.action == "RouteDecode":
        return "decode"
    return (
        "prefill and decode" + (" (no prefill engine)" if made.degraded else "")
        if made.colocated
        else "prefill"
    )


def _valued(chosen: Choice, policy: Policy) -> list[Ranked]:
    """Returns the ranked workers to which the policy applied its formula, which have the same terms as the chosen one.

    BalanceRoute, for example, ranks the workers that it did not try by their free slots.
    """
    named = {match["name"] for match in _NAME.finditer(policy.formula)}
    wanted = next((named & set(r.terms) for r in chosen.ranking if r.worker == chosen.worker), set())
    return [ranked for ranked in chosen.ranking if wanted <= set(ranked.terms)]


def _numbers(ranked: Ranked, policy: Policy) -> str:
    """Returns the policy's formula with this candidate's numbers.

    A name without a number stays as it is. It may be a term that the engine does not report; such a term must not take
    the number of the weight that has the same name.
    """
    weights = {match["weight"] for match in _NAME.finditer(policy.formula)}

    def number(match: re.Match[str]) -> str:
        value: object
        if match["weight"] is not None:
            value = policy.params.get(match["weight"])
        elif match["name"] == "cost":
            return f"{ranked.cost:.6g}"
        else:
            value = ranked.terms.get(match["name"])
            if value is None and match["name"] not in weights:
                value = policy.params.get(match["name"])
        if not isinstance(value, int | float) or isinstance(value, bool):
            return match[0]
        return f"({value:.6g})" if value < 0 else f"{value:.6g}"

    return f"{ranked.worker}: {_NAME.sub(number, policy.formula)}"


def _ranking(ranking: Sequence[Ranked], chosen: str) -> str:
    terms = list(dict.fromkeys(name for ranked in ranking for name in ranked.terms))
    rows = [
        (
            ">" if ranked.worker == chosen else "",
            ranked.worker,
            f"{ranked.cost:.6g}",
            *(f"{ranked.terms[name]:.6g}" if name in ranked.terms else "-" for name in terms),
        )
        for ranked in ranking
    ]
    return table(("", "WORKER", "COST", *terms), rows)


# -------------------------------------------------------------------------------------------------------------- policy


def configure_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice policy` to `parser`."""
    parser.add_argument("what", choices=("show", "set"), help="show the policies in use, or change them now")
    parser.add_argument("--prefill", metavar="NAME", help="set: the policy that chooses prefill engines")
    parser.add_argument("--decode", metavar="NAME", help="set: the policy that chooses decode engines")
    parser.add_argument(
        "--admission", metavar="NAME", help="set: the policy that refuses what would miss its objectives"
    )
    parser.add_argument(
        "--fairness", metavar="NAME", help="set: the policy that shares the service out among tenants"
    )
    parser.add_argument("--flow", metavar="NAME", help="set: the policy that orders KV transfers")
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="[STAGE.]K=V",
        help="set: a parameter (others take their defaults); STAGE. (prefill., decode., admission., fairness. or"
        " flow.) where several are set; V is JSON, a word, or @FILE with JSON in it",
    )
    parser.add_argument(
        "--dispatch", action="append", default=[], metavar="K=V", help="set: a limit of the dispatcher"
    )
    parser.add_argument("--all", action="store_true", help="show: every policy there is, with its parameters")
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    parser.set_defaults(run=run_policy)


def run_policy(args: argparse.Namespace) -> int:
    """Prints the policies, after changing them for `set`, and returns the exit code."""
    if args.what == "show":
        if any(getattr(args, stage) for stage in STAGES) or args.param or args.dispatch:
            raise UsageError(
                "`sluice policy show` changes nothing: write `sluice policy set` to change policies"
            )
        with connect(args) as client:
            policies = client.policies()
    else:
        params = _stage_params(args)
        dispatch = dict(_assignment(text) for text in args.dispatch)
        if not any(getattr(args, stage) for stage in STAGES) and not dispatch:
            raise UsageError(
                "nothing to set: give --prefill NAME, --decode NAME, --admission NAME, --fairness NAME, --flow NAME"
                " or --dispatch K=V"
            )
        with connect(args) as client:
            policies = client.set_policies(
                prefill=args.prefill,
                decode=args.decode,
                prefill_params=params["prefill"],
                decode_params=params["decode"],
                dispatch=dispatch,
                flow=args.flow,
                flow_params=params["flow"],
                admission=args.admission,
                admission_params=params["admission"],
                fairness=args.fairness,
                fairness_params=params["fairness"],
            )
    print(_json(policies) if args.json else render_policies(policies, every=args.all))
    return Exit.OK


def render_policies(policies: Policies, *, every: bool) -> str:
    """Returns the policies in use as text, and the names of all others, or with `every` all about them."""
    lines = []
    for stage in STAGES:
        policy: Policy | None = getattr(policies, stage)
        if policy is None:
            continue
        lines += [f"{stage:8} {policy.name}", f"         {policy.formula}"]
        lines += [f"         {name} = {_short(value)}" for name, value in policy.params.items()]
    lines.append("dispatch " + ", ".join(f"{name} = {value}" for name, value in policies.dispatch.items()))
    for stage in STAGES:
        known: dict[str, Policy] = getattr(policies.available, stage)
        if not known or (stage == "flow" and policies.flow is None and not every):
            continue
        if not every:
            lines.append(f"\nfor {stage} there are: {', '.join(sorted(known))}")
            continue
        rows = [(p.name, _params(p), p.formula) for _, p in sorted(known.items())]
        lines.append("\n" + table((f"FOR {stage.upper()}", "PARAMETERS", "FORMULA"), rows))
    return "\n".join(lines)


def _params(policy: Policy) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in policy.params.items()) or "-"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _stage_params(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the --param options by stage. Raises UsageError where the stage is not clear or not set."""
    named = {stage for stage in STAGES if getattr(args, stage)}
    result: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for text in args.param:
        key, value = _assignment(text)
        stage, _, rest = key.partition(".")
        if stage not in STAGES or not rest:
            if len(named) != 1:
                raise UsageError(f"--param {text}: say for which policy, as prefill.{text} or decode.{text}")
            stage, rest = next(iter(named)), key
        if stage not in named:
            raise UsageError(f"--param {text}: parameters come with their policy: add --{stage} NAME")
        result[stage][rest] = value
    return result


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"{text!r} must look like NAME=VALUE")
    if value.startswith("@"):
        return key, _file(value[1:])
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _file(name: str) -> Any:
    """Returns the JSON in a file; of a heatmap file only the heatmap."""
    try:
        data = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} cannot be read as JSON: {error}") from None
    is_heatmap = isinstance(data, Mapping) and str(data.get("format", "")).startswith("sluice-heatmap/")
    return data["heatmap"] if is_heatmap else data


def _json(result: Explanation | Policies) -> str:
    return json.dumps(result.model_dump(mode="json", by_alias=True, exclude_unset=True), indent=2)
