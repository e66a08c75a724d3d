"""The tree that grows out of answers alone: bounded, balanced, and everybody finds a place."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.weights.tree import FAN_OUT, Reader, instead


def reader(name: str, referred: int = 0, *addresses: str) -> Reader:
    return Reader(name, addresses or (name,), referred)


@pytest.mark.parametrize(
    ("readers", "named"),
    [
        ([], None),
        ([reader("a")], None),
        ([reader("a"), reader("b")], ["a", "b"]),
        # to `a` one was sent already
        ([reader("a", 1), reader("b")], ["b", "a"]),
        ([reader("a", 1), reader("b", 1)], ["a", "b"]),
        # `a` does not lend
        ([Reader("a", ()), reader("b", 7)], ["b"]),
        ([Reader("a", ()), Reader("b", ())], []),
    ],
)
def test_whom_a_lender_names(readers: list[Reader], named: list[str] | None) -> None:
    others = instead(readers, fan_out=2)
    assert (None if others is None else [other.name for other in others]) == named


class Tree:
    """Lenders that answer askers, without any network: the children of each, with how many were sent to them."""

    def __init__(self, fan_out: int) -> None:
        self.fan_out = fan_out
        self.children: dict[str, dict[str, int]] = {"root": {}}

    def join(self, name: str) -> int:
        """Returns at which depth the newcomer finds a lender that feeds it."""
        at, depth = "root", 1
        while True:
            fed = self.children[at]
            others = instead([reader(child, referred) for child, referred in fed.items()], self.fan_out)
            if others is None:
                fed[name] = 0
                self.children[name] = {}
                return depth
            fed[others[0].name] += 1
            at, depth = others[0].name, depth + 1


@given(number=st.integers(1, 200), fan_out=st.integers(2, 4))
def test_everybody_is_fed_at_the_least_depth(number: int, fan_out: int) -> None:
    tree = Tree(fan_out)
    depths = [tree.join(f"n{i}") for i in range(number)]
    assert max(len(fed) for fed in tree.children.values()) <= fan_out
    # a tree of depth d has room for k + k^2 + .. + k^d readers
    least = next(d for d in range(1, 99) if sum(fan_out**i for i in range(1, d + 1)) >= number)
    assert max(depths) == least
    if fan_out == FAN_OUT == 2:
        assert least == math.ceil(math.log2(number + 2)) - 1
