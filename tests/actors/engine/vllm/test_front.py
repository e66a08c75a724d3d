"""The tokenizer is loaded while the core starts, and a failure of either side ends the other and is the one that is
raised. All parts are vLLM's own but the core.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine import async_llm, core_client

from actors.engine.vllm.front import made_beside_its_core
from actors.engine.vllm.stats import Ledger, stat_logger
from tests.actors.engine.vllm.small import SmallModel


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


class Core:
    """A core in the place of vLLM's: its process exists from `launched` on, and it is ready when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.ready, self.ended = threading.Event(), threading.Event()
        self.thread = ""
        monkeypatch.setattr(core_client, "launch_core_engines", self._launch)
        monkeypatch.setattr(async_llm, "EngineCoreClient", self)

    @contextlib.contextmanager
    def _launch(self) -> Iterator[Any]:
        self.engine_manager = self
        self.calls.append("launched")
        yield self
        while not self.ready.wait(0.01):
            if self.ended.is_set():
                raise RuntimeError("Engine core initialization failed.")

    def make_async_mp_client(self, vllm_config: Any, executor_class: Any, log_stats: bool) -> "Core":
        self.thread = threading.current_thread().name
        assert (executor_class.__name__, log_stats) == ("MultiprocExecutor", True)
        with core_client.launch_core_engines():  # type: ignore[call-arg, var-annotated]
            pass
        self.calls.append("client")
        return self

    # what AsyncLLM needs of a client

    engine_ranks_managed = (0,)

    def _start_mm_warmup(self) -> None:
        self.calls.append(f"warm-up of {type(self._renderer).__name__}")

    def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append("shutdown")
        self.ended.set()


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


def loading(monkeypatch: pytest.MonkeyPatch, core: Core, error: Exception | None = None) -> None:
    """Has the core be ready only once the tokenizer is loaded, or has loading it fail."""
    load = async_llm.renderer_from_config

    def renderer_from_config(*of: Any, **options: Any) -> Any:
        core.calls.append("tokenizer")
        if error is not None:
            raise error
        made = load(*of, **options)
        core.ready.set()
        return made

    monkeypatch.setattr(async_llm, "renderer_from_config", renderer_from_config)


def made(model: SmallModel) -> Any:
    ledger = Ledger(lambda transfer: None, lambda request: None)
    return made_beside_its_core(model.config, [stat_logger(ledger)])


def test_the_tokenizer_is_loaded_while_the_core_starts(
    monkeypatch: pytest.MonkeyPatch, model: SmallModel, core: Core
) -> None:
    """One after the other, the core would wait for the tokenizer without end."""
    loading(monkeypatch, core)
    before = async_llm.renderer_from_config, async_llm.EngineCoreClient, core_client.launch_core_engines
    llm = made(model)
    try:
        assert llm.engine_core is core
        assert llm.tokenizer is not None
        # the process first: the configuration goes to it as it is before the tokenizer
        assert core.calls == ["launched", "tokenizer", "client", "warm-up of HfRenderer"]
        # the kernel ends the core with the thread that started it
        assert core.thread == threading.current_thread().name
        assert core._renderer is llm.renderer
    finally:
        llm.shutdown()
    after = async_llm.renderer_from_config, async_llm.EngineCoreClient, core_client.launch_core_engines
    assert after == before


def test_a_tokenizer_that_cannot_be_loaded_ends_the_core(
    monkeypatch: pytest.MonkeyPatch, model: SmallModel, core: Core
) -> None:
    loading(monkeypatch, core, OSError("no tokenizer"))
    with pytest.raises(OSError, match="no tokenizer"):
        made(model)
    assert core.calls[:3] == ["launched", "tokenizer", "shutdown"]
    assert "client" not in core.calls


def test_a_core_that_cannot_start_is_what_is_raised(model: SmallModel, core: Core) -> None:
    core.ended.set()
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        made(model)


def test_no_core_is_started_for_a_configuration_that_is_refused_before(
    monkeypatch: pytest.MonkeyPatch, model: SmallModel, core: Core
) -> None:
    def refused() -> None:
        raise ValueError("no such logger")

    monkeypatch.setattr(async_llm, "load_stat_logger_plugin_factories", refused)
    with pytest.raises(ValueError, match="no such logger"):
        made(model)
    assert core.calls == []
