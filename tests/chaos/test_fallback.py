"""State that is nowhere any more: back to a periodic checkpoint, and the same numbers again.

And jobs that hold for want of a spare: what they write then is all that is needed to go on.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.model.views import JobView
from tests.chaos.shards import SHAPES
from tests.support.job import Job
from tests.support.scripts import LAYOUTS
from tests.support.torchrun import Reference, differences
from tests.support.verdict import Verdict

Start = Callable[..., Job]

ARGS = ["--epochs", "6", "--steps-per-epoch", "20", "--slow", "yes"]


def kill_nodes(job: Job, *names: str) -> None:
    """At the same moment: a second one later would find everything rebuilt."""
    pids = {node.node: node.pid for node in job.status().nodes}
    for name in names:
        os.kill(pids[name], signal.SIGKILL)


def saved_step(status: JobView) -> int:
    return status.checkpoints.step if status.checkpoints is not None else 0


def steps_without_a_checkpoint(job: Job) -> None:
    """Two steps after a new one: the next is some seconds away."""
    before = saved_step(job.status())
    new = job.until(
        lambda s: saved_step(s) if saved_step(s) >= max(3, before + 1) else 0, "a new checkpoint"
    )
    job.until(lambda s: s.committed_step >= new + 2, "steps that no checkpoint has")


@pytest.mark.cost(45)
def test_owner_and_buddy_lost_go_back_to_a_checkpoint(
    start: Start, reference: Reference, verdict: Verdict, tmp_path: Path
) -> None:
    """Ranks 1 and 2 are lost with their nodes, and with them every copy of rank 1's side state.
    Rank 0 lives and has all parameters, which does not help."""
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "2",
        "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-interval", "5",
        script_args=ARGS,
    )  # fmt: skip
    job.spare_parked(2)
    steps_without_a_checkpoint(job)
    kill_nodes(job, "n1", "n2")
    job.finish()
    (incident,) = job.incidents()
    assert incident.outcome == "FELL_BACK" and incident.cause == "node-lost", incident
    assert 0 < incident.steps_lost < 120, incident
    assert f"{incident.steps_lost} steps lost" in job.output()
    assert differences(job.results(), reference(3, *ARGS)) == []
    kept = sorted((tmp_path / "saved" / job.job).iterdir())
    assert 1 <= len(kept) <= 3
    assert sum((path / "manifest.json").exists() for path in kept) <= 2
    job.verify_ledger()
    verdict.note(1, f"fell back, {incident.steps_lost} steps computed again, bit-identical")


@pytest.mark.cost(50)
def test_a_damaged_checkpoint_is_not_the_last_one(
    start: Start, reference: Reference, verdict: Verdict, tmp_path: Path
) -> None:
    """Bytes on disk have changed since it was written: the job goes to the one before it."""
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "2",
        "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-interval", "3",
        script_args=ARGS,
    )  # fmt: skip
    job.spare_parked(2)
    first = job.until(saved_step, "a checkpoint")
    job.until(lambda s: saved_step(s) > first, "another checkpoint")
    kill_nodes(job, "n1", "n2")
    back = "going back to "
    bad = job.until(lambda s: s.reason.partition(back)[2], "a job that goes back")
    for file in Path(bad).glob("state/*.distcp"):  # newcomers are still being built
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    job.finish()
    (incident,) = job.incidents()
    assert incident.outcome == "FELL_BACK" and f"{bad} cannot be read" in incident.reason
    assert 0 < incident.steps_lost < 120, incident
    assert differences(job.results(), reference(3, *ARGS)) == []
    verdict.note(1, f"fell back twice, {incident.steps_lost} steps computed again, identical")


@pytest.mark.cost(45)
def test_the_newest_checkpoint_of_a_directory_is_resumed(
    start: Start, reference: Reference, verdict: Verdict, tmp_path: Path
) -> None:
    """The only node is lost with no room for another life; then it is started again."""
    where = ["--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-interval", "0.5"]
    job = start("--nproc-per-node", "3", "--job-id", "once", *where, script_args=ARGS)
    job.until(lambda s: saved_step(s) >= 5, "a checkpoint of a step after the fifth")
    kill_nodes(job, "n0")
    job.finish(code=4)
    assert "--resume" in job.output()
    again = start(
        "--nproc-per-node", "3", "--job-id", "again", *where,
        "--resume", str(tmp_path / "saved"), script_args=ARGS,
    )  # fmt: skip
    again.finish()
    (incident,) = again.incidents()
    assert (incident.cause, incident.outcome) == ("resume", "RESOLVED")
    used = incident.reason.split("resumed from ")[1].split(";")[0]
    assert json.loads((Path(used) / "manifest.json").read_bytes())["step"] >= 5
    assert differences(again.results(), reference(3, *ARGS)) == []
    verdict.note(1, "resumed from the newest periodic checkpoint, bit-identical")


@pytest.mark.cost(50)
@pytest.mark.parametrize("layout", SHAPES)
def test_shards_come_from_a_checkpoint(
    layout: str, start: Start, reference: Reference, verdict: Verdict, tmp_path: Path
) -> None:
    """Every rank reads its own parts of it; and what is kept in agents is good for the new life:
    a rank that is lost after it is replaced without another loss."""
    world, _ = SHAPES[layout]
    args = ["--layout", layout, "--steps", "120", "--slow", "yes"]
    job = start(
        "--local-nodes", str(world), "--nproc-per-node", "1", "--spare-nodes", "3",
        "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-interval", "5",
        script=LAYOUTS, script_args=args, world=world,
    )  # fmt: skip
    job.spare_parked(3)
    steps_without_a_checkpoint(job)
    kill_nodes(job, "n1", "n2")
    job.until_closed(1)
    job.spare_parked()
    job.until_step(job.status().committed_step + 2)  # the vaults have a base of the new life
    job.kill_rank(1)
    job.until_closed(2)
    job.finish()
    first, second = job.incidents()
    assert first.outcome == "FELL_BACK" and first.steps_lost > 0, first
    assert (second.outcome, second.steps_lost) == ("RESOLVED", 0), second
    assert differences(job.results(), reference(world, *args, script=LAYOUTS)) == []
    verdict.note(2, f"fell back, {first.steps_lost} steps computed again, bit-identical")


HELD = [(layout, "auto") for layout in SHAPES] + [("fsdp", "parity")]


@pytest.mark.cost(50)
@pytest.mark.parametrize(("layout", "redundancy"), HELD)
def test_sharded_ranks_that_hold_write_all_shards(
    layout: str, redundancy: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    """Those of the lost rank too, as they were kept for it; no step is lost."""
    world, replicas = SHAPES[layout]
    args = ["--layout", layout, "--steps", "40", "--slow", "yes", "--ema"]
    options = ["--local-nodes", str(world), "--nproc-per-node", "1", "--redundancy", redundancy]
    script: dict[str, Any] = {"script": LAYOUTS, "script_args": args, "world": world}
    job = start(*options, **script)
    job.until_step(7)
    kill_nodes(job, "n1")
    job.until(lambda s: s.state == "held" and s.checkpoint, "a held job with a checkpoint")
    checkpoint = Path(job.status().checkpoint)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["step"] >= 7
    written = {path.name for path in checkpoint.iterdir()}
    assert {"state", "rank-1.state"}.isdisjoint(written) and "rank-0.state" in written
    assert ("rank-1.vault" in written) == (not replicas), written
    job.process.send_signal(signal.SIGTERM)
    job.finish(code=143)
    again = start(*options, "--resume", str(checkpoint), **script)
    again.finish()
    assert f"resumed from {checkpoint}" in again.incidents()[0].reason
    assert differences(again.results(), reference(world, *args, script=LAYOUTS)) == []
    verdict.note(1, f"held at step {manifest['step']}, resumed there, bit-identical")
