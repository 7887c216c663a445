"""The fence over loopback, one thread per rank."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from keepstep.worker.groups import fence as fences
from keepstep.worker.groups.fence import WORDS, Fence


class Ranks:
    def __init__(self, size: int) -> None:
        self.store: Any = dist.HashStore()
        self.fences = [Fence(rank, size, "127.0.0.1") for rank in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def connect(self) -> None:
        list(self.pool.map(lambda f: f.connect(self.store, 10.0), self.fences))

    def meet(self, words: list[tuple[int, ...]]) -> list[Any]:
        return list(self.pool.map(lambda f, w: f.meet(w), self.fences, words))

    def close(self) -> None:
        for fence in self.fences:
            fence.close()
        self.pool.shutdown()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9])
def test_every_rank_hears_of_every_rank(size: int) -> None:
    ranks = Ranks(size)
    ranks.connect()
    for turn in range(20):  # one after the other: what is heard belongs to the same turn
        rest = (7,) * (WORDS - 4)
        last = [turn if rank == size - 1 else -1 for rank in range(size)]
        words = [(turn, rank, -rank, last[rank], *rest) for rank in range(size)]
        expected = ((turn, 0, 1 - size, -1, *rest), (turn, size - 1, 0, turn, *rest))
        assert ranks.meet(words) == [expected] * size
    ranks.close()


def test_nobody_passes_before_the_last_has_come() -> None:
    ranks = Ranks(5)
    ranks.connect()
    early = [ranks.pool.submit(fence.meet, tuple(range(WORDS))) for fence in ranks.fences[:4]]
    assert not any(future.done() for future in early)
    ranks.fences[4].meet(tuple(range(WORDS)))
    assert all(future.result(10) for future in early)
    ranks.close()


def test_interrupt_frees_who_waits_in_it_and_who_builds_it() -> None:
    ranks = Ranks(3)
    ranks.connect()
    waiting = [ranks.pool.submit(fence.meet, (0,) * WORDS) for fence in ranks.fences[:2]]
    lonely = Fence(0, 2, "127.0.0.1")  # its peer has told its place and never connects
    peer = Fence(1, 2, "127.0.0.1")
    store: Any = dist.HashStore()
    store.set("fence/1", f'["127.0.0.1", {peer._address[1]}, "{peer._cookie.hex()}"]')
    began = threading.Event()

    def build() -> None:
        began.set()
        lonely.connect(store, 60.0)

    with ThreadPoolExecutor(1) as builder:
        building = builder.submit(build)
        assert began.wait(10)
        fences.interrupt_all()
        for future in [*waiting, building]:
            with pytest.raises(OSError):
                future.result(10)
    with pytest.raises(OSError):
        ranks.fences[2].meet((0,) * WORDS)
    for fence in (lonely, peer):
        fence.close()
    ranks.close()


def test_strangers_do_not_get_in() -> None:
    ranks = Ranks(2)
    stranger = socket.create_connection(ranks.fences[0]._address)
    stranger.sendall(b"x" * 24)
    ranks.connect()
    assert ranks.meet([(1,) * WORDS, (2,) * WORDS]) == [((1,) * WORDS, (2,) * WORDS)] * 2
    assert stranger.recv(1) == b""
    stranger.close()
    ranks.close()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_what_every_rank_brings_is_gathered(size: int) -> None:
    ranks = Ranks(size)
    ranks.connect()
    for turn in range(3):
        brought = [bytes([turn, rank]) * (1 + 100_000 * (rank == 1)) for rank in range(size)]
        found = list(ranks.pool.map(lambda f, b: f.gather(b), ranks.fences, brought))
        assert found == [brought] * size
    ranks.close()
