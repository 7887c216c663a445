"""What others say of a node, each as the reason of a real move of a real job. (That a cordon is
one, test_kubernetes_jobs.py has shown.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.schedulers.cluster import until
from tests.schedulers.control_plane import ControlPlane
from tests.schedulers.jobs import ALL, KubernetesJob, end, ranks, same_bits, taints

GROUP = "resource.k8s.io"


@pytest.fixture
def devices(plane: ControlPlane) -> Iterator[None]:
    """This server is older than dynamic resource allocation: its kinds are custom resources here,
    in the shapes of v1."""
    made = []
    for kind in ("ResourceSlice", "DeviceTaintRule"):
        names = {"plural": f"{kind.lower()}s", "singular": kind.lower(), "kind": kind}
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {"name": "v1", "served": True, "storage": True}
        approved = {"api-approved.kubernetes.io": "unapproved, of a test"}
        meta = {"name": f"{names['plural']}.{GROUP}", "annotations": approved}
        plane.apply(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": meta,
                "spec": {
                    "group": GROUP,
                    "scope": "Cluster",
                    "names": names,
                    "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
                },
            }
        )
        made.append(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{meta['name']}")
    for node in plane.nodes:
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": "gpu.example", "pool": pool, "nodeName": node}
        spec["devices"] = [{"name": f"gpu-{index}"} for index in range(4)]
        plane.apply(of_devices("ResourceSlice", node, spec))
    yield
    for path in made:
        plane.ask("DELETE", path)


def of_devices(kind: str, name: str, spec: Any) -> dict[str, Any]:
    return {"apiVersion": f"{GROUP}/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def taint(plane: ControlPlane, node: str) -> None:
    said = {"key": "gpu.health/xid", "value": "79", "effect": "NoSchedule"}
    plane.change_node(node, {"taints": [said]})


def condition(plane: ControlPlane, node: str) -> None:
    plane.change_condition(node, "GpuNvlinkWatch", "True", "link 3 is down")


def sentinel(plane: ControlPlane, node: str) -> None:
    plane.change_node(node, {}, {"dgxc.nvidia.com/nvsentinel-state": "quarantined"})


def device(plane: ControlPlane, node: str) -> None:
    said = {"key": "gpu.example/ecc", "effect": "NoExecute"}
    meant = {"driver": "gpu.example", "pool": node, "device": "gpu-2"}
    plane.apply(of_devices("DeviceTaintRule", "r", {"deviceSelector": meant, "taint": said}))


SIGNALS: list[tuple[Callable[[ControlPlane, str], None], str]] = [
    (taint, "kubernetes: gpu.health/xid=79"),
    (condition, "kubernetes: GpuNvlinkWatch: link 3 is down"),
    (sentinel, "kubernetes: NVSentinel: quarantined"),
    (device, "kubernetes: gpu-2: gpu.example/ecc"),
]


@ALL
@pytest.mark.timeout(290)
@pytest.mark.usefixtures("devices")
def test_a_rank_leaves_a_node_that_somebody_worries_about(
    plane: ControlPlane, tmp_path: Path
) -> None:
    job = KubernetesJob(tmp_path, plane)
    left: list[str] = []
    try:
        job.until_step(3)
        for count, (say, reason) in enumerate(SIGNALS, start=1):
            job.until(lambda: sorted(ranks(plane).values()) == ["0", "1", "2"], "labels of ranks")
            place = next(place for place, rank in ranks(plane).items() if rank == "0")
            say(plane, place)
            assert len(job.moves(count)) == count
            moved = job.resolved()[-1]
            assert reason in moved.reason and moved.steps_lost == 0, moved
            assert moved.trigger == "planned" and moved.moves[0].startswith("rank 0: ")
            job.until(lambda place=place: place not in ranks(plane), "the end of the old pod")
            left.append(place)
            if len(left) == 2:  # somebody has repaired them
                _forgive(plane, left)
        job.finish()
    finally:
        end(job.process)
        _forgive(plane, left)
    until(lambda: ranks(plane) == {}, "the end of all pods")
    same_bits(job, tmp_path)


@ALL
@pytest.mark.timeout(290)
def test_one_rank_leaves_early_and_then_the_first_node_is_lost(
    plane: ControlPlane, tmp_path: Path
) -> None:
    """Two ranks on each node, and one node of warm spares."""
    options = ["-N", "2", "--nproc-per-node", "2", "--spare-nodes", "1"]
    job = KubernetesJob(tmp_path, plane, *options)
    job.world = 4
    try:
        job.until_step(3)
        job.until(lambda: sorted(filter(None, ranks(plane).values())) == ["0-1", "2-3"], "labels")
        where = {label: place for place, label in ranks(plane).items()}
        a, b, c = where["0-1"], where["2-3"], where[""]
        job.signal("n1/1", "gpu-ecc", "32 uncorrected")
        assert job.moves(1) == [["rank 3: n1/1 -> n2/0"]]
        assert job.resolved()[0].trigger == "pre-emptive"
        job.until(lambda: ranks(plane) == {a: "0-1", b: "2", c: "3"}, "the move in the labels")

        plane.crash_node(a)
        moved = job.moves(2)[1]
        assert sorted(move.partition(":")[0] for move in moved) == ["rank 0", "rank 1"]
        assert all(one.steps_lost == 0 for one in job.resolved())
        job.until(lambda: a not in ranks(plane), "the end of the old pod")
        job.until(lambda: len([label for label in ranks(plane).values() if label]) == 3, "labels")
        job.until(lambda: "keepstep.dev/fenced" in taints(plane, a), "the fence")
        job.finish()
    finally:
        end(job.process)
    until(lambda: ranks(plane) == {}, "the end of all pods")
    same_bits(job, tmp_path)


def _shown(plane: ControlPlane) -> dict[str, str]:
    return ranks(plane)


def _forgive(plane: ControlPlane, nodes: list[str]) -> None:
    for node in nodes:
        plane.change_condition(node, "GpuNvlinkWatch", "False", "")
        plane.change_node(node, {"taints": None}, {"dgxc.nvidia.com/nvsentinel-state": None})
    assert all(taints(plane, node) == set() for node in nodes)
