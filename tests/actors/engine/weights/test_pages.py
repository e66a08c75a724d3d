"""Memory that NIXL agents hold."""

import mmap

import numpy as np
import pytest

from actors.engine.weights.pages import PagesAgent


def test_what_was_held_stays_mapped_until_the_end() -> None:
    """Somebody who was given up may still read it."""
    memory = mmap.mmap(-1, 1 << 20)
    agent = PagesAgent("one")
    first, second = (agent.hold(np.frombuffer(memory, np.uint8)) for _ in range(2))
    assert first is second
    assert agent.held == 1
    assert not agent.drop(first)
    assert agent.drop(second)
    assert agent.held == 0
    del first, second
    with pytest.raises(BufferError):
        memory.close()
    agent.close()
    memory.close()
