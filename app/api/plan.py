"""Turns a request's body into a plan: the work for the engines, and the form of the answer. Nothing here does I/O.

Planning has two steps, because tokenising lies between them and may take long for a huge prompt. `plan_chat` and
`plan_completion` check everything that needs no tokens; `Plan.fit` checks the tokens against the context.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.api.budget import (
    check_biases,
    check_candidates,
    check_echo,
    check_options,
    check_schema,
    check_stops,
    check_template,
    check_tools,
)
from app.api.errors import ApiError, bad_request
from app.api.extensions import Defaults, name_of, terms_of
from app.api.fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, refuse_unsupported
from app.api.schema import MAX_PROMPTS, ChatRequest, CompletionRequest, parse
from policies.request.terms import Mode, Terms

_SAMPLING = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos",
    "skip_special_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip
"""Fields of the request that go to the engine under their own names, if the client gave them."""

_OF_ENGINES = set(ChatRequest.model_fields) - {"priority", "slo", "session"} | {"include_reasoning"}
"""Fields of a chat that an engine gets where it parses the answer. Those that are left out are Sluice's own: vLLM has a
`priority`, too, and takes no class for it. The last one is vLLM's, and its parsers go by it.
"""

ECHO_CHARS_PER_ID = 4
"""Characters that an echoed token id is taken for. ASSUMPTION: the mean of English text."""


@dataclass(slots=True)
class Plan:
    """The plan of one HTTP request whose fields have been checked.

    `prompts` are texts or token ids as the client gave them; the prompt of a chat is rendered later. `max_tokens_param`
    is the field that `max_tokens` came from. `unnamed` is the tenant that the request counts for where no API key names
    one. `kept_bytes` is the memory of what is kept beside the prompts until the answer ends: lists, schemas, and the
    chat if engines get it. `limits_itself` says whether the client allows the request less time than the server does.
    """

    chat: bool
    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int
    params: dict[str, Any]
    max_tokens: int | None
    max_tokens_param: str
    logprobs: int | None
    echo: bool
    terms: Terms
    user: str
    add_special_tokens: bool
    prompts: list[str | list[int]] = field(default_factory=list)
    request: ChatRequest | None = None
    engine_chat: bytes | None = None
    unnamed: str = ""
    kept_bytes: int = 0
    limits_itself: bool = False

    def check_lengths(self, fewest_tokens: Callable[[str], int], max_model_len: int) -> None:
        """Raises `ApiError` 400 if a prompt cannot fit the context; a text has `fewest_tokens` tokens at least."""
        for prompt in self.prompts:
            least = fewest_tokens(prompt) if isinstance(prompt, str) else len(prompt)
            if least >= max_model_len:
                raise self._too_long(
                    f"at least {least}" if isinstance(prompt, str) else str(least), max_model_len
                )

    def fit(self, tokens: list[list[int]], max_model_len: int, vocab_size: int) -> list[int]:
        """Returns the max_tokens of each prompt.

        Raises `ApiError` 400 if a prompt is empty, too long or holds an unknown token.
        """
        param = self._prompt_param
        bias = self.params.get("logit_bias")
        if bias:
            _check_ids([int(key) for key in bias], vocab_size, "logit_bias")
        if self.params.get("stop_token_ids"):
            _check_ids(self.params["stop_token_ids"], vocab_size, "stop_token_ids")
        budgets = []
        for index, ids in enumerate(tokens):
            if not ids:
                raise bad_request("The prompt is empty: it has no tokens.", param, "invalid_value")
            if not self.chat and not isinstance(self.prompts[index], str):
                _check_ids(ids, vocab_size, param)
            left = max_model_len - len(ids)
            if left < 1:
                raise self._too_long(str(len(ids)), max_model_len)
            if self.max_tokens is not None and self.max_tokens > left:
                raise bad_request(
                    f"'{self.max_tokens_param}' is {self.max_tokens}, but after {len(ids)} prompt tokens the context "
                    f"of {max_model_len} has room for {left}.",
                    self.max_tokens_param,
                    "context_length_exceeded",
                )
            budgets.append(left if self.max_tokens is None else self.max_tokens)
        if self.echo:
            chars = sum(len(p) * (1 if isinstance(p, str) else ECHO_CHARS_PER_ID) for p in self.prompts)
            check_echo(chars, sum(map(len, tokens)), self.n, self.params.get("prompt_logprobs"))
        least = self.params.get("min_tokens", 0)
        if least > min(budgets):
            raise bad_request(
                f"'min_tokens' ({least}) is more than max_tokens ({min(budgets)}).",
                "min_tokens",
                "invalid_value",
            )
        return budgets

    @property
    def _prompt_param(self) -> str:
        return "messages" if self.chat else "prompt"

    def _too_long(self, tokens: str, max_model_len: int) -> ApiError:
        return bad_request(
            f"The prompt has {tokens} tokens; the model's context is {max_model_len} and must hold at least one more. "
            "Shorten the prompt.",
            self._prompt_param,
            "context_length_exceeded",
        )


def plan_chat(body: bytes, headers: dict[bytes, bytes], defaults: Defaults) -> Plan:
    """Checks a chat request and plans it. Raises `ApiError` 400.

    The names of `headers` are in lower case, and only the `x-sluice-*` headers are read.
    """
    request = parse(ChatRequest, body)
    refuse_unsupported(request.model_extra, CHAT_UNSUPPORTED)
    plan = _common(request, terms_of(request, headers, defaults), headers, defaults, chat=True)
    if request.max_completion_tokens is not None:
        plan.max_tokens, plan.max_tokens_param = request.max_completion_tokens, "max_completion_tokens"
    if request.logprobs:
        plan.logprobs = request.top_logprobs or 0
        plan.params["logprobs"] = plan.logprobs
    elif request.top_logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_request(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            "continue_final_message",
            "invalid_value",
        )
    if request.tool_choice not in (None, "none") and not request.tools:
        raise bad_request("'tool_choice' needs 'tools'.", "tool_choice", "invalid_value")
    if request.tools and request.tool_choice != "none":
        # an engine reads it twice, so it is without what neither Sluice nor vLLM knows
        plan.engine_chat = request.model_dump_json(include=_OF_ENGINES, exclude_unset=True).encode()
        plan.kept_bytes += len(plan.engine_chat)
    if request.tools:
        check_tools(request.tools)
    if request.chat_template_kwargs:
        check_template(request.chat_template_kwargs)
    check_candidates(1, plan.n, plan.logprobs)
    check_options(plan.kept_bytes, plan.n)
    plan.add_special_tokens = bool(request.add_special_tokens)
    plan.request = request
    return plan


def plan_completion(body: bytes, headers: dict[bytes, bytes], defaults: Defaults) -> Plan:
    """Checks a completion request and plans it. Raises `ApiError` 400."""
    request = parse(CompletionRequest, body)
    refuse_unsupported(request.model_extra, COMPLETION_UNSUPPORTED)
    # the prompt's own logprobs do not travel with the KV
    local = bool(request.echo) and request.logprobs is not None
    terms = terms_of(request, headers, defaults, local)
    if local and terms.mode is Mode.DISAGGREGATED:
        raise bad_request(
            "'echo' with 'logprobs' cannot be served disaggregated.", "x-sluice-mode", "invalid_value"
        )
    plan = _common(request, terms, headers, defaults, chat=False)
    if request.best_of is not None and request.best_of != plan.n:
        raise bad_request(
            "'best_of' is supported only where it equals 'n'.", "best_of", "unsupported_parameter"
        )
    plan.prompts = prompts_of(request.prompt)
    if len(plan.prompts) * plan.n > MAX_PROMPTS:
        raise bad_request(f"prompts x n is at most {MAX_PROMPTS}.", "n", "invalid_value")
    if plan.max_tokens is None:
        plan.max_tokens = defaults.completion_tokens
    plan.echo = bool(request.echo)
    if request.logprobs is not None:
        plan.logprobs = plan.params["logprobs"] = request.logprobs
        if plan.echo:
            plan.params["prompt_logprobs"] = request.logprobs
    check_candidates(len(plan.prompts), plan.n, plan.logprobs)
    check_options(plan.kept_bytes, len(plan.prompts) * plan.n)
    plan.add_special_tokens = request.add_special_tokens is not False
    return plan


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """Returns the prompts of a completion request: a string, token ids, or a list of either. Raises `ApiError` 400."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_int(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise bad_request(
            "'prompt' must be a string, a list of token ids, or a list of either.", "prompt", "invalid_value"
        )
    if not prompt:
        raise bad_request("'prompt' is empty.", "prompt", "invalid_value")
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(
            f"'prompt' holds {len(prompt)} prompts; at most {MAX_PROMPTS} are served at once.",
            "prompt",
            "invalid_value",
        )
    for index, item in enumerate(prompt):
        name = "prompt" if len(prompt) == 1 else f"prompt[{index}]"
        if not item and isinstance(item, (str, list)):
            raise bad_request(f"'{name}' is empty.", "prompt", "invalid_value")
        if isinstance(item, str):
            continue
        if not isinstance(item, list) or not all(map(_is_int, item)):
            raise bad_request(
                f"'{name}' must be a string or a list of token ids (integers).", "prompt", "invalid_value"
            )
    return prompt


def _common(
    request: ChatRequest | CompletionRequest,
    terms: Terms,
    headers: dict[bytes, bytes],
    defaults: Defaults,
    *,
    chat: bool,
) -> Plan:
    if request.stream_options is not None and not request.stream:
        raise bad_request("'stream_options' needs 'stream': true.", "stream_options", "invalid_value")
    options = request.stream_options
    given = request.__dict__
    params = {name: given[name] for name in _SAMPLING if given[name] is not None}
    if request.stop is not None:
        params["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    kept_bytes = check_stops(params.get("stop"), request.stop_token_ids, request.min_tokens)
    if request.logit_bias:
        kept_bytes += check_biases(request.logit_bias)
        params["logit_bias"] = {_bias_key(key): value for key, value in request.logit_bias.items()}
    if request.response_format is not None:
        kept_bytes += check_schema(request.response_format, "response_format")
    if request.response_format is not None and _check_format(request.response_format) != "text":
        params["response_format"] = request.response_format
    if request.cache_salt is not None:
        params["cache_salt"] = request.cache_salt
    if request.n is not None and request.n > 1:
        params["n"] = request.n
    return Plan(
        chat=chat,
        model=request.model,
        stream=bool(request.stream),
        include_usage=bool(options and (options.include_usage or options.continuous_usage_stats)),
        continuous_usage=bool(options and options.continuous_usage_stats),
        n=request.n or 1,
        params=params,
        max_tokens=request.max_tokens,
        max_tokens_param="max_tokens",
        logprobs=None,
        echo=False,
        terms=terms,
        user=name_of(request.user, headers, "x-sluice-user"),
        add_special_tokens=True,
        kept_bytes=kept_bytes,
        # no request has more time than that
        limits_itself=terms.timeout_s != defaults.timeout_s,
    )


def _bias_key(key: str) -> str:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise bad_request(f"'logit_bias': {key!r} is no token id.", "logit_bias", "invalid_value")
    return str(int(key))


def _check_format(response_format: dict[str, Any]) -> str:
    kind = response_format.get("type")
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        raise bad_request(
            "'response_format.type' must be text, json_object, json_schema or structural_tag.",
            "response_format",
            "invalid_value",
        )
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise bad_request(
                "'response_format.json_schema.schema' must be a JSON schema.",
                "response_format",
                "invalid_value",
            )
    return str(kind)


def _check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise bad_request(
            f"Token {bad} is outside the vocabulary (0 to {vocab_size - 1}).", param, "invalid_value"
        )


def _is_int(value: object) -> bool:
    return type(value) is int
