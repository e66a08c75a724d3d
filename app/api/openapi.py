"""The OpenAPI document of the HTTP API, made from the bodies in `schema` and the answers in `answers`.

Its version is 3.2, the first that can describe the events of a stream.
"""

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from app.api import answers
from app.api.extensions import CLASSES, MAX_NAME_CHARS, MAX_PRIORITY
from app.api.fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED
from app.api.schema import ChatRequest, CompletionRequest
from policies.request.terms import Mode

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"

_DESCRIPTION = """\
OpenAI's API for text, with extensions: `priority`, `slo` and `session` in the body, or `x-sluice-*` headers.

Errors have OpenAI's shape. A stream consists of `data:` events and ends with `data: [DONE]`; a stream that fails ends
with an event `{"error": ...}` and without `[DONE]`. `Retry-After` says when a 429 or 503 is worth another try.
"""

_ANSWERS: dict[int, str] = {
    400: "The request is wrong; `param` names the field.",
    401: "A key is needed and none that the server accepts was sent.",
    403: "The request may not ask for this priority, or the server does not answer by this name.",
    404: "No such path, model, policy, engine or request.",
    405: "The path does not take this method; `Allow` names those it takes.",
    409: "This cannot be done now; the message says why, and what to do first.",
    413: "The body is larger than the server reads.",
    415: "The body was not sent as `application/json`.",
    429: "A limit of the API key or of requests under way is reached, the queue is full, or the goal would be missed.",
    431: "The headers are longer than the server reads.",
    500: "A fault of the server; its log says more.",
    502: "Engines failed before the first token, and retries are used up.",
    503: "Not ready, overloaded or shutting down.",
    504: "The request took longer than it or the server allows, no further token came for too long, or the router did "
    "not answer in time.",
}

_REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "description": "Name of the request, which the answer repeats: 1 to 128 visible ASCII characters. The server gives"
    " one if none, or none of this form, is sent.",
    "schema": {"type": "string"},
}
_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_PRIORITY = {
    "anyOf": [{"enum": list(CLASSES)}, {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY}]
}


def _header(name: str, text: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": text, "schema": schema}


_EXTENSION_HEADERS = [
    _header("x-sluice-priority", "Used where the body has no `priority`.", _PRIORITY),
    _header("x-sluice-slo-ttft-ms", "Used where the body has no `slo.ttft_ms`.", _POSITIVE),
    _header("x-sluice-slo-tpot-ms", "Used where the body has no `slo.tpot_ms`.", _POSITIVE),
    _header("x-sluice-session", "Used where the body has no `session`.", _NAME),
    _header("x-sluice-user", "Used where the body has no `user`.", _NAME),
    _header(
        "x-sluice-timeout-s",
        "Seconds that the request may take in all; where the server allows less, that counts.",
        _POSITIVE,
    ),
    _header(
        "x-sluice-migrate",
        "Whether another engine goes on with the answer when one fails; an answer that went on says so in `sluice`.",
        {"enum": ["on", "off"]},
    ),
    _header(
        "x-sluice-times",
        "Has the way of the request to its first token noted hop by hop; `explain` shows it.",
        {"enum": ["on", "off"]},
    ),
    _header(
        "x-sluice-mode",
        "Serves the request on one engine or on two, whatever the policy would choose. Needs an admin key.",
        {"enum": [mode.value for mode in Mode]},
    ),
]


def document(served_names: tuple[str, ...], version: str) -> Json:
    """Returns the document of a server that answers to `served_names`."""
    schemas = _schemas()
    for model in ("ChatRequest", "CompletionRequest"):
        schemas[model]["properties"]["model"]["enum"] = [*served_names, None]
    return {
        "openapi": "3.2.0",
        "info": {
            "title": "Sluice",
            "version": version,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "adminKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of the server's admin keys; docs/operations.md says where they are.",
                },
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key that the operator has made with `sluice key`, where there are any.",
                },
            },
        },
    }


_TAGS = {
    "Output": "What OpenAI's clients call.",
    "Operation": "Health, figures and state.",
    "Administration": "Policies, explanations, the journal and scaling. An admin key is needed.",
}

_ANSWER_TYPES: tuple[Any, ...] = (
    answers.Error, answers.ChatCompletion, answers.ChatCompletionChunk, answers.Completion, answers.ModelList,
    answers.Live, answers.Ready, answers.Versions, answers.Status, answers.Policies, answers.PolicyChange,
    answers.Explanation, answers.Journal, answers.Scaling, answers.ScalingChange, answers.Facts,
    answers.Logs, answers.LogsChange,
    answers.Assigned, answers.EngineOrder,
)  # fmt: skip


def _schemas() -> Json:
    _, bodies = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template=_REF
    )
    inputs = [(index, "serialization", TypeAdapter(kind)) for index, kind in enumerate(_ANSWER_TYPES)]
    _, given = TypeAdapter.json_schemas(inputs, ref_template=_REF)  # type: ignore[arg-type]
    schemas: Json = bodies["$defs"] | given["$defs"]
    for model, table in (("ChatRequest", CHAT_UNSUPPORTED), ("CompletionRequest", COMPLETION_UNSUPPORTED)):
        names = ", ".join(f"`{name}`" for name in table)
        schemas[model]["description"] += (
            f"\n\nOther fields are ignored, except these, which are refused unless they ask for nothing: {names}."
        )
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            _plain(field)
    return schemas


def _plain(field: Json) -> None:
    """Shortens a field's schema in place: no generated title, and `type: [T, "null"]` for `anyOf` of T and null."""
    field.pop("title", None)
    kinds = field.get("anyOf", [])
    if len(kinds) == 2 and kinds[1] == {"type": "null"} and "type" in kinds[0]:
        del field["anyOf"]
        field.update(kinds[0], type=[kinds[0]["type"], "null"])
        if "enum" in field:
            field["enum"] = [*field["enum"], None]
    if field.get("default", 0) is None:
        del field["default"]


def _paths() -> Json:
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    request_id = model | {
        "name": "id",
        "description": "An answer's `id`, its `x-request-id`, or an attempt's id.",
    }
    tail = model | {"name": "events", "schema": {"type": "integer", "minimum": 0, "maximum": 1000}}
    return {
        "/v1/chat/completions": {"post": _output("chat", "Answer a conversation", "Chat")},
        "/v1/completions": {"post": _output("complete", "Continue prompts", "")},
        "/v1/models": {"get": _get("Output", "listModels", "List the served names", "ModelList", 401)},
        "/v1/models/{model}": {
            "parameters": [model],
            "get": _get("Output", "getModel", "Show one served name", "Model", 401, 404),
        },
        "/health": {
            "get": _get("Operation", "health", "Can requests be served? (a short name)", "Ready", 503)
        },
        "/health/live": {"get": _get("Operation", "live", "Does the process answer?", "Live")},
        "/health/ready": {"get": _get("Operation", "ready", "Can requests be served?", "Ready", 503)},
        "/version": {"get": _get("Operation", "version", "Show versions", "Versions")},
        "/metrics": {"get": _metrics()},
        "/sluice/status": {
            "get": _get("Operation", "status", "Show engines, router and requests", "Status", 401)
        },
        "/sluice/admin/policy": {
            "get": _admin("getPolicy", "Show the policies", "Policies"),
            "put": _admin("setPolicy", "Change policies until the router restarts", "Policies", 400, 413)
            | {"requestBody": _body("PolicyChange", _POLICY_EXAMPLE)},
        },
        "/sluice/admin/explain/{id}": {
            "parameters": [request_id],
            "get": _admin("explain", "Show why a request was routed as it was", "Explanation", 404),
        },
        "/sluice/admin/journal": {
            "get": _admin("journal", "Show the state of the event log", "Journal", 404),
        },
        "/sluice/admin/journal/{events}": {
            "parameters": [tail],
            "get": _admin("journalTail", "Show the last events too", "Journal", 400, 404),
        },
        "/sluice/admin/scale": {
            "get": _admin("getScaling", "Show what the autoscaler sees and wants", "Scaling", 404),
            "put": _admin(
                "scale",
                "Set numbers or bounds of replicas, or let the policy decide",
                "Scaling",
                400,
                404,
                413,
            )
            | {"requestBody": _body("ScalingChange", _SCALE_EXAMPLE)},
        },
        "/sluice/admin/facts": {
            "get": _admin("facts", "Show what a simulation of this fleet needs to know", "Facts"),
        },
        "/sluice/admin/logs": {
            "get": _admin("getLogs", "Show the levels of log lines", "Logs"),
            "put": _admin("setLogs", "Change the log lines of all processes until they end", "Logs", 400, 413)
            | {"requestBody": _body("LogsChange", _LOGS_EXAMPLE)},
        },
        "/sluice/admin/engines/{id}": {
            "parameters": [model | {"name": "id", "description": "An engine's id, as the status shows it."}],
            "put": _admin(
                "assign", "Have one engine serve a role, or wait warm", "Assigned", 400, 404, 409, 413
            )
            | {"requestBody": _body("EngineOrder", {"duty": "warm"})},
        },
    }


_LOGS_EXAMPLE = {"level": "DEBUG", "logger": "actors.router"}
_SCALE_EXAMPLE = {"counts": {"decode": 3}}
_POLICY_EXAMPLE = {"decode": {"name": "netkv", "params": {}}}
_EXAMPLES = {
    "Chat": {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32},
    "": {"prompt": "The capital of France is", "max_tokens": 16},
}


def _output(operation: str, summary: str, prefix: str) -> Json:
    """Returns the `POST` of one of the two endpoints for output. `prefix` begins the names of its schemas."""
    chunk = _ref("ChatCompletionChunk" if prefix else "Completion")
    event = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [chunk, _ref("Error")]},
    }
    data = {"anyOf": [{"const": "[DONE]"}, event]}
    event_stream = {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
    content = {"application/json": {"schema": _ref(f"{prefix}Completion")}, "text/event-stream": event_stream}
    return {
        "tags": ["Output"],
        "operationId": operation,
        "summary": summary,
        "description": "With `stream` the answer is `text/event-stream`.",
        "parameters": [_REQUEST_ID, *_EXTENSION_HEADERS],
        # the empty one: a server without a key file needs no key
        "security": [{}, {"apiKey": []}, {"adminKey": []}],
        "requestBody": _body(f"{prefix or 'Completion'}Request", _EXAMPLES[prefix]),
        "responses": {
            "200": {"description": "The answer.", "headers": _answer_headers(), "content": content},
            **_errors(400, 401, 403, 404, 413, 415, 429, 431, 500, 502, 503, 504),
        },
    }


def _get(tag: str, operation: str, summary: str, model: str, *errors: int) -> Json:
    return {
        "tags": [tag],
        "operationId": operation,
        "summary": summary,
        "parameters": [_REQUEST_ID],
        "responses": {
            "200": {
                "description": summary + ".",
                "headers": _answer_headers(),
                "content": {"application/json": {"schema": _ref(model)}},
            },
            **_errors(*errors, 431),
        },
    }


def _admin(operation: str, summary: str, model: str, *errors: int) -> Json:
    made = _get("Administration", operation, summary, model, *sorted({*errors, 401, 500, 503, 504}))
    return made | {"security": [{"adminKey": []}]}


def _metrics() -> Json:
    made = _get("Operation", "metrics", "Show all metrics in Prometheus's text format", "Error", 401)
    made["responses"]["200"] = {
        "description": "The metrics, which docs/metrics.md describes.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    return made


def _body(model: str, example: Json) -> Json:
    return {"required": True, "content": {"application/json": {"schema": _ref(model), "example": example}}}


def _errors(*statuses: int) -> Json:
    made: Json = {}
    for status in statuses:
        headers = _answer_headers()
        if status in (429, 503):
            headers["retry-after"] = {
                "description": "Seconds to wait.",
                "schema": {"type": "integer", "minimum": 1},
            }
        made[str(status)] = {
            "description": _ANSWERS[status],
            "headers": headers,
            "content": {"application/json": {"schema": _ref("Error")}},
        }
    return made


def _answer_headers() -> Json:
    return {"x-request-id": {"description": "The name of the request.", "schema": {"type": "string"}}}


def _ref(model: str) -> Json:
    return {"$ref": _REF.format(model=model)}
