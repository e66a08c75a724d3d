"""Makes vLLM's AsyncLLM while its core starts, where vLLM makes the one first and then waits for the other.

AsyncLLM's constructor loads the tokenizer, copies it, and makes what reads requests and writes answers. Only then does
it start the core, and waits until that has its model. Neither side needs the other. Here the constructor runs in a
thread of its own. Where it would load the tokenizer, the calling thread starts the core, with the configuration as it
is by then, and the constructor goes on as soon as the core's process exists. Where it would start the core, it gets the
client of the one that has started.

The calling thread starts the core, because the kernel's parent-death signal is bound to the thread that does
(`plugin`).
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

END_S = 5.0
"""Seconds that the processes of a core get to end whose tokenizer cannot be loaded. ASSUMPTION: as they load, they end
at the first signal; vLLM kills those that do not."""


class _Start:
    """How far a start is, as both threads see it.

    `wanted`: the constructor needs the core, or it is `over`. `spawned`: the core's process exists, as `engines`, or
    cannot be made. `client` is that of the core that has started.
    """

    def __init__(self) -> None:
        self.wanted, self.spawned = threading.Event(), threading.Event()
        self.over = False
        self.engines: Any = None
        self.client: Future[Any] = Future()

    def give_up(self) -> None:
        """Ends the core's processes, so that nobody waits for a core that cannot be used."""
        if self.engines is not None and not self.client.done():
            self.engines.shutdown(timeout=END_S)


def made_beside_its_core(vllm_config: Any, stat_loggers: Sequence[Any]) -> Any:
    """Returns a ready AsyncLLM with these loggers. It blocks. Raises vLLM's error, whichever side has it."""
    from vllm.v1.engine import async_llm, core_client
    from vllm.v1.executor import Executor

    start, executor = _Start(), Executor.get_class(vllm_config)
    load, launch_cores, clients = (
        async_llm.renderer_from_config,
        core_client.launch_core_engines,
        async_llm.EngineCoreClient,
    )

    def renderer_from_config(*of: Any, **options: Any) -> Any:
        start.wanted.set()
        start.spawned.wait()
        if start.client.done():
            # raises if there is no core
            start.client.result()
        return load(*of, **options)

    def make_async_mp_client(*, log_stats: bool, renderer: Any, **_of: Any) -> Any:
        start.wanted.set()
        client = start.client.result()
        if not log_stats:
            raise RuntimeError("vLLM's core was started with statistics, and its owner wants none")
        client._renderer = renderer
        client._start_mm_warmup()
        return client

    @contextlib.contextmanager
    def launch_core_engines(*of: Any, **options: Any) -> Iterator[Any]:
        with launch_cores(*of, **options) as launched:
            start.engines = launched.engine_manager
            start.spawned.set()
            yield launched

    def construct() -> Any:
        try:
            return async_llm.AsyncLLM.from_vllm_config(
                vllm_config, stat_loggers=list(stat_loggers), disable_log_stats=True
            )
        except BaseException:
            start.give_up()
            raise
        finally:
            start.over = True
            start.wanted.set()

    replaced = SimpleNamespace(make_async_mp_client=make_async_mp_client)
    with (
        _replacing(async_llm, renderer_from_config=renderer_from_config, EngineCoreClient=replaced),
        _replacing(core_client, launch_core_engines=launch_core_engines),
        ThreadPoolExecutor(1, thread_name_prefix="vllm-front") as pool,
    ):
        front = pool.submit(construct)
        start.wanted.wait()
        if not start.over:
            try:
                start.client.set_result(clients.make_async_mp_client(vllm_config, executor, log_stats=True))
            except BaseException as error:
                start.client.set_exception(error)
            finally:
                start.spawned.set()
        try:
            return front.result()
        except BaseException:
            if start.client.done() and start.client.exception() is None:
                start.client.result().shutdown(timeout=END_S)
            raise


@contextlib.contextmanager
def _replacing(module: Any, **names: Any) -> Iterator[None]:
    """Has the module know other objects by these names in this context."""
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
