"""A line of several connections, and memory that is received into more than once."""

from __future__ import annotations

import gc
import os
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.agent.landings import Landings
from keepstep.errors import PermanentError, RemoteProtocolError, UsageError
from keepstep.model import vault as v
from keepstep.worker.vault.lane import VaultLacks
from keepstep.worker.vault.vault import FetchedShards, VaultLine, cut, fetch, lanes_of, sliced
from tests.support.vault import MB, agent, going_on, line, opened, plain

LANES = {0: 0, 1: 1, 2: 2, 3: 0}


def step_of(rank: VaultLine, version: int, chance: random.Random) -> dict[int, bytes]:
    """Bases of step 0, gradients of all: what was put."""
    found = {}
    for unit in LANES:
        found[unit] = chance.randbytes(chance.choice((10, 100_000, 2 * MB)))
        if version == 0:
            rank.put_base(unit, 0, [b"base of %d" % unit])
        rank.put_grad(unit, version, found[unit])
    rank.note(version, b"note %d" % version)
    rank.sync(version, going_on)
    return found


def test_what_goes_over_several_lanes_is_one_vault() -> None:
    chance = random.Random(1)
    with agent() as (address, _), line(address, lanes=LANES) as rank:
        opened(rank, units=len(LANES))
        steps = [step_of(rank, version, chance) for version in range(5)]
        assert rank.drained() and not rank.broken
        found = fetch(address, "t", 2, 5)
    assert plain(found) == {
        unit: (0, [b"base of %d" % unit], {at: put[unit] for at, put in enumerate(steps)})
        for unit in LANES
    }
    assert found.notes == {version: b"note %d" % version for version in range(5)}


def test_a_ticket_is_of_its_lane() -> None:
    with agent() as (address, _), line(address, lanes=LANES) as rank:
        opened(rank, units=len(LANES))
        buffer = bytearray(MB)
        for unit in LANES:
            rank.wait_read(rank.put_grad(unit, 1, buffer))
            buffer[:] = bytes([unit]) * MB
        rank.wait_all_read()
        assert rank.drained()


def test_one_lost_lane_breaks_the_line_and_nothing_that_was_acknowledged_is_gone() -> None:
    chance = random.Random(2)
    with agent() as (address, _), line(address, lanes=LANES) as rank:
        opened(rank, units=len(LANES))
        first = step_of(rank, 0, chance)
        connection = rank._lanes[1]._connection
        assert connection is not None
        connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError, match="lost its vault"):
            step_of(rank, 1, chance)
        assert rank.broken
        assert opened(rank, units=len(LANES)) >= 1
        second = step_of(rank, 1, chance)
        log = {unit: found[2] for unit, found in plain(fetch(address, "t", 2, 2)).items()}
        assert log == {unit: {0: first[unit], 1: second[unit]} for unit in LANES}


def test_a_large_unit_goes_over_several_lanes_and_comes_back_whole() -> None:
    chance = random.Random(4)
    numbers = sliced({0: 30 * MB, 1: 30, 2: 30}, {0: 10 * MB, 1: 10})
    assert sorted(numbers) == [0, 1, 2, v.SLICES, 2 * v.SLICES, 3 * v.SLICES]
    lanes = {number: at % 3 for at, number in enumerate(sorted(numbers))}
    bases = {unit: [b"small", chance.randbytes(size), b""] for unit, size in enumerate((3 * MB, 9))}
    with agent() as (address, _), line(address, lanes=lanes) as rank:
        rank.open(b"layout", lanes, 64 * MB)
        steps = []
        for version in range(3):
            steps.append({0: chance.randbytes(3 * MB + 1), 1: chance.randbytes(7)})
            for unit, gradient in steps[-1].items():
                if version == 0:
                    rank.put_base(unit, version, bases[unit])
                ticket = rank.put_grad(unit, version, bytearray(gradient))
                assert len(ticket) == (4 if unit == 0 else 1)
            if version == 0:
                rank.put_base(2, 0, [])
            rank.put_absent(2, version)
            rank.note(version, b"note")
            rank.sync(version, going_on)
        rank.put_absent(0, 3)
        rank.sync(3, going_on)
        found = fetch(address, "t", 2, 3).whole()
    for unit, parts in bases.items():
        assert found[unit].version == 0
        assert [b"".join(part) for part in found[unit].tensors] == parts
        log = {step: b"".join(part) for step, part in found[unit].log.items() if part is not None}
        assert log == {step: put[unit] for step, put in enumerate(steps)}
    assert found[2].tensors == [] and found[2].log == dict.fromkeys(range(3))


def test_slices_begin_with_bases_of_one_version() -> None:
    """A rank that dies while it sends one leaves some of its slices behind."""
    slices = [0, v.SLICES]
    with agent() as (address, _), line(address) as rank:
        rank.open(b"layout", [*slices, 1], MB)
        for unit in (*slices, 1):
            rank.put_base(unit, 4, [b"four"])
            rank.put_grad(unit, 4, b"g")
        for unit in (0, 1):
            rank.put_base(unit, 5, [b"five"])
        rank.sync(4, going_on)
        found = fetch(address, "t", 2, 5)
        assert {base for base, _, _ in found.units.values()} == {4}, "all can begin there"
        rank.put_base(1, 6, [b"six"])
        for step in (5, 6):
            for unit in (*slices, 1):
                rank.put_grad(unit, step, b"g")
        rank.sync(6, going_on)  # and nobody asks for what unit 1 had before
        rank.put_base(1, 7, [b"seven"])
        rank.sync(7, going_on)
        found = fetch(address, "t", 2, 7)
        assert {unit: found.units[unit][0] for unit in found.units} == {0: 4, v.SLICES: 4, 1: 7}
        whole = found.whole()
        assert whole[0].log == {step: [b"g", b"g"] for step in (4, 5, 6)}
        rank.put_grad(0, 7, b"g")
        rank.sync(7, going_on)
        with pytest.raises(VaultLacks, match="unit 0 has base 4 and gradients up to 6, not 7"):
            fetch(address, "t", 2, 8)


def test_slices_that_do_not_belong_together_are_refused() -> None:
    units = {0: (4, [memoryview(b"a")], {}), v.SLICES: (5, [memoryview(b"b")], {})}
    with pytest.raises(RemoteProtocolError, match="slices of unit 0"):
        FetchedShards(b"", units, {}, 2).whole()


@given(size=st.integers(0, 5000), count=st.integers(1, 8))
def test_what_was_cut_is_all_there_and_in_order(size: int, count: int) -> None:
    data = random.Random(size).randbytes(size)
    parts = cut(memoryview(data), count)
    assert len(parts) == count and b"".join(parts) == data
    assert all(len(part) <= -(-size // count) + 64 for part in parts) or size < 64 * count


def test_how_a_unit_is_cut_can_be_said_and_does_not_depend_on_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, parameters = {0: 300, 1: 30}, {0: 100, 1: 10}
    assert sliced(sizes, parameters) == sizes
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    assert sliced(sizes, parameters, said="50") == {0: 150, v.SLICES: 150, 1: 30}
    assert len(sliced(sizes, parameters, said="1")) == 16
    with pytest.raises(UsageError, match="KEEPSTEP_VAULT_SLICE=0 is not a number"):
        sliced(sizes, parameters, said="0")


def test_slices_of_one_unit_have_lanes_of_their_own() -> None:
    numbers = sliced({0: 48 * MB, 1: 48 * MB}, {0: 99 * MB, 1: 99 * MB})
    found = lanes_of(numbers, 1, "4")
    for unit in (0, 1):
        mine = [found[number] for number in numbers if number % v.SLICES == unit]
        assert sorted(mine) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_later_writer_drives_out_all_lanes() -> None:
    with agent() as (address, _), line(address, 1, lanes=LANES) as rank:
        opened(rank, units=len(LANES))
        step_of(rank, 0, random.Random(3))
        with line(address, 2) as successor:  # with another number of lanes
            assert opened(successor, units=len(LANES)) == 1
            for unit in LANES:
                rank.put_grad(unit, 1, b"late")
            with pytest.raises(PermanentError, match="later writer"):
                rank.sync(1, going_on)
            assert all(not log[2].get(1) for log in plain(fetch(address, "t", 2, 1)).values())


def test_a_refusal_of_one_lane_is_the_lines() -> None:
    with agent() as (address, _), line(address, lanes=LANES) as rank:
        opened(rank, units=len(LANES), reserve=MB)
        rank.put_grad(1, 0, bytes(2 * MB))
        rank.put_grad(2, 0, b"fits")
        with pytest.raises(UsageError, match="over its reservation"):
            rank.sync(0, going_on)


@given(sizes=st.dictionaries(st.integers(0, 50), st.integers(0, 100 * MB)), ranks=st.integers(1, 8))
def test_lanes_have_about_the_same_bytes(sizes: dict[int, int], ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: range(32))
        found = lanes_of(sizes, ranks)
    assert found.keys() == sizes.keys()
    count = max(found.values(), default=0) + 1
    assert count <= max(min(32 // ranks // 4, 4, sum(sizes.values()) // (8 * MB)), 1)
    load = [sum(sizes[u] for u in found if found[u] == lane) for lane in range(count)]
    assert max(load) - min(load) <= max(sizes.values(), default=0)


def test_how_many_lanes_there_are_can_be_said() -> None:
    assert set(lanes_of(dict.fromkeys(range(9), 1), 1, "3").values()) == {0, 1, 2}


@pytest.mark.parametrize("said", ["", "0", "17", "many", "-1"])
def test_a_number_of_lanes_that_is_none_is_refused(said: str) -> None:
    with pytest.raises(UsageError, match="from 1 to 16") as refused:
        lanes_of({0: 1}, 1, said)
    assert refused.value.hint


# ------------------------------------------------------------------------------------ memory


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    memory = Landings(lambda: 10 * MB)
    first = memory.take(MB)
    first[:] = b"a" * MB
    part = first[10:20]
    del first
    second = memory.take(MB)
    second[:] = b"b" * MB
    assert bytes(part) == b"a" * 10 and memory.waiting == 0
    del part
    assert memory.waiting == MB
    third = memory.take(MB)
    assert bytes(third[:1]) == b"a" and memory.waiting == 0, "the block that came back"
    assert bytes(second[:1]) == b"b"


def test_no_more_memory_waits_than_is_reserved() -> None:
    unused = [2 * MB]
    memory = Landings(lambda: unused[0])
    held = [memory.take(MB) for _ in range(4)]
    held.clear()
    gc.collect()
    assert memory.waiting == 2 * MB
    unused[0] = MB
    memory.trim()
    assert memory.waiting == MB
    unused[0] = -5
    memory.trim()
    assert memory.waiting == 0


def test_memory_that_was_taken_again_is_not_given_away() -> None:
    unused = [10 * MB]
    memory = Landings(lambda: unused[0])
    first, second = memory.take(MB), memory.take(2 * MB)
    del first, second
    again = memory.take(MB)
    unused[0] = 0
    memory.trim()
    assert memory.waiting == 0
    again[:1] = b"x"


def test_memory_of_sizes_that_come_no_more_makes_room() -> None:
    unused = [4 * MB]
    memory = Landings(lambda: unused[0])
    blocks = [memory.take(MB) for _ in range(4)]
    blocks.clear()
    assert memory.waiting == 4 * MB
    held = memory.take(3 * MB)
    assert memory.waiting == MB and len(held) == 3 * MB


def test_a_vault_that_is_forgotten_keeps_no_memory() -> None:
    with agent() as (address, server), line(address) as rank:
        opened(rank, units=1)
        rank.put_base(0, 0, [bytes(MB)])
        for version in range(8):
            rank.put_grad(0, version, bytes(MB))
            if version % 2:
                rank.put_base(0, version, [bytes(MB)])
            rank.sync(version, going_on)
        held, reserved = server.vault.held()[2]
        waiting = server.vault._landings.waiting
        assert 0 < waiting <= reserved - held
        # It is promised to this rank: others have what is left of the machine, and not less.
        free = 8 * MB
        server.vault._available = lambda: free + reserved - held - waiting
        with line(address, rank=3) as other:
            with pytest.raises(UsageError):
                opened(other, units=1, reserve=free + 1)
            opened(other, units=1, reserve=free)
        server.vault.forget_before(9)
        assert server.vault._landings.waiting == 0
