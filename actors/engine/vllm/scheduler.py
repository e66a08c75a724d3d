"""vLLM's schedulers, which also take requests that another engine has begun (see `resume`), and give requests blocks
that lie side by side (see `blocks`).
"""

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from actors.engine.vllm.blocks import allocate_by
from actors.engine.vllm.config import BLOCK_ALLOCATOR
from actors.engine.vllm.connector.prefix import borrows, forget
from actors.engine.vllm.resume import output_before

if TYPE_CHECKING:
    from vllm.v1.request import Request


class CoreScheduler(Scheduler):
    """vLLM's scheduler. A request whose parameters carry output starts with it, as if it had been preempted."""

    recompute_kv_load_failures: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        transfer = self.vllm_config.kv_transfer_config
        if transfer is not None:
            allocate_by(transfer.get_from_extra_config(BLOCK_ALLOCATOR, "stock"), self.kv_cache_manager)
            # vLLM frees blocks late only where the role reads. Here a prefill engine reads, too (a lent prefix).
            self.defer_block_free |= self.vllm_config.max_concurrent_batches > 1

    def add_request(self, request: "Request") -> None:
        output = output_before(request.sampling_params)
        if output and request.request_id not in self.requests:
            request.append_output_token_ids(output)
        super().add_request(request)

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        """Returns the requests that fail because their KV could not be read. A prefill does not fail for a lent prefix:
        it computes its whole prompt.
        """
        lent = {known for known in failed_req_ids & self.requests.keys() if self._forgets_prefix(known)}
        failing = super()._handle_failed_recving(failed_req_ids - lent)
        recomputes, self.recompute_kv_load_failures = self.recompute_kv_load_failures, True
        try:
            super()._handle_failed_recving(lent)
        finally:
            self.recompute_kv_load_failures = recomputes
        return failing

    def _forgets_prefix(self, request_id: str) -> bool:
        params = self.requests[request_id].kv_transfer_params
        if params is None or not borrows(params):
            return False
        forget(params)
        return True

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
