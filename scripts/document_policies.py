"""Writes docs/policies.md: how to choose a policy, and every policy's formula, inputs and parameters from its class.

python scripts/document_policies.py
"""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from policies.admission.registry import ADMISSION
from policies.dispatch.config import DispatchConfig
from policies.fairness.registry import FAIRNESS
from policies.flow import rmlq
from policies.flow.config import ArbiterConfig
from policies.flow.fetch_or_recompute import FetchConfig
from policies.flow.registry import FLOW
from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.routing.base import Needs
from policies.routing.deepflow.pd_heatmap import PdHeatmap
from policies.routing.flowkv import load_score
from policies.routing.flowkv.load_score import LoadWeights
from policies.routing.params import ranges
from policies.routing.registry import DECODE, PREFILL

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"

HEAD = """# Policies

## How to choose

- **Not sure:** keep the defaults, prefill by `join_shortest_queue` and decode by `composition`. Untuned and without
  forecasts this pair has the least largest regret of 15 over five situations (`python -m benchmarks run defaults`).
- **One decode engine, or thousands of requests/s through one router:** decode by `join_shortest_queue`, which costs
  the router a fraction of the composition's CPU time for a request ([results.md](results.md), "Time of a decision").
- **Prompts share prefixes (chat, RAG, agents):** prefill by `predicted_ttft`; fit its two constants to your engines.
- **KV moves between racks or pods:** decode by `netkv`, describe the network in `router.network.file`, and set
  `contention: shared`. The paper's own count of transfers, the default, made TTFT longer than no count at all in most
  cells that were simulated ([design.md](design.md), section 3.3).
- **Data-parallel decode ranks that end each step together:** decode by `balance_route_h` with a predictor, else
  `balance_route_0`.
- **Both of these, under load:** decode by `composition`, with the network and a predictor.
- **One port for several users, some of whom send far more than others:** keep the default, which shares the service out
  among tenants ([Policies for fairness](#policies-for-fairness)), and give them API keys.
- **More load than the engines carry:** give the classes objectives (`ingress.options.class_slo`); what would miss them
  is then refused at once ([Policies for admission](#policies-for-admission)).

Further:

- Colocated engines beside disaggregated ones: prefill by `combined` with a heatmap measured on your own engines
  ([app/profile](../app/profile/README.md)).
- Shared prefixes, but no measured constants: prefill by `cache_load_aware`; it only weighs hits against load.
- `random`, `round_robin`, `power_of_two`, `load_aware`, `cache_aware`, `locality` and `static_stack` are baselines to
  compare with. What each is worth was measured in simulation: [results.md](results.md).

A policy is set by name, and its parameters by `params`; what is left out keeps its default. Both can be changed while
the router serves (`sluice policy set`, `PUT /sluice/admin/policy`).

```yaml
router:
  prefill: {name: predicted_ttft, params: {prefill_base_s: 0.01, prefill_per_token_s: 0.0005}}
  decode: {name: netkv}
```

The dispatcher's rules come before any policy: they say which workers may take a request at all
([design.md](design.md), section 2; [their limits](#limits-of-the-dispatcher)). A policy ranks the workers that are
left; `explain` shows the ranking of each decision with the terms of the formula below.

`needs` names the inputs that are only provided while a policy uses them:

| needs | what then happens | what must be configured |
|---|---|---|
| prefix hits | prompts are hashed; engines send their KV events | - |
| network | ingresses report KV transfers, from which bandwidths are learned | -; `router.network` may say more |
| lengths | the router predicts each request's output on arrival | `router.predictor.enabled` |
| contention (of `netkv`, by its parameter) | the router learns how transfers slow each other | `router.network.file` |

BR-H, the static stack and the composition also use forecasts of running requests where a predictor makes them, for
their `horizon`; without one every request is taken to stay.

The whole page is written by `python scripts/document_policies.py` from the classes in `policies/routing`,
`policies/dispatch`, `policies/admission`, `policies/fairness` and `policies/flow`.
"""

ADMISSIONS = """
The admission policy says whether a request is taken at all: at its arrival, again at its turn, and while its computed
prompt waits for a decode engine. What it refuses is answered with 429, the wait as `Retry-After`, and the reason in
words; `sluice explain` shows the sum. Requests without an objective (`slo`, or `ingress.options.class_slo`) and
committed ones are never refused by it: retries, requests that migrate, and those that come back after a preemption.

Default: `by_wait`. No class has an objective unless you give it one, and while no request has one every decision is
that of `open`. One request with an objective changes that, for as long as it waits and for a minute after it came:
requests without one may then be held in the queue for `hold_at_most_s`, so that they do not stand before it inside an
engine, and all others for two thirds of `queue_timeout_s`. The limits of the dispatcher hold for all: what is held
counts for `max_queue` and `queue_timeout_s`. A full queue never rejects a committed request; `queue_timeout_s` does.

In simulation `by_wait` keeps its goodput above capacity, and a little less of it at capacity itself
([design.md](design.md#38-admission); `python -m benchmarks run overload`). No live result is kept yet
(`make bench-overload`). `open` takes everything, whatever objectives it has. While the router is away, each ingress
asks a policy of the same name (or `ingress.options.fallback_admission`).

```yaml
router:
  admission: {name: by_wait, params: {hold_at_most_s: 5}}
ingress:
  options: {class_slo: {interactive: {ttft_s: 2}, standard: {ttft_s: 5}}}
```
"""

FAIRNESSES = """
The fairness policy says whose request is next, in the queue before prefill and in the pool of computed prompts. The
class of a request comes first (`priority`), then the shares of the tenants in the class, then the routing policy, which
chooses among what is within its share. A more urgent class gets all while something of it waits, or with `class_ratio`
this many times as much as the next one; with strict classes `router.dispatch.class_ageing_s` keeps the others from
waiting without end. What the admission policy does with late requests it does inside one tenant's queue, and it expects
a wait by the tenant's share.

A tenant is that of the API key. Where keys are off it is the request's `user`, else the address of its client; nobody
checks a user's name, so whoever makes up names has a share for each. A key's `weight` is its tenant's share against
others. `sluice explain` shows the counters of the tenants and classes that waited at a decision.

Default: `vtc`. In simulation modest tenants beside a greedy one got their shares with it at every load. With admission
`by_wait` a tenant that asks for little more than its share gets a little less, because some of its requests would miss
their objectives (`python -m benchmarks run fairness`). Where there is one tenant the decisions are those of `none`, but
for requests of several choices. No live result is kept yet (`make bench-overload`).

```yaml
router:
  fairness: {name: vtc, params: {w_p: 1, w_q: 2}}
```
"""

FLOWS = """
A flow is one transfer of KV, or of activations within an instance, from a node's egress port to another node's ingress
port. The flow policy orders all flows that wait; the arbiter (`policies/flow/arbiter.py`) gives permits to post chunks
in that order, so that a transfer which has time yields to one which has not. Flow scheduling is off unless
`flow.enabled` is true. Its policy is then `mfs` with Q_1 = 1 and two levels, by the rule of
`python -m benchmarks run mfs_thresholds`; where `mfs` is named without parameters, those of the table hold.

```yaml
flow:
  enabled: true
  policy: {name: mfs, params: {scale: 4, levels: 2}}
  options: {arbiter: {late_s: 1.0}}
```
"""

NEEDS = {
    Needs.HITS: "prefix hits",
    Needs.NETWORK: "network",
    Needs.LENGTHS: "lengths",
    Needs.CONTENTION: "contention",
}
SHARED: dict[type[Any], str] = {
    LoadWeights: "the eight weights of the [load score](#the-load-score)",
    PdHeatmap: "those of [`pd_heatmap`](#pd_heatmap)",
    BalanceRouteH: "those of [`balance_route_h`](#balance_route_h)",
}
"""Classes whose parameters other policies inherit, with the words that refer to those parameters."""


def page() -> str:
    """Returns the text of `docs/policies.md`."""
    both = [name for name in PREFILL if name in DECODE]
    prefill = [name for name in PREFILL if name not in DECODE]
    decode = [name for name in DECODE if name not in PREFILL]
    parts = [HEAD, _index()]
    for heading, names in (
        ("Policies for prefill and decode", both),
        ("Policies for prefill", prefill),
        ("Policies for decode", decode),
    ):
        parts += [f"\n## {heading}\n", *(_policy(name, (PREFILL | DECODE)[name]) for name in names)]
    parts += ["\n## The load score\n", _load_score(), "\n## Limits of the dispatcher\n", _limits()]
    parts += ["\n## Policies for admission\n", ADMISSIONS]
    parts += [_bare_policy(name, kind) for name, kind in ADMISSION.items()]
    parts += ["\n## Policies for fairness\n", FAIRNESSES]
    parts += [_bare_policy(name, kind) for name, kind in FAIRNESS.items()]
    parts += ["\n## Policies for flows\n", FLOWS, *(_bare_policy(name, kind) for name, kind in FLOW.items())]
    parts += ["\n### The reverse multi-level queue\n", _text_of(rmlq)]
    parts += ["\n### Sizes of permits\n\nSet under `flow.options.arbiter`.\n"]
    parts += [_table(ArbiterConfig, list(dataclasses.fields(ArbiterConfig)))]
    parts += [
        "\n### Fetching a prefix or computing it again\n",
        _details_of(FetchConfig),
        "\nSet under `router.dispatch`, with `lend_` before each name.\n",
        _table(FetchConfig, list(dataclasses.fields(FetchConfig))),
    ]
    return "".join(parts)


def _bare_policy(name: str, kind: type[Any]) -> str:
    """Returns the section of a policy that routes nothing: what it does, formula, module's text, parameters."""
    fields = [f for f in dataclasses.fields(kind) if f.init and f.name != "name"]
    parameters = _table(kind, fields) if fields else "\nParameters: none.\n"
    text = f"\n### {name}\n\n{_paragraphs(kind.__doc__)}\n\nPaper: {kind.paper}.\n"
    return text + f"\n```text\n{kind.formula}\n```\n" + _details_of(kind) + parameters


def _details_of(kind: type[Any]) -> str:
    """Returns the text of a class's module without its first paragraph."""
    module = inspect.getmodule(kind)
    assert module is not None
    return _text_of(module)


def _text_of(module: ModuleType) -> str:
    """Returns a module's docstring without its first paragraph."""
    return _markdown(inspect.cleandoc(module.__doc__ or "").partition("\n\n")[2])


def _index() -> str:
    rows = ["\n| policy | prefill | decode | paper | needs |", "|---|---|---|---|---|"]
    for name, kind in (PREFILL | DECODE).items():
        stages = " | ".join("x" if name in table else "" for table in (PREFILL, DECODE))
        rows.append(f"| [`{name}`](#{name}) | {stages} | {kind.paper} | {_needs(kind.needs)} |")
    return "\n".join([*rows, ""])


def _needs(needs: Needs) -> str:
    return ", ".join(text for need, text in NEEDS.items() if need in needs) or "nothing"


def _policy(name: str, kind: type[Any]) -> str:
    text = (
        f"\n### {name}\n\n{_paragraphs(kind.__doc__)}\n\nPaper: {kind.paper}. Needs: {_needs(kind.needs)}.\n"
    )
    return (
        text + f"\n```text\n{kind.formula}\n```\n" + _details(kind) + _parameters(kind) + _example(name, kind)
    )


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n"))


def _details(kind: type[Any]) -> str:
    """Returns the text of the class's module: symbols, deviations, what is not claimed.

    Its first paragraph is left out, as the class's docstring says the same. A class that derives from another policy of
    its module has no details of its own.
    """
    module = inspect.getmodule(kind)
    assert module is not None
    assert module.__doc__ is not None
    others = [other for other in (PREFILL | DECODE).values() if other is not kind]
    if any(other.__module__ == kind.__module__ and issubclass(kind, other) for other in others):
        return ""
    return _markdown(inspect.cleandoc(module.__doc__).partition("\n\n")[2])


def _markdown(text: str) -> str:
    """Returns plain text as Markdown; indented lines become code blocks."""
    blocks = []
    for indented, lines in itertools.groupby(text.splitlines(), lambda line: line.startswith("    ")):
        block = textwrap.dedent("\n".join(lines)).strip("\n")
        if block:
            paragraphs = re.sub(r"\n(?=(Deviations?|Not claimed):)", "\n\n", block)
            blocks.append(_code(block) if indented else f"\n{paragraphs}\n")
    return "".join(blocks)


def _code(text: str) -> str:
    return f"\n```text\n{text}\n```\n"


def _parameters(kind: type[Any]) -> str:
    """Returns the table of the class's own parameters, and where its inherited ones are described."""
    inherited = {base: text for base, text in SHARED.items() if issubclass(kind, base) and kind is not base}
    shared = {f.name for base in inherited for f in dataclasses.fields(base)}
    fields = [f for f in dataclasses.fields(kind) if f.name != "name"]
    own = [f for f in fields if f.name not in shared]
    if not fields:
        return "\nParameters: none.\n"
    also = " also" if own else ""
    others = f"\nParameters{also}: {' and '.join(inherited.values())}.\n" if inherited else ""
    return (_table(kind, own) if own else "") + others


def _table(kind: type[Any], fields: "list[dataclasses.Field[Any]]") -> str:
    meanings, allowed = meanings_of(kind), ranges(kind)
    rows = ["\n| parameter | default | unit | allowed | meaning |", "|---|---|---|---|---|"]
    for field in fields:
        unit = limits = ""
        if field.name in allowed:
            declared, optional = allowed[field.name]
            unit, limits = (
                declared.unit,
                re.sub(r"^an? ", "", str(declared)) + (" or null" if optional else ""),
            )
        rows.append(
            f"| `{field.name}` | {_shown(field.default)} | {unit} | {limits} | {meanings.get(field.name, '')} |"
        )
    return "\n".join([*rows, ""])


def meanings_of(kind: type[Any]) -> dict[str, str]:
    """Returns the strings below a dataclass's fields, by field; a class's own string wins over its bases'."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(inspect.cleandoc(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[statement.target.id] = " ".join(below.value.value.split())
    return found


def _shown(default: object) -> str:
    return f"`{_yaml(default)}`"


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # YAML takes a number without a point, such as 1e-07, for a string
    return re.sub(r"^(\d+)e", r"\1.0e", str(value))


def _example(name: str, kind: type[Any]) -> str:
    """Returns a configuration that sets up to three parameters of the class itself to their defaults."""
    own = [f for f in dataclasses.fields(kind) if f.name in ranges(kind)]
    own = [f for f in own if f.name in inspect.get_annotations(kind)] or own
    params = ", ".join(f"{f.name}: {_yaml(f.default)}" for f in own[:3])
    choice = f"{{name: {name}, params: {{{params}}}}}" if params else f"{{name: {name}}}"
    stages = [stage for stage, table in (("prefill", PREFILL), ("decode", DECODE)) if name in table]
    lines = "\n".join(f"  {stage}: {choice}" for stage in stages)
    return f"\n```yaml\nrouter:\n{lines}\n```\n"


def _load_score() -> str:
    heading, _, rest = inspect.cleandoc(load_score.__doc__ or "").partition("\n\n")
    return f"\n{heading}\n{_markdown(rest)}{_table(LoadWeights, _weights())}"


def _weights() -> "list[dataclasses.Field[Any]]":
    return [f for f in dataclasses.fields(LoadWeights) if f.name != "name"]


def _limits() -> str:
    return "\nSet under `router.dispatch`.\n" + _table(
        DispatchConfig, list(dataclasses.fields(DispatchConfig))
    )


if __name__ == "__main__":
    PAGE.write_text(page())
