"""The applications that a run harms, and how many processes of each part they have when all is well."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.chaos.asks import STEP_S
from benchmarks.chaos.scaling import DUTIES, GROUPS, LEAST, POLICY
from benchmarks.chaos.schedule import BARE, FLOW, GCS, LENDING, READS, SCALING, SIM, VLLM, Kind, role_of
from benchmarks.chaos.totals import VLLM_STALL_S
from benchmarks.live.servers import ROOT, Command
from benchmarks.live.targets import MODEL, EngineOptions, sluice_app

PATIENCE = {"max_migrations": 50, "max_retries": 20}
"""Times that a stream may go on elsewhere, and that a request without output may be tried again. The defaults of 2 are
for engines that fail once in days; here a stream of a minute meets a fault of its engine every 20 s, and a prompt may
meet one at each of its tries.
"""

FLOW_BYTES_PER_S = 100e6
"""Bandwidth of a prefill engine's link where reads are scheduled. ASSUMPTION: a read of a long prompt then takes a good
part of a second, so that faults meet reads that are held.
"""

LOAN_BYTES_PER_S = 60e6
"""Bandwidth of an engine's link to prefill engines, by which prefixes are lent. ASSUMPTION: one turn of a conversation
then takes nearly half a second, so that faults meet loans.
"""

LENDING_FASTER = 4.0
"""Factor by which decode engines read faster where prefixes are lent. Most prompts are about this much longer there,
and their reads leave no permits to the loans otherwise.
"""

NETWORK = "tiers:\n  3: {bandwidth_bytes_per_s: 1.0e+10}\n"
"""The network file of an application that lends prefixes; without one nothing is lent. It promises far more than the
links of the engines have (`LOAN_BYTES_PER_S`), so that a loan seems worth its while whatever else is moving.
"""

SOAK_KV_BLOCKS = 4096
"""KV blocks of an engine in a soak, an eighth of the default. Caches of prefixes, and the router's index of them, then
are full after some minutes, and what grows afterwards is something else.
"""

ENGINE_CPUS = 0.02
"""Ray's CPUs of an engine in a placement group, so that all have room on any machine."""

DRAIN_S = 15.0
"""Seconds that an engine which leaves has for its work, where there is an autoscaler. Streams of a minute then have to
go on elsewhere, and the next order comes later as a rule."""

OWN = "app.serve"
"""The module of the command that serves an application with a Ray of its own."""

Engines = Literal["sim", "vllm"]


@dataclass(frozen=True, slots=True)
class Setup:
    """An application and its load. `parts` are the processes of each part when all is well; if it is `scaled`, an
    administrator orders numbers of engines meanwhile, and `parts` has the fewest that serve.
    If it `lends`, its engines borrow prefixes from one another, and clients send prompts that continue those of others.

    A fault begins at least `every_s` after the one before. A fault that is not over after `bound_s` no longer keeps the
    next one from beginning. The application is looked at every `survey_s`. The module `by` serves it: Sluice's own
    command, or one of this folder, which obeys orders.
    """

    engines: Engines
    parts: Mapping[str, int]
    kinds: Sequence[Kind]
    clients: int
    long_share: float
    every_s: float
    bound_s: float
    args: Mapping[str, Any]
    by: str = OWN
    survey_s: float = 0.3
    scaled: bool = False
    lends: bool = False

    def command(self, folder: Path) -> Command:
        """Returns the command that serves the application, with its sockets and orders in `folder`."""
        wire, orders = folder / "chaos-wire", folder / "orders"
        orders.mkdir()
        args: dict[str, Any] = {**self.args, "wire": {"socket_dir": str(wire)}}
        if self.lends:
            network = folder / "network.yaml"
            network.write_text(NETWORK)
            # what is learnt of the links would contradict the file
            args["router"] = {**args["router"], "network": {"file": str(network), "estimate": False}}
        if self.engines == "sim":
            args["engines"] = [
                {**group, "options": {**group["options"], "faults": str(orders)}} for group in args["engines"]
            ]
        command = sluice_app(f"chaos on {self.engines} engines", folder / "app.yaml", args, 600.0)
        argv = list(command.argv)
        if self.by != OWN:
            argv[argv.index(OWN)] = self.by
            argv += ["--orders", str(orders)]
        return Command(
            command.name, argv, command.port, command.ready_path, command.ports,
            {"PYTHONPATH": str(ROOT)}, command.timeout_s,
        )  # fmt: skip


def sim_setup(
    clients: int = 32,
    every_s: float = 3.0,
    ingresses: int = 2,
    long_share: float = 0.12,
    bare: bool = False,
    flow: bool = False,
    gcs: bool = False,
    soak: bool = False,
    scaling: bool = False,
    lend: bool = False,
) -> Setup:
    """Returns 3 prefill and 4 decode sim engines, of 30 ms a step, whose prefills take up to half a second.

    With `flow` an agent schedules the reads of KV, which share a link of each prefill engine. With `bare` there are
    two, one for the prefill and one for the decode engines, and a coordinator; each read needs the permits of both.
    `bare` is without Ray, and with `gcs` the state of Ray's control process, which is harmed as well, is in Redis. For
    a `soak` their KV is small. With `scaling` an autoscaler has engines start, stop and change, as an administrator
    orders it (`scaling.py`), and each engine has a placement group.
    With `lend`, which needs `bare` and `flow`, engines lend prefixes over links like those.
    """
    timing = {"prefill_base_s": 0.05, "prefill_per_token_s": 0.0002, "decode_base_s": STEP_S}
    options: dict[str, Any] = {"slots": 64, "timing": timing, "lease_s": 10.0, "vocab_size": 32_000}
    if soak:
        options["kv_blocks"] = SOAK_KV_BLOCKS
    lent = {"prefill-*": _link(LOAN_BYTES_PER_S)} if lend else {}
    read = {"decode-*": _link(FLOW_BYTES_PER_S * (LENDING_FASTER if lend else 1.0))} if flow else {}
    args: dict[str, Any] = {
        "model": {"path": "sim", "name": "sim"},
        "flow": {"enabled": flow},
        "engines": [
            {
                "name": "prefill",
                "role": "prefill",
                "kind": "sim",
                "replicas": 3,
                "options": options | {"links": read | lent},
            },
            {
                "name": "decode",
                "role": "decode",
                "kind": "sim",
                "replicas": 4,
                "options": options | {"links": lent},
            },
        ],
        "router": {"dispatch": {"lease_margin_s": 2.0, "lend_prefixes": lend}},
        "ingress": {"replicas": ingresses, "options": PATIENCE},
    }
    parts = {"prefill": 3, "decode": 4, "router": 1, "ingress": ingresses}
    if scaling:
        args["scaling"] = POLICY
        for group in args["engines"]:
            own = GROUPS[group["name"]]
            group |= {
                "replicas": own["replicas"],
                "scaling": own["scaling"] | {"drain_s": DRAIN_S},
                "num_cpus": ENGINE_CPUS,
                "placement_group_bundles": [{"CPU": ENGINE_CPUS}],
            }
        parts |= {**LEAST, "autoscaler": 1}
    if not bare:
        parts |= {"controller": 1, "proxy": 1}
    if flow:
        parts |= {"agent": 2, "coordinator": 1} if bare else {"agent": 1}
    if gcs:
        parts |= {"gcs": 1}
    there = {*parts, *(DUTIES if scaling else ())}
    all_kinds = (*SIM, *(BARE if bare else ()), *FLOW, *READS, GCS, *SCALING)
    kinds = [kind for kind in all_kinds if role_of(kind.part) in there]
    if lend:
        kinds += LENDING
    by = "benchmarks.chaos.bare" if bare else "benchmarks.chaos.redis_ray" if gcs else OWN
    return Setup(
        "sim", parts, kinds, clients, long_share, every_s, 90.0, args, by, scaled=scaling, lends=lend
    )


def _link(bytes_per_s: float) -> dict[str, float]:
    return {"bandwidth_bytes_per_s": bytes_per_s, "latency_s": 1e-3}


def vllm_setup(clients: int = 3, every_s: float = 5.0, ingresses: int = 2, flow: bool = False) -> Setup:
    """Returns one prefill and two decode engines of vLLM with SmolLM2-135M in float32, on the cores of this machine.

    With `flow` an agent schedules their reads over NIXL, and is killed and stopped as well, while decode engines and
    their cores die with chunks on their way.

    They share those cores with each other, with Ray and with this program, so clients are few and looks are rare.
    """
    options = {
        **asdict(EngineOptions(max_model_len=2048, slots=16)),
        "tool_parser": "hermes",
        "stall_s": VLLM_STALL_S,
    }
    args = {
        "model": {"path": MODEL},
        "engines": [
            {"name": "prefill", "role": "prefill", "kind": "vllm", "options": options},
            {"name": "decode", "role": "decode", "kind": "vllm", "replicas": 2, "options": options},
        ],
        "flow": {"enabled": flow},
        "ingress": {"replicas": ingresses, "options": PATIENCE},
    }
    parts = {
        "prefill": 1,
        "decode": 2,
        "router": 1,
        "ingress": ingresses,
        "controller": 1,
        "proxy": 1,
        "core": 3,
    }
    if flow:
        parts["agent"] = 1
    kinds = [*VLLM, *(kind for kind in FLOW if kind.part in parts)]
    return Setup("vllm", parts, kinds, clients, 0.1, every_s, 400.0, args, survey_s=1.0)
