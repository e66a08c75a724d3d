"""OpenAI sampling fields of the wire -> vLLM's SamplingParams.

Values are validated by vLLM itself, so what is refused is what vLLM's own server refuses; names that neither
knows are refused too. Defaults that the model's generation_config.json gives hold where the request says nothing.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

FIELDS = frozenset({
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "n", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "response_format", "skip_special_tokens", "include_stop_str_in_output",
    "allowed_token_ids", "bad_words",
})  # fmt: skip

# What a generation_config.json may set; its other entries are no sampling fields.
_MODEL_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")

# What vLLM raises where a request cannot be served as it is.
REFUSALS = (VLLMClientError, ValueError)

_FIRST_WORD = re.compile(r"[a-z_]+")


class BadParameter(ValueError):
    """A field has a value that cannot be served; `param` names it where it is known."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of one request (`n` is the caller's business), streaming deltas. Raises BadParameter."""
    unknown = sorted(set(given) - FIELDS)
    if unknown:
        raise BadParameter(f"{unknown[0]} is not a sampling field that this engine knows", unknown[0])
    values = {name: defaults[name] for name in _MODEL_DEFAULTS if name in defaults}
    values.update({name: value for name, value in given.items() if value is not None})
    values["n"] = 1
    values.setdefault("max_tokens", None)
    structured = structured_outputs(values.pop("response_format", None))
    try:
        return SamplingParams.from_optional(
            **values, structured_outputs=structured, output_kind=RequestOutputKind.DELTA
        )
    except (*REFUSALS, TypeError) as e:
        raise bad_parameter(e) from e


def sequences(given: Mapping[str, Any]) -> int:
    """How many choices are asked for. Raises BadParameter."""
    n = given.get("n")
    if n is None:
        return 1
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadParameter(f"n must be a whole number of at least 1, got {n!r}", "n")
    return n


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of choice `index`: its own copy, and where a seed is given its own seed (seed + index, as vLLM's)."""
    child = params.clone()
    if child.seed is not None:
        child.seed += index
    return child


def prefill_params() -> SamplingParams:
    """One greedy token, which is discarded, and the KV kept for a decode engine."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    )


def structured_outputs(response_format: Any) -> StructuredOutputsParams | None:
    """OpenAI's response_format as a constraint; None for free text. Raises BadParameter."""
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
    """vLLM's complaint with the field named: by vLLM itself, or by the word that its message begins with."""
    message = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    param = getattr(error, "parameter", None)
    if param is None:
        first = _FIRST_WORD.match(message)
        param = first.group() if first and first.group() in FIELDS else None
    return BadParameter(message, param)


def token_logprobs(token_ids: list[int], logprobs: Any, top: int) -> list[Any]:
    """Per token (text, id, logprob, [(text, id, logprob), ...]) with the `top` most likely ones, the likeliest first.

    Of equally likely ones the emitted token comes first: bfloat16 has few values, so equal logprobs are common.
    """
    pieces: list[Any] = []
    for token_id, candidates in zip(token_ids, logprobs, strict=False):
        chosen = candidates[token_id]
        pieces.append((chosen.decoded_token or "", token_id, chosen.logprob, _top(candidates, top, token_id)))
    return pieces


def prompt_logprobs(token_ids: list[int], logprobs: Any, top: int) -> list[Any]:
    """As `token_logprobs` for the prompt; None for its first token, which nothing predicts."""
    return [
        None if candidates is None else token_logprobs([token_id], [candidates], top)[0]
        for token_id, candidates in zip(token_ids, logprobs, strict=False)
    ]


def _top(candidates: Any, top: int, emitted: int) -> list[tuple[str, int, float]]:
    """The `top` likeliest of vLLM's candidates (all: -1), which are the likeliest ones and the emitted token."""
    ranked = sorted(candidates.items(), key=lambda item: (-item[1].logprob, item[0] != emitted))
    return [
        (c.decoded_token or "", token_id, c.logprob) for token_id, c in ranked[: None if top < 0 else top]
    ]
