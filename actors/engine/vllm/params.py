"""Conversion of a message's OpenAI sampling fields into vLLM's SamplingParams.

vLLM itself validates the values, so the engine refuses what vLLM's own server refuses. Names that neither of them knows
are refused too. The defaults of the model's generation_config.json hold for fields that the request leaves out.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from actors.engine.vllm.connector.prefix import borrowing

FIELDS = frozenset({
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "n", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "response_format", "skip_special_tokens", "include_stop_str_in_output",
    "allowed_token_ids", "bad_words", "cache_salt",
})  # fmt: skip

# Sampling fields for which a generation_config.json may give defaults.
_MODEL_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")

# Errors that vLLM raises for a request that it cannot serve as it is.
REFUSALS = (VLLMClientError, ValueError)

_FIRST_WORD = re.compile(r"[a-z_]+")


class BadParameter(ValueError):
    """A field has a value that the engine cannot serve. `param` names the field if it is known."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns the SamplingParams of one choice, streaming deltas; `n` and `cache_salt`, which vLLM takes elsewhere, are
    left to the caller. Raises BadParameter.
    """
    unknown = sorted(set(given) - FIELDS)
    if unknown:
        raise BadParameter(f"{unknown[0]} is not a sampling field that this engine knows", unknown[0])
    values = {name: defaults[name] for name in _MODEL_DEFAULTS if name in defaults}
    values.update({name: value for name, value in given.items() if value is not None})
    values["n"] = 1
    values.pop("cache_salt", None)
    values.setdefault("max_tokens", None)
    structured = structured_outputs(values.pop("response_format", None))
    try:
        return SamplingParams.from_optional(
            **values, structured_outputs=structured, output_kind=RequestOutputKind.DELTA
        )
    except (*REFUSALS, TypeError) as e:
        raise bad_parameter(e) from e


def sequences(given: Mapping[str, Any]) -> int:
    """Returns the number of choices that the request asks for. Raises BadParameter."""
    n = given.get("n")
    if n is None:
        return 1
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadParameter(f"n must be a whole number of at least 1, got {n!r}", "n")
    return n


def cache_salt(given: Mapping[str, Any]) -> str | None:
    """Returns the salt that keeps the request's blocks in the prefix cache apart from others'. Raises BadParameter."""
    salt = given.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise BadParameter("cache_salt must be a text that is not empty", "cache_salt")
    return salt


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Returns a copy of the parameters for choice `index`. If a seed is given, the copy's seed is seed + index, as in
    vLLM, but in 64 bits: model runner V2 keeps seeds in such numbers, and dies of a larger one.
    """
    child = params.clone()
    if child.seed is not None:
        child.seed = (child.seed + index + 2**63) % 2**64 - 2**63
    return child


def prefill_params(
    structured: StructuredOutputsParams | None = None, lent: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Returns the parameters of a prefill: one greedy token, which is discarded, and KV kept for a decode engine. With
    a handle `lent`, the prefix that it names is read and not computed.

    With the constraint `structured` of the decode that follows, the core compiles its grammar already now. A grammar
    that does not compile then fails the prefill, and not every decode after it.
    """
    return SamplingParams(
        structured_outputs=structured,
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": borrowing(lent or {})},
    )


def structured_outputs(response_format: Any) -> StructuredOutputsParams | None:
    """Returns OpenAI's response_format as a constraint, or None for free text. Raises BadParameter."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        schema = (response_format.get("json_schema") or {}).get("schema")
        if not isinstance(schema, dict):
            raise BadParameter(
                "response_format.json_schema.schema must be a JSON schema (an object)", "response_format"
            )
        return StructuredOutputsParams(json=schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(response_format))
    raise BadParameter(
        "response_format must be an object with type text, json_object, json_schema or structural_tag",
        "response_format",
    )


def bad_parameter(error: Exception) -> BadParameter:
    """Returns vLLM's error as a BadParameter. The field is the one that vLLM names, or the word with which its message
    begins.
    """
    message = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    param = getattr(error, "parameter", None)
    if param is None:
        first = _FIRST_WORD.match(message)
        param = first.group() if first and first.group() in FIELDS else None
    return BadParameter(message, param)


def token_logprobs(token_ids: list[int], logprobs: Any, top: int) -> list[Any]:
    """Returns (text, id, logprob, [(text, id, logprob), ...]) for each token. The list has the `top` most likely
    tokens, the likeliest first.

    Among equally likely tokens the emitted one comes first. Equal logprobs are common, because bfloat16 has few values.
    """
    pieces: list[Any] = []
    for token_id, candidates in zip(token_ids, logprobs, strict=False):
        chosen = candidates[token_id]
        pieces.append((chosen.decoded_token or "", token_id, chosen.logprob, _top(candidates, top, token_id)))
    return pieces


def prompt_logprobs(token_ids: list[int], logprobs: Any, top: int) -> list[Any]:
    """Returns the entries of `token_logprobs` for the prompt's tokens. The first is None, because nothing predicts that
    token.
    """
    return [
        None if candidates is None else token_logprobs([token_id], [candidates], top)[0]
        for token_id, candidates in zip(token_ids, logprobs, strict=False)
    ]


def _top(candidates: Any, top: int, emitted: int) -> list[tuple[str, int, float]]:
    """Returns the `top` likeliest of vLLM's candidates, which are its likeliest tokens and the emitted one; with -1,
    all of them.
    """
    ranked = sorted(candidates.items(), key=lambda item: (-item[1].logprob, item[0] != emitted))
    return [
        (c.decoded_token or "", token_id, c.logprob) for token_id, c in ranked[: None if top < 0 else top]
    ]
