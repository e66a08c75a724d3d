"""Parsing of tool calls and reasoning by vLLM's own parsers: they get token deltas and return ready OpenAI deltas.

The engine's process has loaded vLLM anyway, so parsing is done here and not in the ingress. vLLM's parsers keep state,
so each choice has its own. Before the parsing, a parser may adjust the request: it may keep special tokens in the text,
or put the output under a grammar if a tool must be called.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
)
from vllm.parser import ParserManager

from actors.engine.vllm.config import VllmEngineConfig
from actors.engine.vllm.params import REFUSALS, BadParameter, bad_parameter

MAX_CALLS = 128
"""Most tool calls of one choice. vLLM's parsers read all calls again at each token, in the loop that serves all streams
of the engine: that of Hermes takes 2 ms at 250 calls and 7 ms at 1,000 (CPU time on the development machine), for each
choice of a client that has the model repeat one. OpenAI takes 128 tools.
"""


@dataclass(frozen=True, slots=True)
class ToolParsing:
    """The parser class of an engine; `parser` is None if none is configured."""

    parser: Any
    tokenizer: Any
    model_config: Any

    @classmethod
    def build(cls, config: VllmEngineConfig, llm: Any) -> "ToolParsing":
        """Returns the parsing that `config` asks for. Raises vLLM's error if it does not know a parser or it does not
        fit the tokenizer.
        """
        parser = ParserManager.get_parser(
            tool_parser_name=config.tool_parser,
            reasoning_parser_name=config.reasoning_parser,
            enable_auto_tools=config.tool_parser is not None,
            model_name=config.model,
            tokenizer=llm.tokenizer,
        )
        return cls(parser, llm.tokenizer, llm.model_config)

    def session(self, chat: bytes, tokens: list[int]) -> "ChatSession":
        """Returns the parsing of one request. `chat` is the client's body, and `tokens` are the prompt's. Raises
        BadParameter.
        """
        try:
            request = ChatCompletionRequest.model_validate_json(chat)
        except ValidationError as e:
            first = e.errors()[0]
            param = str(first["loc"][0]) if first["loc"] else None
            raise BadParameter(first["msg"], param) from e
        except REFUSALS as e:
            raise bad_parameter(e) from e
        if self.parser is None:
            raise BadParameter(
                "this engine parses no tool calls; set tool_parser in the engine's options to the one of its model",
                "tools",
            )
        try:
            request = self._make(request).adjust_request(request)
        except (*REFUSALS, NotImplementedError) as e:
            raise BadParameter(str(e), "tools") from e
        return ChatSession(self, request, tokens)

    def _make(self, request: ChatCompletionRequest) -> Any:
        kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
        return self.parser(
            self.tokenizer, request.tools, chat_template_kwargs=kwargs, model_config=self.model_config
        )


@dataclass(frozen=True, slots=True)
class ChatSession:
    """One chat request whose output is parsed, as its parser has adjusted it."""

    parsing: ToolParsing
    request: ChatCompletionRequest
    tokens: list[int]

    def adjust(self, params: Any) -> None:
        """Sets what the parser needs in `params` (SamplingParams): special tokens in the text, and its grammar."""
        params.skip_special_tokens = self.request.skip_special_tokens
        structured = self.request.extract_structured_outputs()
        if structured is not None:
            params.structured_outputs = structured

    def choice(self) -> "ChoiceParser":
        """Returns a new parser for one choice."""
        return ChoiceParser(self, self.parsing._make(self.request))


class ChoiceParser:
    """Turns the outputs of one choice into OpenAI deltas."""

    def __init__(self, session: ChatSession, parser: Any) -> None:
        self._session = session
        self._parser = parser
        self._calls = 0

    def delta(self, text: str, token_ids: list[int], finish: str | None) -> tuple[bytes, str | None]:
        """Returns the delta as JSON (`{}` while the parser holds text back), and the finish reason that results. Raises
        ValueError for more than `MAX_CALLS` tool calls.
        """
        request = self._session.request
        message = None
        if text or token_ids or finish is not None:
            message = self._parser.parse_delta(
                text, token_ids, request, prompt_token_ids=self._session.tokens, finished=finish is not None
            )
        if message is None:
            body = b"{}"
        else:
            self._calls = max(self._calls, *(1 + call.index for call in message.tool_calls or ()), 0)
            if self._calls > MAX_CALLS:
                raise ValueError(f"there are more than {MAX_CALLS} tool calls")
            body = message.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
        if finish is not None and self._calls and not named:
            finish = "tool_calls"
        return body, finish
