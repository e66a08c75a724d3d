"""The prefills and decodes of a sim engine: the checks before they are accepted, and their state until they end."""

import asyncio
from typing import cast

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.output import Choice
from actors.engine.sim.params import MAX_CHOICES, ParamError, SimParams, parse_params
from actors.engine.sim.peers import SimHandle, handle_of
from actors.wire.messages import Decode, Failed, Prefill, Resume
from policies.engine_model import text
from policies.engine_model.blocks import BlockHash, block_hashes, salt_of
from policies.engine_model.scheduler import Sequence
from policies.request.stage import Task


class Refused(Exception):
    """The engine does not accept a request. The arguments are those of `Failed`."""

    def __init__(self, code: str, message: str, retryable: bool = False, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.retryable, self.param = code, message, retryable, param

    def failed(self, attempt_id: str, task: Task) -> Failed:
        """Returns the message to the ingress."""
        return Failed(attempt_id, task, self.code, self.message, self.retryable, self.param)


class PrefillTask:
    """A prefill until its KV is leased. The constructor raises Refused if the engine cannot serve the request."""

    __slots__ = ("admitted_s", "attempt_id", "prompt_hash", "prompt_tokens", "received_s", "seq", "timer")

    def __init__(self, config: SimEngineConfig, msg: Prefill, now_s: float) -> None:
        hashes, _ = check(config, msg)
        self.attempt_id = msg.attempt_id
        self.prompt_tokens = len(msg.tokens)
        tokens = self.prompt_tokens + (0 if msg.resume is None else msg.resume.n_tokens)
        self.seq = Sequence(tokens, 0, hashes, msg.priority, prefill_only=True, owner=self)
        self.prompt_hash = text.prompt_hash(msg.tokens)
        self.received_s = self.admitted_s = now_s
        self.timer: asyncio.TimerHandle | None = None


class DecodeTask:
    """A decode until its last token. The constructor raises Refused if the engine cannot serve the request.

    With `gone` nothing more is sent, and the task only waits for its read to end.
    """

    __slots__ = (
        "attempt_id",
        "gone",
        "handle",
        "hashes",
        "left",
        "msg",
        "params",
        "prompt_hash",
        "received_s",
        "seqs",
        "started",
        "timer",
        "transfer",
    )  # fmt: skip

    def __init__(self, config: SimEngineConfig, msg: Decode, received_s: float) -> None:
        if msg.chat is not None:
            raise Refused(
                "bad_request", "a sim engine cannot call tools: its text is synthetic", param="tools"
            )
        self.hashes, self.params = check(config, msg)
        if msg.resume is not None and self.params.n != 1:
            raise Refused("bad_request", f"a resumed request is one choice, not {self.params.n}", param="n")
        self.prompt_hash = text.prompt_hash(msg.tokens)
        self.handle = None if msg.handle is None else self._read_handle(msg.handle, msg)
        self.msg, self.attempt_id = msg, msg.attempt_id
        # on the event loop's clock
        self.received_s = received_s
        # There is a sequence for each choice that has started; `left` choices are not finished.
        self.seqs: list[Sequence] = []
        self.left = self.params.n
        # Whether Admitted was sent; the prefill engine's copy has been given back before that.
        self.started = False
        self.gone = False
        self.timer: asyncio.TimerHandle | None = None
        self.transfer: asyncio.TimerHandle | None = None

    def _read_handle(self, handle: bytes, msg: Decode) -> SimHandle:
        try:
            found = handle_of(handle)
        except ValueError as error:
            raise Refused("unknown_handle", f"this is no handle of a sim engine: {error}", True) from None
        most = 0 if msg.resume is None else msg.resume.n_tokens
        if found.prompt_hash != self.prompt_hash or not 0 <= found.tokens - len(msg.tokens) <= most:
            raise Refused("unknown_handle", "the handle is of another prompt", True)
        return found

    def new_choice(self, max_model_len: int, mean_output_tokens: float | None) -> Sequence:
        """Returns the sequence of the next choice. With a handle the first choice reads the KV, and the others share
        its blocks. A resumed choice starts with the tokens that another engine has generated. What the prefill engine
        has not computed of their KV is computed here. Raises Refused if they are not the beginning of this choice.
        """
        params, tokens, resume = self.params, self.msg.tokens, self.msg.resume
        index = len(self.seqs) if resume is None else resume.choice
        draw = 0 if params.greedy else index  # greedy choices are all the same
        base = text.text_base(self.prompt_hash, params.seed, draw)
        most = params.max_tokens or max_model_len - len(tokens)
        mean = None if params.ignore_eos else mean_output_tokens
        length, ends = text.output_tokens(base, most, mean, params.min_tokens)
        choice = Choice(self, self.attempt_id, index, base, params, "stop" if ends else "length")
        if resume is not None:
            self._resume(choice, resume, length)
        if params.prompt_logprobs is not None and not (resume and resume.n_tokens):
            choice.with_prompt_logprobs(tokens)
        remote = not self.seqs and self.handle is not None
        seq = Sequence(len(tokens), length, self.hashes, self.msg.priority, remote=remote, owner=choice)
        seq.generated = 0 if resume is None else resume.n_tokens
        if remote and self.handle is not None:
            seq.remote_output = self.handle.tokens - len(tokens)
        self.seqs.append(seq)
        return seq

    def _resume(self, choice: Choice, resume: Resume, length: int) -> None:
        count, ids = resume.n_tokens, resume.token_ids
        if not 0 <= count < length:
            message = f"the choice has {length} tokens, so it cannot go on after {count}"
            raise Refused("bad_request", message)
        if ids and ids != [text.token_id(choice.base, i) for i in range(count)]:
            raise Refused("bad_request", "the tokens to go on from are not those of this prompt and seed")
        try:
            choice.resume(count, resume.chars)
        except ValueError as error:
            raise Refused("bad_request", str(error)) from None


def decode_of(seq: Sequence) -> DecodeTask:
    """Returns the decode that a sequence belongs to. The sequence must not be that of a prefill."""
    return cast(DecodeTask, cast(Choice, seq.owner).request)


def check(config: SimEngineConfig, msg: Prefill | Decode) -> tuple[tuple[BlockHash, ...], SimParams]:
    """Returns the block hashes of the prompt, and the checked parameters. Raises Refused that names the parameter at
    fault.
    """
    tokens = msg.tokens
    try:
        params = parse_params(msg.params)
    except ParamError as error:
        raise Refused("bad_request", str(error), param=error.param) from None
    left = config.max_model_len - len(tokens)
    if not tokens:
        raise Refused("bad_request", "the prompt is empty", param="prompt")
    if left < 1:
        message = (
            f"the prompt has {len(tokens)} tokens; the context of {config.max_model_len} must hold one more"
        )
        raise Refused("bad_request", message, param="prompt")
    if msg.resume is not None and not 0 <= msg.resume.n_tokens < left:
        message = f"{msg.resume.n_tokens} tokens are resumed, but the context has room for {left}"
        raise Refused("bad_request", message, param="resume")
    if msg.resume is not None and not msg.resume.choice < MAX_CHOICES:
        message = f"choice {msg.resume.choice} is resumed, but a request has at most {MAX_CHOICES}"
        raise Refused("bad_request", message, param="resume")
    if params.max_tokens is not None and params.max_tokens > left:
        message = f"max_tokens is {params.max_tokens}, but the context has room for {left}"
        raise Refused("bad_request", message, param="max_tokens")
    if config.vocab_size is not None and max(tokens) >= config.vocab_size:
        message = f"a token of the prompt is outside the vocabulary of {config.vocab_size}"
        raise Refused("bad_request", message, param="prompt")
    try:
        return block_hashes(tokens, config.block_size_tokens, salt_of(params.cache_salt)), params
    except OverflowError:
        raise Refused("bad_request", "a token is negative or over 2^32 - 1", param="prompt") from None
