"""Planned and pre-emptive moves: make before break, training goes on meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.model.views import IncidentView, PlanView
from tests.support.job import Job
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]

ARGS = ["--epochs", "8", "--steps-per-epoch", "25", "--evaluate-every", "10", "--slow", "yes"]


@pytest.mark.always
@pytest.mark.cost(40)
def test_migrate_drain_and_taint_in_one_job(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "1", script_args=ARGS
    )
    job.until_step(3)
    job.spare_parked()
    moved = job.cli_as(IncidentView, "migrate", "--rank", "1")
    assert (moved.outcome, moved.victims) == ("RESOLVED", [1])
    job.spare_parked()
    job.post("drain", {"node": "n0"}).raise_for_status()
    job.until_closed(2)
    job.post("untaint", {"target": "n0"}).raise_for_status()
    job.spare_parked()
    node = job.rank(2).node
    job.post("taint", {"target": node, "reason": "ECC errors are rising"}).raise_for_status()
    job.until_closed(3)
    job.finish()
    seen = verdict.identical(job, reference(3, *ARGS), faults=3, incidents=3)
    assert [i.trigger for i in seen] == ["planned", "planned", "pre-emptive"]
    assert all(i.outcome == "RESOLVED" for i in seen)


@pytest.mark.cost(35)
def test_drain_of_a_node_with_two_ranks(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--local-nodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1",
        script_args=ARGS, world=4,
    )  # fmt: skip
    job.until_step(3)
    job.spare_parked(2)
    assert job.cli("drain", "n0").returncode == 0  # waits
    job.finish()
    seen = verdict.identical(job, reference(4, *ARGS), faults=1, incidents=1)
    assert seen[0].victims == [0, 1]


@pytest.mark.cost(35)
def test_signal_by_rest_moves_the_rank(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "1", script_args=ARGS
    )
    job.until_step(3)
    job.spare_parked()
    body = {
        "job": job.job,
        "node": "n2",
        "kind": "xid-63",
        "severity": "taint",
        "reason": "row remap",
    }
    assert job.reached().post("/v1/signals", json=body).status_code in (200, 202)
    job.until_closed(1)
    job.finish()
    seen = verdict.identical(job, reference(3, *ARGS), faults=1, incidents=1)
    assert (seen[0].trigger, seen[0].outcome) == ("pre-emptive", "RESOLVED")


@pytest.mark.cost(40)
@pytest.mark.parametrize("victim", ["leaver", "bystander", "newcomer"])
def test_death_while_a_move_is_prepared(
    victim: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = [*ARGS, "--build-s", "2"]
    job = start("--nproc-per-node", "3", "--spares", "3", script_args=args)
    job.until_step(3)
    job.spare_parked(3)
    assert job.cli("migrate", "--rank", "1", "--no-wait").returncode == 0
    assigned = job.until(
        lambda s: [x for x in s.spares if x.state == "assigned"], "an assigned newcomer"
    )
    if victim == "newcomer":
        os.kill(assigned[0].pid, signal.SIGKILL)
    else:
        job.kill_rank(1 if victim == "leaver" else 0)
    job.until_closed(1 if victim == "newcomer" else 2)
    job.finish()
    seen = verdict.identical(job, reference(3, *args), faults=2)
    assert all(i.outcome == "RESOLVED" for i in seen), seen


@pytest.mark.cost(35)
def test_move_across_an_epoch_is_tried_again(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    """Epochs of a few steps: the newcomer's provisional position is often another epoch's."""
    args = ["--epochs", "60", "--steps-per-epoch", "2", "--slow", "yes"]
    job = start("--nproc-per-node", "3", "--spares", "1", script_args=args)
    job.until_step(5)
    job.spare_parked()
    assert job.cli("migrate", "--rank", "2").returncode == 0
    job.until_closed(1)
    job.finish()
    verdict.identical(job, reference(3, *args), faults=1, incidents=1)


@pytest.mark.cost(40)
def test_a_straggler_is_found_and_moved(
    start: Start, reference: Reference, verdict: Verdict, tmp_path: Path
) -> None:
    """Whatever runs in the place of rank 1 is slow; in another place the rank is not."""
    drag = tmp_path / "drag"
    args = [*ARGS, "--slow-s", "0.05", "--drag", str(drag)]
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "1",
        "--stragglers", "move", "--straggler-factor", "2", "--straggler-after", "3",
        script_args=args,
    )  # fmt: skip
    job.until_step(3)
    job.spare_parked()
    slow = job.rank(1)
    drag.write_text(str(slow.pid))
    job.until_closed(1)
    status = job.status()
    assert status.ranks[1].node == "n3" and status.ranks[1].pid != slow.pid
    (taint,) = next(node for node in status.nodes if node.node == slow.node).taints
    assert taint.startswith("straggler: rank 1 takes "), taint
    job.finish()
    seen = verdict.identical(job, reference(3, *args), faults=1, incidents=1)
    assert (seen[0].trigger, seen[0].cause) == ("planned", "straggler")
    assert (seen[0].victims, seen[0].outcome) == ([1], "RESOLVED")
    assert " x the median of " in seen[0].reason


@pytest.mark.cost(40)
def test_ranks_part_when_a_node_is_free_again(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spares", "1", script_args=ARGS
    )  # fmt: skip
    job.until_step(3)
    job.spare_parked()
    assert job.cli_as(PlanView, "rebalance", "--plan-only").moves == []
    home = job.status().spares[0].node
    drained = next(node for node in ("n0", "n1", "n2") if node != home)
    assert job.cli("drain", drained).returncode == 0
    nodes = [rank.node for rank in job.status().ranks]
    assert nodes.count(home) == 2, nodes
    job.post("untaint", {"target": drained}).raise_for_status()
    (move,) = job.cli_as(PlanView, "rebalance", "--plan-only").moves
    assert move.to.startswith(f"{drained}/") and "has 2 ranks" in move.reason, move
    done = job.cli_as(IncidentView, "rebalance")
    assert (done.cause, done.outcome) == ("rebalance", "RESOLVED")
    assert sorted(rank.node for rank in job.status().ranks) == ["n0", "n1", "n2"]
    job.finish()
    verdict.identical(job, reference(3, *ARGS), faults=2, incidents=2)
