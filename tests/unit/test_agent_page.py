"""The progress page as its reader sees it: whole, torn, growing, short."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from keepstep.agent.page import PageReader, create_page
from keepstep.model.page import (
    CAPACITY_DEFAULT,
    FIELDS,
    INIT_TICK,
    MAGIC,
    NEWEST,
    PAGE_BYTES,
    SLOT_HEADER,
    SLOTS,
    WHERE,
)


class Writer:
    """The worker's side, one field or slot at a time."""

    def __init__(self, fd: int, capacity: int = CAPACITY_DEFAULT) -> None:
        self.fd = fd
        self.capacity = capacity
        self.put("capacity", capacity)
        self.put("magic", MAGIC)

    def put(self, name: str, value: int) -> None:
        os.pwrite(self.fd, value.to_bytes(8, "little"), FIELDS[name])

    def publish(
        self, slot: int, tick: int, data: bytes, *, seq: int = 2, crc: int | None = None
    ) -> None:
        crc = zlib.crc32(data) if crc is None else crc
        header = SLOT_HEADER.pack(seq, tick, len(data), crc)
        os.pwrite(self.fd, header + data, PAGE_BYTES + slot * self.capacity)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_page("test")
    yield fd
    os.close(fd)


def test_a_new_page_is_sized_and_empty(fd: int) -> None:
    assert os.fstat(fd).st_size == PAGE_BYTES + SLOTS * CAPACITY_DEFAULT
    assert not os.get_inheritable(fd)
    reader = PageReader(fd)
    assert reader.sample() is None
    assert reader.ticks() == []
    assert reader.blob(NEWEST) is None


def test_an_initialised_page_without_side_state_has_no_tick_zero(fd: int) -> None:
    Writer(fd)
    reader = PageReader(fd)
    assert reader.ticks() == []
    assert reader.blob(0) is None


def test_header_fields_arrive_by_name(fd: int) -> None:
    writer = Writer(fd)
    numbers = {name: index + 10 for index, name in enumerate(FIELDS) if index > 1}
    for name, value in {**numbers, "where": WHERE.index("fence"), "stepping": 1, "hold": 0}.items():
        writer.put(name, value)
    sample = PageReader(fd).sample()
    assert sample is not None
    assert (sample.where, sample.stepping, sample.hold) == ("fence", True, False)
    for name in ("heartbeat_ns", "progress_ns", "marks", "version", "tick", "generation"):
        assert getattr(sample, name) == numbers[name]


def test_an_unknown_where_is_empty(fd: int) -> None:
    Writer(fd).put("where", 1 << 40)
    sample = PageReader(fd).sample()
    assert sample is not None and sample.where == ""


def test_slots_are_found_by_tick(fd: int) -> None:
    writer = Writer(fd)
    writer.publish(0, 4, b"four")
    writer.publish(1, 5, b"five")
    writer.publish(2, INIT_TICK, b"init")
    reader = PageReader(fd)
    assert reader.ticks() == [-1, 4, 5]
    assert reader.blob(4) == (4, b"four")
    assert reader.blob(INIT_TICK) == (-1, b"init")
    assert reader.blob(NEWEST) == (5, b"five")
    assert reader.blob(3) is None


def test_the_init_record_is_never_the_newest(fd: int) -> None:
    Writer(fd).publish(2, INIT_TICK, b"init")
    assert PageReader(fd).blob(NEWEST) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"seq": 3},  # being written
        {"crc": 1},  # does not match
    ],
)
def test_a_torn_slot_is_not_taken_and_the_other_one_is(fd: int, damage: dict[str, int]) -> None:
    writer = Writer(fd)
    writer.publish(0, 4, b"four")
    writer.publish(1, 5, b"five", **damage)
    assert PageReader(fd).blob(NEWEST) == (4, b"four")
    assert PageReader(fd).blob(5) is None


def test_a_length_beyond_the_slot_is_not_followed(fd: int) -> None:
    Writer(fd)
    os.pwrite(fd, SLOT_HEADER.pack(2, 4, 1 << 60, 0), PAGE_BYTES)
    assert PageReader(fd).blob(4) is None


class Interfering(PageReader):
    """Lets the worker act after the reader's n-th pread."""

    def __init__(self, fd: int, after: int, act: object) -> None:
        super().__init__(fd)
        self.reads, self.after, self.act = 0, after, act

    def _read(self, offset: int, length: int) -> bytes:
        data = super()._read(offset, length)
        self.reads += 1
        if self.reads == self.after:
            self.act()  # type: ignore[operator]
        return data


@pytest.mark.parametrize("after", range(1, 10))
def test_a_slot_rewritten_while_it_is_read_is_read_again(fd: int, after: int) -> None:
    writer = Writer(fd)
    writer.publish(0, 4, b"a" * 1000)
    writer.publish(1, 5, b"b" * 1000)
    reader = Interfering(fd, after, lambda: writer.publish(0, 6, b"c" * 1000, seq=4))
    blobs = dict(reader._slots())
    assert reader.reads >= after
    assert blobs[5] == b"b" * 1000
    assert {**blobs, 5: b""} in ({4: b"a" * 1000, 5: b""}, {6: b"c" * 1000, 5: b""})


@pytest.mark.parametrize("after", range(1, 10))
def test_a_page_that_grows_while_it_is_read_is_read_again(fd: int, after: int) -> None:
    writer = Writer(fd)
    writer.publish(0, 4, b"four")
    writer.publish(1, 5, b"five")

    def grow() -> None:
        writer.capacity *= 4
        os.ftruncate(fd, PAGE_BYTES + SLOTS * writer.capacity)
        writer.publish(0, 6, b"6" * (writer.capacity - SLOT_HEADER.size))
        writer.publish(1, 5, b"five")
        writer.put("capacity", writer.capacity)

    reader = Interfering(fd, after, grow)
    blobs = dict(reader._slots())
    assert reader.reads >= after
    assert blobs.get(5) == b"five"
    assert len(blobs.get(6, b"")) in (0, writer.capacity - SLOT_HEADER.size)
    assert PageReader(fd).ticks() == [5, 6]


@pytest.mark.parametrize("size", [0, 8, PAGE_BYTES, PAGE_BYTES + 10, PAGE_BYTES + 40])
def test_a_truncated_page_reads_as_nothing(fd: int, size: int) -> None:
    Writer(fd).publish(0, 4, b"four" * 100)
    os.ftruncate(fd, size)
    reader = PageReader(fd)
    reader.sample()
    assert reader.blob(4) is None


def test_a_closed_page_reads_as_nothing() -> None:
    fd = create_page("test")
    Writer(fd).publish(0, 4, b"four")
    reader = PageReader(fd)
    reader.close()
    reader.close()
    assert not reader.open
    assert reader.sample() is None and reader.blob(4) is None
