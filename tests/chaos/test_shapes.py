"""Faults in steps of other shapes: see shapes.py for what each of them is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.job import Job, inject
from tests.support.scripts import SHAPES
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]


@pytest.mark.cost(28)
@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        # 5 is the last step of an epoch: it sees the end of its loader
        ("pull", ["1,step=2,point=in_backward", "2,step=5,point=before_fence"]),
        ("pull", ["0,step=5,point=in_fence", "1,step=11,point=in_optimizer"]),
        ("pop", ["1,step=3,point=in_backward", "0,step=7,point=before_fence"]),
        ("view", ["2,step=1,point=before_fence", "1,step=7,point=in_fence"]),
        ("view", ["0,step=4,point=in_optimizer", "2,step=8,point=after_step"]),
        # 6 steps of the zip, then 7 of the loop behind it
        ("zip", ["1,step=5,point=in_backward", "0,step=8,point=in_backward"]),
        ("zip", ["2,step=6,point=before_forward", "1,step=19,point=in_optimizer"]),
    ],
    ids=lambda value: value if isinstance(value, str) else f"at {value[0][7:8]}",
)
def test_kill_in_a_step_that(
    shape: str, faults: list[str], start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "2", *inject(*(f"kill:rank={x}" for x in faults)),
        script=SHAPES, script_args=["--shape", shape],
    )  # fmt: skip
    job.finish()
    expected = reference(3, "--shape", shape, script=SHAPES)
    verdict.identical(job, expected, faults=2, incidents=2)


@pytest.mark.cost(25)
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("point", ["in_backward", "in_fence", "after_step"])
def test_static_graph_and_a_kill_in_the_first_steps(
    step: int, point: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        *inject(f"kill:rank={(step + 1) % 3},step={step},point={point}"),
        script=SHAPES, script_args=["--shape", "static"],
    )  # fmt: skip
    job.finish()
    expected = reference(3, "--shape", "static", script=SHAPES)
    verdict.identical(job, expected, faults=1, incidents=1)


@pytest.mark.cost(25)
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_between_micro_batches(
    victim: int, start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = ["--shape", "micro", "--die", f"{victim}:4"]
    job = start("--nproc-per-node", "3", "--spares", "1", script=SHAPES, script_args=args)
    job.finish()
    expected = reference(3, *args, script=SHAPES)
    seen = verdict.identical(job, expected, faults=1, incidents=1)
    assert (seen[0].victims, seen[0].decision) == ([victim], "RETRY")


@pytest.mark.cost(25)
@pytest.mark.parametrize("nodes", [1, 3])
def test_lost_connections_without_a_victim_are_built_again(
    nodes: int, start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = ["--shape", "plain", "--reset", "1:4"]
    job = start(
        "--local-nodes", str(nodes), "--nproc-per-node", str(3 // nodes),
        script=SHAPES, script_args=args,
    )  # fmt: skip
    job.finish()
    expected = reference(3, *args, script=SHAPES)
    seen = verdict.identical(job, expected, faults=1, incidents=1)
    assert (seen[0].cause, seen[0].victims, seen[0].moves) == ("connection", [], [])


@pytest.mark.cost(35)
def test_drain_while_steps_pull_their_batches(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = ["--shape", "pull", "--epochs", "2", "--steps-per-epoch", "60", "--slow", "yes"]
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "1",
        script=SHAPES, script_args=args,
    )  # fmt: skip
    job.until_step(3)
    job.spare_parked()
    job.post("drain", {"node": "n1"}).raise_for_status()
    job.until_closed(1)
    job.finish()
    expected = reference(3, *args, script=SHAPES)
    seen = verdict.identical(job, expected, faults=1, incidents=1)
    assert seen[0].outcome == "RESOLVED" and seen[0].moves
