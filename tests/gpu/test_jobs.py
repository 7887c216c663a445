"""Real jobs over NCCL on one GPU, hurt at the points of the chaos suite; bits are compared.

Starting a job takes longer than recovering it, so each carries several faults, with a spare for
each of them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from keepstep.model.views import IncidentView
from keepstep.net.environment import plugin_environment
from tests.support.job import Job, Result
from tests.support.verdict import Verdict

Start = Callable[..., Job]
Reference = Callable[..., Future[list[Result]]]

STEPS = ["--epochs", "3"]
# Where, and in which step; sections come after every fifth.
POINTS = {
    "before_forward": 2,
    "in_backward": 5,
    "before_fence": 8,
    "in_fence": 11,
    "in_optimizer": 14,
    "after_step": 17,
    "in_section": 20,
}


def hurt(
    start: Start, reference: Reference, verdict: Verdict, world: int, faults: list[str],
    *script_args: str,
) -> list[IncidentView]:  # fmt: skip
    args = [*STEPS, *script_args]
    expected = reference(world, *args)
    options = [word for fault in faults for word in ("--inject", fault)]
    job = start(
        "--nproc-per-node", str(world), "--spares", str(len(faults)), *options,
        script_args=args, world=world,
    )  # fmt: skip
    job.finish(deadline_s=60 + 30 * len(faults))  # processes with CUDA start slowly
    guarded = "foreach" not in script_args
    assert any(found["guarded"] for found in job.results()) == guarded
    return verdict.identical(job, expected.result(), faults=len(faults), incidents=len(faults))


@pytest.mark.parametrize(("layout", "world"), [("ddp", 3), ("fsdp", 3), ("hsdp", 4)])
def test_kill_at_every_point(
    layout: str, world: int, start: Start, reference: Reference, verdict: Verdict
) -> None:
    faults = [
        f"kill:rank={n % world},step={step},point={point}"
        for n, (point, step) in enumerate(POINTS.items(), 1)
    ]
    hurt(start, reference, verdict, world, faults, "--layout", layout)


@pytest.mark.parametrize(
    "variant",
    [
        ["--optimizer", "foreach"],
        ["--scaler", "--backend", "cpu:gloo,cuda:nccl"],
        ["--quiet"],
        ["--meter"],
    ],
    ids=["unguarded", "scaler-and-both-backends", "result-alone", "meter"],
)
def test_kills_with(
    variant: list[str], start: Start, reference: Reference, verdict: Verdict
) -> None:
    faults = [
        "kill:rank=2,step=1,point=in_backward",
        "kill:rank=0,step=6,point=in_fence",
        "kill:rank=1,step=12,point=in_optimizer",
    ]
    hurt(start, reference, verdict, 3, faults, *variant)


def test_device_errors_replace_the_rank(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    faults = [
        "device-error:rank=1,step=6,point=before_forward",
        "device-error:rank=2,step=12,point=in_backward",
    ]
    seen = hurt(start, reference, verdict, 3, faults, "--layout", "ddp")
    assert [(i.cause, i.victims) for i in seen] == [
        ("device-error", [1]),
        ("device-error", [2]),
    ]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_planned_migration(
    layout: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = [*STEPS, "--layout", layout, "--slow", "yes"]
    expected = reference(3, *args)
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "1", script_args=args
    )
    job.until_step(3)
    job.spare_parked()
    moved = job.cli_as(IncidentView, "migrate", "--rank", "1")
    assert (moved.outcome, moved.victims) == ("RESOLVED", [1])
    job.finish()
    seen = verdict.identical(job, expected.result(), faults=1, incidents=1)
    assert [i.trigger for i in seen] == ["planned"]


@pytest.mark.parametrize(
    ("keep", "sources"),
    [
        ("buddy", ["the vault of the buddy", "the vault of the buddy"]),
        ("parity", ["the vault of its own agent", "the parity at"]),
    ],
    ids=["buddy", "parity"],
)
def test_shards_of_a_process_and_of_a_node_that_are_lost(
    keep: str,
    sources: list[str],
    start: Start,
    reference: Reference,
    verdict: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large ones, cut into slices, over several connections."""
    monkeypatch.setenv("KEEPSTEP_VAULT_LANES", "3")
    monkeypatch.setenv("KEEPSTEP_VAULT_SLICE", "10000")
    args = [*STEPS, "--layout", "fsdp", "--slow", "yes"]
    expected = reference(3, *args)
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "2", "--redundancy", keep,
        "--inject", "kill:rank=1,step=5,point=in_backward", script_args=args,
    )  # fmt: skip
    job.until(lambda status: len(job.live_incidents() or []) == 1, "the first incident")
    job.until_step(9)
    job.spare_parked()
    node = job.rank(0).node
    job.kill_node(node)
    job.until(lambda status: len(job.live_incidents() or []) == 2, "the second incident")
    job.hurry()
    job.finish()
    seen = verdict.identical(job, expected.result(), faults=2, incidents=2)
    assert all(one in i.source for one, i in zip(sources, seen, strict=True)), seen


def test_a_network_that_gives_up_costs_no_step(
    start: Start, reference: Reference, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All paths between a rank and the others are cut for longer than the plugin waits: NCCL's own
    error, seen while the device is waited for, ends in new communicators and no lost step."""
    # For the plain run, too: NCCL adds in another order over a network that it rates otherwise.
    for name, value in plugin_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEEPSTEP_NET_PATHS", "127.0.0.1,127.0.0.2")
    monkeypatch.setenv("KEEPSTEP_NET_DEADLINE_S", "2")
    args = [*STEPS, "--layout", "ddp", "--slow", "yes", "--control"]
    expected = reference(3, *args)
    job = start("--net=tcp", "--nproc-per-node", "3", "--spares", "1", script_args=args)
    job.until_step(3)
    (control,) = job.out.glob("control-1-*")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for path in range(2):
            sock.sendto(f"cut {path}".encode(), str(control))
    job.until(lambda status: job.live_incidents(), "an incident")
    job.finish()
    assert verdict.identical(job, expected.result(), faults=1)


def test_a_newcomer_with_another_batch_on_its_device_is_stopped(start: Start) -> None:
    job = start(
        "--nproc-per-node", "2", "--spares", "1", "--on-divergence", "continue",
        "--inject", "kill:rank=1,step=6,point=in_fence", script_args=["--other"], world=2,
    )  # fmt: skip
    job.finish()
    assert not job.unfired()
    (reason,) = [i.reason for i in job.incidents() if i.outcome == "DIVERGED"]
    assert "other inputs on the newcomer of rank 1" in reason and "argument 1 " in reason


def test_a_batch_that_is_changed_on_the_device_is_not_tried_again(start: Start) -> None:
    job = start(
        "--nproc-per-node", "2", "--spares", "1",
        "--inject", "kill:rank=1,step=6,point=in_backward", script_args=["--in-place"], world=2,
    )  # fmt: skip
    job.finish(code=1)
    assert not job.unfired()
    assert "argument 1 was changed in 'train_step:" in job.output()


def test_compiled_step(start: Start, reference: Reference, verdict: Verdict) -> None:
    fault = "kill:rank=1,step=6,point=in_backward"
    hurt(start, reference, verdict, 2, [fault], "--compile")


def test_cuda_graph_inside_a_step_is_refused(start: Start, verdict: Verdict) -> None:
    job = start("--nproc-per-node", "2", script_args=["--graph"], world=2)
    job.finish(code=1)
    assert "a CUDA graph inside step 'train_step:" in job.output()
    verdict.note(0, "refused with a UsageError")
