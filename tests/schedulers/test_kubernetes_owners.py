"""A real job in pods of a user's own workload, on a real Kubernetes control plane: ranks move out
of its pods and into others, and it stays as it is. What of it is real, workloads.py says."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import invoke
from keepstep.errors import NoSpare, UsageError
from keepstep.model.schedule import Ask, Constraints
from keepstep.orchestrator import registry
from tests.schedulers.cluster import until
from tests.schedulers.control_plane import NAMESPACE, ControlPlane
from tests.schedulers.jobs import (
    ALL,
    KubernetesJob,
    access,
    address,
    end,
    migrations,
    ranks,
    run,
    same_bits,
)
from tests.schedulers.kubernetes_lab import KubernetesLab
from tests.schedulers.workloads import Workload, workload
from tests.support.scripts import SCRIPT

KINDS = ["Job", *(pytest.param(kind, marks=ALL) for kind in ("JobSet", "TrainJob", "PyTorchJob"))]


@pytest.fixture
def url(tmp_path: Path, plane: ControlPlane) -> Iterator[str]:
    """Of an orchestrator; a Secret has the token that lets agents in."""
    if address().startswith("127."):
        pytest.skip("no address beyond loopback: pods join with tokens, over TLS")
    home = tmp_path / "home"
    words = ["-m", "keepstep", "orchestrator", "--id", "main", "--host", address()]
    words += ["--scheduler", "kubernetes", *access(plane, tmp_path)]
    process = run(tmp_path / "orchestrator.log", home, *words)
    secret = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    try:
        entry = until(lambda: registry.read(home, "main"), "the orchestrator")
        plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "agents", "namespace": NAMESPACE},
                "stringData": {"token": _token(home)},
            }
        )
        yield entry.url
    finally:
        end(process)
        plane.ask("DELETE", f"{secret}/agents")


def _token(home: Path) -> str:
    words = [sys.executable, "-m", "keepstep", "token", "create", "--orchestrator", "main"]
    env = {"KEEPSTEP_HOME": str(home), "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    made = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return made.stdout.strip()


def swaps(plane: ControlPlane) -> dict[str, tuple[str, str]]:
    """Node that was left -> its heir, and where that came from."""
    found = migrations(plane).values()
    return {old: (to, kind) for phase, kind, old, to in found if phase == "Done"}


@pytest.mark.timeout(290)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_leave_pods_of_a_workload_that_stays_as_it_is(
    plane: ControlPlane, url: str, tmp_path: Path, kind: str
) -> None:
    with workload(plane, kind, url, tmp_path / "home") as theirs:
        said = theirs.specs()
        options = ["--orchestrator", "main", "--adopt", f"{kind.lower()}/train"]
        job = KubernetesJob(tmp_path, plane, *options, orchestrator="main")
        try:
            b = _lose_and_cordon(plane, theirs, job)
            assert theirs.specs() == said
            job.finish()
        finally:
            end(job.process)
        until(lambda: ranks(plane) == {}, "the end of our pods, and of our marks on theirs")
        plane.change_node(b, {"unschedulable": None})
        if kind != "PyTorchJob":  # whose controller would end it
            until(theirs.is_complete, "the end of their Job")
        assert theirs.specs() == said
    same_bits(job, tmp_path)


def _lose_and_cordon(plane: ControlPlane, theirs: Workload, job: KubernetesJob) -> str:
    """Rank 0's node is lost, and rank 1's node cordoned, which is returned."""
    job.until_step(3)
    job.until(lambda: sorted(ranks(plane).values()) == ["0", "1", "2"], "labels of ranks")
    where = {rank: place for place, rank in ranks(plane).items()}
    a, b, c = where["0"], where["1"], where["2"]
    assert set(theirs.pods()) == {a, b, c}
    lost = theirs.pods()[a]["metadata"]["uid"]

    plane.crash_node(a)
    ((first,),) = job.moves(1)
    assert first.startswith("rank 0: n0/0 -> n") and job.resolved()[0].trigger == "unplanned"
    job.until(lambda: a in swaps(plane), "the swap in the migrations")
    d, origin = swaps(plane)[a]
    job.until(lambda: ranks(plane) == {d: "0", b: "1", c: "2"}, "the swap in the labels")
    assert lost not in [pod["metadata"]["uid"] for pod in theirs.pods().values()]
    swapped = f"job job: {d} has taken the place of {a}"
    job.until(lambda: swapped in theirs.events(), "the swap in the events of their workload")
    if origin == "idle":
        (spare,) = [one for one in plane.pods("keepstep.dev/op") if _is_at(one, d)]
        assert spare["metadata"]["ownerReferences"][0]["uid"] == theirs.root["metadata"]["uid"]
        if theirs.kind != "PyTorchJob":  # nobody is here who would make another pod for it
            job.until(lambda: _waits(theirs, {b, c}), "the pod that their controller has made")

    plane.change_node(b, {"unschedulable": True})
    assert job.moves(2)[1][0].startswith("rank 1: n1/0 -> n")
    assert "kubernetes: cordoned" in job.resolved()[1].reason
    job.until(lambda: b in swaps(plane), "the swap in the migrations")
    e = swaps(plane)[b][0]
    job.until(lambda: ranks(plane) == {d: "0", e: "1", c: "2"}, "the swap in the labels")
    kinds = sorted(kind for _, kind in swaps(plane).values())
    # What their controller makes for a pod that was lost is a spare that costs nobody anything.
    assert kinds == (["idle", "idle"] if theirs.kind == "PyTorchJob" else ["idle", "reserved"])
    swapped = f"job job: {e} has taken the place of {b}"
    job.until(lambda: swapped in theirs.events(), "the swap in the events of their workload")
    path = f"/apis/keepstep.dev/v1alpha1/namespaces/{NAMESPACE}/migrations"
    found = [one["status"] for one in plane.ask("GET", path)["items"]]
    assert {one["owner"] for one in found if one["phase"] == "Done"} == {f"{theirs.kind}/train"}
    return b


def _is_at(pod: Any, place: str) -> bool:
    return bool(pod["spec"].get("nodeName") == place)


def _waits(theirs: Workload, taken: set[str]) -> bool:
    """A pod of theirs that runs, and has no rank."""
    return any(
        place not in taken and pod["status"]["phase"] == "Running"
        for place, pod in theirs.pods().items()
    )


def plain_job(name: str, **spec: Any) -> dict[str, Any]:
    """Of three pods in which nothing runs."""
    limits = {"nvidia.com/gpu": "4"} if "nodeSelector" not in spec else {}
    container = {"name": "c", "image": "none", "resources": {"limits": limits}}
    pod = {"containers": [container], "restartPolicy": "Never", **spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"parallelism": 3, "completions": 3, "template": {"spec": pod}},
    }


def of(job: str, op: str, owner: str, count: int = 1) -> Ask:
    limits = Constraints(owner=owner)
    return Ask(job=job, op=op, constraints=limits, kinds=["reserved"], count=count)


def test_pods_of_a_workload_are_claimed_once_and_let_go(plane: ControlPlane) -> None:
    jobs = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    scheduler = KubernetesLab(plane).scheduler
    plane.apply(plain_job("one"))
    try:
        first = scheduler.acquire(of("a", "start", "job/one", 2), 30)
        assert first.adopted and len(set(first.places)) == 2
        assert scheduler.acquire(of("a", "start", "job/one", 2), 30) == first
        with pytest.raises(NoSpare, match="1 of 2 pods of job/one"):
            scheduler.acquire(of("b", "start", "job/one", 2), 1)
        until(lambda: all(_runs(pod) for pod in plane.pods("job-name=one")), "their pods")
        (offer,) = scheduler.spares(of("a", "spare-1", "job/one"))
        spare = scheduler.acquire(of("a", "spare-1", "job/one"), 30)
        assert (spare.places, spare.kind) == ([offer.place], "reserved")
        assert scheduler.acquire(of("a", "spare-1", "job/one"), 30) == spare
        with pytest.raises(NoSpare):
            scheduler.acquire(of("a", "spare-2", "job/one"), 1)
        for lease in scheduler.leases("a"):
            scheduler.release(lease)
        assert scheduler.leases() == []
        marks = [
            key
            for pod in plane.pods("job-name=one")
            for name in ("labels", "annotations")
            for key in pod["metadata"].get(name, {})
        ]
        assert not [key for key in marks if "keepstep" in key]

        plane.apply(plain_job("two", nodeSelector={"kubernetes.io/hostname": plane.nodes[0]}))
        with pytest.raises(UsageError, match="several pods of job/two are on one node"):
            scheduler.acquire(of("b", "start", "job/two", 2), 30)
    finally:
        for name in ("one", "two"):
            with contextlib.suppress(AssertionError):
                plane.ask("DELETE", f"{jobs}/{name}", propagationPolicy="Background")


def _runs(pod: Any) -> bool:
    return bool(pod["status"].get("phase") == "Running")


@pytest.mark.parametrize(
    "options, error",
    [
        (["--adopt", "job/train"], "--adopt needs --orchestrator"),
        (["--orchestrator", "main", "--adopt", "pod/x"], "pod/x is no workload"),
        (["--orchestrator", "main", "--adopt", "job"], "job is no workload"),
        (["--orchestrator", "main", "--adopt", "job/nobody"], "keepstep has no Job nobody"),
        (["--orchestrator", "main", "--adopt", "trainjob/x"], "this cluster knows no TrainJob"),
    ],
)
def test_what_cannot_be_adopted_is_refused(
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
