"""Which side state is kept, and which answer a request gets."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.agent.blobs import BlobServer
from keepstep.agent.page import PageReader, create_page
from keepstep.core.agent.blobs import BlobStore
from keepstep.model.blob_messages import (
    SERIAL_BITS,
    BlobData,
    BlobGet,
    BlobMissing,
    BlobOk,
    BlobPut,
    BlobRefused,
)
from keepstep.model.page import (
    CAPACITY_DEFAULT,
    FIELDS,
    MAGIC,
    NEWEST,
    PAGE_BYTES,
    SLOT_HEADER,
    TICKS_KEPT,
)


def test_the_newest_ticks_and_the_init_record_are_kept() -> None:
    store = BlobStore()
    for tick in (-1, 0, 1, 2, 3):
        store.put(5, tick, b"%d" % tick)
    assert store.ticks(5) == [-1, 1, 2, 3]
    assert store.get(5, NEWEST) == (3, b"3")
    assert store.get(5, -1) == (-1, b"-1")
    assert store.get(5, 0) is None
    assert store.get(6, NEWEST) is None


def test_a_retried_tick_is_replaced() -> None:
    store = BlobStore()
    store.put(0, 7, b"old")
    store.put(0, 8, b"first try")
    store.put(0, 8, b"second try")
    assert store.get(0, 8) == (8, b"second try")
    assert store.ticks(0) == [7, 8]


@given(st.lists(st.integers(-1, 20), min_size=1))
def test_what_was_just_acknowledged_is_there(ticks: list[int]) -> None:
    store = BlobStore()
    for tick in ticks:
        store.put(0, tick, b"%d" % tick)
        assert store.get(0, tick) == (tick, b"%d" % tick)
        assert len([kept for kept in store.ticks(0) if kept >= 0]) <= TICKS_KEPT
    assert (-1 in store.ticks(0)) == (-1 in ticks)


@pytest.fixture
def pages() -> Iterator[list[PageReader]]:
    """A young worker with ticks 5, 6 and a dead, older one with 4, 5."""
    made = []
    for name, ticks in (("young", (5, 6)), ("dead", (4, 5))):
        fd = create_page(name)
        os.pwrite(fd, CAPACITY_DEFAULT.to_bytes(8, "little"), FIELDS["capacity"])
        os.pwrite(fd, MAGIC.to_bytes(8, "little"), FIELDS["magic"])
        for tick in ticks:
            data = f"{name} {tick}".encode()
            header = SLOT_HEADER.pack(2, tick, len(data), zlib.crc32(data))
            at = PAGE_BYTES + (tick % TICKS_KEPT) * CAPACITY_DEFAULT
            os.pwrite(fd, header + data, at)
        made.append(PageReader(fd))
    yield made
    for page in made:
        page.close()


@pytest.fixture
def server(pages: list[PageReader]) -> BlobServer:
    server = BlobServer("s3cret", lambda rank: pages if rank == 1 else [])
    for rank, tick in ((1, 3), (1, 6), (2, 8)):
        put = BlobPut(token="s3cret", rank=rank, tick=tick, data=b"copy %d" % tick)
        assert server.answer(put) == BlobOk()
    return server


@pytest.mark.parametrize(
    ("rank", "tick", "data", "own"),
    [
        (1, 6, b"young 6", True),  # a page before a copy
        (1, 5, b"young 5", True),  # the younger worker before the dead one
        (1, 4, b"dead 4", True),
        (1, 3, b"copy 3", False),
        (1, NEWEST, b"young 6", True),
        (2, NEWEST, b"copy 8", False),
    ],
)
def test_a_tick_comes_from_wherever_it_is(
    server: BlobServer, rank: int, tick: int, data: bytes, own: bool
) -> None:
    reply = server.answer(BlobGet(token="s3cret", rank=rank, tick=tick))
    assert isinstance(reply, BlobData)
    assert (reply.data, reply.own) == (data, own)


def test_missing_says_what_is_held(server: BlobServer) -> None:
    get = BlobGet(token="s3cret", rank=1, tick=99)
    assert server.answer(get) == BlobMissing(held=[3, 4, 5, 6])
    assert server.answer(BlobGet(token="s3cret", rank=9, tick=NEWEST)) == BlobMissing(held=[])


@pytest.mark.parametrize("token", ["", "s3cre", "s3cret ", "schl\u00fcssel", "\udc80"[:0]])
def test_a_wrong_token_gets_nothing_and_changes_nothing(server: BlobServer, token: str) -> None:
    assert isinstance(server.answer(BlobGet(token=token, rank=1, tick=6)), BlobRefused)
    put = BlobPut(token=token, rank=7, tick=1, data=b"x")
    assert isinstance(server.answer(put), BlobRefused)
    assert server.answer(BlobGet(token="s3cret", rank=7, tick=1)) == BlobMissing(held=[])


@pytest.mark.parametrize(("rank", "tick"), [(-1, 0), (0, -2)])
def test_impossible_side_state_is_refused(server: BlobServer, rank: int, tick: int) -> None:
    put = BlobPut(token="s3cret", rank=rank, tick=tick, data=b"x")
    assert isinstance(server.answer(put), BlobRefused)


def test_copies_of_a_life_that_is_over_are_forgotten() -> None:
    """The job went back: the same ticks come again, and the old ones must not be taken for them."""
    server = BlobServer("t", lambda _: ())
    for generation, ticks in ((2, (-1, 98, 99)), (5, (40, 41))):
        for tick in ticks:
            serial = (generation << SERIAL_BITS) + tick + 2
            put = BlobPut(token="t", rank=1, tick=tick, data=b"%d" % tick, serial=serial)
            assert server.answer(put) == BlobOk()
    for _ in range(2):  # it may be told more than once
        server.forget(5)
        newest = server.answer(BlobGet(token="t", rank=1, tick=NEWEST))
        assert isinstance(newest, BlobData) and newest.tick == 41
        assert server.answer(BlobGet(token="t", rank=1, tick=99)) == BlobMissing(held=[41])
