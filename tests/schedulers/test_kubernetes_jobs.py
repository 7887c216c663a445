"""A real job on a real Kubernetes control plane: nodes are lost, cordoned and taken from others,
training goes on, bit for bit. Kubelets are simulated (see kubelet.py); agents and ranks are real.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.cli.main import invoke
from keepstep.orchestrator import registry
from tests.schedulers.cluster import until
from tests.schedulers.control_plane import NAMESPACE, ControlPlane
from tests.schedulers.jobs import (
    ALL,
    WORLD,
    KubernetesJob,
    access,
    address,
    end,
    migrations,
    ranks,
    run,
    same_bits,
    taints,
)
from tests.schedulers.kubernetes_lab import KubernetesLab
from tests.support.scripts import SCRIPT


@pytest.fixture
def job(tmp_path: Path, plane: ControlPlane) -> Iterator[KubernetesJob]:
    started = KubernetesJob(tmp_path, plane, "--preempt")
    yield started
    end(started.process)


def events(plane: ControlPlane) -> list[str]:
    found = plane.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    return [one["message"] for one in found]


def replica_set() -> dict[str, Any]:
    """A job of somebody else, whose pod comes back when there is room for it."""
    container = {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    pod = {"containers": [container], "terminationGracePeriodSeconds": 1}
    pod["nodeSelector"] = {"nvidia.com/gpu.product": "NVIDIA-H200"}
    labels = {"app": "low"}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "low", "namespace": "default"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def low_runs_on(plane: ControlPlane) -> list[str]:
    pods = plane.pods(space="default")
    return [pod["spec"]["nodeName"] for pod in pods if pod["status"]["phase"] == "Running"]


@pytest.mark.timeout(290)
def test_a_node_is_lost_and_another_one_cordoned(
    plane: ControlPlane, job: KubernetesJob, tmp_path: Path
) -> None:
    job.until_step(3)
    job.until(lambda: sorted(ranks(plane).values()) == ["0", "1", "2"], "labels of ranks")
    where = {rank: place for place, rank in ranks(plane).items()}
    a, b, c = where["0"], where["1"], where["2"]

    plane.crash_node(a)
    assert job.moves(1) == [["rank 0: n0/0 -> n3/0"]]
    assert job.resolved()[0].trigger == "unplanned"
    job.until(lambda: a not in ranks(plane), "the swap")
    (d,) = set(ranks(plane)) - {b, c}
    job.until(lambda: ranks(plane) == {d: "0", b: "1", c: "2"}, "the swap in the labels")
    job.until(lambda: "keepstep.dev/fenced" in taints(plane, a), "the fence")
    done = {"job-spare-1": ("Done", "idle", a, d)}
    job.until(lambda: migrations(plane) == done, "the swap in the migrations")
    swapped = f"job job: {d} has taken the place of {a}"
    job.until(lambda: swapped in events(plane), "the swap in the events")

    plane.apply(replica_set())
    (e,) = job.until(lambda: low_runs_on(plane), "somebody else's pod")
    assert e not in (a, b, c, d)
    plane.change_node(b, {"unschedulable": True})
    assert job.moves(2)[1] == ["rank 1: n1/0 -> n4/0"]
    assert "kubernetes: cordoned" in job.resolved()[1].reason
    job.until(lambda: ranks(plane) == {d: "0", e: "1", c: "2"}, "the swap in the labels")
    done["job-spare-2"] = ("Done", "preempt", b, e)
    job.until(lambda: migrations(plane) == done, "the swap in the migrations")
    assert low_runs_on(plane) == []
    plane.change_node(b, {"unschedulable": None})
    job.until(lambda: low_runs_on(plane) == [b], "the pod that had to go")

    job.finish()
    until(lambda: ranks(plane) == {}, "the end of all pods")
    assert (
        plane.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets", fieldSelector="type=Opaque")[
            "items"
        ]
        == []
    )
    same_bits(job, tmp_path)


@pytest.mark.parametrize(
    "options, error",
    [
        (["-n", "nowhere"], "no namespace nowhere"),
        (["--spare-pool", "nobodys"], "no pool nobodys"),
        (["--gpus-per-node", "b300:4"], "GPUs of type b300"),
        (["-l", "zone=nowhere"], "1 nodes are wanted, and there are 0"),
        (["-N", "7"], "7 nodes are wanted, and there are 6"),
        (["--orchestrator", "nobody"], "no live orchestrator nobody"),
        (["--pod-template", "/nowhere"], "cannot read the pod template /nowhere"),
        (["--gpus-per-node", "many"], "--gpus-per-node is many"),
        (["--replenish"], "there are no spare nodes"),
        (["--kubeconfig", "/nowhere"], "no cluster of Kubernetes can be found"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    plane: ControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    error: str,
) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    words = ["kubernetes", "launch", *access(plane, tmp_path), *options, str(SCRIPT)]
    assert invoke(words) == 2
    said = capsys.readouterr().err
    assert error in said and "hint: " in said and "Traceback" not in said
    assert plane.pods() == []


@ALL
@pytest.mark.timeout(290)
def test_an_orchestrator_killed_with_a_spare_in_hand_leaks_nothing(
    plane: ControlPlane, tmp_path: Path
) -> None:
    """The spare is of a pool, and later the rank moves back to where it was."""
    home, log = tmp_path / "home", tmp_path / "orchestrator.log"
    words = ["-m", "keepstep", "orchestrator", "--id", "main", "--host", address()]
    words += ["--scheduler", "kubernetes", *access(plane, tmp_path)]
    first = run(log, home, *words)
    until(lambda: registry.read(home, "main"), "the orchestrator")
    spare = plane.nodes[0]
    pool = KubernetesLab(plane).reserve(spare)
    options = ["--orchestrator", "main", "--back-after", "2", "--spare-pool", pool]
    job = KubernetesJob(tmp_path, plane, *options, orchestrator="main")
    second: list[subprocess.Popen[bytes]] = []
    try:
        job.until_step(3)
        job.until(lambda: sorted(ranks(plane).values()) == ["0", "1", "2"], "labels of ranks")
        where = {rank: place for place, rank in ranks(plane).items()}
        a, b, c = where["0"], where["1"], where["2"]
        plane.crash_node(b)
        job.until(lambda: spare in ranks(plane), "a spare")
        end(first)
        second.append(run(log, home, *words))
        assert job.moves(1) == [["rank 1: n1/0 -> n3/0"]]
        job.until(lambda: ranks(plane) == {a: "0", spare: "1", c: "2"}, "the swap in the labels")
        plane.start_node(b)
        job.until(lambda: b in plane.ready(), "the lost node")
        plane.change_node(b, {"taints": None})
        assert job.moves(2)[1] == ["rank 1: n3/0 -> n4/0"]
        job.until(lambda: ranks(plane) == {a: "0", b: "1", c: "2"}, "the way back in the labels")
        done = {
            "job-spare-1": ("Done", "reserved", b, spare),
            "job-spare-2": ("Done", "idle", spare, b),
        }
        job.until(lambda: migrations(plane) == done, "both swaps in the migrations")
        assert taints(plane, spare) == {"keepstep.dev/spare"} and taints(plane, b) == set()
        job.finish()
        until(lambda: ranks(plane) == {}, "the end of all pods")
    finally:
        end(first, job.process, *second)
    same_bits(job, tmp_path)


@ALL
def test_a_killed_launcher_leaves_no_pod(
    plane: ControlPlane, job: KubernetesJob, tmp_path: Path
) -> None:
    job.until_step(1)
    assert len(ranks(plane)) == WORLD
    guards = _guards(tmp_path)
    job.process.kill()
    until(lambda: ranks(plane) == {}, "the end of all pods")
    until(lambda: not any(one.is_running() for one in guards), "the end of who did that")


def _guards(folder: Path) -> list[psutil.Process]:
    found = [
        one
        for one in psutil.process_iter(["cmdline"])
        if "keepstep.cli.release_guard" in (words := one.info["cmdline"] or [])
        and str(folder / "home") in words
    ]
    assert len(found) == 1
    return found


@ALL
@pytest.mark.timeout(290)
def test_training_goes_on_without_the_api_server(
    plane: ControlPlane, job: KubernetesJob, tmp_path: Path
) -> None:
    """A node that is drained meanwhile is left when there is one to go to."""
    job.until_step(3)
    job.until(lambda: sorted(ranks(plane).values()) == ["0", "1", "2"], "labels of ranks")
    where = {rank: place for place, rank in ranks(plane).items()}
    a, b, c = where["0"], where["1"], where["2"]
    plane.stop_server()
    try:
        job.drain("n1")
        view = job.view()
        assert view is not None
        job.until_step(view.committed_step + 3)
        job.until(lambda: "does not answer" in job.words(), "a note")
        assert job.resolved() == []
    finally:
        plane.start_server()
    ((move,),) = job.moves(1)  # to a node that was asked for again
    assert move.startswith("rank 1: n1/0 -> n") and job.resolved()[0].trigger == "planned"
    job.until(lambda: b not in ranks(plane), "the swap")
    job.until(lambda: sorted(ranks(plane).values()) == ["0", "1", "2"], "the swap in the labels")
    assert set(ranks(plane)) > {a, c}
    assert "keepstep.dev/degraded" in taints(plane, b)
    job.finish()
    until(lambda: ranks(plane) == {}, "the end of all pods")
    same_bits(job, tmp_path)
