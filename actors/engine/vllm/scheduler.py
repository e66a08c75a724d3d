"""vLLM's schedulers, which also take requests that another engine has begun (see `resume`)."""

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from actors.engine.vllm.resume import output_before

if TYPE_CHECKING:
    from vllm.v1.request import Request


class CoreScheduler(Scheduler):
    """vLLM's scheduler. A request whose parameters carry output starts with it, as if it had been preempted."""

    def add_request(self, request: "Request") -> None:
        output = output_before(request.sampling_params)
        if output and request.request_id not in self.requests:
            request.append_output_token_ids(output)
        super().add_request(request)

    def _get_local_prefix_cache_hit(self, request: "Request") -> Any:
        hit = super()._get_local_prefix_cache_hit(request)
        if hit[1] > request.num_prompt_tokens:
            # vLLM counts cached tokens of prompts only, and asserts that there are no others.
            request.prefill_stats = None
        return hit

    def _handle_blocked_waiting_request(self, request: "Request") -> bool:
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self._advance_grammar(request)
        return super()._handle_blocked_waiting_request(request)

    def _advance_grammar(self, request: "Request") -> None:
        """Leads a grammar that has just been compiled past the output that came before. If it does not accept that
        output, it takes the place of a grammar that does not compile, which fails the request.
        """
        output = output_before(request.sampling_params)
        structured = request.structured_output_request
        if not output or structured is None or not isinstance(structured.grammar, StructuredOutputGrammar):
            return
        if not self.structured_output_manager.accept_tokens(request, output):
            refused: Future[StructuredOutputGrammar] = Future()
            refused.set_exception(ValueError("the grammar does not accept the output of the first engine"))
            structured.grammar = refused


class AsyncCoreScheduler(CoreScheduler, AsyncScheduler):
    """vLLM's scheduler for asynchronous scheduling, with the additions of `CoreScheduler`."""
