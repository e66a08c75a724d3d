"""The seam of a resumed choice in the engine's own process, where vLLM makes text of token ids and parsers read it.

vLLM's detokenizer gets the tokens of the first engine one by one before those of the core. Characters whose bytes lie
on both sides of the seam, and stop strings across it, are then found as ever. What the client has is not sent again:
the text goes on at `Resume.chars`. A parser of tools or reasoning reads the same pieces as the first engine's parser
did, and what it makes of those that the client has got is thrown away, with new ids of tool calls in it. Later deltas
name a call by its index alone, so that the id that the client knows stays valid.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

from actors.engine.vllm.config import SCHEDULERS
from actors.wire.messages import Decode, Resume

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

    from actors.engine.vllm.tools import ChoiceParser


class NotResumable(ValueError):
    """A choice with which this engine cannot go on. The message says why."""


@dataclass(frozen=True, slots=True)
class Primed:
    """The work that the first tokens of a resumed choice leave to be done.

    `unsent` are parsed deltas, each with the number of characters that it covers, which the client has not got. `end`
    is the output that ends the choice at once, if the tokens contain its end.
    """

    unsent: list[tuple[bytes, int]]
    end: EngineCoreOutput | None


def check(msg: Decode, choices: int, vllm_config: "VllmConfig") -> None:
    """Raises NotResumable with the reason if this engine cannot go on with what `msg.resume` says."""
    resume = msg.resume
    if resume is None:
        return
    if choices != 1:
        raise NotResumable(f"a resumed request is one choice, not {choices}")
    if resume.n_tokens != len(resume.token_ids):
        raise NotResumable(
            f"a vLLM engine goes on from token ids: {resume.n_tokens} tokens came, but {len(resume.token_ids)} ids"
        )
    if not resume.n_tokens:
        return
    vocabulary = vllm_config.model_config.get_vocab_size()
    if any(not 0 <= token_id < vocabulary for token_id in resume.token_ids):
        raise NotResumable(f"resume has token ids outside the vocabulary of {vocabulary}")
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in SCHEDULERS.values():
        raise NotResumable(
            f"this engine cannot go on with an answer: its scheduler {scheduler.scheduler_cls} takes no output tokens"
        )
    if msg.chat is not None and (vllm_config.speculative_config is not None or scheduler.stream_interval > 1):
        raise NotResumable(
            "this engine cannot go on with parsed output: with speculative decoding or a stream interval the pieces "
            "that the first engine's parser has read are not known"
        )


def prime(
    state: "RequestState",
    request: "EngineCoreRequest",
    resume: Resume,
    parser: "ChoiceParser | None",
    max_model_len: int,
) -> Primed:
    """Gives the first engine's tokens to the detokenizer of `state`, and to the parser. Raises NotResumable if they do
    not fit what the client has.
    """
    finish, reason = _end_of(request, resume.token_ids, max_model_len)
    detokenizer = state.detokenizer
    assert detokenizer is not None
    unsent: list[tuple[bytes, int]] = []
    read = 0
    stop = None
    for n, token_id in enumerate(resume.token_ids, 1):
        # vLLM leaves a stop token that ends the output out of the text.
        ends = finish == FinishReason.STOP and n == len(resume.token_ids)
        stop = detokenizer.update([token_id], ends)
        if parser is not None:
            text = detokenizer.get_next_output_text(False, True)
            delta, _ = parser.delta(text, [token_id], None)
            if read < resume.chars < read + len(text):
                raise _misfit(resume, f"end in the middle of a piece of {len(text)} characters")
            read += len(text)
            if read > resume.chars:
                unsent.append((delta, len(text)))
        if stop is not None:
            finish, reason = FinishReason.STOP, stop
            break
    length = len(getattr(detokenizer, "output_text", ""))
    if resume.chars > length:
        raise _misfit(resume, f"are more than the {length} of the text")
    if parser is None:
        detokenizer._last_output_text_offset = resume.chars  # type: ignore[attr-defined]
    state.sent_tokens_offset = detokenizer.num_output_tokens()
    end = None
    if finish is not None:
        end = EngineCoreOutput(request.request_id, [], finish_reason=finish, stop_reason=reason)
    return Primed(unsent, end)


def _misfit(resume: Resume, how: str) -> NotResumable:
    return NotResumable(
        f"the {resume.chars} characters that the client has of {resume.n_tokens} tokens {how}"
    )


def _end_of(
    request: "EngineCoreRequest", token_ids: list[int], max_model_len: int
) -> tuple[FinishReason | None, Any]:
    """Returns finish and stop reason if vLLM's core would have ended the request at the last of these tokens."""
    if not token_ids:
        return None, None
    record = Request.from_engine_core_request(request, None)
    record.append_output_token_ids(token_ids)
    if not check_stop(record, max_model_len):
        return None, None
    return record.get_finished_reason(), record.stop_reason
