"""Two ranks whose witness speaks once, at the same step on both: `diverging.py OUT [SAVED]`.

What finds a difference is not the subject here, so the script plays the witness: it calls what a
witness calls, inside a step and before the update. With SAVED it does so only behind a checkpoint
there, and not before step 6 in any case.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep

STEPS = 40
SPEAKS_AT = 6

out = Path(sys.argv[1])
saved = Path(sys.argv[2]) if len(sys.argv) > 2 else None
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
ks = keepstep.attach(ddp, optimizer)
spoken = out / f"spoken-{rank}"


def is_time() -> bool:
    """The same answer on both ranks, and only once in the life of the job."""
    ready = ks.committed_step >= SPEAKS_AT and not spoken.exists()
    if saved is not None:
        ready = ready and any(saved.glob("*/checkpoint-*/manifest.json"))
    votes = torch.tensor([float(ready)])
    dist.all_reduce(votes)
    return votes.item() == dist.get_world_size()


@ks.step
def train_step(batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = ddp(batch).square().mean()
    loss.backward()
    if not ks._transactions.call.warming and is_time():
        spoken.write_text(str(ks.committed_step))
        table = {"all|weight": "ab12" if rank == 0 else "ff00", "all|bias": "77"}
        ks._recovery.diverged("replicas", "train_step", table=table, agreed=ks.committed_step)
    optimizer.step()
    time.sleep(0.1)
    return loss.item()


batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(n)) for n in range(STEPS)]
for batch in ks.batches(batches):
    train_step(batch)
digest = [p.tolist() for p in model.parameters()]
(out / f"rank-{rank}.json").write_text(json.dumps({"steps": ks.committed_step, "model": digest}))
print("done", flush=True)
