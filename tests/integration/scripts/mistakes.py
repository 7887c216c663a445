"""Every mistake a training script can make with Keepstep, for test_bad_input.

`all`: each mistake on all ranks, caught and printed; then honest steps; the last mistake is not
caught. The other cases are made by rank 1 alone, uncaught, while rank 0 goes on.
`honest`: no mistake; waits in the middle for the file given with --gate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("case", choices=["all", "attach", "gone", "collective", "fewer", "honest"])
parser.add_argument("--gate", type=Path)
args = parser.parse_args()

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
bare = nn.Linear(4, 4)
ddp = nn.parallel.DistributedDataParallel(bare)
hidden = nn.Linear(4, 4)  # attached bare, used wrapped: a script may do that
wrapper = nn.parallel.DistributedDataParallel(hidden)
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
other = torch.optim.SGD(hidden.parameters(), lr=0.1)
stranger = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
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


if args.case == "gone" and rank == 1:
    raise SystemExit(0)
if args.case == "attach" and rank == 1:
    keepstep.attach(nn.ReLU(), sgd)
if args.case == "all":
    attempt("model without parameters", lambda: keepstep.attach(nn.ReLU(), sgd))
    attempt("model that is none", lambda: keepstep.attach(x, sgd))
    attempt("optimizer that is none", lambda: keepstep.attach(ddp, "adam"))
    lbfgs = torch.optim.LBFGS(ddp.parameters())
    attempt("LBFGS", lambda: keepstep.attach(ddp, lbfgs))

ks = keepstep.attach([ddp, hidden], [sgd, other])


@ks.step
def honest(mistaken: bool = False) -> float:
    sgd.zero_grad()
    loss = ddp(x).square().mean()
    loss.backward()
    sgd.step()
    if mistaken:
        dist.all_reduce(loss)
    return loss.item()


@ks.step
def collective_after_update() -> None:
    ddp(x).sum().backward()
    sgd.step()
    dist.all_reduce(torch.ones(1))


@ks.step
def objects_after_update() -> None:
    ddp(x).sum().backward()
    sgd.step()
    dist.all_gather_object([None] * dist.get_world_size(), rank)


@ks.step
def forward_after_update() -> None:
    ddp(x).sum().backward()
    sgd.step()
    ddp(x)


@ks.step
def forward_of_the_wrapper_after_update() -> None:
    ddp(x).sum().backward()
    sgd.step()
    wrapper(x).sum().backward()


@ks.step
def backward_after_update() -> None:
    loss = wrapper(x).sum()
    ddp(x).sum().backward()
    sgd.step()
    loss.backward()


@ks.step
def point_to_point_after_update() -> None:
    ddp(x).sum().backward()
    sgd.step()
    peer, mine = 1 - rank, torch.ones(1)
    for work in (dist.isend(mine, peer), dist.irecv(torch.zeros(1), peer)):
        assert work is not None
        work.wait()


@ks.step
def not_attached() -> None:
    stranger.step()


@ks.step
def closure_by_position() -> None:
    sgd.step(lambda: ddp(x).sum().item())


@ks.step
def closure_by_name() -> None:
    sgd.step(closure=lambda: ddp(x).sum().item())


@ks.section
def update_in_a_section() -> None:
    sgd.step()


@ks.step
def step_in_a_step() -> None:
    honest()


if args.case == "all":
    attempt("attach twice", lambda: keepstep.attach(ddp, sgd))
    attempt("register without state_dict", lambda: ks.register("counter", object()))
    attempt("register of no functions", lambda: ks.register("counter", 1, 2))
    for mistake in (
        not_attached,
        closure_by_position,
        closure_by_name,
        update_in_a_section,
        step_in_a_step,
        collective_after_update,
        objects_after_update,
        forward_after_update,
        forward_of_the_wrapper_after_update,
        backward_after_update,
        point_to_point_after_update,
    ):
        attempt(mistake.__name__.replace("_", " "), mistake)
    attempt("register after the first step", lambda: ks.register("late", dict, dict))
for _ in range(3):
    honest()
if args.case == "fewer" and rank == 1:
    raise SystemExit(0)
honest(mistaken=args.case == "all" or (args.case == "collective" and rank == 1))
if args.gate is not None:
    print("waiting", flush=True)
    while not args.gate.exists():
        time.sleep(0.02)
for _ in range(3):
    honest()
data = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
print(f"END rank {rank} step {ks.committed_step} sha256 {hashlib.sha256(data).hexdigest()}")
