"""The request bodies of `/v1/chat/completions` and `/v1/completions`, validated by pydantic on the raw bytes.

Types are strict (a string is no number), null means "not given", numbers must be finite, unknown fields are
kept aside (`fields.refuse_unsupported` looks at them). The first problem becomes one `ApiError` 400 that
names the field. Where OpenAI's specification is silent, the limits are those of vLLM's server.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from app.api.errors import ApiError, bad_request

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
_INT64 = 2**63 - 1

Priority = Annotated[int, Field(ge=-1000, le=1000)] | Literal["interactive", "standard", "batch"]
NonEmpty = Annotated[str, Field(min_length=1)]


class StreamOptions(BaseModel):
    """`stream_options`: a last chunk with the usage; `continuous_usage_stats` (vLLM) puts it into every
    chunk.
    """

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Slo(BaseModel):
    """`slo`: the latencies that the client wants, in milliseconds. An unknown key is an error: it would be a
    silent no-op.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    ttft_ms: Annotated[float, Field(gt=0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0)] | None = None


@with_config(ConfigDict(strict=True, extra="allow"))
class Message(TypedDict, total=False):
    """One message of a conversation; handed to the chat template as it is, other keys included."""

    role: NonEmpty
    content: str | list[dict[str, Any]] | None
    name: str | None
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None


class _Request(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, le=_INT64)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: dict[str, Any] | None = None
    priority: Priority | None = None
    slo: Slo | None = None
    session: Annotated[str, Field(max_length=512)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None


class ChatRequest(_Request):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


class CompletionRequest(_Request):
    """Body of `POST /v1/completions`. `prompt` is checked by `plan.prompts_of`: its union would hide which
    part is wrong.
    """

    prompt: Any
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse(model: type[R], body: bytes) -> R:
    """The validated body. Raises `ApiError` 400 with the first field at fault."""
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
    """`("messages", 0, "content", "str")` -> `messages[0].content`: union branches and constraints are no
    part of it.
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
