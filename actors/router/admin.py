"""Answers, as JSON, to the questions that an administrator asks the router through an ingress (`app.ingress.admin`).

    policy      the policies in use, with parameters and formula, and all policies to choose from
    set_policy  {"prefill": NAME | {"name", "params"}, "decode": .., "admission": .., "fairness": .., "flow": ..,
                "dispatch": {..}}: changes all of these or nothing
    explain     {"id"}: the decisions made for a request
    journal     {"tail": n}: the state of the event log, and its last n events
    facts       engines with the totals of their steps, and the network as configured and learnt
    assign      {"engine", "role", "duty"}: has one engine serve a role, or wait warm (`actors.router.assigning`)
    logs        the levels of the router's loggers
    set_logs    {"level", "logger", "access"}: changes the log lines of router, ingresses, engines, observers and
                autoscaler

A change lasts until the router restarts; a permanent one belongs in the configuration.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from actors.router.assigning import NotAssigned
from actors.router.clock import clock_s
from actors.router.decisions import DecisionLog, described
from actors.router.facts import FleetFacts
from actors.router.flows import FlowAgents, available
from actors.router.journal import RouterJournal
from actors.telemetry import logs
from actors.wire import messages as wire
from policies.admission.registry import ADMISSION
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.fairness.registry import FAIRNESS
from policies.journal.codec import CodecError, dumps, encoder, loads
from policies.routing.registry import DECODE, PREFILL
from policies.state import events as ev

log = logging.getLogger(__name__)

MAX_TAIL = 1000
"""Most events of the journal that one answer contains."""

NEWEST = 3
"""Number of recent request ids named in the answer to `explain` for an unknown request."""

_CONFIG = encoder(DispatchConfig)


class Refused(ValueError):
    """The router refuses to answer a question. The message says why, and `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RouterAdmin:
    """Answers the questions about one router. `feed` takes events for the dispatcher; `changed` runs after a change of
    policy; `assign` orders one engine to serve a role with a duty; `tell` sends a change of log lines to all processes
    and returns their number.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        decisions: DecisionLog,
        journal: RouterJournal | None,
        feed: Callable[[ev.Event], None],
        changed: Callable[[], None],
        flows: FlowAgents | None = None,
        facts: FleetFacts | None = None,
        assign: Callable[[object, object, object], dict[str, Any]] | None = None,
        tell: Callable[[wire.SetLogs], int] = lambda message: 0,
    ) -> None:
        self._assign, self._tell = assign, tell
        self._flows = FlowAgents() if flows is None else flows
        self._facts = facts
        self._dispatcher, self._decisions, self._journal = dispatcher, decisions, journal
        self._feed, self._changed = feed, changed

    def answer(self, message: wire.Admin) -> wire.AdminAnswer:
        """Returns the answer to a question. It never raises, since an error would end the ingress's connection and its
        requests.
        """
        try:
            status, text = 200, dumps(self._answer(message))
        except (Refused, NotAssigned) as refused:
            status, text = refused.status, dumps({"message": str(refused)})
        except Exception as error:  # a bug
            log.exception("the administrator's question %s cannot be answered", message.what)
            status = 500
            text = dumps({"message": f"the router cannot answer this: {error!r}; its log says more"})
        return wire.AdminAnswer(message.ask, status, text.encode("ascii"))

    def _answer(self, message: wire.Admin) -> dict[str, Any]:
        asked = _read(message.body)
        match message.what:
            case "policy":
                return self._policy()
            case "set_policy":
                self._set_policy(asked)
                return self._policy()
            case "explain":
                return self._explain(str(asked.get("id", "")))
            case "journal":
                return self._journal_status(asked.get("tail", 0))
            case "facts":
                if self._facts is None:
                    raise Refused(404, "this router knows no engines and no network")
                return self._facts.told()
            case "assign":
                if self._assign is None:
                    raise Refused(404, "this router has no engines to order")
                return self._assign(asked.get("engine"), asked.get("role"), asked.get("duty"))
            case "logs":
                return {"levels": logs.levels()}
            case "set_logs":
                return self._set_logs(asked)
            case "scale":
                raise Refused(404, "the autoscaler answers this, and the router does not")

    def _policy(self) -> dict[str, Any]:
        dispatcher = self._dispatcher
        assert _CONFIG is not None
        return {
            "prefill": described(dispatcher.prefill),
            "decode": described(dispatcher.decode),
            "admission": described(dispatcher.admission),
            "fairness": described(dispatcher.fairness),
            "dispatch": _CONFIG(dispatcher.config),
            "flow": self._flows.policy(),
            "available": {
                "prefill": {name: described(kind()) for name, kind in PREFILL.items()},
                "decode": {name: described(kind()) for name, kind in DECODE.items()},
                "admission": {name: described(kind()) for name, kind in ADMISSION.items()},
                "fairness": {name: described(kind()) for name, kind in FAIRNESS.items()},
                "flow": available(),
            },
        }

    def _set_policy(self, asked: Mapping[str, Any]) -> None:
        unknown = sorted(set(asked) - {"prefill", "decode", "admission", "fairness", "dispatch", "flow"})
        if unknown or not asked:
            what = f"{unknown[0]!r} is not known" if unknown else "nothing is asked for"
            raise Refused(400, f"{what}: give prefill, decode, admission, fairness, dispatch or flow")
        prefill, decode, admission, fairness, flow = (
            _choice(stage, asked) for stage in ("prefill", "decode", "admission", "fairness", "flow")
        )
        dispatch = _object(asked.get("dispatch") or {}, "dispatch")
        try:
            if flow is not None:
                self._flows.check(flow)
            if dispatch or not all(one is None for one in (prefill, decode, admission, fairness)):
                self._feed(ev.PoliciesChanged(clock_s(), prefill, decode, dispatch, admission, fairness))
            if flow is not None:
                self._flows.set_policy(flow)
        except ValueError as error:
            raise Refused(400, f"{error}; nothing was changed") from None
        self._changed()

    def _set_logs(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(asked) - {"level", "logger", "access"})
        if unknown or not set(asked) & {"level", "access"}:
            what = f"{unknown[0]!r} is not known" if unknown else "nothing is asked for"
            raise Refused(400, f"{what}: give level (with logger, for a part of them) or access")
        level, logger, access = asked.get("level"), asked.get("logger") or "", asked.get("access")
        if not isinstance(logger, str) or not isinstance(access, bool | None):
            raise Refused(400, "logger must be a name, and access true or false")
        try:
            logs.change(level, logger, access)
        except logs.BadLogs as error:
            raise Refused(400, f"{error}; nothing was changed") from None
        told = self._tell(wire.SetLogs(level, logger, access))
        log.info("an administrator set log level %s of %s, access lines %s", level, logger or "all", access)
        return {"levels": logs.levels(), "told": told}

    def _explain(self, request_id: str) -> dict[str, Any]:
        decisions = self._decisions.explain(request_id)
        if not decisions:
            newest = ", ".join(self._decisions.newest(NEWEST))
            raise Refused(
                404,
                f"no decision is known for {request_id[:80]!r}: the router keeps those of its last"
                f" {self._decisions.capacity} requests since it started ({self._decisions.requests} now"
                + (f"; the newest are {newest}" if newest else "")
                + "), and none that an ingress made without it",
            )
        return {
            "id": request_id,
            "decisions": decisions,
            "transfers": self._decisions.transfers(request_id),
            "flows": self._decisions.flows(request_id),
            "times": self._decisions.times(request_id),
        }

    def _journal_status(self, tail: object) -> dict[str, Any]:
        if self._journal is None:
            raise Refused(404, "the router keeps no journal: see router.journal in the configuration")
        if not isinstance(tail, int) or not 0 <= tail <= MAX_TAIL:
            raise Refused(400, f"tail is {tail!r}: it must be a whole number 0..{MAX_TAIL}")
        return {**self._journal.status(), "tail": [loads(line) for line in self._journal.tail(tail)]}


def _choice(stage: str, asked: Mapping[str, Any]) -> ev.PolicyChoice | None:
    given = asked.get(stage)
    if given is None:
        return None
    if isinstance(given, str):
        return ev.PolicyChoice(given)
    choice = _object(given, stage)
    if not isinstance(choice.get("name"), str) or set(choice) - {"name", "params"}:
        raise Refused(400, f'{stage} must be a policy\'s name, or {{"name": .., "params": {{..}}}}')
    return ev.PolicyChoice(choice["name"], _object(choice.get("params") or {}, f"{stage}.params"))


def _read(body: bytes) -> dict[str, Any]:
    try:
        return _object(loads(body.decode()) if body else {})
    except (CodecError, UnicodeDecodeError) as error:
        raise Refused(400, f"the question is {error}") from None


def _object(value: Any, what: str = "the question") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(400, f"{what} must be a JSON object")
    return value
