"""vLLM engines whose processes stand still or die: a stalled core, and lenders that vanish in the middle of a read.

UCX moves KV over TCP here, as between nodes; between processes of one node it would copy a stopped worker's memory
without its help.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from actors.engine.watchdog import FIRST_STEPS
from actors.wire.messages import Decode, Failed, Out, Prefill, PrefillDone
from app.models import resolve
from tests.actors.engine.rig import Client
from tests.live.serving import PATIENCE_S, ROOT
from tests.live.vllm_app import BLOCK, COMPUTING, CORE_PROCESSES, MODEL, TCP, engine
from tests.live.vllm_client import Engine
from tests.live.vllm_pair.pair import START_S, fresh, text
from tests.processes import command_line, kill_all, still_running

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(900)]

STALL_S = 6.0
HANG_S = 40.0
"""Limit of a start that hangs. On an idle machine the core hangs by then; on a busy one it may still import."""
REPLACE_AFTER = 3.0
READ_TIMEOUT_S = 4.0
HOLD_READS_S = 3.0


def config(name: str, role: str, core: int, **options: Any) -> dict[str, Any]:
    return engine(core, engine_id=name, role=role, **options)


# ------------------------------------------------------------------------------------------------------ a stalled core


async def until(holds: Any, what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.02)


async def failures(client: Client, attempt_ids: list[str]) -> set[tuple[str, bool]]:
    """(code, retryable) of the failures of these attempts."""

    def failed() -> list[Failed]:
        return [m for a in attempt_ids for m in client.of(a) if isinstance(m, Failed)]

    await until(lambda: len(failed()) == len(attempt_ids), f"{failed()}")
    return {(m.code, m.retryable) for m in failed()}


@pytest.mark.nightly
async def test_a_core_that_stands_still_gives_its_work_away_and_is_replaced_in_the_end(
    tmp_path: Path,
) -> None:
    """Stopped and continued, the core is ready again; stopped for good, it is killed with its workers."""
    address, log = f"unix:{tmp_path}/e.sock", (tmp_path / "e.log").open("wb")
    options = config("e", "colocated", 0, stall_s=STALL_S, replace_after_stalls=REPLACE_AFTER)
    own = {key: options.pop(key) for key in ("engine_id", "role")}
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "actors.engine.host", "--kind", "vllm", "--id", own["engine_id"],
        "--role", own["role"], "--listen", address, "--config", json.dumps(options),
        stdout=asyncio.subprocess.PIPE, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    children: list[psutil.Process] = []
    try:
        assert host.stdout is not None
        async with asyncio.timeout(START_S):
            while not (await host.stdout.readline()).startswith(b"ready "):
                assert host.returncode is None, (tmp_path / "e.log").read_text()[-3000:]
        children = psutil.Process(host.pid).children(recursive=True)
        core = next(child for child in children if "EngineCore" in command_line(child))
        tree = [core, *core.children(recursive=True)]
        client = Client()
        await client.connect((address,))
        # The first steps may compile, so their limit is longer.
        client.decode("first", fresh(20), max_tokens=2 * FIRST_STEPS, ignore_eos=True, timeout_s=PATIENCE_S)
        await client.text("first")

        async def run(names: list[str]) -> None:
            for name in names:
                client.decode(name, fresh(20), max_tokens=1400, ignore_eos=True, timeout_s=PATIENCE_S)
            await until(lambda: all(client.outs(name) for name in names), "running decodes")

        await run(["a", "b", "c"])
        core.suspend()
        stopped_s = time.monotonic()
        assert await failures(client, ["a", "b", "c"]) == {("stalled", True)}
        print(f"\nstalled after {time.monotonic() - stopped_s:.1f} s; stall_s is {STALL_S}")
        client.decode("refused", fresh(20))
        assert await failures(client, ["refused"]) == {("stalled", True)}
        core.resume()

        async def taken(name: str) -> bool:
            client.decode(name, fresh(20), max_tokens=4, ignore_eos=True, timeout_s=PATIENCE_S)
            await until(lambda: client.of(name), name)
            return isinstance(client.of(name)[0], Failed)

        tries = 0
        while await taken(f"again-{tries}"):
            tries += 1
            assert tries < 200
            await asyncio.sleep(0.2)
        await client.text(f"again-{tries}")
        assert sum(out.n_tokens for out in client.outs(f"again-{tries}")) == 4

        await run(["d"])
        core.suspend()
        stopped_s = time.monotonic()
        assert await failures(client, ["d"]) == {("stalled", True)}
        loop = asyncio.get_running_loop()
        assert len(tree) >= CORE_PROCESSES
        assert await loop.run_in_executor(None, still_running, tree, PATIENCE_S) == []
        print(f"killed after {time.monotonic() - stopped_s:.1f} s; {REPLACE_AFTER} times stall_s")
        # The engine looks at its core from time to time, so its state follows the death of the processes.
        end_s, tries = time.monotonic() + PATIENCE_S, 0
        while True:
            client.decode(f"dead-{tries}", fresh(20))
            seen = await failures(client, [f"dead-{tries}"])
            if seen != {("stalled", True)} or time.monotonic() > end_s:
                break
            tries += 1
            await asyncio.sleep(0.1)
        assert seen == {("engine_dead", True)}
    finally:
        if host.returncode is None:
            host.terminate()
            async with asyncio.timeout(PATIENCE_S):
                await host.wait()
        log.close()
    assert still_running(children, timeout_s=60) == []


@pytest.mark.nightly
async def test_a_core_that_never_answers_fails_the_start(tmp_path: Path) -> None:
    """The core hangs before it loads the model; the start fails, and no process is left."""
    options = config("h", "colocated", 0, start_limit_s=HANG_S)
    own = {key: options.pop(key) for key in ("engine_id", "role")}
    path = f"{Path(__file__).with_name('faulty_vllm')}{os.pathsep}{ROOT}"
    with (tmp_path / "h.log").open("wb") as log:
        host = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "actors.engine.host", "--kind", "vllm", "--id", own["engine_id"],
            "--role", own["role"], "--listen", f"unix:{tmp_path}/h.sock", "--config", json.dumps(options),
            stdout=asyncio.subprocess.PIPE, stderr=log,
            env={**os.environ, "PYTHONPATH": path, "SLUICE_TEST_HANGING_CORE": "1"},
        )  # fmt: skip
        children: list[psutil.Process] = []
        try:
            async with asyncio.timeout(START_S + HANG_S):
                while host.returncode is None:
                    children += psutil.Process(host.pid).children(recursive=True)
                    await asyncio.sleep(0.5)
        except psutil.NoSuchProcess:
            await host.wait()
        finally:
            if host.returncode is None:
                host.kill()
                await host.wait()
    said = (tmp_path / "h.log").read_text()
    assert host.returncode == 1, said[-3000:]
    assert "set start_limit_s" in said
    assert still_running(children, timeout_s=60) == []


# -------------------------------------------------------------------------------------- lenders that vanish in a read


def environment(word: str) -> dict[str, str]:
    """KV over TCP, and a core in which no grammar that contains `word` compiles."""
    path = f"{Path(__file__).with_name('faulty_vllm')}{os.pathsep}{ROOT}"
    return {"UCX_TLS": TCP, "PYTHONPATH": path, "SLUICE_TEST_BROKEN_GRAMMAR": word}


def object_with(name: str, **more: Any) -> dict[str, Any]:
    """Sampling fields that ask for an object with the integer field `name`."""
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": wanted, "max_tokens": 40, "temperature": 0.0, **more}


class Lent:
    """Prefill engine `p` and decode engine `d`, which holds each read for a while before it begins."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.lenders = 0
        held = {"hold_reads_s": HOLD_READS_S, "read_timeout_s": READ_TIMEOUT_S}
        self.p = self._lender()
        self.d = Engine(
            config("d", "decode", 1, connector_args=held), directory / "d.log", **environment("in_decode")
        )

    def _lender(self) -> Engine:
        self.lenders += 1
        return Engine(
            config("p", "prefill", 0), self._directory / f"p{self.lenders}.log", **environment("in_prefill")
        )

    def new_lender(self) -> None:
        self.p.stop()
        self.p = self._lender()
        self.p.wait_ready(START_S)

    def held_read(self, attempt_id: str, tokens: list[int], **params: Any) -> None:
        """Begins a decode, up to the moment in which its read is held."""
        done = self.p.prefill(attempt_id, tokens)
        self.d.send(Decode(attempt_id, tokens, {"max_tokens": 4, **params}, done.handle, PATIENCE_S))
        self.d.until_status(lambda s: s.kv_blocks_used > 0)

    def works(self, attempt_id: str) -> None:
        tokens = fresh(BLOCK + 5)
        done = self.p.prefill(attempt_id, tokens)
        pieces = self.d.decode(attempt_id, tokens, {"max_tokens": 4, "ignore_eos": True}, done.handle)
        assert sum(piece.n_tokens for piece in pieces) == 4
        self.p.until_idle(0)
        self.d.until_idle(0)


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lent]:
    lent = Lent(tmp_path_factory.mktemp("lent"))
    try:
        lent.p.wait_ready(START_S)
        lent.d.wait_ready(START_S)
        lent.works("warm")
        yield lent
    finally:
        lent.p.stop()
        lent.d.stop()


def test_a_read_from_a_stopped_lender_fails_its_request_and_frees_both_sides_in_the_end(lent: Lent) -> None:
    """The request learns of it in time; its blocks wait for the read, which ends when the lender goes on."""
    overdue = lent.d.ask("metrics")["transfers_overdue"]
    lent.held_read("stopped", fresh(2 * BLOCK + 3))
    (worker,) = lent.p.processes(COMPUTING)
    worker.suspend()
    began_s = time.monotonic()
    try:
        failed = lent.d.wait_for("stopped", (Failed, Out))
        print(
            f"\nfailed after {time.monotonic() - began_s:.1f} s; the read was held for up to {HOLD_READS_S}"
        )
        assert isinstance(failed, Failed), failed
        assert (failed.code, failed.task, failed.retryable) == ("kv_load", "decode", True)
        # Nobody may use the blocks while the read can still write them.
        assert lent.d.status().kv_blocks_used == 3
        assert lent.d.ask("metrics")["transfers_overdue"] == overdue + 1
        # The engine serves others meanwhile.
        assert lent.d.decode("alone", fresh(30), {"max_tokens": 8, "ignore_eos": True}, None)[-1].finish
    finally:
        worker.resume()
    lent.p.until_idle(0)
    lent.d.until_idle(0)
    lent.works("after-stop")


def refused_prefill(lent: Lent, attempt_id: str, params: dict[str, Any]) -> Failed:
    lent.p.send(Prefill(attempt_id, fresh(20), params, PATIENCE_S))
    failed = lent.p.wait_for(attempt_id, (Failed, PrefillDone))
    assert isinstance(failed, Failed), failed
    lent.p.until_idle(0)
    return failed


def test_a_grammar_that_does_not_compile_is_the_request_s_fault_at_prefill(lent: Lent) -> None:
    """The engine's own check passes; its core fails."""
    failed = refused_prefill(lent, "broken", object_with("in_prefill"))
    assert (failed.code, failed.task, failed.retryable, failed.param) == (
        "bad_request", "prefill", False, "response_format",
    )  # fmt: skip


def test_what_only_a_decode_looks_at_is_refused_by_the_prefill(lent: Lent) -> None:
    for name, value in (("logit_bias", {"99999999": 1.0}), ("top_p", 7.0), ("n", 0)):
        failed = refused_prefill(lent, f"wrong-{name}", {name: value})
        assert (failed.code, failed.retryable) == ("bad_request", False)


def test_a_grammar_that_fails_after_the_prefill_is_no_failure_of_the_transfer(lent: Lent) -> None:
    """The decode engine's core compiles what the prefill engine's compiled, and fails: another engine would, too."""
    params, tokens = object_with("in_decode"), fresh(BLOCK + 20)
    lent.p.send(Prefill("late", tokens, params, PATIENCE_S))
    done = lent.p.wait_for("late", (Failed, PrefillDone))
    assert isinstance(done, PrefillDone), done
    lent.d.send(Decode("late", tokens, params, done.handle, PATIENCE_S))
    failed = lent.d.wait_for("late", (Failed, Out))
    assert isinstance(failed, Failed), failed
    assert (failed.code, failed.retryable, failed.param) == ("bad_request", False, "response_format")
    lent.d.until_idle(0)
    # The lender hears that nobody will read.
    lent.p.until_idle(0)


@pytest.mark.parametrize("inside", [False, True], ids=["behind a word", "inside a character"])
def test_a_schema_is_obeyed_after_its_prefill_has_compiled_it(lent: Lent, inside: bool) -> None:
    """The answer begins with its object, even where the prompt ends inside a character, and is the text of its ids."""
    tokenizer = Tokenizer.from_file(str(resolve(MODEL) / "tokenizer.json"))
    last = tokenizer.encode("\N{GRINNING FACE}" if inside else "JSON").ids[0]
    params, tokens, name = object_with("count"), [*fresh(BLOCK + 20), last], f"schema-{inside}"
    lent.p.send(Prefill(name, tokens, params, PATIENCE_S))
    done = lent.p.wait_for(name, (Failed, PrefillDone))
    assert isinstance(done, PrefillDone), done
    pieces = lent.d.decode(name, tokens, params, done.handle)
    ids = [token for piece in pieces for token in piece.token_ids or []]
    assert tokenizer.decode(ids).lstrip().startswith("{")
    assert text(pieces) == tokenizer.decode(ids)
    lent.p.until_idle(0)
    lent.d.until_idle(0)


def test_a_read_from_a_killed_lender_fails_its_request_and_its_successor_serves(lent: Lent) -> None:
    """A read that a dead peer leaves ends as an error, so nothing is kept for it."""
    lent.held_read("killed", fresh(2 * BLOCK + 3))
    kill_all(lent.p.children())
    failed = lent.d.wait_for("killed", (Failed, Out))
    assert isinstance(failed, Failed), failed
    assert (failed.code, failed.task, failed.retryable) == ("kv_load", "decode", True)
    lent.d.until_idle(0)
    lent.new_lender()
    lent.works("after-kill")
