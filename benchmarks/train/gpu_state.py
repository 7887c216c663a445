"""A script that knows nothing of Keepstep, with a given amount of state on a GPU (transparent.py).

A small model trains; the rest is ballast, whose sum is checked when OUT/check appears.
"""

from __future__ import annotations

import argparse
import struct
import time
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--bytes", type=float, required=True)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
args = parser.parse_args()

STEP_S = 0.05
CHUNK = 1 << 26
out = Path(args.out)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2048, 2048), nn.Dropout(0.1), nn.Linear(2048, 2048)).to(args.device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
own = sum(4 * p.nbytes for p in net.parameters())  # with gradients and AdamW's two
ballast = torch.empty(max(1, int(args.bytes - own)) // 4, dtype=torch.int32, device=args.device)
for part in ballast.split(CHUNK):
    part.random_()


def total() -> int:
    return sum(int(part.sum()) for part in ballast.split(CHUNK))


expected = total()
step = 0
with (out / "rank-0.commits").open("ab", buffering=0) as log:
    while True:
        rows = torch.randn(64, 2048, device=args.device)
        (net(rows) - rows).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if args.device == "cuda":
            torch.cuda.synchronize()
        step += 1
        log.write(struct.pack("<qqq", step, time.monotonic_ns(), 0))
        if (out / "check").exists():
            (out / "check").unlink()
            (out / "checked").write_text(str(total() == expected))
        time.sleep(STEP_S)
