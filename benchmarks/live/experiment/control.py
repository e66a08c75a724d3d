"""The controls with which an experiment changes an application and puts it back: policies, counts, roles, duties.

Policies and numbers go through the ingress's endpoints for administrators, by the SDK. Single engines are changed
through the dashboard (`PUT /api/engines/ID`), because the ingress has no endpoint for them. An engine is killed by a
signal to its process, which must be one of this user's on this machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
import psutil

from benchmarks import certificates
from benchmarks.live.experiment.plan import Action, Arm, Plan, Policies, shown
from sluice import NotFoundError, Sluice, SluiceError, Timeouts
from sluice._admin_key import key_of_this_machine
from sluice.types import EngineStatus, Scaling, Status

LIMITS = Timeouts(connect_s=3.0, read_s=15.0, total_s=30.0)
ANSWER_S = 15.0


class ControlError(Exception):
    """Something cannot be done to the application; the message says why, and what to do."""


class RefusedOrderError(ControlError):
    """The application refuses an order to one engine, perhaps only in its present state."""


class Control:
    """The controls of one application: `url` is its public port, `dashboard` the address of its page, if it has one.

    `key` is an admin key; without one SLUICE_ADMIN_KEY or the key file of this machine counts, and is in `key` then.
    """

    def __init__(self, url: str | None, key: str | None = None, dashboard: str | None = None) -> None:
        self._told = certificates.client(url)
        self.client = Sluice(url, admin_key=key, timeouts=LIMITS, http_client=self._told)
        self.url = self.client.base_url
        self.dashboard = None if dashboard is None else dashboard.rstrip("/")
        self.key = key or os.environ.get("SLUICE_ADMIN_KEY") or key_of_this_machine(self.url)
        self._http = self.of_dashboard()

    def close(self) -> None:
        """Ends all connections."""
        self.client.close()
        self._http.close()
        if self._told is not None:
            self._told.close()

    def of_dashboard(self) -> httpx.Client:
        """Returns a new client that asks the dashboard, with the key."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        trust = certificates.pinned(self.dashboard) or True
        return httpx.Client(headers=headers, verify=trust, timeout=ANSWER_S, trust_env=False)

    # -------------------------------------------------------------------------------------------------- before a run

    def check(self, plan: Plan) -> Status:
        """Returns the state of the application. Raises ControlError if it cannot do what the plan asks for."""
        status = self.client.status()
        if not status.ready:
            raise ControlError(f"the application is not ready: {self._detail()}; wait until it is")
        if "policy" in plan.kinds:
            self._check_policies(plan)
        if "scale" in plan.kinds:
            self._check_counts(plan)
        needed = plan.kinds & {"role", "drain", "activate"}
        if needed and self.dashboard is None:
            raise ControlError(
                f"{sorted(needed)[0]} goes through the dashboard: give its address with --dashboard, such as"
                " http://127.0.0.1:8002"
            )
        for action in plan.actions:
            if action.kind in ("role", "drain", "activate", "kill"):
                # what an engine can do then depends on the actions before
                named = _named(_target(action), status)
                if action.kind == "kill":
                    _process(named[0])
        return status

    def _detail(self) -> str:
        return self.client.health().detail or "no reason is given"

    def _check_policies(self, plan: Plan) -> None:
        available = self.client.policies().available
        changes = [a.policy for a in plan.actions] + [arm.policy for arm in plan.arms.values()]
        for change in changes:
            for stage in Policies.STAGES:
                choice = None if change is None else getattr(change, stage)
                if choice is None:
                    continue
                name = choice if isinstance(choice, str) else str(choice["name"])
                known = getattr(available, stage)
                if name not in known:
                    raise ControlError(
                        f"there is no {stage} policy {name!r}; there are {', '.join(known) or 'none'}"
                    )

    def _check_counts(self, plan: Plan) -> None:
        try:
            groups = {group.name: group for group in self.client.scaling().groups}
        except NotFoundError as error:
            raise ControlError(
                f"numbers of engines cannot be changed: {error.message}; leave `scale` out, or set scaling.enabled"
            ) from error
        changes = [a.scale for a in plan.actions] + [arm.scale for arm in plan.arms.values()]
        for change in changes:
            for name, count in (change if isinstance(change, Mapping) else {}).items():
                if name not in groups:
                    raise ControlError(f"there is no group {name!r}; there are {', '.join(groups)}")
                if not groups[name].min <= count <= groups[name].max:
                    raise ControlError(
                        f"scale {name} to {count}: the group may have {groups[name].min} to {groups[name].max}"
                    )

    def before(self, plan: Plan) -> dict[str, Any]:
        """Returns what `restore` needs to put back everything that the plan may change."""
        found: dict[str, Any] = {"url": self.url, "dashboard": self.dashboard}
        if "policy" in plan.kinds:
            found["policy"] = self._policies_before(plan)
        if "scale" in plan.kinds:
            found["scale"] = _counts_before(self.client.scaling())
        if plan.kinds & {"role", "drain", "activate"}:
            found["engines"] = {
                engine.id: {"role": engine.role, "duty": engine.duty or "active"}
                for engine in self.client.status().engines
                if engine.id is not None
            }
        return found

    def _policies_before(self, plan: Plan) -> dict[str, Any]:
        now = self.client.policies()
        changes = [a.policy for a in plan.actions] + [arm.policy for arm in plan.arms.values()]
        bodies = [change.body() for change in changes if change is not None]
        found: dict[str, Any] = {}
        for stage in Policies.STAGES:
            policy = getattr(now, stage)
            if policy is not None and any(stage in body for body in bodies):
                found[stage] = {"name": policy.name, "params": policy.params}
        changed = {key for body in bodies for key in body.get("dispatch", {})}
        # a change of the decode policy changes the limit that its overcommit has
        if changed:
            found["dispatch"] = {key: value for key, value in now.dispatch.items() if key in changed}
        return found

    # ------------------------------------------------------------------------------------------------------- actions

    def set_arm(self, arm: Arm) -> list[str]:
        """Sets what an arm asks for; returns what was done, in words. Raises ControlError or SluiceError."""
        done = []
        if arm.policy is not None:
            done.append(self._policy(arm.policy))
        if arm.scale is not None:
            done.append(self._scale(arm.scale))
        return done

    def do(self, action: Action) -> str:
        """Carries out an action; returns what was done, in words. Raises ControlError or SluiceError."""
        if action.policy is not None:
            return self._policy(action.policy)
        if action.scale is not None:
            return self._scale(action.scale)
        engine = self._engine(_target(action), action.kind, self.client.status())
        if action.kill is not None:
            return _kill(engine)
        if action.role is not None:
            self._put_engine(engine.id or "", {"role": action.role.role})
            return f"role of {engine.id}: {engine.role} -> {action.role.role}"
        duty = "warm" if action.drain is not None else "active"
        self._put_engine(engine.id or "", {"duty": duty})
        return f"{action.kind} {engine.id}: duty {engine.duty} -> {duty}"

    def _policy(self, change: Policies) -> str:
        self.client.set_policies(**_policy_arguments(change.body()))
        return f"policy: {shown(change.body())}"

    def _scale(self, order: Mapping[str, int] | str) -> str:
        if isinstance(order, str):
            self.client.scale(auto=True)
            return "scale: auto"
        self.client.scale(order)
        return f"scale: {shown(order)}"

    def _engine(self, name: str, kind: str, status: Status) -> EngineStatus:
        """Returns the engine of this id, or the first of this group to which the action can do something."""
        engines = _named(name, status)
        duty = "warm" if kind == "activate" else "active"
        fitting = [e for e in engines if e.state in (None, "ready") and (e.duty or "active") == duty]
        if not fitting:
            raise ControlError(f"{kind} {name}: no engine of it is ready and {duty}")
        return sorted(fitting, key=lambda e: e.id or "")[0]

    def _put_engine(self, engine: str, body: Mapping[str, str]) -> None:
        """Orders an engine to have a role or a duty, and waits until the application says that it has. Raises
        RefusedOrderError, or ControlError if the dashboard cannot be reached.
        """
        assert self.dashboard is not None
        try:
            answer = self._http.put(f"{self.dashboard}/api/engines/{quote(engine, safe='')}", json=dict(body))
        except httpx.HTTPError as error:
            raise ControlError(f"the dashboard at {self.dashboard} cannot be reached: {error}") from error
        if answer.status_code >= 400:
            try:
                message = answer.json()["message"]
            except (ValueError, KeyError, TypeError):
                message = f"status {answer.status_code}"
            raise RefusedOrderError(f"engine {engine}: {message}")
        # what comes next, another action or putting back, begins with what the application says of its engines
        end_s = time.monotonic() + ANSWER_S
        while not self._shows(engine, body):
            if time.monotonic() > end_s:
                raise ControlError(
                    f"engine {engine} was ordered {shown(body)} and does not follow: see its log"
                )
            time.sleep(0.1)

    def _shows(self, engine: str, body: Mapping[str, str]) -> bool:
        """Returns whether an engine has what `body` asks for, or has gone."""
        found = [one for one in self.client.status().engines if one.id == engine]
        return all((getattr(one, key) or "active") == value for one in found for key, value in body.items())

    # ------------------------------------------------------------------------------------------------------- restore

    def restore(self, before: Mapping[str, Any]) -> list[str]:
        """Puts back what `before` says; returns what was done. Raises the first error after trying every part."""
        done: list[str] = []
        errors: list[Exception] = []
        for part in ("engines", "scale", "policy"):
            if not before.get(part):
                continue
            try:
                done += getattr(self, f"_restore_{part}")(before[part])
            except (SluiceError, ControlError) as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return done

    def _restore_policy(self, policy: Mapping[str, Any]) -> list[str]:
        now = self.client.policies()
        change: dict[str, Any] = {}
        for stage in Policies.STAGES:
            current = getattr(now, stage)
            wanted = policy.get(stage)
            if wanted and (
                current is None or (current.name, current.params) != (wanted["name"], wanted["params"])
            ):
                change[stage] = wanted
        limits = {k: v for k, v in policy.get("dispatch", {}).items() if now.dispatch.get(k) != v}
        if limits:
            change["dispatch"] = limits
        if not change:
            return []
        self.client.set_policies(**_policy_arguments(change))
        return [f"policy: {shown({k: v.get('name', v) for k, v in change.items()})}"]

    def _restore_scale(self, scale: Mapping[str, Any]) -> list[str]:
        if _counts_before(self.client.scaling()) == scale:
            return []
        if scale["mode"] == "auto":
            self.client.scale(auto=True)
            return ["scale: auto"]
        self.client.scale(scale["counts"])
        return [f"scale: {shown(scale['counts'])}"]

    def _restore_engines(self, engines: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Puts back role and duty of engines that are still there; those that have gone have no state.

        The last active engine of a group that decodes keeps its role and duty, so what is refused is tried again after
        another engine was put back. Raises the last refusal when no further engine can be.
        """
        done: list[str] = []
        now = {engine.id: engine for engine in self.client.status().engines}
        changes = {name: _change_back(now[name], was) for name, was in engines.items() if name in now}
        left = {name: change for name, change in changes.items() if change}
        while left:
            refusal, before = None, len(left)
            for engine, change in list(left.items()):
                try:
                    self._put_engine(engine, change)
                except RefusedOrderError as error:
                    refusal = error
                    continue
                done.append(f"engine {engine}: {shown(change)}")
                del left[engine]
            if refusal is not None and len(left) == before:
                raise refusal
        return done

    def settle(self, most_s: float) -> bool:
        """Waits until nothing is in flight, at most `most_s`; returns whether that came."""
        end_s = time.monotonic() + most_s
        while time.monotonic() < end_s:
            requests = self.client.status().requests
            if requests is None or not requests.in_flight:
                return True
            time.sleep(0.2)
        return False


def _policy_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a change of policies as arguments of the SDK's `set_policies`."""
    found: dict[str, Any] = {}
    for stage in Policies.STAGES:
        choice = body.get(stage)
        if isinstance(choice, str):
            found[stage] = choice
        elif choice is not None:
            found[stage], found[f"{stage}_params"] = choice["name"], choice.get("params") or {}
    if body.get("dispatch"):
        found["dispatch"] = body["dispatch"]
    return found


def _change_back(engine: EngineStatus, was: Mapping[str, str]) -> dict[str, str]:
    """Returns the role and the duty that an engine had and has no more."""
    return {
        key: was[key]
        for key in ("role", "duty")
        if was.get(key) and was[key] != (getattr(engine, key) or "active")
    }


def _counts_before(scaling: Scaling) -> dict[str, Any]:
    wanted = {group.name: group.wanted for group in scaling.groups if group.wanted is not None}
    return {"mode": scaling.mode, **({"counts": wanted} if scaling.mode == "manual" else {})}


def _named(name: str, status: Status) -> list[EngineStatus]:
    """Returns the engine of this id, or those of this group. Raises ControlError if there is none."""
    engines = [e for e in status.engines if e.id == name or (e.id or "").rpartition("-")[0] == name]
    if not engines:
        groups = sorted({(e.id or "").rpartition("-")[0] for e in status.engines})
        raise ControlError(f"there is no engine and no group {name!r}; there are {', '.join(groups)}")
    return engines


def _target(action: Action) -> str:
    return action.role.engine if action.role is not None else str(getattr(action, action.kind))


def _process(engine: EngineStatus) -> psutil.Process:
    """Returns the process of an engine. Raises ControlError if it is none of this user's on this machine.

    An engine listens on a unix socket that is named after it, and no two engines have one name.
    """
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if "ServeReplica" not in " ".join(process.cmdline()):
                continue
            for connection in process.net_connections(kind="unix"):
                name = os.path.basename(str(connection.laddr or ""))
                if name.endswith(".sock") and name.rpartition("-")[0] == engine.id:
                    return process
        except psutil.Error:
            # it ended meanwhile, or belongs to somebody else
            continue
    raise ControlError(
        f"kill {engine.id}: its process is not on this machine, or belongs to another user; kill works only where both"
        " are the same"
    )


def _kill(engine: EngineStatus) -> str:
    process = _process(engine)
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error as error:
        raise ControlError(f"kill {engine.id}: {error}") from error
    return f"kill {engine.id} (process {process.pid})"
