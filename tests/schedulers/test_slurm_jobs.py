"""A real job on a real Slurm cluster: nodes are lost and drained, training goes on, bit for bit.

Agents and ranks are steps of Slurm, and reach the orchestrator by TLS with tokens where this
machine has an address beyond loopback.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.schedule import slurm_cli
from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.cli.main import invoke
from keepstep.errors import NoRight
from keepstep.model.schedule import START, AgentStart, Ask, Constraints
from keepstep.orchestrator import registry
from tests.schedulers.cluster import RACKS, Cluster, until
from tests.schedulers.jobs import (
    SlurmJob,
    address,
    allocations,
    end,
    run,
    same_bits,
)
from tests.schedulers.labs import SlurmLab
from tests.support.scripts import SCRIPT


@pytest.fixture
def job(tmp_path: Path, cluster: Cluster) -> Iterator[SlurmJob]:
    started = SlurmJob(tmp_path, "--preempt")
    yield started
    end(started.process)


@pytest.mark.timeout(290)
def test_a_node_is_lost_and_another_one_drained(
    cluster: Cluster, job: SlurmJob, tmp_path: Path
) -> None:
    job.until_step(3)
    first = cluster.ask("squeue", "-h", "-o", "%i")
    a, b, c = allocations(cluster)["start:queue"]

    def swapped() -> dict[str, list[str]] | None:
        now = allocations(cluster)
        return now if a not in now["start:queue"] and any(a in one for one in now) else None

    cluster.crash_node(a)  # the first of the allocation, with rank 0
    (lost,) = job.until(job.resolved, "the move of rank 0")
    assert lost.trigger == "unplanned" and lost.moves == ["rank 0: n0/0 -> n3/0"]
    view = job.view()
    assert view is not None
    d = view.nodes[3].place
    assert all(node.labels == {"rack": RACKS[node.place]} for node in view.nodes if node.place)
    # Idle nodes come first; one that Slurm does not give in time is not waited for.
    kind = "idle" if f"spare-1:idle:{a}" in job.until(swapped, "the swap in squeue") else "preempt"
    assert allocations(cluster) == {"start:queue": [b, c], f"spare-1:{kind}:{a}": [d]}
    assert cluster.states()[a].startswith("down")
    assert "keepstep: job job has lost its node n0" in cluster.ask("sinfo", "-R", "-h", "-o", "%E")

    (e,) = set(cluster.nodes[:-1]) - {a, b, c, d}  # the last one has other GPUs
    SlurmLab(cluster).occupy([e], low=True)
    cluster.ask("scontrol", "update", f"NodeName={b}", "State=DRAIN", "Reason=fan")
    job.until(lambda: len(job.resolved()) == 2, "the move of rank 1")
    moved = job.resolved()[1]
    assert moved.trigger == "planned" and "slurm: fan" in moved.reason
    assert moved.moves == ["rank 1: n1/0 -> n4/0"]
    expected = {"start:queue": [c], f"spare-1:{kind}:{a}": [d], f"spare-2:preempt:{b}": [e]}
    job.until(lambda: allocations(cluster) == expected, "the swap in squeue")
    job.until(lambda: cluster.states()[b] == "drained", "a drained node")
    assert cluster.jobs("PENDING") == [f"other-{e}|"]  # whom it was taken from will run again
    rows = cluster.ask("sacct", "-D", "-X", "-n", "-P", "-j", first, "-o", "State,NNodes")
    assert "RESIZING|2" in rows.splitlines()

    job.finish()
    assert allocations(cluster) == {}
    same_bits(job, tmp_path)


@pytest.mark.skipif("KEEPSTEP_ALL" not in os.environ, reason="only make test-all has the time")
@pytest.mark.timeout(290)
def test_an_orchestrator_killed_with_a_spare_in_hand_leaks_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    """And later the rank moves back to where it was."""
    home, log = tmp_path / "home", tmp_path / "orchestrator.log"
    words = ["-m", "keepstep", "orchestrator", "--id", "main", "--host", address()]
    words += ["--scheduler", "slurm"]
    first = run(log, home, *words)
    until(lambda: registry.read(home, "main"), "the orchestrator")
    options = ["--orchestrator", "main", "--back-after", "2"]
    job = SlurmJob(tmp_path, *options, orchestrator="main")
    second: list[subprocess.Popen[bytes]] = []
    try:
        job.until_step(3)
        a, b, c = allocations(cluster)["start:queue"]
        cluster.crash_node(b)
        job.until(lambda: "spare-1:idle" in allocations(cluster), "a spare")
        end(first)
        held = allocations(cluster)
        second.append(run(log, home, *words))
        (lost,) = job.until(job.resolved, "the move")
        assert lost.moves == ["rank 1: n1/0 -> n3/0"] and lost.steps_lost == 0
        (d,) = held["spare-1:idle"]
        swapped = {"start:queue": [a, c], f"spare-1:idle:{b}": [d]}
        job.until(lambda: allocations(cluster) == swapped, "the swap in squeue")
        cluster.start_node(b)
        cluster.ask("scontrol", "update", f"NodeName={b}", "State=RESUME")
        job.until(lambda: len(job.resolved()) == 2, "the move back")
        assert job.resolved()[1].moves == ["rank 1: n3/0 -> n4/0"]
        back = {"start:queue": [a, c], f"spare-2:idle:{d}": [b]}
        job.until(lambda: allocations(cluster) == back, "the way back in squeue")
        job.until(lambda: cluster.states()[d] == "idle", "an idle spare")
        job.finish()
        until(lambda: allocations(cluster) == {}, "the end of all allocations")
    finally:
        end(first, job.process, *second)
    same_bits(job, tmp_path)


@pytest.mark.parametrize(
    "options, error",
    [
        (["-p", "nowhere"], "no partition nowhere"),
        (["--spare-reservation", "nobodys"], "no reservation nobodys"),
        (["--gpus-per-node", "b300:4"], "GPUs of type b300"),
        (["--gpus-per-node", "many"], "--gpus-per-node is many"),
        (["-N", "7"], "7 nodes are wanted, and there are 6"),
        (["--orchestrator", "nobody"], "no live orchestrator nobody"),
        (["--replenish"], "there are no spare nodes"),
        (["--replenish", "--spare-nodes", "1", "--no-idle"], "by a scheduler only"),
        (["--within", "a b"], "label 'a b'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_allocated(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    error: str,
) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    assert invoke(["slurm", "launch", *options, str(SCRIPT)]) == 2
    said = capsys.readouterr().err
    assert error in said and "hint: " in said and "Traceback" not in said
    assert cluster.jobs("PENDING,RUNNING") == []


def test_an_agent_has_the_whole_node(cluster: Cluster, tmp_path: Path) -> None:
    scheduler, file = SlurmScheduler(), tmp_path / "seen"
    limits = Constraints(gpus=4, gpu_type="h200")
    ask = Ask(job="job", op=START, constraints=limits, kinds=["queue"])
    (place,) = scheduler.acquire(ask, 20).places
    agent = AgentStart(
        job="job",
        node="n0",
        command=["sh", "-c", f"env > {file}.new; mv {file}.new {file}; exec sleep 600"],
        env={"KEEPSTEP_TOKEN": "secret"},
        directory=str(tmp_path),
        log=str(tmp_path / "log"),
    )
    scheduler.start_agent(place, agent)
    until(file.exists, "an agent")
    seen = dict(line.partition("=")[::2] for line in file.read_text().splitlines())
    assert seen["CUDA_VISIBLE_DEVICES"] == "0,1,2,3" and seen["SLURMD_NODENAME"] == place
    assert seen["SLURM_CPUS_ON_NODE"] == "4" and seen["KEEPSTEP_TOKEN"] == "secret"


class AsNobody:
    """In the place of `subprocess`."""

    TimeoutExpired, DEVNULL = subprocess.TimeoutExpired, subprocess.DEVNULL

    @staticmethod
    def run(command: Any, **given: Any) -> Any:
        return subprocess.run(command, **{**given, "user": "nobody", "cwd": "/"})


def test_without_an_operators_rights_nodes_are_not_tainted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_cli, "subprocess", AsNobody)
    monkeypatch.setattr(slurm_cli, "me", lambda: "nobody")
    scheduler = SlurmScheduler()
    can = scheduler.capabilities()
    assert not can.taint and "without an operator's rights" in can.lacks[0]
    for tried in (lambda: scheduler.taint("c1", "fenced", "x"), _drain_anyway):
        with pytest.raises(NoRight) as refused:
            tried()
        assert "rights" in refused.value.hint
    assert cluster.states()["c1"] == "idle"


def _drain_anyway() -> None:
    slurm_cli.run("scontrol", "update", "NodeName=c1", "State=DRAIN", "Reason=x")
