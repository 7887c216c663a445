"""Kubernetes to try everything with, and what other people do there."""

from __future__ import annotations

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler
from keepstep.adapters.schedule.kubernetes_requests import Settings
from keepstep.ports.schedule import Scheduler
from tests.schedulers.cluster import RESERVED, until
from tests.schedulers.control_plane import ControlPlane
from tests.schedulers.labs import Lab


class KubernetesLab(Lab):
    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        super().__init__(self.again(), plane.nodes)

    def again(self) -> Scheduler:
        file = str(self.plane.kubeconfig())
        return KubernetesScheduler(Settings(kubeconfig=file, template=TEMPLATE))

    def reserve(self, place: str) -> str:
        taint = {"key": "keepstep.dev/spare", "value": RESERVED, "effect": "NoSchedule"}
        self.plane.change_node(place, {"taints": [taint]})
        return RESERVED

    def occupy(self, places: list[str], *, low: bool) -> None:
        for place in places:
            self.plane.apply(other_pod(place, low=low))
        want = {f"other-{place}" for place in places}
        until(lambda: want <= self.others(), "the pods of others")

    def others(self) -> set[str]:
        """Those that run."""
        pods = self.plane.pods(space="default")
        return {pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"}

    def taint(self, place: str) -> None:
        taint = {"key": "gpu.health/xid", "value": "theirs", "effect": "NoSchedule"}
        self.plane.change_node(place, {"taints": [taint]})


TEMPLATE = {"spec": {"containers": [{"name": "agent", "image": "none"}]}}


def other_pod(place: str, *, low: bool) -> dict[str, object]:
    """Of somebody else, on that node, with its GPUs."""
    container = {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    spec = {
        "containers": [container],
        "nodeSelector": {"kubernetes.io/hostname": place},
        "terminationGracePeriodSeconds": 1,
    }
    if not low:
        spec["priorityClassName"] = "keepstep-train"
    meta = {"name": f"other-{place}", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
