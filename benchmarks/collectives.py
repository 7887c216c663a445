"""All-reduce under NCCL: the network plugin against NCCL's own sockets, on one GPU.

Two ranks that take each other for other machines, once with NET/Socket and once with the plugin
over two loopback addresses. Both pairs live all the time and take turns, in an order drawn anew for
each size and round; ratios are taken inside a round, and the control is the sockets a second time.
With --mps both ranks of a pair are on the GPU at once (mps.py).
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.mps import sharing
from keepstep.net.environment import plugin_environment

SCRIPT = Path(__file__).parent / "train" / "collectives.py"
SIZES = (4 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
BLOCK_BYTES = 256 << 20  # of one measurement, but at most so many operations:
BLOCK_MAX = {False: 100, True: 1000}  # in turns on the GPU, and at once
APART = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}


class Pair:
    def __init__(self, **env: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(SIZES[-1])],
                env={
                    **os.environ, **APART, **place, "RANK": str(rank),
                    "NCCL_HOSTID": f"keepstep-{port}-{rank}", **env,
                },
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip

    def heard(self) -> list[str]:
        lines = [rank.stdout.readline().strip() for rank in self.ranks if rank.stdout]
        if not all(lines):
            raise RuntimeError("a rank has ended")
        return lines

    def measure(self, size: int, most: int) -> float:
        count = max(1, min(most, BLOCK_BYTES // size))
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{size} {count}\n")
            rank.stdin.flush()
        return max(map(float, self.heard()))

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def run(quick: bool, rounds: int | None = None, mps: bool = False) -> list[str]:
    if not torch.cuda.is_available():
        return ["collectives: skipped, there is no GPU on this machine"]
    with sharing(at_once=mps):
        return _run(quick, rounds or (3 if quick else 9), mps)


def _run(quick: bool, rounds: int, mps: bool) -> list[str]:
    provenance = report.Provenance()
    paths = {"KEEPSTEP_NET_PATHS": "127.0.0.1,127.0.0.2"}
    pairs = {
        "plugin": Pair(**plugin_environment(), **paths),
        "socket": Pair(NCCL_NET="Socket"),
        "control": Pair(NCCL_NET="Socket"),
    }
    chance = random.Random(0)
    taken: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    try:
        for pair in pairs.values():
            pair.heard()
        for number in range(-1, rounds):  # the first round is not counted
            for size in SIZES:
                order = chance.sample(list(pairs), len(pairs))
                found = {name: pairs[name].measure(size, BLOCK_MAX[mps]) for name in order}
                if number >= 0:
                    taken[size].append(found)
    finally:
        for pair in pairs.values():
            pair.end()
    results: dict[str, Any] = {}
    for size, measured in taken.items():
        ratios = {
            name: [one[name] / one["socket"] for one in measured] for name in ("plugin", "control")
        }
        results[str(size)] = {
            "socket_us": 1e6 * report.percentile([one["socket"] for one in measured], 50),
            **{name: report.summary(values) for name, values in ratios.items()},
            "seconds": measured,
        }
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    path = report.write(
        "collectives-mps" if mps else "collectives",
        quick,
        provenance.close(),
        {"nccl": nccl, "rounds": rounds, "sizes": results},
    )
    rows = [
        (
            f"{int(size) // 1024} KiB", f"{one['socket_us']:.0f}",
            f"{one['plugin']['p50']:.3f}",
            "{min:.3f} .. {max:.3f}".format(**one["plugin"]),
            f"{one['control']['p50']:.3f}",
        )
        for size, one in results.items()
    ]  # fmt: skip
    title = f"all-reduce, NCCL {nccl}{', MPS' * mps}: time by the plugin / by NET/Socket"
    names = ("size", "socket us", "ratio p50", "min .. max", "control p50")
    return [report.table(title, names, rows), f"written: {path}"]
