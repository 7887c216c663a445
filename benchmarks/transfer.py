"""How fast a newcomer gets its state, against what the machine can do at best.

A source in one process, a newcomer in another, the same bytes in turn by four ways:

    pulled over sockets     as between nodes: several streams, hashed on both ends
    raw socket loop         one sender, one receiver, one buffer each, nothing looked at
    pulled on one host      the source's memory is read directly, hashed on both ends
    memcpy                  one thread, from memory to memory that has been touched before

Ratios are taken inside a round; the order in a round is drawn anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from benchmarks import report
from keepstep.model.commands import Source
from keepstep.model.messages import Address
from keepstep.worker.state import transfer
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.serving import StateServer
from keepstep.worker.state.transfer import pull

MIB = 2**20
TOKEN, TICK = "benchmark", 1
BUFFER = MIB
SIZES_MIB = (0.25, 1, 4, 16, 64)  # of the tensors, in turn


def state_of(total_mib: int, seed: int) -> StateSet:
    """Parameters of mixed sizes; an optimizer would only add more of the same."""
    torch.manual_seed(seed)
    net = nn.Module()
    left, count = float(total_mib), 0
    while left > 0:
        size = min(SIZES_MIB[count % len(SIZES_MIB)], left)
        net.register_parameter(f"p{count}", nn.Parameter(torch.rand(int(size * MIB) // 4)))
        left -= size
        count += 1
    return StateSet({"net": net}, {}, {})


def serve(pipe: Connection, total_mib: int) -> None:
    """The source: a state server, and on request a raw sender."""
    torch.set_num_threads(1)
    server = StateServer("127.0.0.1", TOKEN, state_of(total_mib, 1).export(), TICK)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, listener.getsockname()[1], os.getpid()))
    buffer = memoryview(bytearray(os.urandom(BUFFER)))
    with contextlib.suppress(EOFError):
        while wanted := pipe.recv():
            if wanted == "hashed anew":
                server._digests.clear()
                continue
            with listener.accept()[0] as sock:
                for _ in range(total_mib):
                    sock.sendall(buffer)
    server.close()


class Bench:
    def __init__(self, total_mib: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.total = total_mib * MIB
        self._mib = total_mib
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, total_mib), daemon=True)
        self.process.start()
        address, self._raw_port, pid = self._pipe.recv()
        self._source = Source(rank=0, pid=pid, node="n", serve=Address(address.host, address.port))
        self._target = state_of(total_mib, 2)
        self._from = torch.ones(self.total, dtype=torch.uint8)
        self._to = torch.ones(self.total, dtype=torch.uint8)
        self._readable = transfer._memory_is_readable

    def pull(self, direct: bool) -> None:
        transfer._memory_is_readable = self._readable if direct else lambda _: False
        self._pipe.send("hashed anew")  # as for the first newcomer
        pull([self._source], TICK, TOKEN, self._target)

    def raw(self) -> None:
        self._pipe.send("raw")
        buffer = memoryview(bytearray(BUFFER))
        got = 0
        with socket.create_connection(("127.0.0.1", self._raw_port)) as sock:
            while count := sock.recv_into(buffer):
                got += count
        assert got == self.total, got

    def copy(self) -> None:
        ctypes.memmove(self._to.data_ptr(), self._from.data_ptr(), self.total)

    def close(self) -> None:
        self._pipe.close()
        self.process.join(30)


def run(quick: bool, rounds: int | None = None) -> list[str]:
    provenance = report.Provenance()
    torch.set_num_threads(1)
    rounds = rounds or (5 if quick else 25)
    bench = Bench(128 if quick else 512)
    ways: dict[str, Callable[[], Any]] = {
        "pulled over sockets": lambda: bench.pull(direct=False),
        "raw socket loop": bench.raw,
        "pulled on one host": lambda: bench.pull(direct=True),
        "memcpy": bench.copy,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    chance = random.Random(0)
    for number in range(-1, rounds):  # the first round touches all memory and is not counted
        for name in chance.sample(list(ways), len(ways)):
            began = time.perf_counter()
            ways[name]()
            if number >= 0:
                taken[name].append(time.perf_counter() - began)
    bench.close()
    speed = {name: [bench.total / s / 1e9 for s in times] for name, times in taken.items()}
    pairs = (("pulled over sockets", "raw socket loop"), ("pulled on one host", "memcpy"))
    ratios = {
        f"{ours} / {best}": [base / own for own, base in zip(taken[ours], taken[best], strict=True)]
        for ours, best in pairs
    }
    result = {
        "bytes": bench.total,
        "rounds": rounds,
        "seconds": taken,
        "gb_per_s": {name: report.summary(values) for name, values in speed.items()},
        "ratios": {
            name: {**report.summary(values), "interval95": report.interval(values)}
            for name, values in ratios.items()
        },
        "goals": {"pulled over sockets / raw socket loop": 0.9, "pulled on one host / memcpy": 0.7},
    }
    report.write("transfer", quick, provenance.close(), result)
    lines = [f"transfer of {bench.total / 1e6:.0f} MB, {rounds} rounds, medians"]
    lines += [f"  {name:24} {statistics.median(v):6.2f} GB/s" for name, v in speed.items()]
    lines += [f"  {name:48} {statistics.median(v):5.2f}" for name, v in ratios.items()]
    return ["\n".join(lines)]
