"""Turns a plan into tokens: checks the model's name, renders the chat template, and tokenises the prompts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from app.api.conversation import messages_for_template
from app.api.errors import ApiError, bad_request
from app.api.plan import Plan
from app.api.schema import ChatRequest
from app.ingress.config import IngressConfig
from app.ingress.tokenizer import TemplateError, TextCodec


class Prompts(NamedTuple):
    """The prompts of a request, ready for the engines: token ids and max_tokens of each.

    `echoes` has the text of each prompt and of its first token, and is empty if the answer echoes no prompts.
    """

    tokens: list[list[int]]
    budgets: list[int]
    echoes: list[tuple[str, str]]


class Intake:
    """Turns plans into tokens. It has no state beside its configuration; `prepare` may run in a thread."""

    def __init__(self, config: IngressConfig, codec: TextCodec) -> None:
        self._config = config
        self.codec = codec

    def check(self, plan: Plan) -> None:
        """Raises `ApiError` 404 for a model that is not served."""
        names = self._config.served_names
        if plan.model and plan.model not in names:
            message = f"The model '{plan.model}' is not served here; there is {', '.join(names)}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_tools(self, decoders: Sequence[tuple[str, ...]]) -> None:
        """Raises `ApiError` 400 for a request that asks for tool calls if no engine parses them, by the features of
        each engine that decodes. Where nothing is left that could decode, the request waits as any other does.
        """
        if decoders and not any("tools" in features for features in decoders):
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
            raise bad_request(message, "messages", "invalid_value") from None

    def fewest_tokens(self, plan: Plan) -> int:
        """Returns a number of tokens that the prompts of a plan have at least together, without tokenising them; 0 for
        a conversation that is not rendered yet.
        """
        fewest = self.codec.fewest_tokens
        return sum(fewest(prompt) if isinstance(prompt, str) else len(prompt) for prompt in plan.prompts)

    def check_lengths(self, plan: Plan, context: int) -> None:
        """Raises `ApiError` 400 if a prompt is too long for the context by its length alone."""
        plan.check_lengths(self.codec.fewest_tokens, context)

    def prepare(self, plan: Plan, context: int) -> Prompts:
        """Returns the tokens of a plan, which must fit the context. Renders a conversation that is not rendered yet.

        Prompts that came as token ids stay as they are. Raises `ApiError` 400. The caller has checked the lengths of
        long prompts.
        """
        if not plan.prompts and plan.request is not None:
            plan.prompts = [self.render(plan.request)]
            self.check_lengths(plan, context)
        encode, special = self.codec.encode, plan.add_special_tokens
        tokens = [encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in plan.prompts]
        budgets = plan.fit(tokens, context, self.codec.vocab_size)
        return Prompts(tokens, budgets, self._echoes(plan, tokens) if plan.echo else [])

    def _echoes(self, plan: Plan, tokens: list[list[int]]) -> list[tuple[str, str]]:
        decode = self.codec.decode
        return [
            (prompt if isinstance(prompt, str) else decode(prompt), decode(ids[:1]))
            for prompt, ids in zip(plan.prompts, tokens, strict=True)
        ]
