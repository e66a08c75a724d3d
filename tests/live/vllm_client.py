"""The other end of vllm_host.py: starts one engine process, sends it messages, and collects what comes back."""

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import psutil

from actors.wire.messages import (
    Admitted,
    Decode,
    Failed,
    Message,
    Out,
    Prefill,
    PrefillDone,
    Resume,
    Status,
    Tokens,
)
from tests.live.serving import PATIENCE_S
from tests.processes import command_line, kill_all

HOST = Path(__file__).with_name("vllm_host.py")
ANSWERS = msgspec.msgpack.Decoder(Message | dict)


class Engine:
    """One engine process. Methods wait; each raises TimeoutError with what was seen when nothing comes."""

    def __init__(self, config: dict[str, Any], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(HOST), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": str(HOST.parents[2]), **environment},
            )
        self.largest_batch = 0  # pieces that came in one message
        self._changed = threading.Condition()
        self._seen: dict[str, list[Any]] = defaultdict(list)
        self._answers: dict[str, list[Any]] = defaultdict(list)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        while head := stdout.read(4):
            message = ANSWERS.decode(stdout.read(struct.unpack(">I", head)[0]))
            with self._changed:
                if isinstance(message, Tokens):
                    self.largest_batch = max(self.largest_batch, len(message.items))
                    for item in message.items:
                        self._seen[item.attempt_id].append(item)
                elif isinstance(message, dict):
                    self._answers[message["name"]].append(message["value"])
                else:
                    self._seen[message.attempt_id].append(message)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_ready(self, timeout_s: float) -> dict[str, float]:
        """Phases of the start."""
        self.phases: dict[str, float] = self._answer("ready", timeout_s)
        return self.phases

    def send(self, message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(struct.pack(">I", len(body)) + body)
        stdin.flush()

    def ask(self, what: str) -> Any:
        self.send(what)
        return self._answer(what, PATIENCE_S)

    def status(self) -> Status:
        return Status(**self.ask("status"))

    def seen(self, attempt_id: str) -> list[Any]:
        with self._changed:
            return list(self._seen[attempt_id])

    def wait_for(self, attempt_id: str, kind: Any, timeout_s: float = PATIENCE_S) -> Any:
        """The first message of one of the types `kind` about `attempt_id`."""
        return self._until(
            lambda: next((m for m in self._seen[attempt_id] if isinstance(m, kind)), None),
            timeout_s,
            f"{kind} of {attempt_id}",
            attempt_id,
        )

    def prefill(
        self,
        attempt_id: str,
        tokens: list[int],
        resume: Resume | None = None,
        params: dict[str, Any] | None = None,
    ) -> PrefillDone:
        self.send(Prefill(attempt_id, tokens, params or {}, PATIENCE_S, resume=resume))
        done = self.wait_for(attempt_id, (PrefillDone, Failed))
        assert isinstance(done, PrefillDone), done
        return done

    def decode(
        self, attempt_id: str, tokens: list[int], params: dict[str, Any], handle: bytes | None, **more: Any
    ) -> list[Out]:
        """Run a decode to its end; all its pieces."""
        self.send(Decode(attempt_id, tokens, params, handle, PATIENCE_S, **more))
        return self.finish(attempt_id, int(params.get("n", 1)))

    def finish(self, attempt_id: str, choices: int = 1) -> list[Out]:
        def ended() -> bool:
            failed = [m for m in self._seen[attempt_id] if isinstance(m, Failed)]
            assert not failed, failed
            return sum(1 for m in self._seen[attempt_id] if isinstance(m, Out) and m.finish) == choices

        self._until(ended, PATIENCE_S, f"the end of {attempt_id}", attempt_id)
        return [m for m in self.seen(attempt_id) if isinstance(m, Out)]

    def admitted(self, attempt_id: str) -> Admitted:
        return self.wait_for(attempt_id, Admitted)

    def until_status(self, holds: Any, timeout_s: float = PATIENCE_S) -> Status:
        """Ask for the status until `holds(status)`; the last one is in the error."""
        until_s = time.monotonic() + timeout_s
        while not holds(status := self.status()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"status stays at {status}")
            time.sleep(0.05)
        return status

    def until_idle(self, blocks: int, timeout_s: float = PATIENCE_S) -> Status:
        """Nothing runs, waits or is leased, and exactly `blocks` KV blocks are in use."""
        return self.until_status(
            lambda s: (s.running, s.waiting, s.leases, s.kv_blocks_used) == (0, 0, 0, blocks), timeout_s
        )

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes of the engine whose title has `name`: "EngineCore", or "Worker"."""
        return [child for child in self.children() if name in command_line(child)]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        """End the engine; kill what does not end in time."""
        if self.process.poll() is None:
            self.send("stop")
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                kill_all(self.children())
                self.process.kill()
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self, what: str, timeout_s: float) -> Any:
        self._until(lambda: self._answers[what], timeout_s, what)  # an answer may be an empty list
        return self._answers[what].pop(0)

    def _until(self, found: Any, timeout_s: float, what: str, attempt_id: str = "") -> Any:
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while not (value := found()):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self.process.poll() is not None:
                    seen = self._seen.get(attempt_id, [])[-3:]
                    tail = self._log.read_text(errors="replace")[-3000:]
                    raise TimeoutError(
                        f"no {what}; exit status {self.process.poll()}; seen {seen}; log ends:\n{tail}"
                    )
                self._changed.wait(min(left_s, 0.5))
        return value
