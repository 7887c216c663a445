"""What is refused at attach, without a job around it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.utils.data import DataLoader

from keepstep.errors import UsageError
from keepstep.worker.script import children, refusals


@pytest.mark.parametrize(
    "hook",
    [
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        debugging_hooks.noop_hook,
        quantization_hooks.quantization_pertensor_hook,
        functools.partial(default_hooks.allreduce_hook, None),
    ],
)
def test_hooks_without_state_are_exact(hook: Any) -> None:
    refusals.refuse_hook(hook)


@pytest.mark.parametrize(
    "hook",
    [
        powerSGD_hook.powerSGD_hook,
        powerSGD_hook.batched_powerSGD_hook,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        functools.partial(powerSGD_hook.powerSGD_hook),
    ],
)
def test_other_hooks_are_refused(hook: Any) -> None:
    with pytest.raises(UsageError, match="may keep state") as refused:
        refusals.refuse_hook(hook)
    assert refusals.VOUCHED in refused.value.hint


def test_a_hook_that_is_vouched_for_is_taken() -> None:
    def mine(state: Any, bucket: Any) -> Any:
        return bucket

    mine.keepstep_exact = True  # type: ignore[attr-defined]
    refusals.refuse_hook(mine)


def test_optimizer_inside_backward_is_found_where_it_steps() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    refusals.inside_backward(optimizer, "train")  # no backward runs
    parameter.register_post_accumulate_grad_hook(
        lambda _: refusals.inside_backward(optimizer, "train")
    )
    with pytest.raises(UsageError, match=r"SGD\.step\(\) .* inside backward, in 'train'"):
        parameter.sum().backward()


def test_threads_of_autograd_are_not_other_threads() -> None:
    said: list[str] = []

    def work(backward: bool) -> None:
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: refusals.other_thread("all_reduce"))
        try:
            x.sum().backward() if backward else refusals.other_thread("all_reduce")
        except UsageError as error:
            said.append(error.message)

    for backward in (True, False):
        thread = threading.Thread(target=work, args=(backward,), name="mine")
        thread.start()
        thread.join()
    assert len(said) == 1 and "thread 'mine'" in said[0]


# ------------------------------------------------------------------------------------- children

WAIT = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def no_children() -> Iterator[None]:
    children.refuse_living()
    yield
    children.refuse_living()


@pytest.mark.usefixtures("no_children")
def test_living_child_is_refused_unless_vouched_for() -> None:
    for vouched in (False, True):
        env = {**os.environ, children.VOUCHED: "1"} if vouched else dict(os.environ)
        with subprocess.Popen(WAIT, stdin=subprocess.PIPE, env=env) as child:
            assert child.stdin is not None
            try:
                if vouched:
                    children.refuse_living()
                else:
                    with pytest.raises(UsageError, match=f"pid {child.pid}, .*stdin"):
                        children.refuse_living()
            finally:
                child.stdin.close()


@pytest.mark.usefixtures("no_children")
def test_child_of_multiprocessing_is_named() -> None:
    go = multiprocessing.get_context("spawn").Event()
    child = multiprocessing.get_context("spawn").Process(target=go.wait, name="environment-3")
    child.start()
    try:
        with pytest.raises(UsageError, match="SpawnProcess 'environment-3'"):
            children.refuse_living()
    finally:
        go.set()
        child.join()


@pytest.mark.usefixtures("no_children")
def test_workers_of_a_loader_are_no_strangers() -> None:
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    children.refuse_living()
    iterator._shutdown_workers()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_children")
def test_child_that_has_ended_is_not_living() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    children.refuse_living()
    child.wait()
