"""A conversation as chat templates expect it: contents are text, and arguments of tool calls are objects."""

from typing import Any

import orjson

from app.api.errors import bad_request
from app.api.schema import ChatRequest
from app.api.structure import MAX_OBJECTS, check_structure


def messages_for_template(request: ChatRequest) -> list[dict[str, Any]]:
    """Returns the conversation with text parts joined and tool arguments as objects. Raises `ApiError` 400."""
    _check_arguments(request)
    messages = []
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        out: dict[str, Any] = dict(message)
        content = out.get("content")
        if isinstance(content, list):
            out["content"] = _join_parts(content, where)
        elif content is None:
            if not out.get("tool_calls"):
                raise bad_request(
                    f"'{where}.content' is missing.", f"{where}.content", "missing_required_parameter"
                )
            out["content"] = ""
        if out.get("tool_calls"):
            out["tool_calls"] = [_tool_call(call, where) for call in out["tool_calls"]]
        messages.append(out)
    return messages


def _check_arguments(request: ChatRequest) -> None:
    """Raises `ApiError` 400 if the arguments of all tool calls together have too many parts. They are texts in the
    body, so the check of its structure has not counted what is in them.
    """
    texts = [
        arguments
        for message in request.messages
        for call in message.get("tool_calls") or ()
        if isinstance(function := call.get("function"), dict)
        and isinstance(arguments := function.get("arguments"), str)
    ]
    # each part has a character at least
    if sum(map(len, texts)) > MAX_OBJECTS:
        what = "The arguments of the conversation's tool calls have"
        check_structure(",".join(texts).encode(), what, "messages")


def _join_parts(parts: list[dict[str, Any]], where: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        name = f"{where}.content[{index}]"
        kind = part.get("type", "text")
        if kind not in ("text", "input_text", "refusal"):
            raise bad_request(
                f"'{name}': parts of type {str(kind)!r} are not supported; send text.",
                name,
                "unsupported_parameter",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise bad_request(f"'{name}.text' must be a string.", name, "invalid_value")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(
            f"'{where}.tool_calls' need a function with a name.", f"{where}.tool_calls", "invalid_value"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:
            raise bad_request(
                f"'{where}.tool_calls': the arguments are not valid JSON.",
                f"{where}.tool_calls",
                "invalid_value",
            ) from None
    return call | {"function": function | {"arguments": arguments if arguments is not None else {}}}
