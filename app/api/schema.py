"""The request bodies of `/v1/chat/completions` and `/v1/completions`, validated by pydantic on the raw bytes.

Types are strict (a string is no number), null means "not given", numbers must be finite, and unknown fields are kept
aside for `fields.refuse_unsupported`. The first problem becomes one `ApiError` 400 that names the field. Where OpenAI's
specification is silent, the limits are those of vLLM's server.
"""

from typing import Annotated, Any, Literal, Required, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, with_config
from typing_extensions import TypedDict

from app.api.errors import ApiError, bad_request

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 64
_INT64 = 2**63 - 1

Priority = Annotated[int, Field(ge=-1000, le=1000)] | Literal["interactive", "standard", "batch"]
NonEmpty = Annotated[str, Field(min_length=1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]
"""A cache salt as vLLM's server takes it (`validate_cache_salt` of vLLM 0.32)."""


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_PROMPTS: dict[str, Any] = {
    "type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1, "maxItems": MAX_PROMPTS,
}  # fmt: skip
_PROMPT: dict[str, Any] = {"anyOf": [_TEXT, _IDS, _PROMPTS]}


class StreamOptions(BaseModel):
    """Options of a stream.

    `include_usage` asks for a last chunk with the usage, and vLLM's `continuous_usage_stats` for the usage in every
    chunk.
    """

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Slo(BaseModel):
    """The latencies that the client wants, in milliseconds. Unknown keys are errors, as they would have no effect."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    ttft_ms: Annotated[float, Field(gt=0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0)] | None = None


@with_config(ConfigDict(strict=True, extra="allow"))
class Message(TypedDict, total=False):
    """One message of a conversation. Keys that are not listed here reach the chat template too."""

    role: Required[NonEmpty]
    content: str | list[dict[str, Any]] | None
    name: str | None
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None


class _Request(BaseModel):
    """The fields that both endpoints share. The text below a field is its description in `/openapi.json`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    """Name of the model; without it the served model answers."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events, token by token."""
    stream_options: StreamOptions | None = None
    """Options of a streamed answer; allowed with `stream` only."""
    max_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    """Most output tokens of each choice; for chats the rest of the context if it is left out, for completions 16."""
    min_tokens: Annotated[int, Field(ge=0, le=_INT64)] | None = None
    """Number of output tokens before which no stop ends a choice."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Number of choices for each prompt."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Temperature of the sampling; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the probability mass that is sampled from."""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Number of likeliest tokens that are sampled from; 0 and -1 mean all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Least probability of a token, as a share of the likeliest one's."""
    seed: Annotated[int, Field(ge=-_INT64, le=_INT64)] | None = None
    """Seed of the sampling."""
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end a choice; they are not part of the answer."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a choice."""
    ignore_eos: bool | None = None
    """Whether generation goes on after the end-of-sequence token."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Penalty for every token that has occurred in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Penalty for every token by its number of occurrences in the output."""
    # a logit times or by either is finite in float32; without bounds NaN reaches an engine's sampler
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Factor that makes tokens of the prompt and of the output so far less likely (above 1) or likelier (below 1)."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Biases of logits, by token id (as text)."""
    response_format: dict[str, Any] | None = None
    """`{"type": "text"}`, `json_object`, `structural_tag`, or `json_schema` with a `json_schema.schema`."""
    priority: Priority | None = None
    """Sluice: a class or a number; lower numbers are served earlier (interactive -1, standard 0, batch 1)."""
    slo: Slo | None = None
    """Sluice: the latencies that the client wants."""
    session: Annotated[str, Field(max_length=512)] | None = None
    """Sluice: a name that all turns of one conversation share."""
    cache_salt: CacheSalt | None = None
    """Requests share KV in prefix caches only with requests that have the same salt, or none, as they have."""
    user: Annotated[str, Field(max_length=512)] | None = None
    """Name of the person or program that asks: predictors learn output lengths for each user, and where API keys are
    off each user has a share of the service.
    """


class ChatRequest(_Request):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    """The conversation, oldest message first; contents are text."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    """Most output tokens of each choice; it wins over `max_tokens`."""
    logprobs: bool | None = None
    """Whether each token comes with its log probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of alternatives for each token; allowed with `logprobs` only."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's shape; refused if no engine can parse tool calls."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, or one function; needs `tools`."""
    parallel_tool_calls: bool | None = None
    """Whether the model may call several tools at once."""
    reasoning_effort: str | None = None
    """A word that is passed to the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the opening of the model's turn; true if left out."""
    continue_final_message: bool | None = None
    """Whether the model continues the last message instead of answering it."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to the rendered prompt; false if left out."""


class CompletionRequest(_Request):
    """Body of `POST /v1/completions`.

    `plan.prompts_of` checks `prompt`, because the error of a union would not show which part is wrong.
    """

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    """A text, a list of token ids, or a list of either."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Allowed only where it equals `n`."""
    echo: bool | None = None
    """Whether the answer begins with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of likeliest alternatives for each token; 0 gives the chosen token's log probability alone."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text prompt; true if left out."""


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse(model: type[R], body: bytes) -> R:
    """Returns the validated body. Raises `ApiError` 400 with the first field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error) from None


def _api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return bad_request(
            f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.",
            None,
            "invalid_json",
        )
    if not first["loc"]:
        return bad_request("The body must be a JSON object.", None, "invalid_json")
    param = _path(first["loc"])
    if first["type"] == "missing":
        return bad_request(f"'{param}' is required.", param, "missing_required_parameter")
    given = "" if isinstance(first["input"], (dict, list)) else f", got {_short(first['input'])}"
    return bad_request(f"'{param}': {first['msg']}{given}.", param, "invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """Returns the path of a field in words, without union branches and constraints.

    For `("messages", 0, "content", "str")` it is `messages[0].content`.
    """
    path = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _NAMES:
            path += f".{part}"
        else:
            break
    return path


_NAMES = frozenset({*StreamOptions.model_fields, *Slo.model_fields, *Message.__annotations__})


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
