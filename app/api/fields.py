"""Request fields that OpenAI or vLLM know and Sluice does not serve: each is refused by name, never ignored.

A field is listed with the values that ask for nothing, such as its default; these pass. Fields that are not listed are
ignored: unknown ones, as by vLLM's own server, and those without influence on the output (`metadata`, `store`,
`service_tier`, ...).
"""

from typing import Any

from app.api.errors import bad_request

_NONE: tuple[Any, ...] = (None,)
_OFF: tuple[Any, ...] = (None, False)
_EMPTY_LIST: tuple[Any, ...] = (None, [])

_BOTH: dict[str, tuple[Any, ...]] = {
    "use_beam_search": _OFF,
    "length_penalty": (None, 1, 1.0),
    "logits_processors": _EMPTY_LIST,
    "allowed_token_ids": _NONE,
    "bad_words": _EMPTY_LIST,
    "truncate_prompt_tokens": _NONE,
    "prompt_logprobs": _NONE,
    "include_stop_str_in_output": _OFF,
    "spaces_between_special_tokens": (None, True),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "guided_choice": _NONE,
    "guided_grammar": _NONE,
    "structured_outputs": _NONE,
    "kv_transfer_params": _NONE,
    "vllm_xargs": _NONE,
    "mm_processor_kwargs": _NONE,
}

CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = _BOTH | {
    "functions": _EMPTY_LIST,
    "function_call": (None, "none"),
    "audio": _NONE,
    "modalities": (None, ["text"]),
    "prediction": _NONE,
    "web_search_options": _NONE,
    "chat_template": _NONE,
    "documents": _EMPTY_LIST,
    "echo": _OFF,
    "best_of": (None, 1),
    "prompt": _NONE,
    "suffix": _NONE,
}

COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = _BOTH | {
    "suffix": (None, ""),
    "prompt_embeds": _NONE,
    "messages": _NONE,
    "tools": _EMPTY_LIST,
    "top_logprobs": _NONE,
    "max_completion_tokens": _NONE,
}


def refuse_unsupported(extra: dict[str, Any] | None, table: dict[str, tuple[Any, ...]]) -> None:
    """Raises `ApiError` 400 for the first field of `extra` that `table` lists and whose value is not a harmless one."""
    for name, value in (extra or {}).items():
        harmless = table.get(name)
        if harmless is not None and not any(value == h and type(value) is type(h) for h in harmless):
            raise bad_request(
                f"'{name}' is not supported by this server; leave it out.", name, "unsupported_parameter"
            )
