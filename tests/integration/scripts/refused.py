"""What cannot be protected, for test_refused: one case a run, made by all ranks.

`all`: each refusal at attach and after it, caught and printed; then honest steps. The other cases
are not caught, or are accepted.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("case", choices=["all", "child", "adding", "backend", "kept", "unlike"])
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--results", type=int, default=64, help="of 32 kB each, before attach")
parser.add_argument("--marker", type=Path, help="made by the newcomer that is unlike")
args = parser.parse_args()

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


class Adding:
    """A scheduler whose load adds, in Megatron's way."""

    num_steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps += state["num_steps"]


class Other(dist.ProcessGroup):
    """A backend that nobody knows how to replace."""

    def getBackendName(self) -> str:
        return "other"


def wrapped() -> Any:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


def custom_hook(state, bucket):  # type: ignore[no-untyped-def]
    return default_hooks.allreduce_hook(None, bucket)


ddp = wrapped()
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
x = torch.arange(8.0).reshape(2, 4) + rank


def attempt(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except keepstep.UsageError as error:
        said = {"case": name, "refused": True, "message": error.message, "hint": error.hint}
    except BaseException as error:
        said = {"case": name, "refused": False, "message": repr(error), "hint": ""}
    else:
        said = {"case": name, "refused": False, "message": "it was accepted", "hint": ""}
    print("MISTAKE " + json.dumps(said), flush=True)


def hooked(state: Any, hook: Any) -> None:
    other = wrapped()
    other.register_comm_hook(state, hook)
    keepstep.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))


def averaged() -> None:
    averager = PeriodicModelAverager(period=4)
    keepstep.attach(ddp, sgd)
    del averager


def local_sgd() -> None:
    optimizer = PostLocalSGDOptimizer(sgd, averager=None)
    keepstep.attach(ddp, optimizer)


def in_backward() -> None:
    other = wrapped()
    _apply_optimizer_in_backward(torch.optim.SGD, other.parameters(), {"lr": 0.1})
    keepstep.attach(other, sgd)


def fused() -> None:
    other = wrapped()
    other._register_fused_optim(torch.optim.SGD, 0.1)
    keepstep.attach(other, sgd)


def with_child() -> None:
    with multiprocessing.Manager() as manager:
        shared = manager.dict()
        keepstep.attach(ddp, sgd)
        del shared


def with_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    try:
        keepstep.attach(ddp, sgd)
    finally:
        child.communicate()


def with_rpc() -> None:
    from torch.distributed import rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size())
    try:
        keepstep.attach(ddp, sgd)
    finally:
        rpc.shutdown(graceful=False)


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None)


if args.case == "unlike" and keepstep.is_newcomer() and not args.marker.exists():
    args.marker.touch()
    torch.set_num_threads(3)
if args.case == "child" and rank == 1:
    with_child()
if args.case == "adding":
    keepstep.attach(ddp, sgd, scheduler=Adding())
if args.case == "backend":
    dist.Backend.register_backend("other", lambda store, rank, size, timeout: Other(rank, size))
    dist.new_group([0, 1], backend="other")
if args.case == "all":
    attempt("PowerSGD", lambda: hooked(power_sgd(), powerSGD_hook.powerSGD_hook))
    local = PostLocalSGDState(None, None, 2)
    attempt("post-local SGD hook", lambda: hooked(local, post_localSGD_hook))
    attempt("a hook of its own", lambda: hooked(None, custom_hook))
    attempt("model averager", averaged)
    attempt("local SGD", local_sgd)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    attempt("ZeRO", lambda: keepstep.attach(ddp, zero))
    attempt("optimizer in backward", in_backward)
    attempt("fused optimizer", fused)
    attempt("manager", with_child)
    attempt("process", with_process)
    attempt("scheduler that adds", lambda: keepstep.attach(ddp, sgd, scheduler=Adding()))
    attempt("registered that adds", lambda: keepstep.attach(ddp, sgd, count=Adding()))
    attempt("RPC", with_rpc)

# What is exact: hooks without state, a fake group, a child that is vouched for.
ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
fake = dist.new_group([rank], backend="fake", use_local_synchronization=True)
bystander = subprocess.Popen(
    [sys.executable, "-c", "import sys; sys.stdin.read()"],
    stdin=subprocess.PIPE,
    env={**os.environ, "KEEPSTEP_BYSTANDER": "1"},
)
set_up = [torch.full((8000,), 100.0 * n + rank) for n in range(args.results)]
for n, tensor in enumerate(set_up):
    dist.broadcast(tensor, n % dist.get_world_size())
agreed = torch.stack(set_up).double().sum()

ks = keepstep.attach(ddp, sgd)


@ks.step
def honest() -> float:
    sgd.zero_grad()
    loss = ddp(x).square().mean() + 0.0 * agreed.float()
    assert marker is not None and time.perf_counter() > 0.0
    loss.backward()
    dist.all_reduce(torch.ones(1), group=fake)
    sgd.step()
    return loss.item()


marker = object()  # other code may depend on it; a newcomer never gets it


@ks.step
def functional_after_update() -> None:
    ddp(x).sum().backward()
    sgd.step()
    functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD) + 0


@ks.step
def update_inside_backward() -> None:
    handles = [p.register_post_accumulate_grad_hook(lambda _: sgd.step()) for p in ddp.parameters()]
    try:
        ddp(x).square().mean().backward()
    finally:
        for handle in handles:
            handle.remove()


def in_thread() -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            dist.all_reduce(torch.ones(1))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="mine")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def uneven() -> None:
    with ddp.join():
        pass


if args.case == "all":
    from torch.distributed import optim, rpc

    late = functools.partial(ddp.register_comm_hook, power_sgd(), powerSGD_hook.powerSGD_hook)
    attempt("hook after attach", late)
    attempt("Join", uneven)
    with ddp.join(enable=False):
        pass
    attempt("averager after attach", lambda: PeriodicModelAverager(period=4))
    attempt("RPC after attach", lambda: rpc.init_rpc("w", rank=rank, world_size=2))
    apply = optim._apply_optimizer_in_backward
    later = functools.partial(apply, torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
    attempt("optimizer in backward after attach", later)
    attempt("register after attach", lambda: ks.register("late", Adding()))
    attempt("thread", in_thread)
    attempt("update inside backward", update_inside_backward)
    attempt("functional after update", functional_after_update)
for _ in ks.batches(range(args.steps)):
    honest()
    marker = object()
data = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
print(
    f"END rank {rank} step {ks.committed_step} agreed {agreed.item()} "
    f"sha256 {hashlib.sha256(data).hexdigest()}",
    flush=True,
)
bystander.communicate()
