"""The time of tokenising: tokens are counted, and time is spent."""

from app.ingress.tokenizer import WordCodec
from benchmarks.live.measure import prompts
from benchmarks.peers.tokenising import one


def test_a_word_is_a_token_of_the_sim_engines_codec_and_more_words_take_more_time() -> None:
    short, long = (one(WordCodec(), prompts(0, 4, words - 1)) for words in (5, 5000))
    assert (short["tokens"], long["tokens"]) == (5, 5000)
    assert 0.0 < short["cpu_ms"] < long["cpu_ms"]
