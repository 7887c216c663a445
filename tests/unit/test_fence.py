"""The fence over loopback, one thread per rank."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from keepstep.worker.groups import fence as fences
from keepstep.worker.groups.fence import WORDS, Fence


@pytest.fixture(autouse=True)
def nobody_waits_for_ever() -> Iterator[None]:
    """Also if a test fails, and leaves threads in a fence."""
    yield
    fences.interrupt_all()


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


DEADLINE_S = 60


@pytest.mark.parametrize(
    "sizes",
    [[1 << 20] * 8, [0, 3 << 20, 1, 700_000, 5 << 20, 16, 0]],
    ids=["equal", "uneven"],
)
def test_what_is_larger_than_any_buffer_is_gathered(sizes: list[int]) -> None:
    ranks = Ranks(len(sizes))
    ranks.connect()
    brought = [bytes([65 + rank]) * size for rank, size in enumerate(sizes)]
    words = (3,) * WORDS

    def go(rank: int) -> Any:
        fence = ranks.fences[rank]
        first = fence.gather(brought[rank])
        return first, fence.meet(words), fence.gather(brought[rank])

    found = [ranks.pool.submit(go, rank) for rank in range(len(sizes))]
    for future in found:  # a rank that is ahead does not disturb one that still reads
        first, met, second = future.result(DEADLINE_S)
        assert first == brought == second and met == (words, words)
    ranks.close()


def in_the_middle(ranks: Ranks) -> list[Future[Any]]:
    """All but the last rank gather, and the one before it sends more than its buffers hold."""
    gathering = [ranks.pool.submit(f.gather, b"x" * (16 << 20)) for f in ranks.fences[:-1]]
    ranks.fences[-1]._incoming[0].recv(1, socket.MSG_PEEK)
    return gathering


def test_an_interruption_ends_all_who_gather_much() -> None:
    ranks = Ranks(8)
    ranks.connect()
    gathering = in_the_middle(ranks)
    assert not any(future.done() for future in gathering)
    fences.interrupt_all()
    for future in gathering:
        with pytest.raises(ConnectionResetError):
            future.result(DEADLINE_S)
    ranks.close()


def test_a_peer_that_is_gone_ends_who_gathers_with_it() -> None:
    ranks = Ranks(3)
    ranks.connect()
    gathering = in_the_middle(ranks)
    ranks.fences[2].close()
    for future in gathering:
        with pytest.raises(ConnectionResetError):
            future.result(DEADLINE_S)
    with pytest.raises(ConnectionResetError):
        ranks.fences[2].gather(b"")
    ranks.close()


def test_a_length_that_nobody_can_mean_is_refused() -> None:
    ranks = Ranks(2)
    ranks.connect()
    ranks.fences[1]._outgoing[0].sendall(fences._LENGTH.pack(fences.GATHERED_BYTES_MAX + 1))
    with pytest.raises(ConnectionResetError, match="announced"):
        ranks.pool.submit(ranks.fences[0].gather, b"").result(DEADLINE_S)
    ranks.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_least_and_greatest_of_tables_are_those_of_all_ranks(size: int) -> None:
    ranks, dice = Ranks(size), random.Random(size)
    ranks.connect()
    for _ in range(5):
        tables = [
            {f"n{n}": dice.choice("abc") for n in range(20) if dice.random() < 0.3}
            for _ in range(size)
        ]
        names = {name for table in tables for name in table}
        values = {name: [t[name] for t in tables if name in t] for name in names}
        expected = tuple({n: pick(v) for n, v in values.items()} for pick in (min, max))
        found = [
            ranks.pool.submit(f.extremes, t) for f, t in zip(ranks.fences, tables, strict=True)
        ]
        assert [future.result(DEADLINE_S) for future in found] == [expected] * size
    ranks.close()


def test_many_ranks_have_no_more_to_say_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {f"class|{name:060}": "0123456789abcdef" for name in range(2000)}
    whole = len(str(table))
    monkeypatch.setattr(fences, "GATHERED_BYTES_MAX", whole)
    ranks = Ranks(16)
    ranks.connect()
    found = [ranks.pool.submit(fence.extremes, table) for fence in ranks.fences]
    assert [future.result(DEADLINE_S) for future in found] == [(table, table)] * 16
    ranks.close()
