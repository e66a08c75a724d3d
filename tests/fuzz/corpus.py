# ruff: noqa: E501  (one case a line)
"""The parts of requests: bodies that are right, headers, paths, and heads that attackers are known to send."""

from typing import Any

from app.config import SIM_MODEL

CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "hello"}]},
    {"model": "tiny", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "max_tokens": 3},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": "a"}], "n": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["x"], "logit_bias": {"5": 1}},
    {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 2},
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "1"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}],
        "tool_choice": "none",
    },
    {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
    {"messages": [{"role": "user", "content": "a"}], "priority": "batch", "slo": {"ttft_ms": 100.0, "tpot_ms": 50}, "session": "s", "user": "u", "cache_salt": "x"},
    {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"x": 1}},
)  # fmt: skip
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "hello"},
    {"prompt": ["a b", "c"], "max_tokens": 2, "n": 2, "stream": True},
    {"prompt": [1, 2, 3], "max_tokens": 2, "min_tokens": 1, "stop_token_ids": [4], "ignore_eos": True},
    {"prompt": [[1], [2, 3]], "echo": True, "logprobs": 1},
    {"prompt": "a", "best_of": 1, "suffix": "", "presence_penalty": 1, "repetition_penalty": 1.1, "skip_special_tokens": False},
)  # fmt: skip
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/tiny", "/v1/models/%74iny", "/health", "/health/live",
    "/metrics", "/version", "/sluice/status", "/", "/docs", "/openapi.json", "/sluice/admin/policy", "/sluice/admin/explain/x",
    "/sluice/admin/journal?n=5", "/sluice/admin/%00", "/v1/models/%ff", "/../../etc/passwd", "/%2e%2e/x", "*", "//x", "/v1/models/" + "a" * 300,
    "http://localhost/version", "http://other:99999/version", "/\x7f", "/a b", "",
)  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE", "get", "QUERY", "")
HEADERS = (
    "host: localhost", "host: 127.0.0.1:8000", "host: evil.example", "host:", "host: a b", "content-type: application/json",
    "content-type: text/plain", "content-type:", "authorization: Bearer the key of the rig", "authorization: Bearer x",
    "authorization: Basic a", "authorization: Bearer", "connection: close", "connection: keep-alive", "connection: upgrade",
    "connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "upgrade: websocket", "http2-settings: AAMAAABkAAQAAP__",
    "expect: 100-continue", "expect: 200-ok", "transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "transfer-encoding: x",
    "content-length: 0", "content-length: 5", "content-length: -1", "content-length: 99999999999999999999", "content-length: 100000",
    "content-length: 1,1", "x-request-id: mine", "x-request-id: " + "x" * 200, "x-sluice-priority: -1000", "x-sluice-priority: interactive",
    "x-sluice-priority: x", "x-sluice-slo-ttft-ms: nan", "x-sluice-slo-ttft-ms: 1e999", "x-sluice-session: s", "x-sluice-user: \xe9",
    "x-sluice-mode: colocated", "x-sluice-mode: x", "x-sluice-migrate: off", "x-sluice-times: on", "accept-encoding: gzip",
    "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "traceparent: x", "cookie: a=b", ": x", "a b: c", "x", " y: z",
)  # fmt: skip
RAW = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2;x=" + b"y" * 300 + b"\r\nab\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\nhost: localhost\n\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 3000 + b"\r\n",
    b"GET /" + b"%" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"\r\n" * 50 + b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n",
)  # fmt: skip
"""Whole connections: smuggling, folded headers, bare line feeds, another protocol, and the limits."""

CONFIGS: tuple[dict[str, Any], ...] = (
    {"model": {"path": SIM_MODEL}, "engines": [{"name": "e", "kind": "sim", "role": "colocated", "replicas": 1}]},
    {
        "model": {"path": SIM_MODEL, "name": "m"},
        "ingress": {"port": 8000, "host": "127.0.0.1", "replicas": 2, "options": {"max_in_flight": 10, "class_slo": {"batch": {"ttft_s": 1.0}}}},
        "router": {"prefill": {"name": "join_shortest_queue"}, "decode": {"name": "join_shortest_queue"}, "dispatch": {"max_queue": 5}},
        "engines": [
            {"name": "p", "kind": "sim", "role": "prefill", "replicas": 2, "options": {"slots": 4}},
            {"name": "d", "kind": "sim", "role": "decode", "replicas": 1},
        ],
        "wire": {"ports": "9000-9100"}, "scaling": {"enabled": False}, "flow": {"enabled": False}, "dashboard": {"port": 0},
    },
)  # fmt: skip
