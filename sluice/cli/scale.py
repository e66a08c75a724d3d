"""`sluice scale`: what the autoscaler sees, wants and orders; numbers and bounds by hand, and back to the policy."""

from __future__ import annotations

import argparse

from sluice.types import ScaledGroup, Scaling, ScalingPlan

from .output import Exit, UsageError, connect, table

AUTO = "auto"
BOUNDS = ("min", "max", "warm", "warm_max")


def configure_scale(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sluice scale` to `parser`."""
    parser.add_argument(
        "orders",
        nargs="*",
        metavar="GROUP=N | GROUP.BOUND=N | auto",
        help="numbers of serving replicas by group, such as prefill=2 decode=3; bounds (min, max, warm, warm_max), such"
        " as decode.max=6 decode.warm=1; `auto` has the policy decide again; nothing: show the state",
    )
    parser.add_argument(
        "--plan", action="store_true", help="show the plan that this would make; change nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    parser.set_defaults(run=run_scale)


def run_scale(args: argparse.Namespace) -> int:
    """Gives the order, if there is one, prints the autoscaler's state, and returns the exit code."""
    auto, counts, bounds = read_orders(args.orders)
    with connect(args) as client:
        if auto or counts or bounds or args.plan:
            scaling = client.scale(counts, auto=auto, plan=args.plan, bounds=bounds)
        else:
            scaling = client.scaling()
    print(scaling.model_dump_json(exclude_none=True) if args.json else render_scaling(scaling))
    return Exit.OK


def read_orders(orders: list[str]) -> tuple[bool, dict[str, int], dict[str, dict[str, int]]]:
    """Returns whether the policy is to decide, the numbers by group, and the bounds by group. Raises UsageError."""
    if AUTO in orders:
        if len(orders) > 1:
            raise UsageError("`auto` stands alone: it gives all groups back to the policy")
        return True, {}, {}
    counts: dict[str, int] = {}
    bounds: dict[str, dict[str, int]] = {}
    for order in orders:
        name, equals, number = order.partition("=")
        group, dot, bound = name.partition(".")
        if not group or not equals or not (number.isascii() and number.isdigit()):
            raise UsageError(
                f"{order!r} is no order: write GROUP=N with a whole number, such as decode=3, GROUP.max=N, or auto"
            )
        if dot and bound not in BOUNDS:
            raise UsageError(f"{name!r} is no bound: there are {', '.join(BOUNDS)}, such as {group}.max=4")
        into, key = (bounds.setdefault(group, {}), bound) if dot else (counts, name)
        if key in into:
            raise UsageError(f"{name} has two numbers: give one")
        into[key] = int(number)
    if counts and bounds:
        raise UsageError("give numbers or bounds, not both: one order at a time")
    return False, counts, bounds


def render_scaling(scaling: Scaling) -> str:
    """Returns the state as text: who decides, the groups, the plan with its reasons, and what is ordered."""
    mode = scaling.mode if scaling.by is None else f"{scaling.mode} (by {scaling.by})"
    age_s = scaling.observed_for_s
    lines = [
        f"mode      {mode}",
        f"policy    {scaling.policy.name if scaling.policy else '-'}",
        f"observed  {'never' if age_s is None else f'{age_s:.1f} s ago'}",
    ]
    if scaling.phase not in (None, "awake"):
        lines.append(f"engines   {scaling.phase}")
    if scaling.held is not None:
        lines.append(f"held      {scaling.held}")
    header = (
        "GROUP",
        "ROLE",
        "BOUNDS",
        "KEEPS",
        "WANTED",
        "REPLICAS",
        "ACTIVE",
        "WARM",
        "STARTING",
        "OVERDUE",
        "DRAINING",
    )
    rows = [
        (
            group.name,
            group.role,
            f"{group.min}..{group.max}",
            f"{group.keeps_warm} warm",
            "-" if group.wanted is None else str(group.wanted),
            "-" if group.replicas is None else str(group.replicas),
            *(str(n) for n in (group.active, group.warm, group.starting, group.overdue, group.draining)),
        )
        for group in scaling.groups
    ]
    lines += ["", table(header, rows), "", *_plan(scaling.plan)]
    lines += [f"bounds    {_changed(group)}" for group in scaling.groups if _changed(group)]
    lines += [f"reason    {reason}" for reason in scaling.reasons]
    lines += [f"note      {note}" for note in scaling.notes]
    return "\n".join(lines)


def _changed(group: ScaledGroup) -> str:
    """Returns in words which bounds of a group an administrator has set; "" for none."""
    told = group.configured
    if told is None:
        return ""
    now = (group.min, group.max, group.keeps_warm, group.warm_max)
    pairs = zip(BOUNDS, (told.min, told.max, told.warm, told.warm_max), now, strict=True)
    changed = [f"{name} {after} (configured: {before})" for name, before, after in pairs if before != after]
    return f"{group.name}: {', '.join(changed)}, set by an administrator" if changed else ""


def _plan(plan: ScalingPlan | None) -> list[str]:
    if plan is None:
        return ["plan      none yet"]
    serving = plan.serving
    lines = [
        f"plan      {serving.prefill} prefill, {serving.decode} decode, {serving.colocated} colocated serve,"
        f" {plan.warm} warm"
    ]
    lines += [f"move      {move.way} {move.engine or 'one more'} ({move.role})" for move in plan.moves]
    lines += [f"order     {order.engine}: {order.role}, {order.duty}" for order in plan.engines]
    lines += [f"order     {name}: {number} replicas" for name, number in plan.replicas.items()]
    return lines
