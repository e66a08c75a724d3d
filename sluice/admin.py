"""A client of an application's dashboard: all that its page can do, for scripts.

    from sluice.admin import Dashboard

    with Dashboard() as dashboard:
        change = dashboard.scale(bounds={"decode": {"max": 6}})
        run = dashboard.start_experiment(dashboard.experiments().shipped[0]["text"])
        dashboard.undo(change.id)

Changes that are made here are in the dashboard's audit log, with before, after and an undoing, as those of its page
are. The same changes without a log are methods of `Sluice`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote, urlencode

import httpx

from ._core import (
    Call,
    Deadline,
    Settings,
    Timeouts,
    admin_headers,
    assign_body,
    check_event_stream,
    key_of,
    parse,
    policy_body,
    root_url,
    scale_body,
)
from ._errors import InvalidResponseError
from ._events import SSEDecoder
from ._metrics import Metrics, parse_metrics
from ._retry import RetryPolicy
from ._transport import Transport
from .types import (
    Change,
    CheckedPlan,
    Experiments,
    LoggedChange,
    Policies,
    Run,
    Scaling,
    SeenRequest,
    Status,
    WhatIf,
)

DEFAULT_URL = "http://127.0.0.1:8002"

Bounds = Mapping[str, Mapping[str, int]]


class Dashboard(Transport):
    """A client for one dashboard. It may be shared between threads. Close it, or use it in a `with` block.

    Args:
        url: root of the dashboard. Default: SLUICE_DASHBOARD_URL, else http://127.0.0.1:8002.
        key: an admin key, or a viewer key for what only reads. Default: SLUICE_ADMIN_KEY, else what a dashboard on this
            machine has in its key file. The file is not read with an `http_client` of your own.
        timeouts: see `Timeouts`.
        retry: see `RetryPolicy`.
        http_client: your own `httpx.Client`, for proxies, certificates or limits; you close it yourself.

    Calls raise the errors of `Sluice`. A change that cannot be made now is an ApiError of status 409 that says why.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        http_client: httpx.Client | None = None,
    ) -> None:
        given = url or os.environ.get("SLUICE_DASHBOARD_URL") or DEFAULT_URL
        settings = Settings(
            root_url(given),
            None,
            None,
            timeouts or Timeouts(),
            retry or RetryPolicy(),
            key_of("admin", key, "SLUICE_ADMIN_KEY"),
            reads_key_file=http_client is None,
        )
        super().__init__(settings, http_client)

    # ---------------------------------------------------------------------------------------------------- what there is

    def session(self) -> dict[str, Any]:
        """Returns the role of the key, the version and the model, and whether there are experiments."""
        return self._object("GET", "/api/session")

    def status(self) -> Status:
        """Returns the whole fleet, as `Sluice.status` does of one ingress."""
        return parse(self._answer(self._call("GET", "/api/status")), Status)

    def metrics(self) -> Metrics:
        """Returns the Prometheus metrics, summed over all ingresses."""
        return parse_metrics(self._answer(self._call("GET", "/metrics")).text())

    def watch(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields what the page gets: a ("snapshot", {..}) of the last 15 minutes, then a ("delta", {..}) a second.

        Whoever takes them too slowly for the dashboard to keep what comes between gets a new snapshot instead. It ends
        when the connection does; a second call begins with a new snapshot.
        """
        call = self._call("GET", "/api/stream")
        opened = self._open(call, Deadline(None))
        try:
            check_event_stream(call, opened.response.headers)
            decoder = SSEDecoder()
            for piece in opened.response.iter_bytes():
                for name, payload in decoder.events(piece):
                    yield name, _object(payload, call)
        except httpx.RequestError as error:
            raise opened.failure(error) from error
        finally:
            opened.close()

    def heat(self, engines: Sequence[str]) -> dict[str, Any]:
        """Returns the last ten minutes of engines (128 at most) in bins of 10 s: shares of slots and of KV in use."""
        return self._object("GET", f"/api/engines/heat?{urlencode({'ids': ','.join(engines)})}")

    def request(self, request_id: str) -> SeenRequest:
        """Returns where the time of a request went, and the router's decisions about it."""
        return parse(
            self._answer(self._call("GET", f"/api/requests/{quote(request_id, safe='')}")), SeenRequest
        )

    # ---------------------------------------------------------------------------------------------------------- changes

    def policies(self) -> Policies:
        """Returns the policies in use, and those that can be chosen."""
        return parse(self._answer(self._call("GET", "/api/policy")), Policies)

    def set_policies(
        self,
        *,
        prefill: str | None = None,
        decode: str | None = None,
        prefill_params: Mapping[str, Any] | None = None,
        decode_params: Mapping[str, Any] | None = None,
        dispatch: Mapping[str, Any] | None = None,
        flow: str | None = None,
        flow_params: Mapping[str, Any] | None = None,
        admission: str | None = None,
        admission_params: Mapping[str, Any] | None = None,
        fairness: str | None = None,
        fairness_params: Mapping[str, Any] | None = None,
    ) -> Change:
        """Changes the policies that decide, as `Sluice.set_policies` does."""
        body = policy_body(
            prefill,
            decode,
            prefill_params,
            decode_params,
            dispatch,
            flow,
            flow_params,
            admission,
            admission_params,
            fairness,
            fairness_params,
        )
        return self._change("PUT", "/api/policy", body)

    def scaling(self) -> Scaling:
        """Returns what the autoscaler sees, wants and orders."""
        return parse(self._answer(self._call("GET", "/api/scale")), Scaling)

    def plan(self, counts: Mapping[str, int] | None = None, *, bounds: Bounds | None = None) -> Scaling:
        """Returns the plan that these numbers or bounds would make, without them the policy's; nothing is changed."""
        body = scale_body(counts, False, True, bounds)
        return parse(self._answer(self._call("PUT", "/api/scale", body)), Scaling)

    def scale(
        self, counts: Mapping[str, int] | None = None, *, auto: bool = False, bounds: Bounds | None = None
    ) -> Change:
        """Sets numbers of replicas, their bounds, or has the policy decide again, as `Sluice.scale` does."""
        return self._change("PUT", "/api/scale", scale_body(counts, auto, False, bounds))

    def assign(self, engine: str, *, role: str | None = None, duty: str | None = None) -> Change:
        """Orders one engine to serve a role, or to be `active` or `warm`, as `Sluice.assign` does."""
        return self._change("PUT", f"/api/engines/{quote(engine, safe='')}", assign_body(role, duty))

    def drain(self, engine: str) -> Change:
        """Has one engine take no new work; what runs there ends. `assign(engine, duty="active")` brings it back."""
        return self._change("POST", f"/api/engines/{quote(engine, safe='')}/drain", b"{}")

    def changes(self) -> list[LoggedChange]:
        """Returns the last changes of the audit log, the newest first."""
        found = self._object("GET", "/api/audit")
        return [LoggedChange.model_validate(one) for one in found["changes"]]

    def undo(self, change_id: str) -> Change:
        """Puts back what a change had found. Raises ApiError 409 where something has changed the same since."""
        return self._change("POST", "/api/undo", json.dumps({"id": change_id}).encode())

    # ------------------------------------------------------------------------------------------------------ experiments

    def experiments(self) -> Experiments:
        """Returns the shipped plans, the runs, and what a run may not exceed."""
        return parse(self._answer(self._call("GET", "/api/experiments")), Experiments)

    def check_experiment(self, text: str) -> CheckedPlan:
        """Returns what a plan (YAML) would do, or everything that is wrong with it."""
        return parse(self._answer(self._post("/api/experiments/check", {"text": text})), CheckedPlan)

    def start_experiment(self, text: str) -> Run:
        """Starts a run of a plan. Raises ApiError 409 while another one runs."""
        return parse(self._answer(self._post("/api/experiments/start", {"text": text})), Run)

    def stop_experiment(self) -> dict[str, Any]:
        """Has the run end that is under way; what it has changed is put back."""
        return self._object("POST", "/api/experiments/stop", b"{}")

    def run(self, run_id: str) -> dict[str, Any]:
        """Returns a run with its plan, versions, actions and series by second."""
        return self._object("GET", f"/api/experiments/runs/{quote(run_id, safe='')}")

    def delete_run(self, run_id: str) -> None:
        """Deletes a run and its files."""
        self._answer(self._call("DELETE", f"/api/experiments/runs/{quote(run_id, safe='')}"))

    def compare_runs(self, run_ids: Sequence[str]) -> dict[str, Any]:
        """Returns runs side by side: figures with differences and intervals, and series by second."""
        return self._object("GET", f"/api/experiments/compare?{urlencode({'ids': ','.join(run_ids)})}")

    def report(self, run_id: str, kind: Literal["html", "json", "png"] = "html") -> bytes:
        """Returns the report of a run as a file."""
        path = f"/api/experiments/runs/{quote(run_id, safe='')}/report.{kind}"
        return self._answer(self._call("GET", path)).body

    # ---------------------------------------------------------------------------------------------------------- what if

    def whatif_base(self) -> dict[str, Any]:
        """Returns a file for the simulator made from what runs (`text`), its name (`base`), its `facts`, and what could
        not be learnt. It takes an admin key and some seconds.
        """
        return self._object("POST", "/api/whatif/base", b"{}")

    def start_whatif(self, text: str, changes: Sequence[Mapping[str, Any]], base: str | None = None) -> str:
        """Has the simulator answer what `changes`, each {"name", "set": {KEY: VALUE}}, would do, and returns an id.

        `base` is the name that `whatif_base` gave the file. What was measured stands beside the answer if the file was
        not changed since.
        """
        asked = {"text": text, "changes": [dict(one) for one in changes]}
        if base is not None:
            asked["base"] = base
        answer = self._answer(self._post("/api/whatif/start", asked))
        return str(_object(answer.text(), answer.call)["id"])

    def whatif(self) -> WhatIf:
        """Returns the state of the last question, with the answer once it is done."""
        return parse(self._answer(self._call("GET", "/api/whatif")), WhatIf)

    def stop_whatif(self) -> WhatIf:
        """Gives the question up that the simulator works on."""
        return parse(self._answer(self._post("/api/whatif/stop", {})), WhatIf)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _call(self, method: str, path: str, body: bytes | None = None) -> Call:
        return Call(method, path, body=body, headers=admin_headers(self._settings))

    def _post(self, path: str, asked: Any) -> Call:
        return self._call("POST", path, json.dumps(asked).encode())

    def _change(self, method: str, path: str, body: bytes) -> Change:
        return parse(self._answer(self._call(method, path, body)), Change)

    def _object(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        answer = self._answer(self._call(method, path, body))
        return _object(answer.text(), answer.call)


def _object(text: str, call: Call) -> dict[str, Any]:
    """Returns a JSON object. Raises InvalidResponseError for anything else."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise InvalidResponseError(f"{call.path}: expected a JSON object, got {text[:200]!r}")
    return found
