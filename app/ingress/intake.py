"""Turns a plan into tokens: checks the model's name, renders the chat template, and tokenises the prompts."""

from collections.abc import Sequence
from typing import Any

from app.api.conversation import messages_for_template
from app.api.errors import ApiError, bad_request
from app.api.plan import Plan
from app.api.schema import ChatRequest
from app.ingress.config import IngressConfig
from app.ingress.tokenizer import TemplateError, TextCodec


class Intake:
    """Turns plans into tokens. It has no state beside its configuration; `encode` and `echoes` may run in a thread."""

    def __init__(self, config: IngressConfig, codec: TextCodec) -> None:
        self._config = config
        self.codec = codec

    def check(self, plan: Plan) -> None:
        """Raises `ApiError` 404 for a model that is not served."""
        names = self._config.served_names
        if plan.model and plan.model not in names:
            message = f"The model '{plan.model}' is not served here; there is {', '.join(names)}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_tools(self, plan: Plan, decoders: Sequence[tuple[str, ...]]) -> None:
        """Raises `ApiError` 400 if tool calls are asked for and no engine parses them, by the features of each engine
        that decodes. Where nothing is left that could decode, the request waits as any other does.
        """
        if (
            plan.engine_chat is not None
            and decoders
            and not any("tools" in features for features in decoders)
        ):
            message = "'tools': no engine here parses tool calls; leave them out."
            raise bad_request(message, "tools", "unsupported_parameter")

    def render(self, request: ChatRequest) -> str:
        """Returns the prompt of a conversation. Raises `ApiError` 400 where the template refuses it."""
        messages = messages_for_template(request)
        kwargs: dict[str, Any] = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        tools = request.tools if request.tool_choice != "none" else None
        goes_on = bool(request.continue_final_message)
        generate = request.add_generation_prompt is not False and not goes_on
        try:
            return self.codec.render_chat(messages, tools or None, generate, goes_on, kwargs)
        except TemplateError as error:
            message = f"The model's chat template refuses the conversation: {error}."
            raise bad_request(message, "messages") from None

    def encode(self, plan: Plan) -> list[list[int]]:
        """Returns the token ids of each prompt; a prompt that came as token ids stays as it is."""
        encode, special = self.codec.encode, plan.add_special_tokens
        return [encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in plan.prompts]

    def echoes(self, plan: Plan, tokens: list[list[int]]) -> list[tuple[str, str]]:
        """Returns the text of each prompt and of its first token, or an empty list if the answer echoes no prompt."""
        if not plan.echo:
            return []
        decode = self.codec.decode
        return [
            (prompt if isinstance(prompt, str) else decode(prompt), decode(ids[:1]))
            for prompt, ids in zip(plan.prompts, tokens, strict=True)
        ]
