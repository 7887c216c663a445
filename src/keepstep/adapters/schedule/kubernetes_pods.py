"""Pods and nodes as the API server has them: found, made, marked, and ended for certain."""

from __future__ import annotations

import contextlib
import time

from keepstep.adapters.schedule import kubernetes_objects as objects
from keepstep.adapters.schedule.kubernetes_api import Api, Conflict, NotThere, Object
from keepstep.adapters.schedule.kubernetes_devices import Devices
from keepstep.adapters.schedule.kubernetes_objects import Machine
from keepstep.errors import TransientError, UsageError

LOOK_S = 0.1
END_S = 30.0  # a pod gets its own grace period within this time


class Pods:
    def __init__(self, api: Api) -> None:
        self._api = api
        self.devices = Devices(api)

    def machines(self) -> dict[str, Machine]:
        core = self._api.core
        nodes = self._api.items(core.list_node)
        pods = self._api.items(core.list_pod_for_all_namespaces)
        return objects.machines(nodes, pods, self.devices.look())

    def find(self, job: str = "", op: str = "") -> list[Object]:
        """Ours, or whatever pods somebody has labelled as a job's."""
        chosen = f"{objects.JOB}={objects.label(job)}" if job else objects.JOB
        found = self._api.items(self._api.core.list_pod_for_all_namespaces, label_selector=chosen)
        return [
            pod
            for pod in found
            if any(op in ("", lease.op) for lease in objects.leases([pod], job))
        ]

    def make(self, space: str, pod: Object) -> None:
        with contextlib.suppress(Conflict):  # it is there already: the name says what for
            self._api.call(self._api.core.create_namespaced_pod, space, pod)

    def note(
        self, pod: Object, notes: Object, labels: Object | None = None, *, unchanged: bool = False
    ) -> None:
        """`unchanged`: raise Conflict if the pod is not as it was read."""
        meta = pod["metadata"]
        body: Object = {"metadata": {"annotations": notes}}
        if unchanged:
            body["metadata"]["resourceVersion"] = meta["resourceVersion"]
        if labels:
            body["metadata"]["labels"] = labels
        self._api.call(self._api.core.patch_namespaced_pod, meta["name"], meta["namespace"], body)

    def delete(
        self, pods: list[Object], grace_s: int | None = None, limit_s: float = END_S
    ) -> None:
        """And wait until they are gone. Where no kubelet answers, nobody else would ever do it."""
        left = {(pod["metadata"]["namespace"], pod["metadata"]["name"]): pod for pod in pods}
        dead = {name for name, one in self.machines().items() if one.silent} if left else set()
        end = time.monotonic() + limit_s
        for pod in left.values():
            silent = pod["spec"].get("nodeName") in dead
            self._delete_one(pod, 0 if silent else grace_s)
        while left:
            there = {
                (pod["metadata"]["namespace"], pod["metadata"]["name"]): pod["metadata"]["uid"]
                for pod in self.find()
            }
            left = {k: p for k, p in left.items() if there.get(k) == p["metadata"]["uid"]}
            if left and time.monotonic() > end:
                raise TransientError(f"pod {next(iter(left))[1]} does not end")
            if left:
                time.sleep(LOOK_S)

    def _delete_one(self, pod: Object, grace_s: int | None) -> None:
        meta = pod["metadata"]
        body: Object = {"preconditions": {"uid": meta["uid"]}}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        with contextlib.suppress(NotThere, Conflict):  # gone, or another one of that name
            if objects.is_foreign(pod) and grace_s is None:
                # Theirs: their controllers are told that it is a disruption, not a failure.
                self._evict(meta)
                return
            self._api.call(
                self._api.core.delete_namespaced_pod, meta["name"], meta["namespace"], body=body
            )
        with contextlib.suppress(NotThere):
            self._api.call(self._api.core.delete_namespaced_secret, meta["name"], meta["namespace"])

    def _evict(self, meta: Object) -> None:
        evict = self._api.core.create_namespaced_pod_eviction
        about = {"name": meta["name"], "namespace": meta["namespace"]}
        for version in ("policy/v1", "policy/v1beta1"):  # the second one for servers before 1.22
            body = {"apiVersion": version, "kind": "Eviction", "metadata": about}
            try:
                self._api.call(evict, meta["name"], meta["namespace"], body)
                return
            except UsageError:
                if version == "policy/v1beta1":
                    raise
