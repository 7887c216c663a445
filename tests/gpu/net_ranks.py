"""One of two ranks of test_net.py: collectives over NCCL, and digests of what they gave."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = (1, 1000, 65536, 1 << 20, 16 << 20)
DEADLINE_S = 120.0


def digest(*tensors: torch.Tensor) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def collectives(rank: int) -> dict[str, Any]:
    found = {}
    for size in SIZES:
        torch.manual_seed(1000 * rank + size % 997)
        mine = torch.randn(size, device="cuda")
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        summed = mine.clone()
        dist.all_reduce(summed)
        half = torch.empty(size, device="cuda")
        dist.reduce_scatter_tensor(half, torch.cat(both))
        other = torch.empty_like(mine)
        asked = [
            dist.P2POp(dist.isend, mine, 1 - rank),
            dist.P2POp(dist.irecv, other, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(asked):
            work.wait()
        found[str(size)] = digest(*both, summed, half, other)
    return found


def loop(rank: int, folder: Path) -> dict[str, Any]:
    """Rounds until told to stop; both ranks leave after the same one. All rounds are alike."""
    hashed = set()
    stop = torch.zeros(1, device="cuda")
    rounds = 0
    while not stop.item():
        torch.manual_seed(rank)
        mine = torch.randn(4 << 20, device="cuda")
        dist.all_reduce(mine)
        hashed.add(digest(mine))
        (folder / f"looping-{rank}").touch()
        stop.fill_(float((folder / "stop").exists()))
        dist.all_reduce(stop)
        rounds += 1
    assert rounds > 0 and len(hashed) == 1, "rounds that must be alike differ"
    return {"digest": hashed.pop()}


def survive(rank: int, folder: Path) -> dict[str, Any]:
    """Until the network gives up: the error is seen, the group aborted, the process lives."""
    group: Any = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cuda"))
    error = ""
    end = time.monotonic() + DEADLINE_S
    tensor = torch.ones(1 << 20, device="cuda")
    while not error and time.monotonic() < end:
        try:
            work = dist.all_reduce(tensor, async_op=True)
            (folder / f"looping-{rank}").touch()
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.01)
        except dist.DistBackendError as failure:
            error = str(failure)
    backend.abort()
    alive = float(torch.ones(1000, device="cuda").sum().item()) == 1000.0
    return {"error": error, "alive_after_abort": alive}


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    if mode == "collectives":
        result = collectives(rank)
    elif mode == "loop":
        result = loop(rank, folder)
    else:
        result = survive(rank, folder)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    if mode == "survive":
        os._exit(0)  # a group that was aborted has nothing to say goodbye with
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
