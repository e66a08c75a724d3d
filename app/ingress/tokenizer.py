"""Turns text into tokens and conversations into text, without transformers or torch (650 MB less in every ingress).

`HfCodec` reads a Hugging Face directory (tokenizer.json, tokenizer_config.json, chat_template.jinja) with the
`tokenizers` library, and renders chat templates as Hugging Face specifies them. `WordCodec` needs no files; the sim
engine's model uses it.
"""

import datetime as dt
import json
import re
import zlib
from pathlib import Path
from typing import Any, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from app.ingress.token_bound import bound_of


class TemplateError(ValueError):
    """A chat template refused a conversation (roles out of order, say); the message is the template's own."""


class TextCodec(Protocol):
    """The part of a model's tokenizer that the ingress uses.

    It is thread-safe, because long prompts are encoded in a thread.
    """

    vocab_size: int

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that `text` has at least, without tokenising it: 0 if that cannot be said."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> str:
        """Returns the prompt of a conversation. Raises `TemplateError` where the template refuses it."""


class HfCodec:
    """The tokenizer and the chat template of a Hugging Face directory.

    Raises FileNotFoundError without a tokenizer.json, and ValueError for JSON or a chat template that cannot be parsed.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory)
        tokenizer = path / "tokenizer.json"
        if not tokenizer.is_file():
            raise FileNotFoundError(
                f"{tokenizer} is missing: the model directory needs a fast tokenizer (tokenizer.json)"
            )
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_path = path / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        self._specials = {
            name: _token_text(value)
            for name, value in config.items()
            if name.endswith("_token") and value is not None
        }
        self._template = _compile(_template_text(path, config))
        self.vocab_size = _vocab_size(path, self._tokenizer)
        self._bound = bound_of(self._tokenizer)

    def fewest_tokens(self, text: str) -> int:
        return self._bound.fewest(text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `Tokenizer.encode` holds the GIL for as long as it takes, 0.7 s for 1 MB; the batch calls release it. The fast
        # one leaves offsets out, which takes half the time.
        (made,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = made.ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> str:
        if self._template is None:
            raise TemplateError("the model has no chat template; use /v1/completions")
        variables = self._specials | kwargs
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        variables.setdefault("documents", None)
        try:
            text = self._template.render(variables)
        except RecursionError:
            # arguments of tool calls may be nested as deeply as Python's calls
            raise TemplateError("a value in it is nested too deeply") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise TemplateError(str(error) or type(error).__name__) from None
        return _cut_after_last(text, messages) if continue_final_message else text


class WordCodec:
    """A codec whose tokens are words: a word's id is its CRC-32 modulo the vocabulary. `decode` only names the ids."""

    def __init__(self, vocab_size: int = 32_000) -> None:
        self.vocab_size = vocab_size

    def fewest_tokens(self, text: str) -> int:
        return 0  # a word may have any length

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        size, crc = self.vocab_size, zlib.crc32
        return [crc(word) % size for word in _WORD.findall(text.encode("utf-8", "replace"))]

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{token}" for token in ids)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> str:
        lines = [f"<{m['role']}> {m.get('content') or ''}" for m in messages]
        if tools:
            lines.insert(0, f"<tools> {json.dumps(tools)}")
        if add_generation_prompt and not continue_final_message:
            lines.append("<assistant>")
        return "\n".join(lines)


_WORD = re.compile(rb"\s*\S+|\s+")


def _token_text(value: Any) -> str:
    """Returns a special token's text, which is a string or, in older files, in `content` of an object."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _template_text(path: Path, config: dict[str, Any]) -> str | None:
    """Returns the template in chat_template.jinja, else in tokenizer_config.json, where it may be one of several."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _vocab_size(path: Path, tokenizer: Tokenizer) -> int:
    """Returns the vocabulary's size from config.json: embeddings may be padded beyond the tokenizer's ids."""
    file = path / "config.json"
    if file.is_file():
        config = json.loads(file.read_text("utf-8"))
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        if isinstance(size, int):
            return size
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return int(size)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks training targets; when serving, its body is plain output."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads a class attribute)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _compile(text: str | None) -> jinja2.Template | None:
    if text is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the model's chat template does not compile (line {error.lineno}): {error.message}"
        ) from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON, as templates expect; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().strftime(form)


def _cut_after_last(text: str, messages: list[dict[str, Any]]) -> str:
    """Returns the rendered text up to the end of the last message's content, so that the model continues it."""
    content = str(messages[-1].get("content") or "").strip()
    if not content or content not in text:
        raise TemplateError("'continue_final_message': the template does not show the last message's content")
    return text[: text.rindex(content) + len(content)]
