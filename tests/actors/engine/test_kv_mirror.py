"""An engine's mirror of its cache: batches without gaps, exact chains, replay, and all of it where that fails."""

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine import kv_mirror
from actors.engine.kv_mirror import KvMirror
from actors.wire.kv import from_wire, pack_hashes, unpack_hashes
from actors.wire.messages import KvEvents, KvReplay, KvState
from policies.engine_model.blocks import Change, Cleared, Removed, Stored
from policies.state.prefix_index import PrefixIndex

# Prompts that share heads; block hashes name their whole chain, so a block has one parent.
CHAINS = [(1, 2, 3, 4, 5), (1, 2, 30, 40), (1, 2, 31), (7, 8)]
PARENT = {b: p for chain in CHAINS for p, b in zip((None, *chain), chain, strict=False)}

CHANGES = st.lists(
    st.one_of(
        st.builds(
            lambda chain, first, count: _stored(chain[first : first + count]),
            st.sampled_from(CHAINS),
            st.integers(0, 4),
            st.integers(1, 5),
        ),
        st.lists(st.sampled_from(sorted(PARENT)), min_size=1, max_size=3, unique=True).map(
            lambda blocks: Removed(tuple(blocks))
        ),
        st.just(Cleared()),
    ),
    max_size=25,
)


def _stored(blocks: tuple[int, ...]) -> Change:
    return Stored(blocks, PARENT[blocks[0]]) if blocks else Cleared()


def feed(index: PrefixIndex, messages: list[KvEvents] | list[KvState]) -> None:
    for message in messages:
        if isinstance(message, KvEvents):
            index.apply("w", message.epoch, message.seq, from_wire(message.changes))
    states = [m for m in messages if isinstance(m, KvState)]
    if states:
        assert [m.part for m in states] == list(range(states[0].parts))
        chains = [change for m in states for change in from_wire(m.chains) if isinstance(change, Stored)]
        index.restore("w", states[0].epoch, states[0].next_seq, chains)


@settings(max_examples=200, deadline=None)
@given(CHANGES, st.integers(1, 4))
def test_a_snapshot_restores_exactly_what_the_batches_made(changes: list[Change], part: int) -> None:
    mirror, live, anew = KvMirror("e"), PrefixIndex(), PrefixIndex()
    for change in changes:
        feed(live, mirror.take([change]))
    assert mirror.blocks == len(live.content("w"))
    kv_mirror.PART_BLOCKS, before = part, kv_mirror.PART_BLOCKS
    try:
        feed(anew, mirror.answer(KvReplay("", None)))
    finally:
        kv_mirror.PART_BLOCKS = before
    assert anew.content("w") == live.content("w")
    for chain in CHAINS:
        assert anew.lookup(chain) == live.lookup(chain)
    if changes:
        assert anew.position("w") == live.position("w")


def test_what_was_missed_is_replayed() -> None:
    mirror = KvMirror("e")
    sent = [batch for n in range(5) for batch in mirror.take([Stored((n,))])]
    assert mirror.answer(KvReplay(mirror.epoch, 1, 3)) == sent[1:4]
    assert mirror.answer(KvReplay(mirror.epoch, 3)) == sent[3:]
    assert mirror.answer(KvReplay(mirror.epoch, 5)) == []


def test_batches_that_are_not_kept_any_more_an_unknown_epoch_and_a_new_reader_get_everything() -> None:
    mirror = KvMirror("e", replay_blocks=3)
    for n in range(5):
        mirror.take([Stored((n,), None if n == 0 else n - 1)])
    assert [m.seq for m in mirror.answer(KvReplay(mirror.epoch, 2)) if isinstance(m, KvEvents)] == [2, 3, 4]
    for ask in (
        KvReplay(mirror.epoch, 1),
        KvReplay("other", 4),
        KvReplay(mirror.epoch, None),
        KvReplay(mirror.epoch, 6),
    ):
        (state,) = mirror.answer(ask)
        assert isinstance(state, KvState)
        assert (state.next_seq, from_wire(state.chains)) == (5, (Stored((0, 1, 2, 3, 4)),))


def test_what_happened_while_nobody_read_comes_as_a_whole() -> None:
    mirror = KvMirror("e")
    mirror.take([Stored((1,))])
    mirror.follow([Stored((2,), 1)])
    mirror.follow([])
    (batch,) = mirror.take([Stored((3,), 2)])
    assert mirror.answer(KvReplay(mirror.epoch, batch.seq)) == [batch]
    (state,) = mirror.answer(KvReplay(mirror.epoch, 1))  # what was not sent cannot be replayed
    assert isinstance(state, KvState)
    assert from_wire(state.chains) == (Stored((1, 2, 3)),)


def test_an_empty_cache_has_a_snapshot_too() -> None:
    (state,) = KvMirror("e").answer(KvReplay("", None))
    assert isinstance(state, KvState)
    assert (state.next_seq, state.parts, state.chains) == (0, 1, [])


def test_long_chains_are_cut_into_messages_of_bounded_size() -> None:
    most = kv_mirror.BATCH_BLOCKS
    chain = tuple(range(1, 2 * most + 2))
    mirror, index = KvMirror("e"), PrefixIndex()
    batches = mirror.take([Stored(chain), Removed(chain[: most + 5])])
    assert all(sum(len(c.hashes) // 8 for c in b.changes) <= 2 * most for b in batches)
    assert [b.seq for b in batches] == list(range(len(batches)))
    feed(index, batches)
    assert set(index.content("w")) == set(chain[most + 5 :])


def test_hashes_of_all_sizes_survive_the_wire() -> None:
    hashes = (0, 1, 2**63, 2**64 - 1)
    assert len(pack_hashes(hashes)) == 32
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    changes = (Stored(hashes, 2**64 - 1), Stored((5,)), Removed((7,)), Cleared())
    batch = KvMirror("e").take(changes)[0]
    assert from_wire(batch.changes) == changes
