"""Training on a Slurm that refuses: no node that would do, a fenced one that is back, no rights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.schedulers.cluster import Cluster, until
from tests.schedulers.jobs import SlurmJob, allocations, end, same_bits
from tests.schedulers.labs import SlurmLab

pytestmark = [
    pytest.mark.skipif("KEEPSTEP_ALL" not in os.environ, reason="only make test-all has the time"),
    pytest.mark.timeout(420),
]


def noted(job: SlurmJob, words: str) -> bool:
    view = job.view()
    return view is not None and any(words in note.text for note in view.notes)


def held(job: SlurmJob) -> bool:
    view = job.view()
    return view is not None and view.state == "held"


def test_neither_others_nor_other_gpus_nor_a_fenced_node_are_taken(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Preemption is refused, the only idle node has other GPUs, and the lost one comes back."""
    job = SlurmJob(tmp_path, "--preempt")
    try:
        job.until_step(3)
        a, b, c = allocations(cluster)["start:queue"]
        *alike, other = [node for node in cluster.nodes if node not in (a, b, c)]
        SlurmLab(cluster).occupy(alike, low=False)
        cluster.crash_node(b)
        job.until(lambda: held(job), "a job that holds")
        job.until(lambda: noted(job, "the scheduler gives no node"), "a refusal")
        cluster.start_node(b)
        until(lambda: cluster.states()[b] == "down", "a fenced node whose slurmd is back")
        assert held(job) and cluster.states()[other] == "idle"
        cluster.ask("scancel", "--name", f"other-{alike[0]}")
        (lost,) = job.until(job.resolved, "the move of rank 1")
        assert lost.victims == [1] and lost.steps_lost == 0
        view = job.view()
        assert view is not None and view.ranks[1].node in [
            node.node for node in view.nodes if node.place == alike[0]
        ]
        assert cluster.states()[b] == "down" and cluster.states()[other] == "idle"
        assert f"other-{alike[1]}|{alike[1]}" in cluster.jobs()
        job.finish()
        assert allocations(cluster) == {}
    finally:
        end(job.process)
    same_bits(job, tmp_path)


def test_a_node_is_lost_and_nobody_may_fence_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the lost node are waited for until they must have ended; then it goes on."""
    real = shutil.which("scontrol")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/sh\ncase "$*" in *"update NodeName="*)\n'
        '  echo "slurm_update error: Invalid user id" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    (tools / "scontrol").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        job = SlurmJob(tmp_path)
    try:
        job.until_step(3)
        cluster.crash_node(allocations(cluster)["start:queue"][1])
        job.until(lambda: noted(job, "needs an operator's rights"), "a note about rights")
        (lost,) = job.until(job.resolved, "the move of rank 1")
        assert lost.victims == [1] and lost.steps_lost == 0
        job.finish()
        assert allocations(cluster) == {}
    finally:
        end(job.process)
    same_bits(job, tmp_path)
