"""Jobs that a scheduler runs, and what it says of them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.cli.client import Client
from keepstep.errors import KeepstepError
from keepstep.model.views import IncidentView, JobView
from keepstep.orchestrator import registry
from keepstep.orchestrator.requests import Asked, DrainRequest, SignalRequest, SignalTaken
from tests.schedulers.cluster import Cluster, until
from tests.schedulers.control_plane import NAMESPACE, ControlPlane
from tests.schedulers.kubernetes_lab import TEMPLATE
from tests.support.job import results
from tests.support.scripts import SCRIPT
from tests.support.torchrun import differences, run_plain

STEPS = ["--epochs", "2", "--steps-per-epoch", "100"]
WORLD = 3
JOB_S = 150.0


def address() -> str:
    """Of this machine, beyond loopback if it has one."""
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return str(one.address)
    return "127.0.0.1"


def run(log: Path, home: Path, *words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "KEEPSTEP_HOME": str(home), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, *words], env=env, stdout=file, stderr=file)


class SlurmJob:
    """One `keepstep slurm launch`, with three nodes unless it is said."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        orchestrator: str = "",
        job: str = "job",
        world: int = WORLD,
        home: Path | None = None,
    ) -> None:
        """`orchestrator`: the id of the one that is asked; by default it is embedded."""
        self.out, self.slow, self._log = folder / "out", folder / "slow", folder / "launch.log"
        self._home, self._id, self.id = home or folder / "home", orchestrator or job, job
        self.world = world
        self.seen: dict[str, None] = {}  # what was to be seen while it was waited for, in order
        self.out.mkdir(parents=True)
        self.slow.touch()  # until `finish` it takes its time: what is done to it happens meanwhile
        command = [sys.executable, "-m", "keepstep", "slurm", "launch", "-N", str(world)]
        command += ["-p", "train", "--gpus-per-node", "h200:4", "--job-id", job]
        command += ["--stall-timeout", "6", "--host", address(), *options]
        command += [str(SCRIPT), "--out", str(self.out), *STEPS]
        command += ["--slow", str(self.slow), "--slow-s", "1"]
        self.process = run(self._log, self._home, *command[1:])

    def words(self) -> str:
        seen = "\n".join(list(self.seen)[-20:])
        return f"{self._log.read_text()[-6000:]}\nseen meanwhile:\n{seen}"

    def _look(self) -> None:
        view = self.view()
        self.seen |= {f"note: {note.text}": None for note in (view.notes if view else ())}
        with contextlib.suppress(Exception):  # it may be away, too
            self.seen[self.held()] = None

    def held(self) -> str:
        """What the scheduler itself says of the job."""
        command = ["squeue", "-h", "-o", "%i %T %N %k"]
        rows = subprocess.run(command, capture_output=True, text=True, timeout=2)
        return f"squeue: {rows.stdout.strip()}"

    def _ask(self, path: str, kind: Any) -> Any:
        entry = registry.read(self._home, self._id)
        try:
            return Client.of(entry).get(path, kind) if entry is not None else None
        except KeepstepError:
            return None

    def view(self) -> JobView | None:
        seen: JobView | None = self._ask(f"/v1/jobs/{self.id}", JobView)
        return seen

    def resolved(self) -> list[IncidentView]:
        seen = self._ask(f"/v1/jobs/{self.id}/incidents", list[IncidentView]) or []
        return [one for one in seen if one.outcome == "RESOLVED"]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        def check() -> Any:
            assert self.process.poll() is None, f"it ended before {what}\n{self.words()}"
            if not (found := condition()):
                self._look()
            return found

        try:
            return until(check, what, JOB_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.words()}") from error

    def until_step(self, step: int) -> None:
        self.until(lambda: (v := self.view()) and v.committed_step >= step, f"step {step}")

    def finish(self) -> None:
        self.slow.unlink()
        assert self.process.wait(JOB_S) == 0, self.words()
        assert ", 0 steps lost" in self.words()


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def same_bits(job: SlurmJob, folder: Path) -> None:
    """As an undisturbed run of the same script under torchrun."""

    plain = run_plain(folder / f"plain-{job.id}", job.world, STEPS)
    assert differences(results(job.out, job.world), plain) == []


def allocations(cluster: Cluster, job: str = "job") -> dict[str, list[str]]:
    """Ours: what their comments say, and their nodes."""
    lines = cluster.ask("squeue", "-h", "-t", "RUNNING", "-o", "%k|%N").splitlines()
    rows = [line.split("|") for line in lines if line.startswith(f"keepstep:{job}:")]
    return {
        comment.removeprefix(f"keepstep:{job}:"): cluster.ask(
            "scontrol", "show", "hostnames", nodes
        ).split()
        for comment, nodes in rows
    }


def nodes_of(cluster: Cluster, allocation: str) -> list[str]:
    said = cluster.ask("squeue", "-h", "-j", allocation, "-o", "%N")
    return cluster.ask("scontrol", "show", "hostnames", said).split()


ALL = pytest.mark.skipif("KEEPSTEP_ALL" not in os.environ, reason="only make test-all has the time")


def access(plane: ControlPlane, folder: Path) -> list[str]:
    """Options that every command takes."""
    template = folder / "pod.json"
    template.write_text(json.dumps(TEMPLATE))
    return ["--kubeconfig", str(plane.kubeconfig()), "--pod-template", str(template)]


class KubernetesJob(SlurmJob):
    """One `keepstep kubernetes launch` with three nodes."""

    def __init__(
        self, folder: Path, plane: ControlPlane, *options: str, orchestrator: str = "job"
    ) -> None:
        self.out, self.slow, self._log = folder / "out", folder / "slow", folder / "launch.log"
        self._home, self._id, self.id = folder / "home", orchestrator, "job"
        self.world, self.seen, self._plane = WORLD, {}, plane
        self.out.mkdir()
        self.slow.touch()
        command = ["-m", "keepstep", "kubernetes", "launch", "-N", str(WORLD)]
        command += ["--gpus-per-node", "h200:4", "--job-id", "job", *access(plane, folder)]
        command += ["--stall-timeout", "6", "--host", address(), *options]
        command += [str(SCRIPT), "--out", str(self.out), *STEPS]
        command += ["--slow", str(self.slow), "--slow-s", "1"]
        self.process = run(self._log, self._home, *command)

    def held(self) -> str:
        return f"pods: {ranks(self._plane)}"

    def drain(self, node: str) -> None:
        entry = registry.read(self._home, self._id)
        assert entry is not None
        Client.of(entry).post("/v1/jobs/job/drain", DrainRequest(node=node, reason="asked"), Asked)

    def signal(self, slot: str, kind: str, reason: str) -> None:
        entry = registry.read(self._home, self._id)
        assert entry is not None
        said = SignalRequest(job=self.id, kind=kind, reason=reason, slot=slot)
        Client.of(entry).post("/v1/signals", said, SignalTaken)

    def moves(self, count: int) -> list[list[str]]:
        self.until(lambda: len(self.resolved()) == count, f"{count} moves")
        return [one.moves for one in self.resolved()]


def ranks(plane: ControlPlane) -> dict[str, str]:
    """Places of our pods and what `kubectl get pods -L keepstep.dev/rank` says of them."""
    return {
        pod["spec"].get("nodeName", ""): pod["metadata"]["labels"].get("keepstep.dev/rank", "")
        for pod in plane.pods("keepstep.dev/job")
    }


def migrations(plane: ControlPlane) -> dict[str, tuple[str, str, str, str]]:
    path = f"/apis/keepstep.dev/v1alpha1/namespaces/{NAMESPACE}/migrations"
    found = plane.ask("GET", path)["items"]
    names = ("phase", "kind", "from", "to")
    return {
        one["metadata"]["name"]: tuple(one.get("status", {}).get(name, "") for name in names)
        for one in found
    }


def taints(plane: ControlPlane, node: str) -> set[str]:
    return {one["key"] for one in plane.node(node)["spec"].get("taints") or []}
