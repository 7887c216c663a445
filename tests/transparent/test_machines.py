"""From one machine to another (network namespaces): other addresses, and nothing in the clear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job import results
from tests.support.machines import STALL_S, Cluster, Lab, laboratory, why_not
from tests.support.torchrun import Reference, differences


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(reason)
    with laboratory(tmp_path, 4) as it:
        yield it


@pytest.mark.timeout(290)
@pytest.mark.parametrize("script", ["train.py", "pretend_gpu.py"])
def test_ranks_move_to_other_machines_and_their_memory_is_never_seen(
    script: str, lab: Lab, tmp_path: Path, reference: Reference, request: pytest.FixtureRequest
) -> None:
    if script == "pretend_gpu.py":
        request.getfixturevalue("cuda")
    cluster = Cluster(lab, jobs_at=tmp_path / "out")
    cluster.out.mkdir()
    slow = tmp_path / "slow"
    slow.touch()
    words = ["run", "--orchestrator", cluster.url, "--stall-timeout", STALL_S, "--job-id", "job"]
    words += ["--mode", "transparent", "--nnodes", "2", "--nproc-per-node", "1"]
    words += [str(Path(__file__).with_name(script))]
    words += ["--out", str(cluster.out), "--slow", str(slow), "--destroy"]
    secret = "a-word-of-the-environment"
    for machine, node in zip(cluster.others, ("n0", "n1"), strict=False):
        where = ("--orchestrator", cluster.url, "--token-file", str(cluster.join))
        machine.start(f"agent-{node}", "agent", *where, "--node", node, "--wait", SECRET=secret)
    run = cluster.head.start("run", *words, KEEPSTEP_TOKEN=cluster.operator)
    cluster.until_step(2)
    cluster.agent(cluster.others[2], "n2")
    for rank in (1, 0):
        moved = cluster.head.run("migrate", "--rank", str(rank), "--json", "--job", "job")
        assert moved.returncode == 0, moved.stderr + lab.logs()
    places = {seat.rank: seat.node for seat in cluster.status().ranks}
    assert places == {0: "n1", 1: "n2"}
    slow.unlink()
    cluster.end(run)
    assert differences(results(cluster.out, 2), reference(2)) == []
    assert secret.encode() not in lab.sniffer.seen()
