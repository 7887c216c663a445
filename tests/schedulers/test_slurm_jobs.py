"""Real jobs on a real Slurm cluster: nodes are lost and drained, and training goes on, bit for bit.

The agents and ranks are steps of Slurm, and reach the orchestrator by TLS with tokens where this
machine has an address beyond loopback.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster, until
from labs import SlurmLab

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tests" / "chaos" / "train.py"
STEPS = ["--epochs", "2", "--steps-per-epoch", "100"]
WORLD = 3
JOB_S = 120.0


def address() -> str:
    """Of this machine, beyond loopback if it has one."""
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return str(one.address)
    return "127.0.0.1"


def results(out: Path) -> list[Any]:
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


def same(one: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on where and how often a rank was started."""
    return {key: value for key, value in one.items() if key in ("digest", "losses", "samples")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("plain")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD}", str(SCRIPT), "--out", str(out), *STEPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return results(out)


class SlurmJob:
    """One `keepstep slurm launch` with three nodes."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.out, self.slow, self._log = folder / "out", folder / "slow", folder / "launch.log"
        self.out.mkdir()
        self.slow.touch()  # until `finish` it takes its time: what is done to it happens meanwhile
        self._env = {**os.environ, "KEEPSTEP_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "keepstep", "slurm", "launch", "-N", str(WORLD)]
        command += ["-p", "train", "--gpus-per-node", "h200:4", "--job-id", "job"]
        command += ["--stall-timeout", "6", "--host", address(), *options]
        command += [str(SCRIPT), "--out", str(self.out), *STEPS, "--slow", str(self.slow)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log)

    def words(self) -> str:
        return self._log.read_text()[-6000:]

    def ask(self, *words: str) -> Any:
        command = [sys.executable, "-m", "keepstep", *words, "--json"]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else []

    def _alive(self) -> None:
        assert self._process.poll() is None, self.words()

    def until_step(self, step: int) -> dict[str, Any]:
        def reached() -> Any:
            self._alive()
            seen = self.ask("status")
            return seen and seen[0]["committed_step"] >= step and seen[0]

        found: dict[str, Any] = until(reached, f"step {step}", JOB_S)
        return found

    def until_resolved(self, count: int) -> list[dict[str, Any]]:
        def resolved() -> Any:
            self._alive()
            seen = self.ask("incidents")
            return len([one for one in seen if one["outcome"] == "RESOLVED"]) >= count and seen

        try:
            found: list[dict[str, Any]] = until(resolved, "the move", JOB_S)
        except TimeoutError as error:
            raise AssertionError(self.words()) from error
        return found

    def finish(self, expected: list[Any]) -> None:
        self.slow.unlink()
        try:
            code = self._process.wait(JOB_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.words()) from error
        assert code == 0, self.words()
        assert "0 steps lost" in self.words()
        assert [same(one) for one in results(self.out)] == [same(one) for one in expected]

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def start(tmp_path: Path, cluster: Cluster) -> Iterator[Any]:
    jobs: list[SlurmJob] = []

    def make(*options: str) -> SlurmJob:
        jobs.append(SlurmJob(tmp_path, *options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def allocations(cluster: Cluster) -> dict[str, str]:
    """Comments and nodes of ours."""
    lines = cluster.ask("squeue", "-h", "-t", "RUNNING", "-o", "%k|%N").splitlines()
    return dict(line.split("|") for line in lines if line.startswith("keepstep:"))


@pytest.mark.timeout(240)
def test_the_first_node_of_the_allocation_is_lost(
    cluster: Cluster, start: Any, undisturbed: list[Any]
) -> None:
    job = start()
    job.until_step(3)
    assert allocations(cluster) == {"keepstep:job:start:queue": "c[1-3]"}
    cluster.crash_node("c1")
    (lost,) = job.until_resolved(1)
    assert lost["trigger"] == "unplanned" and lost["moves"] == ["rank 0: n0/0 -> n3/0"]
    assert lost["steps_lost"] == 0
    swapped = {"keepstep:job:start:queue": "c[2-3]", "keepstep:job:spare-1:idle:c1": "c4"}
    until(lambda: allocations(cluster) == swapped, "the swap in squeue")
    assert cluster.states()["c1"].startswith("down")
    assert "keepstep: job job has lost its node n0" in cluster.ask("sinfo", "-R", "-h", "-o", "%E")
    (view,) = job.ask("status")
    assert {node["node"]: node["place"] for node in view["nodes"]}["n3"] == "c4"
    job.finish(undisturbed)
    assert allocations(cluster) == {}


@pytest.mark.timeout(240)
def test_a_drained_node_is_left_for_one_of_a_lower_job(
    cluster: Cluster, start: Any, undisturbed: list[Any]
) -> None:
    job = start("--preempt")
    job.until_step(3)
    first = cluster.ask("squeue", "-h", "-o", "%i")
    SlurmLab(cluster).occupy(["c4", "c5"], low=True)
    cluster.ask("scontrol", "update", "NodeName=c2", "State=DRAIN", "Reason=fan")
    (moved,) = job.until_resolved(1)
    assert moved["trigger"] == "planned" and "slurm: fan" in moved["reason"]
    assert moved["moves"] == ["rank 1: n1/0 -> n3/0"]
    ours = until(
        lambda: "keepstep:job:spare-1:preempt:c2" in (s := allocations(cluster)) and s, "it"
    )
    place = ours["keepstep:job:spare-1:preempt:c2"]
    assert place in ("c4", "c5") and ours["keepstep:job:start:queue"] == "c[1,3]"
    until(lambda: cluster.states()["c2"] == "drained", "a drained node")
    assert cluster.jobs("PENDING") == [f"other-{place}|"]  # it will run again
    rows = cluster.ask("sacct", "-D", "-X", "-n", "-P", "-j", first, "-o", "State,NodeList")
    assert "RESIZING|c[1-3]" in rows.splitlines()
    job.finish(undisturbed)
    assert allocations(cluster) == {}
