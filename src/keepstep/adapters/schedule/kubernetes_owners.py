"""Pods that somebody else's workload makes: a Job, a JobSet, a TrainJob or a PyTorchJob.

Theory of operation. A workload is never written to: its controller sees to the number of its pods,
and each of them runs an agent that waits until a node of the job is to be where it is. A job that
*adopts* the workload claims pods of it as its first places, by marks on the pods; the order of
ranks is the one in which the controller numbers them. What is left over, and what the controller
makes for a pod that was evicted, is claimed when the job needs a spare, before any other node is
looked at. Spares that we have to make ourselves belong to the workload, and go with it.

Whose a pod is, is said by the owners of its owners: a TrainJob makes a JobSet, which makes Jobs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from keepstep.adapters.schedule import kubernetes_objects as objects
from keepstep.adapters.schedule.kubernetes_api import Api, Conflict, NotThere, Object
from keepstep.adapters.schedule.kubernetes_objects import Machine
from keepstep.adapters.schedule.kubernetes_pods import LOOK_S, Pods
from keepstep.errors import KeepstepError, NoSpare, UsageError
from keepstep.model.schedule import START, Ask, Kind, Lease

KINDS = {
    "Job": ("batch", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org", "trainjobs"),
    "PyTorchJob": ("kubeflow.org", "pytorchjobs"),
}
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"  # of a TrainJob's Jobs: only one trains


class Owners:
    def __init__(self, api: Api, pods: Pods) -> None:
        self._api = api
        self._pods = pods

    # ----------------------------------------------------------------------- whose a pod is

    def read(self, space: str, named: str) -> Object:
        """KIND/NAME as people write it."""
        word, _, name = named.partition("/")
        kind = next((one for one in KINDS if one.lower() == word.lower()), "")
        if not kind or not name:
            raise UsageError(
                f"{named} is no workload whose pods can be adopted",
                hint=f"KIND/NAME, with a KIND of {', '.join(KINDS)}",
            )
        group, plural = KINDS[kind]
        version = self._api.preferred(group)
        if not version:
            raise UsageError(
                f"this cluster knows no {kind}", hint=f"it does not serve the API group {group}"
            )
        try:
            return self._get(group, version, space, plural, name)
        except NotThere as error:
            raise UsageError(
                f"namespace {space} has no {kind} {name}",
                hint=f"see kubectl get {plural} -n {space}",
            ) from error

    def _get(self, group: str, version: str, space: str, plural: str, name: str) -> Object:
        read = self._api.custom.get_namespaced_custom_object
        return self._api.call(read, group, version, space, plural, name)

    def _above(self, one: Object, seen: dict[str, Object | None]) -> Iterator[Object]:
        """Its owners of the kinds that we know, the nearest first."""
        space = one["metadata"]["namespace"]
        while True:
            refs = one["metadata"].get("ownerReferences") or []
            ref = next(filter(_is_known, refs), None)
            if ref is None:
                return
            if ref["uid"] not in seen:
                group, plural = KINDS[ref["kind"]]
                version = ref["apiVersion"].rpartition("/")[2]
                seen[ref["uid"]] = None
                with contextlib.suppress(NotThere):
                    seen[ref["uid"]] = self._get(group, version, space, plural, ref["name"])
            above = seen[ref["uid"]]
            if above is None or above["metadata"]["uid"] != ref["uid"]:
                return
            yield (one := above)

    def root(self, pod: Object) -> Object | None:
        """What its user has made, if we may see it."""
        with contextlib.suppress(KeepstepError):
            return next(reversed(list(self._above(pod, {}))), None)
        return None

    def below(self, space: str, named: str) -> list[Object]:
        """Pods of that workload that may train."""
        uid = self.read(space, named)["metadata"]["uid"]
        seen: dict[str, Object | None] = {}
        return [
            pod
            for pod in self._api.items(self._api.core.list_namespaced_pod, space)
            if _trains(line := list(self._above(pod, seen)))
            and uid in (one["metadata"]["uid"] for one in line)
        ]

    # ----------------------------------------------------------------------- claims

    def adopt(self, ask: Ask, space: str, timeout_s: float) -> Lease:
        """The first places of a job, or what was claimed for `op` before."""
        end = time.monotonic() + timeout_s
        while True:
            mine = [pod for pod in self._pods.find(ask.job, ask.op) if _is_claimed(pod)]
            if len(mine) >= ask.count:
                (lease,) = objects.leases(mine)
                return lease
            free = self._free(ask, space) if ask.op == START else []
            chosen = sorted([*mine, *free], key=objects.numbered)[: ask.count]
            if len(chosen) == ask.count:
                self._claim_all(ask, chosen)
            elif time.monotonic() > end:
                whose = ask.constraints.owner or f"with the label of job {ask.job}"
                raise NoSpare(f"{len(chosen)} of {ask.count} pods of {whose} are on nodes")
            else:
                time.sleep(LOOK_S)

    def _claim_all(self, ask: Ask, pods: list[Object]) -> None:
        places = [pod["spec"]["nodeName"] for pod in pods]
        if len(set(places)) < len(places):
            raise UsageError(
                f"several pods of {ask.constraints.owner or ask.job} are on one node",
                hint="give them a podAntiAffinity, or all GPUs of a node each",
            )
        for index, pod in enumerate(pods):
            if not self._claim(pod, ask, "queue", index):
                return  # it is another one now

    def _free(self, ask: Ask, space: str) -> list[Object]:
        """Pods on nodes that nobody has claimed."""
        named = ask.constraints.owner
        found = self.below(space, named) if named else self._pods.find(ask.job)
        return [
            pod
            for pod in found
            if objects.may_run(pod)
            and pod["spec"].get("nodeName")
            and "deletionTimestamp" not in pod["metadata"]
            and objects.OP not in (pod["metadata"].get("annotations") or {})
        ]

    def spares(self, ask: Ask, space: str, known: dict[str, Machine]) -> list[Object]:
        """Those that run, and would do."""
        if not ask.constraints.owner:
            return []
        ours = {pod["spec"].get("nodeName") for pod in self._pods.find(ask.job)}
        return [
            pod
            for pod in self._free(ask, space)
            if pod.get("status", {}).get("phase") == "Running"
            and (place := pod["spec"]["nodeName"]) in known
            and known[place].place.state in ("used", "free")
            and known[place].suits(ask)
            and place not in ours
        ]

    def take(self, ask: Ask, space: str, known: dict[str, Machine]) -> bool:
        found = self.spares(ask, space, known)
        return any(self._claim(pod, ask, "reserved", 0) for pod in found)

    def _claim(self, pod: Object, ask: Ask, kind: Kind, index: int) -> bool:
        """Only as it was read: another job may look at it, too."""
        try:
            marks = objects.claim(pod, ask.job, ask.op, kind, index)
            self._pods.note(pod, *marks, unchanged=True)
        except (Conflict, NotThere):
            return False
        return True

    def let_go(self, pods: list[Object]) -> None:
        """They are not ours to end."""
        for pod in filter(_is_claimed, pods):
            with contextlib.suppress(NotThere):
                self._pods.note(pod, *objects.unclaim(pod))


def _is_known(ref: Object) -> bool:
    group, _, _ = ref["apiVersion"].rpartition("/")
    return ref["kind"] in KINDS and KINDS[ref["kind"]][0] == group


def _is_claimed(pod: Object) -> bool:
    return objects.ADOPTED in (pod["metadata"].get("annotations") or {})


def _trains(line: list[Object]) -> bool:
    """Not a pod that only fetches a TrainJob's data."""
    steps = [(one["metadata"].get("labels") or {}).get(STEP, "trainer") for one in line]
    return all(step == "trainer" for step in steps)
