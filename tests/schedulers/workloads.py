"""Workloads of users whose pods run agents: as their controllers make them.

The controller of Jobs is real. Those of JobSet, TrainJob and PyTorchJob are not here: what they
would make from such an object (a JobSet, a Job, pods, with their labels and owners) is made once by
the test, and nothing is replaced that only they would replace.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.schedulers.cluster import until
from tests.schedulers.control_plane import NAMESPACE, ControlPlane, path_of

COUNT = 3
NAME = "train"
GROUPS = {
    "JobSet": ("jobset.x-k8s.io", "v1alpha2"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1"),
    "PyTorchJob": ("kubeflow.org", "v1"),
}
JOBSET, KUBEFLOW = "jobset.sigs.k8s.io", "training.kubeflow.org"


def template(url: str, home: Path) -> dict[str, Any]:
    """Of a pod of the user: it says where it is, and waits for its turn."""
    env: list[Any] = [{"name": "KEEPSTEP_HOME", "value": str(home)}]
    where = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    token = {"secretKeyRef": {"name": "agents", "key": "token"}}
    env += [{"name": "NODE_NAME", "valueFrom": where}]
    env += [{"name": "KEEPSTEP_TOKEN", "valueFrom": token}]
    container = {
        "name": "agent",
        "image": "none",
        "command": [sys.executable, "-P", "-m", "keepstep", "agent"],
        "args": ["--orchestrator", url, "--job", "job", "--place", "$(NODE_NAME)", "--wait"],
        "env": env,
        "resources": {"limits": {"nvidia.com/gpu": "4"}},
    }
    spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
    }
    return {"metadata": {"labels": {"app": NAME}}, "spec": spec}


class Workload:
    def __init__(self, plane: ControlPlane, kind: str, pod: dict[str, Any]) -> None:
        self._plane, self.kind = plane, kind
        self._made: list[str] = []
        if kind == "Job":
            self.root = self._make(self._job(NAME, pod))
        else:
            self._define(kind)
            spec = {"note": "a real one has its pods' template here", "template": pod}
            self.root = self._make(self._object(kind, spec))
        if kind == "TrainJob":
            self._define("JobSet")
            below = self._make(self._object("JobSet", {"template": pod}, self.root))
            self._job_of(below, pod, {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})
        if kind == "JobSet":
            self._job_of(self.root, pod, {})
        if kind == "PyTorchJob":
            for type_, index in (("master", 0), ("worker", 0), ("worker", 1)):
                self._replica(type_, index, pod)

    def _define(self, kind: str) -> None:
        group, version = GROUPS[kind]
        names = {"plural": f"{kind.lower()}s", "singular": kind.lower(), "kind": kind}
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        served = {"name": version, "served": True, "storage": True}
        self._make(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{names['plural']}.{group}"},
                "spec": {
                    "group": group,
                    "scope": "Namespaced",
                    "names": names,
                    "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
                },
            }
        )

    def _object(self, kind: str, spec: Any, owner: Any = None) -> dict[str, Any]:
        group, version = GROUPS[kind]
        meta = {"name": NAME, "namespace": NAMESPACE, **_owned(owner)}
        return {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": meta, "spec": spec}

    def _job(self, name: str, pod: Any, **meta: Any) -> dict[str, Any]:
        spec = {"parallelism": COUNT, "completions": COUNT, "backoffLimit": 0, "template": pod}
        meta = {"name": name, "namespace": NAMESPACE, **meta}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}

    def _job_of(self, jobset: Any, pod: Any, labels: dict[str, str]) -> None:
        said = {f"{JOBSET}/jobset-name": NAME, f"{JOBSET}/replicatedjob-name": "node"}
        said |= {f"{JOBSET}/job-index": "0", f"{JOBSET}/job-global-index": "0"}
        marked = {**pod, "metadata": {"labels": {**pod["metadata"]["labels"], **said}}}
        name = f"{NAME}-node-0"
        self._make(self._job(name, marked, labels={**said, **labels}, **_owned(jobset)))

    def _replica(self, type_: str, index: int, pod: Any) -> None:
        labels = {f"{KUBEFLOW}/job-name": NAME, f"{KUBEFLOW}/replica-type": type_}
        labels |= {f"{KUBEFLOW}/replica-index": str(index), **pod["metadata"]["labels"]}
        meta = {"name": f"{NAME}-{type_}-{index}", "namespace": NAMESPACE, "labels": labels}
        meta |= _owned(self.root)
        self._make({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod["spec"]})

    def _make(self, one: dict[str, Any]) -> Any:
        self._plane.apply(one)
        path = f"{path_of(one)}/{one['metadata']['name']}"
        self._made.append(path)
        return self._plane.ask("GET", path)

    def specs(self) -> list[Any]:
        """Of the workload and of all that was made for it, save pods."""
        made = [path for path in self._made if "/pods/" not in path]
        return [self._plane.ask("GET", path)["spec"] for path in made]

    def pods(self) -> dict[str, Any]:
        """By the node where they are."""
        found = self._plane.pods(f"app={NAME}")
        return {pod["spec"].get("nodeName", ""): pod for pod in found}

    def events(self) -> list[str]:
        found = self._plane.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
        uid = self.root["metadata"]["uid"]
        return [one["message"] for one in found if one["involvedObject"].get("uid") == uid]

    def is_complete(self) -> bool:
        """Its Job, as the real controller of Jobs sees it."""
        (path,) = [path for path in self._made if "/jobs/" in path]
        status = self._plane.ask("GET", path)["status"]
        states = [(one["type"], one["status"]) for one in status.get("conditions") or []]
        return ("Complete", "True") in states and status["succeeded"] == COUNT

    def remove(self) -> None:
        for path in reversed(self._made):
            with contextlib.suppress(AssertionError):  # gone with its owner
                self._plane.ask("DELETE", path, propagationPolicy="Background")
        until(lambda: not self._plane.pods(f"app={NAME}"), "the end of the workload's pods")


def _owned(owner: Any) -> dict[str, Any]:
    if owner is None:
        return {}
    meta = owner["metadata"]
    ref = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
    return {"ownerReferences": [{**ref, "name": meta["name"], "uid": meta["uid"]}]}


@contextlib.contextmanager
def workload(plane: ControlPlane, kind: str, url: str, home: Path) -> Iterator[Workload]:
    made = Workload(plane, kind, template(url, home))
    try:
        yield made
    finally:
        made.remove()
