"""The numbers of replicas in Ray Serve, and the autoscaler's memory in Ray's store.

Serve's controller takes a number of replicas for a deployment of an application that says `external_scaler_enabled`
(Ray 2.60, `ServeController.update_deployment_replicas`). It is called directly, because Serve's REST route for it needs
Ray's dashboard. Every call runs in a thread of its own with a time limit, since Ray's control plane may hang.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from actors.router.worker_thread import WorkerThread
from actors.scaling.fleet import Deployed, Fleet, Replica

log = logging.getLogger("ray.serve")

ANSWER_S = 10.0
"""Longest wait for an answer of Serve's controller. ASSUMPTION: an overloaded one answers within a few seconds."""
NAMESPACE = "sluice"
HEAD = "node:__internal_head__"
"""Ray's resource that marks the head node."""
_STOPPING = "STOPPING"
_DEPLOYING = "DEPLOYING"
"""Serve's word for an application from a deploy until all its replicas run. Numbers set from outside do not lead to
it (`ApplicationState._determine_app_status`)."""
_NOT_RUNNING = frozenset({"STARTING", "RECOVERING", _STOPPING})


class ServeCounts:
    """The numbers of replicas of an application's engine groups; `deployments` has each group's deployment.

    With `spare` replicas of a group, the resources of that many more than there are stay asked for at the cluster's own
    autoscaler, so that nodes stand ready; `bundles` are the resources of one replica. Ray keeps a request until the
    next one, so that this one stands is noted in Ray's store: `close`, or a later `ServeCounts` that wants no spare
    replicas, gives the nodes back. A request that somebody else has made is left alone.
    """

    def __init__(
        self,
        application: str,
        deployments: Mapping[str, str],
        spare: Mapping[str, int],
        bundles: Mapping[str, list[dict[str, float]]],
    ) -> None:
        self._application, self._deployments = application, deployments
        self._spare, self._bundles = spare, bundles
        self._thread = WorkerThread("counts of replicas")
        self._asked: list[dict[str, float]] | None = None
        """The bundles that are asked for; None: not known, because a process before asked for them."""
        self._note, self._token = f"scaling-spare/{application}", uuid.uuid4().hex.encode()

    async def check(self) -> None:
        """Raises RuntimeError if the application does not let its numbers of replicas be set."""
        details = await self._thread.call(self._details)
        application = details["applications"].get(self._application)
        if application is not None and not application.get("external_scaler_enabled"):
            raise RuntimeError(
                f"scaling.enabled is set, but Serve refuses numbers of replicas for application {self._application}:"
                " set `external_scaler_enabled: true` beside `import_path` in the Serve config file"
            )

    async def read(self) -> Fleet:
        """Returns what Serve has now. Raises what Ray raises, and KeyError while the application is not there."""
        return await self._thread.call(self._read)

    async def set(self, targets: Mapping[str, int]) -> None:
        """Sets numbers of replicas. Raises what Ray raises."""
        await self._thread.call(lambda: self._set(targets))

    async def close(self) -> None:
        """Gives back the spare nodes, unless a successor has asked for some already. Raises what Ray raises."""
        await self._thread.call(self._give_back)

    def _details(self) -> Any:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        return ray.get(controller.get_serve_instance_details.remote(), timeout=ANSWER_S)

    def _read(self) -> Fleet:
        details = self._details()
        head = next((n["NodeID"] for n in ray.nodes() if n["Alive"] and HEAD in n["Resources"]), None)
        fleet = fleet_of(details, self._application, self._deployments, head)
        self._keep_spare(fleet)
        return fleet

    def _set(self, targets: Mapping[str, int]) -> None:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        for name, number in targets.items():
            deployment = DeploymentID(name=self._deployments[name], app_name=self._application)
            ray.get(controller.update_deployment_replicas.remote(deployment, number), timeout=ANSWER_S)
            log.info("%s has %d replicas from now on", name, number)

    def _keep_spare(self, fleet: Fleet) -> None:
        self._ask(spare_bundles(fleet, self._spare, self._bundles))

    def _ask(self, bundles: list[dict[str, float]]) -> None:
        """Asks the cluster's autoscaler for `bundles`; for none only where some were asked for before."""
        if bundles == self._asked:
            return
        if bundles:
            # noted first, so that a process that dies in between leaves no request without a note
            _internal_kv_put(self._note, self._token, overwrite=True, namespace=NAMESPACE)
            _request(bundles)
        elif _internal_kv_get(self._note, namespace=NAMESPACE) is not None:
            _request([])
            _internal_kv_del(self._note, namespace=NAMESPACE)
        self._asked = bundles

    def _give_back(self) -> None:
        if _internal_kv_get(self._note, namespace=NAMESPACE) == self._token:
            self._ask([])


def _request(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)


def fleet_of(
    details: Mapping[str, Any], application: str, deployments: Mapping[str, str], head: str | None
) -> Fleet:
    """Returns the fleet in Serve's details of the whole instance. Raises KeyError for an application or a deployment
    that is not there (yet).
    """
    own = details["applications"][application]
    crowds: Counter[str] = Counter()
    for app in details["applications"].values():
        for deployment in app["deployments"].values():
            crowds.update(
                r["node_id"]
                for r in deployment["replicas"]
                if r.get("node_id") and r["state"] not in _NOT_RUNNING
            )
    groups = {
        name: Deployed(
            own["deployments"][deployment]["target_num_replicas"],
            tuple(_replica(r) for r in own["deployments"][deployment]["replicas"]),
            own["deployments"][deployment].get("message") or "",
        )
        for name, deployment in deployments.items()
    }
    deployed_s, deploying = float(own.get("last_deployed_time_s") or 0.0), own.get("status") == _DEPLOYING
    companions = tuple(
        sorted(
            r["replica_id"]
            for name, deployment in own["deployments"].items()
            if name not in deployments.values()
            for r in deployment["replicas"]
        )
    )
    return Fleet(groups, dict(crowds), head, deployed_s, deploying, companions)


def _replica(told: Mapping[str, Any]) -> Replica:
    state = str(told["state"])
    return Replica(
        told["replica_id"],
        told.get("node_id"),
        float(told.get("start_time_s") or 0.0),
        state not in _NOT_RUNNING,
        state == _STOPPING,
    )


def spare_bundles(
    fleet: Fleet, spare: Mapping[str, int], bundles: Mapping[str, list[dict[str, float]]]
) -> list[dict[str, float]]:
    """Returns the resources to ask the cluster's autoscaler for: those of all replicas and of the spare ones, because
    Ray takes a request as the whole size of the cluster. Without spare ones it is nothing.
    """
    if not any(spare.values()):
        return []
    return [
        dict(bundle)
        for name, deployed in fleet.groups.items()
        for _ in range(deployed.target + spare.get(name, 0))
        for bundle in bundles[name]
    ]


class RayStore:
    """The autoscaler's memory in Ray's store, which lives as long as the cluster's control process keeps its state. It
    is one for each application, whatever its configuration: the controller knows what still holds.
    """

    def __init__(self, application: str) -> None:
        self._key = f"scaling/{application}"
        self._thread = WorkerThread("memory of the autoscaler")

    async def load(self) -> str | None:
        """Returns what was saved last, or None. Raises what Ray raises."""
        found: bytes | None = await self._thread.call(
            lambda: _internal_kv_get(self._key, namespace=NAMESPACE)
        )
        return None if found is None else found.decode()

    async def save(self, memory: str) -> None:
        """Saves the memory. Raises what Ray raises."""
        await self._thread.call(
            lambda: _internal_kv_put(self._key, memory.encode(), overwrite=True, namespace=NAMESPACE)
        )
