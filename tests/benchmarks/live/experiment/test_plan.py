"""Plans of experiments: what is refused and in which words, the order of trials, and the shipped files."""

import re

import pytest
import yaml

from benchmarks.live.experiment.cli import SHIPPED
from benchmarks.live.experiment.plan import Bounds, Load, PlanError, read

GOOD = """
name: good
load:
  classes: {interactive: {prompt_tokens: 10, output_tokens: 5, ttft_slo_ms: 100}}
  phases: [{name: a, for_s: 10, rate_per_s: 5}, {name: b, for_s: 20, rate_per_s: 10}]
"""


def changed(**keys: object) -> str:
    return yaml.safe_dump({**yaml.safe_load(GOOD), **keys})


def load(**keys: object) -> dict[str, object]:
    return {**yaml.safe_load(GOOD)["load"], **keys}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a plan is a mapping"),
        ("- 1", "a plan is a mapping"),
        ("{", "this is no YAML"),
        ("a: &x [1]\nb: *x", "aliases .* are not allowed"),
        ("name: a\nname: b", "the key name occurs twice"),
        ("[" * 20_000, "nested too deeply"),
        ("x: " + "1" * 5_000, "a value cannot be read"),
        ("x: " + "a" * 70_000, "longer than 64 kB"),
        ("x: 2026-99-99", "a value cannot be read|no such key"),
        ("name: x", "load: Field required"),
        (changed(nme=1), "nme: no such key"),
        (changed(name="../x"), "name: a name has at most 40 letters"),
        (changed(name="<b>"), "name: a name has at most 40 letters"),
        (changed(name="burst, again"), "name: a name has at most 40 letters"),
        (changed(name="burst\n"), "name: a name has at most 40 letters"),
        (changed(load={}), "load: give either phases or a trace"),
        (
            changed(load=load(trace={"name": "synthetic-chat", "for_s": 5, "rate_per_s": 1})),
            "either phases or a trace",
        ),
        (
            changed(load=load(phases=[{"name": "a", "for_s": 0, "rate_per_s": 1}])),
            r"phases.0.for_s: .*greater than 0",
        ),
        (
            changed(load=load(phases=[{"name": "a", "for_s": 1, "rate_per_s": -1}])),
            r"rate_per_s: .*greater than or",
        ),
        (
            changed(load=load(phases=[{"name": "a", "for_s": 1, "rate_per_s": float("nan")}])),
            "rate_per_s: .*",
        ),
        (
            changed(load=load(phases=[{"name": "a", "for_s": 1, "rate_per_s": rate} for rate in (1, 2)])),
            "two phases share a name",
        ),
        (changed(load=load(classes={"gold": {}})), "load.classes.gold"),
        (
            changed(load=load(classes={"batch": {"prompt_tokens": 0}})),
            "classes.batch.prompt_tokens: .*greater than",
        ),
        (changed(load=load(classes={"batch": {"share": 0}})), "no class has a share above 0"),
        (
            changed(
                load=load(phases=[{"name": "a", "for_s": 1, "rate_per_s": 1, "classes": {"batch": {"x": 1}}}])
            ),
            "phase a: classes.batch.x: no such key",
        ),
        (changed(actions=[{"at_s": 1}]), "give exactly one of policy, scale, role, drain, activate, kill"),
        (changed(actions=[{"at_s": 1, "drain": "a", "kill": "b"}]), "give exactly one of"),
        (changed(actions=[{"at_s": 31, "drain": "a"}]), "one is at 31 s, after the end of the load at 30 s"),
        (changed(actions=[{"at_s": 1, "policy": {}}]), "give prefill, .*fairness, flow or dispatch"),
        (changed(actions=[{"at_s": 1, "policy": {"decode": {"nam": "x"}}}]), "decode: give a policy's name"),
        (
            changed(actions=[{"at_s": 1, "scale": {"decode": -1}}]),
            "scale.decode: .*greater than or equal to 0",
        ),
        (
            changed(actions=[{"at_s": 1, "kill": "decode"}]),
            "kill is not allowed: start the command with --may-kill",
        ),
        (changed(repeats=0), "repeats: .*greater than or equal to 1"),
        (changed(order="random"), "order: "),
        (
            changed(load=load(phases=[{"name": "a", "for_s": 1, "rate_per_s": 201}])),
            "201 requests/s are above the bound",
        ),
        (changed(load=load(phases=[{"name": "a", "for_s": 901, "rate_per_s": 1}])), "would take 901 s"),
        (
            changed(repeats=20, load=load(phases=[{"name": "a", "for_s": 50, "rate_per_s": 1}])),
            "20 times the load of 50 s",
        ),
    ],
)
def test_a_wrong_plan_is_refused_in_words(text: str, problem: str) -> None:
    with pytest.raises(PlanError) as refused:
        read(text, Bounds())
    assert re.search(problem, "\n".join(refused.value.problems)), refused.value.problems


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(PlanError) as refused:
        read(changed(nme=1, repeats=0), Bounds())
    assert len(refused.value.problems) == 2


def test_files_are_read_by_the_command_only() -> None:
    text = changed(load={"trace": {"file": "/etc/passwd", "for_s": 5, "rate_per_s": 1}})
    assert read(text, Bounds()).load.trace is not None
    with pytest.raises(PlanError, match="files are read by the command only"):
        read(text, Bounds(may_read=False))


def test_many_requests_are_refused() -> None:
    text = changed(load=load(phases=[{"name": "a", "for_s": 800, "rate_per_s": 1000}]))
    with pytest.raises(PlanError, match="800,000 requests are more than the 200,000"):
        read(text, Bounds(rate_per_s=1000))


@pytest.mark.parametrize(
    ("order", "repeats", "labels"),
    [
        ("abba", 1, ["a 1", "b 1"]),
        ("abba", 3, ["a 1", "b 1", "b 2", "a 2", "a 3", "b 3"]),
        ("in_turn", 2, ["a 1", "b 1", "a 2", "b 2"]),
    ],
)
def test_the_order_of_trials(order: str, repeats: int, labels: list[str]) -> None:
    arms = {name: {"policy": {"decode": "round_robin"}} for name in "ab"}
    plan = read(changed(arms=arms, order=order, repeats=repeats, pause_s=2), Bounds())
    assert [trial.label for trial in plan.trials] == labels
    # 30 s each, with 2 s between two
    assert plan.duration_s == 30 * len(labels) + 2 * (len(labels) - 1)


def test_a_phase_changes_the_classes_it_names_and_no_others() -> None:
    classes = {"interactive": {"prompt_tokens": 10, "ttft_slo_ms": 100}, "batch": {"output_tokens": 7}}
    phases = [{"name": "a", "for_s": 1, "rate_per_s": 1, "classes": {"interactive": {"prompt_tokens": 99}}}]
    made = Load.model_validate({"classes": classes, "phases": phases})
    of = made.classes_of(made.phases[0])
    assert (of["interactive"].prompt_tokens, of["interactive"].ttft_slo_ms) == (99, 100)
    assert of["batch"].output_tokens == 7


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_plans_keep_the_bounds_and_are_short(path) -> None:
    plan = read(path.read_text(), Bounds(may_kill=path.stem == "kill"))
    assert 50 <= plan.duration_s <= 180
    assert plan.summary.endswith(".")


def test_there_are_the_five_shipped_plans() -> None:
    assert {path.stem for path in SHIPPED.glob("*.yaml")} == {
        "burst",
        "ratio-shift",
        "policy-ab",
        "drain",
        "kill",
    }
