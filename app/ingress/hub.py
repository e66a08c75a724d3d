"""The hub of one ingress replica: it owns the links and the live jobs, and carries messages between them.

It is the live `job.Ports`. Everything runs on one event loop in callbacks; the only timers are two for the
whole replica: progress to the router (batched) and the sweep over deadlines.

Without a router each job is decided here (`fallback`). This is counted, and `/sluice/status` shows it: it is a
degraded mode, not a quiet one.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from actors.wire.channel import Channel, Identity
from actors.wire.kv import pack_hashes
from actors.wire.link import Link
from actors.wire.messages import (
    AdminAnswer,
    Admitted,
    EngineInfo,
    Failed,
    Fleet,
    FleetStatus,
    Message,
    PrefillDone,
    Progress,
    Reject,
    RouteDecode,
    RoutePrefill,
    Tokens,
    Transferred,
)
from app.ingress import fallback
from app.ingress.admin_calls import AdminCalls
from app.ingress.config import IngressConfig
from app.ingress.hints import hints_of
from app.ingress.job import Job
from app.ingress.job_parts import EngineFailed, EngineLost, RouterLost, State, Work
from app.ingress.links import EngineLink, EngineLinks
from app.ingress.metrics import IngressMetrics
from policies.engine_model.blocks import block_hashes

log = logging.getLogger(__name__)


class Hub:
    """`start` connects; `fleet` and `fleet_status` are the router's last words (None before the first)."""

    def __init__(
        self,
        config: IngressConfig,
        me: Identity,
        find_router: Callable[[], Awaitable[tuple[str, ...]]],
        metrics: IngressMetrics,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.max_retries = config.max_retries
        self.lease_margin_s = config.lease_margin_s
        self.jobs: dict[str, Job] = {}
        self.fleet: Fleet | None = None
        self._was_whole = False
        self._salt = (me.secret or b"sluice")[:64]
        self.fleet_status: FleetStatus | None = None
        self._engines = EngineLinks(me, self._from_engine, self._engine_lost)
        self._router = Link(
            me, find_router, self._from_router, self._router_up, self._router_down, name="router"
        )
        self._admin_calls = AdminCalls(self._router.send)
        self.ask_router = self._admin_calls.call
        self._epochs = itertools.count(1)
        self._epoch: int | None = None
        self._context_tokens: int | None = None
        self._attempt_prefix = secrets.token_hex(4)
        self._attempt_ids = itertools.count(1)
        self._admitted: list[str] = []
        self._transferred: list[tuple[str, int, float, int, float]] = []  # the last: when it ended
        self._progressed: set[Job] = set()
        self._progress_timer: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.now_s = time.monotonic  # uvloop's own clock has a resolution of 1 ms

    async def start(self) -> None:
        """Connects in the background; `ready()` says when requests can be served."""
        self._router.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Cancels what still runs and closes all links. Idempotent."""
        self._stopping = True
        for job in list(self.jobs.values()):
            job.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._progress_timer is not None:
            self._progress_timer.cancel()
        await self._router.stop()
        await self._engines.stop()

    # ----------------------------------------------------------------------------------------- what others ask

    def ready(self) -> str | None:
        """None if a request can be served now, else why not.

        At first that takes a colocated engine, or a prefill and a decode engine of one group. Afterwards a decode
        engine is enough: it computes prompts itself while the prefill tier is away.
        """
        if self.fleet is None:
            return "the router has not answered yet"
        infos = [link.info for link in self._engines.all() if link.connected and link.info.state == "ready"]
        if not infos:
            return "no engine is ready"
        groups = {
            role: {i.group for i in infos if i.role == role} for role in ("prefill", "decode", "colocated")
        }
        if groups["colocated"] or groups["prefill"] & groups["decode"]:
            self._was_whole = True
        if not groups["colocated"] and not groups["decode"]:
            return "no engine that can decode is ready"
        prefill_expected = (
            any(info.role == "prefill" for info in self.fleet.engines) or self.config.expects_prefill
        )
        if prefill_expected and not self._was_whole:
            return "no prefill engine is ready"
        return None

    def engines(self) -> list[EngineInfo]:
        """The engines of the fleet, by id."""
        return [link.info for link in self._engines.all()]

    def context_tokens(self) -> int | None:
        """The least context of all engines: what every one of them can serve. None before the first engine."""
        return self._context_tokens

    def router_connected(self) -> bool:
        return self._epoch is not None

    # ------------------------------------------------------------------------------------------- Ports of jobs

    def new_attempt_id(self, work: Work) -> str:
        return f"{work.id or self._attempt_prefix}-{next(self._attempt_ids):x}"

    def register(self, job: Job) -> None:
        self.jobs[job.attempt_id] = job

    def forget(self, job: Job, outcome: str) -> None:
        del self.jobs[job.attempt_id]
        self._progressed.discard(job)
        self.metrics.job_closed(job, outcome)

    def hints_of(self, work: Work) -> bytes:
        """What the router's predictors want to know of a request; nothing where there are none."""
        if self.fleet is None or not self.fleet.wants_hints:
            return b""
        return hints_of(work, self.config.served_names[0], self._salt)

    def block_hashes_of(self, work: Work) -> tuple[bytes, int]:
        """Hashes of the prompt's KV blocks that a prefix cache can serve, where the router's policies look at hits.

        The last token is always computed, so a block that ends with it is none of them; a prompt whose own logprobs
        are asked for is computed whole.
        """
        size = None if self.fleet is None else self.fleet.block_tokens
        if size is None or work.terms.local:
            return b"", 0
        return pack_hashes(block_hashes(work.tokens[:-1], size)), size

    def router_epoch(self) -> int | None:
        return self._epoch

    def to_router(self, message: Message) -> None:
        self._router.send(message)

    def to_engine(self, engine_id: str, job: Job, message: Message) -> bool:
        link = self._engines.attached(engine_id, job.attempt_id)
        if link is None or not link.send(message):
            return False
        link.jobs[job.attempt_id] = job
        return True

    def leave_engine(self, engine_id: str, job: Job) -> None:
        link = self._engines.attached(engine_id, job.attempt_id)
        if link is not None:
            link.jobs.pop(job.attempt_id, None)

    def admitted(self, job: Job) -> None:
        self.metrics.job_admitted(job)
        self._admitted.append(job.attempt_id)
        if job.handle is not None and self.fleet is not None and self.fleet.wants_transfers:
            times = job.times
            item = (
                job.attempt_id,
                times.transfer_bytes,
                times.transfer_s or 0.0,
                times.descriptors,
                self.now_s(),
            )
            self._transferred.append(item)
        self._schedule_progress()

    def retried(self, job: Job, stage: str, code: str) -> None:
        self.metrics.retries.labels(stage, code).inc()
        log.warning(
            "retry of a request after a failed %s (%s), now avoiding %s",
            stage,
            code,
            ", ".join(job.avoid) or "no engine",
        )

    def transfer_failed(self, job: Job) -> None:
        self.metrics.transfer_failures.inc()

    def refused(self, job: Job, event: object) -> None:
        self.metrics.refused_events.inc()
        log.debug("job %s in state %s refused %s", job.attempt_id, job.state.value, type(event).__name__)

    def choose_prefill(self, job: Job) -> RoutePrefill | None:
        """Our own decision, counted; None where no engine serves."""
        route = fallback.choose_prefill(self._engines.all(), job)
        if route is not None:
            self.metrics.fallbacks.labels("prefill").inc()
        return route

    def choose_decode(self, job: Job) -> RouteDecode | None:
        """Our own decision, counted; None where no engine serves."""
        assert job.prefill_engine is not None
        holder = self._engines.attached(job.prefill_engine, job.attempt_id)
        route = (
            None if holder is None else fallback.choose_decode(self._engines.all(), holder.info.group, job)
        )
        if route is not None:
            self.metrics.fallbacks.labels("decode").inc()
        return route

    # ------------------------------------------------------------------------------------------------ engines

    def _from_engine(self, link: EngineLink, message: Message) -> None:
        if isinstance(message, Tokens):
            self._tokens(message)
        elif isinstance(message, (PrefillDone, Admitted)):
            self._to_job(message.attempt_id, message)
        elif isinstance(message, Failed):
            self._to_job(message.attempt_id, EngineFailed(link.info.id, message))
        else:
            raise ValueError(f"an ingress does not take {type(message).__name__}")

    def _tokens(self, message: Tokens) -> None:
        jobs, progressed = self.jobs, self._progressed
        for out in message.items:
            job = jobs.get(out.attempt_id)
            if job is None:
                continue  # its cancellation is on the way
            if job.state is State.DECODING:
                job.output(out)
            else:
                job.on(out)
            if job.state is State.DECODING:
                progressed.add(job)
        if progressed:
            self._schedule_progress()

    def _to_job(self, attempt_id: str, event: Any) -> None:
        job = self.jobs.get(attempt_id)
        if job is not None:
            job.on(event)

    def _engine_lost(self, link: EngineLink, reason: str) -> None:
        jobs, link.jobs = list(link.jobs.values()), {}
        if jobs:
            log.warning("engine %s lost (%s) with %d requests", link.info.id, reason, len(jobs))
        for job in jobs:
            if self.jobs.get(job.attempt_id) is job:
                job.on(EngineLost(link.info.id, reason))

    # ------------------------------------------------------------------------------------------------- router

    def _from_router(self, _: Channel, message: Message) -> None:
        match message:
            case RoutePrefill() | RouteDecode() | Reject():
                self._to_job(message.attempt_id, message)
            case FleetStatus():
                self.fleet_status = message
            case AdminAnswer():
                self._admin_calls.answer(message)
            case Fleet():
                self.fleet = message
                self._engines.update(message.engines)
                if message.engines:  # a router just restarted may know none yet
                    self._context_tokens = min(info.max_model_len for info in message.engines)
            case _:
                raise ValueError(f"an ingress does not take {type(message).__name__} from a router")

    def _router_up(self, _: Channel) -> None:
        self._epoch = next(self._epochs)
        for job in list(self.jobs.values()):
            job.router_up(self._epoch)

    def _router_down(self, reason: str) -> None:
        self._epoch = None
        self._admin_calls.lost()
        self._admitted.clear()
        if self._stopping:
            return
        log.warning("router lost (%s): deciding %d requests here until it is back", reason, len(self.jobs))
        for job in list(self.jobs.values()):
            job.on(RouterLost())

    def _schedule_progress(self) -> None:
        if self._progress_timer is None:
            self._progress_timer = self._loop.call_later(self.config.progress_interval_s, self._send_progress)

    def _send_progress(self) -> None:
        self._progress_timer = None
        items = [(attempt_id, "admitted", 0) for attempt_id in self._admitted if attempt_id in self.jobs]
        items += [(job.attempt_id, "tokens", job.output_tokens) for job in self._progressed]
        transferred, self._transferred = self._transferred, []
        self._admitted.clear()
        self._progressed.clear()
        if items and self._epoch is not None:
            self._router.send(Progress(items))
        if transferred and self._epoch is not None:
            now_s = self.now_s()
            self._router.send(Transferred([(*item, now_s - ended_s) for *item, ended_s in transferred]))  # type: ignore[misc]

    # -------------------------------------------------------------------------------------------------- sweep

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_interval_s)
            try:
                self._engines.sweep(self.config.sweep_interval_s)
                now_s = self.now_s()
                for job in list(self.jobs.values()):
                    job.sweep(now_s)
            except Exception:  # a bug; without this task no request would ever expire
                self.metrics.internal_errors.inc()
                log.exception("the sweep failed; it is tried again in %g s", self.config.sweep_interval_s)
