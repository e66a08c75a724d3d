"""The OpenAPI document says what the code does: fields, limits, headers, paths."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from app.api import answers
from app.api.fields import CHAT_UNSUPPORTED
from app.api.openapi import document
from app.api.schema import ChatRequest, CompletionRequest

DOCUMENT = document(("tiny", "alias"), "1.2.3")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def test_every_field_of_a_request_is_described() -> None:
    for model in (ChatRequest, CompletionRequest):
        schema = SCHEMAS[model.__name__]
        assert set(schema["properties"]) == set(model.model_fields)
        for name, field in schema["properties"].items():
            assert field["description"].endswith("."), name
    assert all(f"`{name}`" in SCHEMAS["ChatRequest"]["description"] for name in CHAT_UNSUPPORTED)


def test_limits_are_those_of_the_models() -> None:
    chat = SCHEMAS["ChatRequest"]["properties"]
    assert chat["temperature"] | {"description": ""} == {
        "description": "", "type": ["number", "null"], "minimum": 0, "maximum": 2,
    }  # fmt: skip
    assert chat["model"]["enum"] == ["tiny", "alias", None]
    assert SCHEMAS["CompletionRequest"]["required"] == ["prompt"]
    assert SCHEMAS["Slo"]["additionalProperties"] is False


def test_every_reference_leads_somewhere() -> None:
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                found.add(value["$ref"].removeprefix("#/components/schemas/"))
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(DOCUMENT)
    assert found <= set(SCHEMAS)
    assert "ChatCompletionChunk" in found and "Error" in found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_both_forms_of_an_answer_and_every_error_are_shown(path: str) -> None:
    post = DOCUMENT["paths"][path]["post"]
    assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    headers = {parameter["name"] for parameter in post["parameters"]}
    assert {
        "x-sluice-priority",
        "x-sluice-slo-ttft-ms",
        "x-sluice-slo-tpot-ms",
        "x-sluice-session",
    } <= headers
    assert {"x-sluice-user", "x-sluice-mode", "x-request-id"} <= headers
    for status in ("429", "503"):
        assert "retry-after" in post["responses"][status]["headers"]
    assert answers.Error.__doc__ is not None


def test_the_tables_of_the_page_are_those_of_the_document() -> None:
    root = Path(__file__).parents[3]
    page = runpy.run_path(str(root / "scripts" / "document_api.py"))["page"]
    text = (root / "docs" / "api.md").read_text()
    assert page(text) == text, "run python scripts/document_api.py"


def test_each_row_of_a_generated_table_is_one_line() -> None:
    root = Path(__file__).parents[3]
    block = runpy.run_path(str(root / "scripts" / "document_api.py"))["BLOCK"]
    blocks = [found[0].splitlines()[1:-1] for found in block.finditer((root / "docs" / "api.md").read_text())]
    tables = [lines for lines in blocks if lines[0].startswith("|")]
    assert len(tables) == len(blocks) - 1
    assert [line for lines in tables for line in lines if not line.startswith(("| ", "|---"))] == []
