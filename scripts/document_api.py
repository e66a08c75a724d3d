"""Fills the tables of docs/api.md from the OpenAPI document, which is made from the code (`app.api.openapi`).

python scripts/document_api.py
"""

import re
from pathlib import Path
from typing import Any

from app.api.fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED
from app.api.openapi import document

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENT = document(("MODEL",), "0")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def page(text: str) -> str:
    """Returns the page `text` with its tables written anew."""
    made = {
        "endpoints": _endpoints,
        "fields both": lambda: _fields(_shared()),
        "fields ChatRequest": lambda: _fields(_own("ChatRequest")),
        "fields CompletionRequest": lambda: _fields(_own("CompletionRequest")),
        "refused": _refused,
        "errors": _errors,
    }
    return BLOCK.sub(lambda block: block[1] + made[block[2]]() + block[3], text)


def _table(head: str, rows: list[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + "---|" * columns, *rows, ""])


def _endpoints() -> str:
    return _table(
        "method | path | purpose",
        [
            f"| {method.upper()} | `{path}` | {operation['summary']} |"
            for path, operations in DOCUMENT["paths"].items()
            for method, operation in operations.items()
            if method != "parameters"
        ],
    )


def _properties(model: str) -> dict[str, Any]:
    return SCHEMAS[model]["properties"]  # type: ignore[no-any-return]


def _shared() -> dict[str, Any]:
    chat, completion = _properties("ChatRequest"), _properties("CompletionRequest")
    return {name: field for name, field in chat.items() if completion.get(name) == field}


def _own(model: str) -> dict[str, Any]:
    return {name: field for name, field in _properties(model).items() if name not in _shared()}


def _fields(fields: dict[str, Any]) -> str:
    rows = [
        f"| `{name}` | {_type(field)} | {' '.join(field['description'].split())} |"
        for name, field in fields.items()
    ]
    return _table("field | values | meaning", rows)


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return f"{{{', '.join(f'`{name}`' for name in _properties(field['$ref'].rpartition('/')[2]))}}}"
    if "anyOf" in field:
        return " or ".join(_type(kind) for kind in field["anyOf"] if kind != {"type": "null"})
    if "enum" in field:
        return ", ".join(
            "a served name" if value == "MODEL" else f"`{value}`" for value in field["enum"] if value
        )
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    name = next(kind for kind in kinds if kind != "null")
    items = f" of {_type(field['items'])}" if field.get("items") else ""
    return name + items + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    parts = [f"from {low:,}" if low is not None and abs(low) < 2**31 - 1 else ""]
    parts += [f"above {field['exclusiveMinimum']:g}" if "exclusiveMinimum" in field else ""]
    parts += [f"to {high:,}" if high is not None and high < 2**31 - 1 else ""]
    parts += [f"up to {field['maxLength']} characters" if "maxLength" in field else ""]
    parts += [f"up to {field['maxItems']:,}" if "maxItems" in field else ""]
    said = " ".join(part for part in parts if part)
    return f", {said}" if said else ""


def _refused() -> str:
    both = [name for name in CHAT_UNSUPPORTED if name in COMPLETION_UNSUPPORTED]
    return "".join(
        f"- {where}: {', '.join(f'`{name}`' for name in names)}\n"
        for where, names in (
            ("both", both),
            ("chats", [name for name in CHAT_UNSUPPORTED if name not in both]),
            ("completions", [name for name in COMPLETION_UNSUPPORTED if name not in both]),
        )
    )


def _errors() -> str:
    answers: dict[str, str] = {"405": "The path does not take this method; `Allow` names those it takes."}
    for operations in DOCUMENT["paths"].values():
        for method, operation in operations.items():
            if method != "parameters":
                answers |= {s: r["description"] for s, r in operation["responses"].items() if s != "200"}
    return _table("status | meaning", [f"| {status} | {text} |" for status, text in sorted(answers.items())])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
