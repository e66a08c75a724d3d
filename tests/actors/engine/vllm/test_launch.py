"""Ports of NIXL's side channel: kept until the engine listens, and a taken one is said instead of waited for."""

import os
import socket
import threading
from pathlib import Path

import pytest
import zmq

from actors.engine.vllm.config import VllmEngineConfig
from actors.engine.vllm.engine import VllmEngine
from actors.engine.vllm.launch import (
    PhaseClock,
    core_phases,
    launch,
    prepare,
    reserve_ports,
    served_config,
    set_environment,
)
from actors.engine.vllm.stats import Hello, Ledger
from app.models import resolve

HOST = "127.0.0.1"


def test_reserved_ports_are_nobody_else_s_but_the_side_channel_can_listen_there() -> None:
    port, held = reserve_ports(HOST, 3)
    try:
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert port + 2 < first_given
        for taken in range(port, port + 3):
            with socket.socket() as other, pytest.raises(OSError):
                other.bind((HOST, taken))
            with zmq.Context() as context, context.socket(zmq.ROUTER) as channel:
                channel.bind(f"tcp://{HOST}:{taken}")
    finally:
        for one in held:
            one.close()
    with socket.socket() as other:
        other.bind((HOST, port))


def test_a_side_channel_s_port_that_is_taken_ends_the_start_with_a_hint() -> None:
    from actors.engine.vllm.connector.scheduler import SluiceScheduler

    scheduler = SluiceScheduler.__new__(SluiceScheduler)  # what is tested needs no engine
    scheduler._listen_error = None
    ready = threading.Event()
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        scheduler._nixl_handshake_listener({}, ready, threading.Event(), HOST, port)
    assert ready.is_set()
    assert "in use" in str(scheduler._listen_error)


def test_weights_end_before_the_kv_cache_and_the_slowest_worker_counts() -> None:
    engine = VllmEngine(VllmEngineConfig(engine_id="d", role="decode", model="m"))
    clock = engine._clock = PhaseClock()
    at_s = clock.started_at_s
    clock.end("imports", at_s + 10.0)
    # born, imports, weights, KV cache registered
    core_phases(
        clock,
        [
            Hello("h", 1, at_s + 11.0, at_s + 20.0, at_s + 26.0, at_s + 27.0),
            Hello("h", 1, at_s + 12.0, at_s + 18.0, at_s + 25.0, at_s + 30.0),
        ],
    )
    clock.end("core_ready", at_s + 32.0)
    clock.end("warm_up", at_s + 32.5)
    assert engine.phases == pytest.approx(
        {
            "imports": 10.0, "core_spawn": 2.0, "worker_imports": 8.0, "weights": 6.0, "kv_cache": 4.0,
            "core_ready": 2.0, "warm_up": 0.5,
        },
        abs=0.01,
    )  # fmt: skip
    assert engine.loading_s == pytest.approx((6.0, 6.5), abs=0.01)


def test_what_engines_get_by_default_gives_way_to_what_is_set() -> None:
    config = VllmEngineConfig(engine_id="d", role="decode", model="m")
    before = dict(os.environ)
    try:
        for given, expected in (None, "on"), ("off", "off"):
            os.environ.pop("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", None)
            if given is not None:
                os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = given
            set_environment(config, "cuda", 5600)
            assert os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == expected
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_nothing_is_pre_warmed_where_vllm_s_imports_depend_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.engine.vllm.launch.check_device", lambda device: None)
    monkeypatch.setattr("actors.engine.vllm.launch.gpu_models", lambda: ("NVIDIA H200", "NVIDIA L4"))
    with pytest.raises(
        ValueError, match=r"several models \(NVIDIA H200, NVIDIA L4\).* scaling\.prewarmed: 0"
    ):
        prepare(VllmEngineConfig(engine_id="d", role="decode", model="m", device="cuda"))


def test_an_engine_that_the_installed_vllm_cannot_run_is_refused_before_its_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.engine.vllm.config.installed_device", lambda: "cuda")
    config = VllmEngineConfig(engine_id="d", role="decode", model="m", device="cpu", side_channel_port=1)
    for start in prepare, lambda config: launch(config, Ledger.__new__(Ledger), PhaseClock()):
        with pytest.raises(ValueError, match=r"it has no GPU .* set engines\[\]\.num_gpus"):
            start(config)


def test_an_engine_takes_as_many_tokens_a_step_as_vllm_s_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    of_a_large_gpu = ({UsageContext.OPENAI_API_SERVER: 8192}, {})
    monkeypatch.setattr(EngineArgs, "get_batch_defaults", lambda *of: of_a_large_gpu)
    made = served_config({"model": str(resolve("smollm2-135m-instruct")), "max_num_seqs": 4})
    assert made.scheduler_config.max_num_batched_tokens == 8192
