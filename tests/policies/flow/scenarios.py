"""Random flows over a few nodes, for property tests."""

from typing import Any

from hypothesis import strategies as st

from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.registry import flow_policy
from tests.policies.flow.link import Link

NODES = ("n0", "n1", "n2", "n3")
NAMES = st.sampled_from(["mfs", "fair", "sjf", "edf", "karuna"])


@st.composite
def flows(draw: st.DrawFn, most: int = 12, conserving: bool = False) -> list[tuple[float, Flow]]:
    """Draws flows with the times of their submissions; `conserving` leaves explicit deadlines out."""
    made = []
    for number in range(draw(st.integers(1, most))):
        stage = draw(st.sampled_from(list(Stage)))
        source, target = draw(st.permutations(NODES))[:2]
        explicit = stage is Stage.P2D and not conserving and draw(st.booleans())
        fields: dict[str, Any] = {
            "due_s": draw(st.floats(0.0, 20.0)) if explicit else None,
            "rli": draw(st.integers(0, 12)) if stage is Stage.REUSE else 0,
        }
        request = f"r{draw(st.integers(0, 4))}"
        size = draw(st.integers(1, 4000))
        one = Flow(
            flow_id=f"f{number}",
            request_id=request,
            batch=f"b{request}",
            stage=stage,
            source=source,
            target=target,
            size=size,
            **fields,
        )
        made.append((draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])), one))
    return made


CONFIGS = st.builds(
    ArbiterConfig,
    window=st.integers(1, 3),
    chunk_s=st.sampled_from([0.05, 0.25, 1.0]),
    least_chunk_bytes=st.sampled_from([1, 200]),
    whole_read_when_alone=st.booleans(),
    whole_at_most_s=st.sampled_from([None, 0.5]),
    patience=st.integers(1, 4),
    learn=st.booleans(),
    port_bytes_per_s=st.just(1000.0),
)


def link(name: str, config: ArbiterConfig, given: list[tuple[float, Flow]]) -> Link:
    """Returns a link with the flows' submissions planned."""
    made = Link(Arbiter(flow_policy(name), config))
    for at_s, each in given:
        made.submit(each, at_s)
    return made
