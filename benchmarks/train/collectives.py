"""One of two ranks on one GPU: does all-reduces of the sizes that it reads from its input."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    largest = torch.zeros(int(sys.argv[1]) // 4, device="cuda")
    dist.all_reduce(largest)
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        size, count = map(int, line.split())
        part = largest[: size // 4]
        dist.all_reduce(part)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(part)
        torch.cuda.synchronize()
        print((time.perf_counter() - began) / count, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
