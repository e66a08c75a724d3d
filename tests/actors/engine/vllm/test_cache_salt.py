"""The prefix cache of vLLM and the router's index agree about cache salts.

The blocks are cached, found and announced by vLLM's own block pool and hash functions, and only the engine's
computation is left out.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from actors.engine.vllm.kv_events import Translator  # noqa: E402
from actors.engine.vllm.params import BadParameter, cache_salt, sampling_params  # noqa: E402
from policies.engine_model.blocks import block_hashes, salt_of  # noqa: E402
from policies.state.prefix_index import PrefixIndex  # noqa: E402

SIZE = 4
Prompt = tuple[list[int], str | None]
prompts = st.tuples(
    # two tokens only, so that prompts share prefixes
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5 * SIZE),
    st.sampled_from([None, "a", "b"]),
)


class Engine:
    """The prefix cache of one vLLM engine, and the index that a router keeps of it."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        self._pool = BlockPool(256, True, SIZE, enable_kv_cache_events=True)
        self._feed = Translator()
        self._index = PrefixIndex()
        self._seen = self._batches = 0

    def _request(self, tokens: Sequence[int], salt: str | None) -> Request:
        self._seen += 1
        sampling = SamplingParams(max_tokens=1)
        return Request(
            str(self._seen), list(tokens), sampling, None, cache_salt=salt, block_hasher=self._hasher
        )

    def hits(self, tokens: Sequence[int], salt: str | None) -> int:
        """Returns how many leading blocks of a prompt vLLM finds in its cache."""
        hashes = self._request(tokens, salt).block_hashes
        found = [self._pool.get_cached_block(block, [0]) is not None for block in hashes]
        return found.index(False) if False in found else len(found)

    def compute(self, tokens: Sequence[int], salt: str | None) -> None:
        """Caches the full blocks of a prompt as vLLM does after it has computed them."""
        request, hits = self._request(tokens, salt), self.hits(tokens, salt)
        full = len(tokens) // SIZE
        cached = [self._pool.get_cached_block(block, [0]) for block in request.block_hashes[:hits]]
        blocks = [block[0] for block in cached if block is not None]
        blocks += self._pool.get_new_blocks(full - hits)
        self._pool.cache_full_blocks(request, blocks, hits, full, SIZE, 0)
        for event in self._pool.take_events():
            self._feed.stored(event)
        changes = tuple(self._feed.drain())
        if changes:
            self._index.apply("w", "first", self._batches, changes)
            self._batches += 1

    def predicted(self, tokens: Sequence[int], salt: str | None) -> int:
        """Returns the hits that a router expects of the hashes that an ingress sends."""
        return self._index.blocks_held("w", block_hashes(tokens, SIZE, salt_of(salt)))


@settings(deadline=None)
@given(st.lists(prompts, max_size=8), prompts)
def test_the_router_expects_the_hits_that_vllm_has(computed: list[Prompt], asked: Prompt) -> None:
    engine = Engine()
    for tokens, salt in computed:
        engine.compute(tokens, salt)
    assert engine.predicted(*asked) == engine.hits(*asked)


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_prompt_shares_all_blocks_with_its_salt_and_none_with_another(salt: str | None) -> None:
    engine, tokens = Engine(), list(range(3 * SIZE))
    engine.compute(tokens, salt)
    assert engine.hits(tokens, salt) == engine.predicted(tokens, salt) == 3
    for other in {None, "mine", "theirs"} - {salt}:
        assert engine.hits(tokens, other) == engine.predicted(tokens, other) == 0


def test_the_salt_is_no_sampling_field_of_vllm_but_is_passed_on() -> None:
    given = {"cache_salt": "mine", "max_tokens": 3}
    assert sampling_params(given, {}).max_tokens == 3
    assert cache_salt(given) == "mine"
    assert cache_salt({}) is None


@pytest.mark.parametrize("salt", ["", 7, ["mine"]])
def test_a_salt_that_is_no_text_is_refused(salt: object) -> None:
    with pytest.raises(BadParameter, match="cache_salt") as refused:
        cache_salt({"cache_salt": salt})
    assert refused.value.param == "cache_salt"
