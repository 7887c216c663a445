"""Two jobs of one orchestrator on a small cluster, a job in an allocation of somebody else, and one
whose Slurm goes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.orchestrator import registry
from tests.schedulers.cluster import Cluster, until
from tests.schedulers.jobs import SlurmJob, address, allocations, end, nodes_of, run, same_bits

pytestmark = [
    pytest.mark.skipif("KEEPSTEP_ALL" not in os.environ, reason="only make test-all has the time"),
    pytest.mark.timeout(420),
]


def keepstep(home: Path, *words: str) -> str:
    env = {**os.environ, "KEEPSTEP_HOME": str(home)}
    command = [sys.executable, "-m", "keepstep", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_of_lower_priority_yields_a_node_and_comes_back_by_itself(
    cluster: Cluster, tmp_path: Path
) -> None:
    """All five nodes with the right GPUs are used, and one is lost."""
    home, log = tmp_path / "home", tmp_path / "orchestrator.log"
    words = ["-m", "keepstep", "orchestrator", "--id", "main", "--host", address()]
    main = run(log, home, *words, "--scheduler", "slurm")
    until(lambda: registry.read(home, "main"), "the orchestrator")
    shared = ["--orchestrator", "main"]
    low = SlurmJob(
        tmp_path / "low", *shared, "--grace", "1", orchestrator="main", job="low", home=home
    )
    high = SlurmJob(
        tmp_path / "high", *shared, "--priority", "5", "--preempt",
        orchestrator="main", job="high", world=2, home=home,
    )  # fmt: skip
    try:
        low.until_step(3)
        high.until_step(3)
        lines = json.loads(keepstep(home, "jobs", "--orchestrator", "main", "--json"))
        assert {line["job"]: line["priority"] for line in lines} == {"low": 0, "high": 5}
        (a, b) = allocations(cluster, "high")["start:queue"]
        plan = json.loads(
            keepstep(home, "drain", "n1", "--job", "high", "--orchestrator", "main",
                     "--plan-only", "--json")
        )  # fmt: skip
        assert [one["kind"] for one in plan["offers"]] == ["yield"] * 3

        cluster.crash_node(b)
        (lost,) = high.until(high.resolved, "the move of rank 1")
        assert lost.trigger == "unplanned" and lost.steps_lost == 0
        low.until(lambda: (v := low.view()) and v.state == "held", "the one that yields")
        view = low.view()
        assert view is not None and view.checkpoint
        left = allocations(cluster, "low")["start:queue"]
        assert len(left) == 2 and len(allocations(cluster, "high")) == 2

        cluster.start_node(b)
        cluster.ask("scontrol", "update", f"NodeName={b}", "State=RESUME")
        low.until(lambda: (v := low.view()) and v.state == "running", "its return")
        assert [b] in allocations(cluster, "low").values()
        for job in (high, low):
            job.finish()
        assert a in cluster.nodes
    finally:
        end(main, low.process, high.process)
    for job in (high, low):
        same_bits(job, tmp_path)


def test_a_job_in_an_adopted_allocation_uses_its_spare_and_gets_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The allocation outlives it."""
    options = ["-p", "train", "-N3", "--exclusive", "--gres=gpu:h200:4", "-J", "mine"]
    cluster.ask("salloc", "--no-shell", "--no-kill", *options)
    mine = cluster.ask("squeue", "-h", "-n", "mine", "-o", "%i")
    a, b, c = nodes_of(cluster, mine)
    job = SlurmJob(tmp_path, "--adopt", mine, "--spare-nodes", "1", "--replenish", world=2)
    try:
        job.until_step(3)
        assert allocations(cluster) == {"start:adopted": [a, b, c]}
        cluster.crash_node(a)
        (lost,) = job.until(job.resolved, "the move of rank 0")
        assert lost.moves == ["rank 0: n0/0 -> n2/0"] and lost.steps_lost == 0
        job.until(lambda: len(allocations(cluster)) == 2, "a new spare node")
        swapped = {"start:adopted": [b, c]}
        job.until(lambda: swapped.items() <= allocations(cluster).items(), "the swap in squeue")
        (spare,) = allocations(cluster)["spare-1:idle"]
        job.until(
            lambda: (v := job.view()) and any(s.state == "parked" for s in v.spares), "a spare"
        )
        assert spare not in (a, b, c)
        job.finish()
        assert allocations(cluster) == {} and nodes_of(cluster, mine) == [b, c]
    finally:
        end(job.process)
    same_bits(job, tmp_path)


def test_a_node_is_lost_while_slurm_is_away(cluster: Cluster, tmp_path: Path) -> None:
    """Training goes on without it, and what is needed is asked for until it answers."""
    job = SlurmJob(tmp_path)
    try:
        job.until_step(3)
        said = cluster.ask("squeue", "-h", "-o", "%S")
        began = time.mktime(time.strptime(said, "%Y-%m-%dT%H:%M:%S"))
        saved = cluster.folder / "state" / "job_state"
        until(lambda: saved.stat().st_mtime > began + 1, "what Slurm knows on disk")
        (a, b, c) = allocations(cluster)["start:queue"]
        cluster.stop_controller()
        try:
            view = job.view()
            assert view is not None
            job.until_step(view.committed_step + 3)
            cluster.crash_node(b)
            job.until(
                lambda: (v := job.view()) and any("slurm" in note.text for note in v.notes),
                "a note that Slurm does not answer",
            )
            job.until(lambda: (v := job.view()) and v.state == "held", "a job that holds")
        finally:
            cluster.start_controller()
        (lost,) = job.until(job.resolved, "the move of rank 1")
        assert lost.victims == [1] and lost.steps_lost == 0
        job.until(lambda: allocations(cluster)["start:queue"] == [a, c], "the swap in squeue")
        job.finish()
        assert allocations(cluster) == {}
    finally:
        end(job.process)
    same_bits(job, tmp_path)
