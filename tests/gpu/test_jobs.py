"""Real jobs over NCCL on one GPU, hurt at the points of the chaos suite; bits are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Job, Verdict

Start = Callable[..., Job]
Reference = Callable[..., list[dict[str, Any]]]

STEPS = ["--epochs", "3"]
POINTS = [
    "before_forward",
    "in_backward",
    "before_fence",
    "in_fence",
    "in_optimizer",
    "after_step",
    "in_section",
]


def inject(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--inject", fault)]


def fired(job: Job, count: int) -> None:
    assert len(job.last["injects_fired"]) == count, job.last["injects_fired"]


def kills(point: str, world: int) -> list[str]:
    """Three, each of another rank."""
    steps = [5, 15, 20] if point == "in_section" else [3, 10, 17]
    return [f"kill:rank={(n + 1) % world},step={s},point={point}" for n, s in enumerate(steps)]


@pytest.mark.parametrize("point", POINTS)
def test_ddp_kill_each_rank_at(
    point: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "2", *inject(*kills(point, 3)), script_args=STEPS
    )
    job.finish()
    fired(job, 3)
    verdict.identical(job, reference(3, *STEPS), faults=3, incidents=3)


@pytest.mark.parametrize(
    "variant",
    [["--optimizer", "foreach"], ["--scaler"], ["--backend", "cpu:gloo,cuda:nccl"]],
    ids=["unguarded", "scaler", "both-backends"],
)
def test_ddp_kills_with(
    variant: list[str], start: Start, reference: Reference, verdict: Verdict
) -> None:
    faults = [
        "kill:rank=2,step=1,point=in_backward",
        "kill:rank=0,step=6,point=in_fence",
        "kill:rank=1,step=12,point=in_optimizer",
    ]
    args = [*STEPS, *variant]
    job = start("--nproc-per-node", "3", "--spares", "2", *inject(*faults), script_args=args)
    job.finish()
    fired(job, 3)
    verdict.identical(job, reference(3, *args), faults=3, incidents=3)


def test_planned_migration(start: Start, reference: Reference, verdict: Verdict) -> None:
    args = ["--epochs", "4", "--steps-per-epoch", "25", "--slow", "yes"]
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "1", script_args=args
    )
    job.until_step(3)
    job.spare_parked()
    moved = job.cli_json("migrate", "--rank", "1")
    assert (moved["outcome"], moved["victims"]) == ("RESOLVED", [1])
    job.finish()
    seen = verdict.identical(job, reference(3, *args), faults=1, incidents=1)
    assert [i["trigger"] for i in seen] == ["planned"]


@pytest.mark.parametrize("point", ["before_forward", "in_backward"])
def test_device_error_replaces_the_rank(
    point: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        *inject(f"device-error:rank=1,step=6,point={point}"),
        script_args=STEPS,
    )  # fmt: skip
    job.finish()
    fired(job, 1)
    seen = verdict.identical(job, reference(3, *STEPS), faults=1, incidents=1)
    assert (seen[0]["cause"], seen[0]["victims"]) == ("device-error", [1])


def test_compiled_step(start: Start, reference: Reference, verdict: Verdict) -> None:
    args = [*STEPS, "--compile"]
    fault = "kill:rank=1,step=6,point=in_backward"
    job = start("--nproc-per-node", "2", "--spares", "1", *inject(fault), script_args=args, world=2)
    job.finish()
    fired(job, 1)
    verdict.identical(job, reference(2, *args), faults=1, incidents=1)


def test_cuda_graph_inside_a_step_is_refused(start: Start, verdict: Verdict) -> None:
    job = start("--nproc-per-node", "2", script_args=["--graph"], world=2)
    job.finish(code=1)
    assert "a CUDA graph inside step 'train_step:" in job.output()
    verdict.note(0, "refused with a UsageError")
