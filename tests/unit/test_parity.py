"""The parity of a group: what members add to it, and what comes out for one that is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.agent.blobs import BlobServer
from keepstep.core import placement
from keepstep.core.agent.parity import xor
from keepstep.errors import PermanentError, UsageError
from keepstep.model.commands import Parity
from keepstep.model.job import JobSpec, NodeSpec
from keepstep.model.messages import Address, BuddyLost
from keepstep.worker.vault import lane
from keepstep.worker.vault.parity import Both, ParityLine
from keepstep.worker.vault.rebuild import NotRebuilt, rebuild
from keepstep.worker.vault.vault import FetchedShards, VaultLine, fetch

RENEW = 4


def going_on() -> bool:
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    turn = threading.Event()
    for _ in range(2000):
        if condition():
            return
        turn.wait(0.01)
    pytest.fail("it never came")


class Nodes:
    """Agents, the last of which keeps the parity; each other one has a rank."""

    def __init__(self, ranks: int) -> None:
        self.servers = [BlobServer("t", lambda rank: [], None) for _ in range(ranks + 1)]
        self.addresses = [asyncio.run(one.start("127.0.0.1")) for one in self.servers]
        self.lost: set[int] = set()

    @property
    def holder(self) -> Address:
        return self.addresses[-1]

    def lose(self, node: int) -> None:
        self.servers[node].close()
        self.lost.add(node)

    @property
    def alive(self) -> list[Address]:
        return [one for i, one in enumerate(self.addresses) if i not in self.lost]


@contextmanager
def nodes(ranks: int = 3) -> Iterator[Nodes]:
    made = Nodes(ranks)
    try:
        yield made
    finally:
        for server in made.servers:
            server.close()


class Rank:
    """Puts what it is given, as Redundancy does."""

    def __init__(self, rank: int, where: Nodes, units: int, generation: int = 1) -> None:
        self.said: list[Any] = []
        members = list(range(len(where.addresses) - 1))
        self.live: Any = SimpleNamespace(
            rank=rank,
            generation=generation,
            version=0,
            welcome=SimpleNamespace(token="t"),
            channel=SimpleNamespace(
                inbox=SimpleNamespace(parity=Parity(holder=where.holder, members=members)),
                send=self.said.append,
            ),
        )
        self.units = {unit: unit % (1 + rank % 3) for unit in range(units)}  # and their lanes
        self.parity = ParityLine(self.live)
        self.line = Both(self.parity, where.addresses[rank], "t", rank, generation, self.units)
        self.renewed = -1

    def open(self, reserve: int = 1 << 20) -> None:
        self.line.open(b"layout", self.units, reserve)
        self.parity.open(b"layout", self.units, reserve)

    def begin(self, version: int, always: bool = False) -> None:
        self.live.version = version
        if always or version % RENEW == 0:
            self.parity.begin(version)
            for unit in self.units:
                self.line.put_base(unit, version, self.base(unit, version))

    def base(self, unit: int, version: int) -> list[bytes]:
        text = f"base {version} of unit {unit} of rank {self.live.rank} " * (unit + 1)
        return [text.encode(), b"", b"m" * (3 * self.live.rank + version)]

    def gradient(self, unit: int, version: int) -> bytes | None:
        if (unit + version + self.live.rank) % 5 == 0:
            return None
        word = f"{self.live.generation} {version} {unit} {self.live.rank}"
        return word.encode() * (1 + self.live.rank)

    def fence(self, version: int) -> None:
        for unit in self.units:
            gradient = self.gradient(unit, version)
            if gradient is None:
                self.line.put_absent(unit, version)
            else:
                self.line.put_grad(unit, version, gradient)
        self.line.note(version, f"note {version} of {self.live.rank}".encode())
        self.line.sync(version, going_on)

    def step(self, version: int) -> None:
        self.begin(version)
        self.fence(version)

    def retried(self, generation: int) -> None:
        """A swap: everything is opened anew."""
        self.live.generation = generation
        self.line.generation = generation
        self.open()

    def close(self) -> None:
        self.line.close()
        if self.parity._line is not None:
            self.parity._line.close()


@contextmanager
def ranks(where: Nodes, units: tuple[int, ...] = (2, 2, 2)) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        made = [Rank(rank, where, count) for rank, count in enumerate(units)]
        for one in made:
            stack.callback(one.close)
            one.open()
        yield made


def plain(found: FetchedShards) -> Any:
    return (
        found.layout,
        found.notes,
        {
            unit: (
                base,
                [bytes(one) for one in tensors],
                {step: None if one is None else bytes(one) for step, one in log.items()},
            )
            for unit, (base, tensors, log) in found.units.items()
        },
    )


def test_xor() -> None:
    into = bytearray(b"\x0f\xf0\x55")
    xor(memoryview(into), memoryview(b"\xff\xff\x55"))
    assert bytes(into) == b"\xf0\x0f\x00"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_what_a_lost_node_had_comes_out_of_the_parity(victim: int) -> None:
    with nodes() as where, ranks(where, (1, 4, 2)) as members:
        for version in range(7):
            for member in members:
                member.step(version)
        expected = plain(fetch(where.addresses[victim], "t", victim, 7))
        where.lose(victim)
        found, words = rebuild(where.alive, "t", victim, 7)
        assert plain(found) == expected
        assert f":{where.holder.port} and the vaults of ranks" in words
        held, reserved = where.servers[-1].vault.held_of_parities()[0, 1, 2]
        single = [server.vault.held().get(i, (0,))[0] for i, server in enumerate(where.servers)]
        assert max(single) <= held < sum(single) and held < reserved


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_sent_again_or_made_again_one_loss_is_made_up_for(data: st.DataObject) -> None:
    """Connections to the holder break, steps are made again, and a rank is lost at any point."""
    with nodes() as where, ranks(where, (2, 1, 3)) as members:
        generation, realign = 1, False
        last = data.draw(st.integers(1, 10), "steps")
        for version in range(last):
            if data.draw(st.integers(0, 3), "retry") == 0:
                done = data.draw(st.integers(0, 3), "ranks that came to the fence")
                for member in members[:done]:
                    member.begin(version, realign)
                    member.fence(version)
                generation, realign = generation + 1, True
                for member in members:
                    member.retried(generation)
            for member in members:
                member.begin(version, realign)
            realign = False
            for member in data.draw(st.permutations(members), "order"):
                if data.draw(st.integers(0, 4), "cut") == 0:
                    member.parity.interrupt()
                member.fence(version)
        for member in members[: data.draw(st.integers(0, 3), "ranks that go on")]:
            member.begin(last)
            member.line.wait_all_read()
        assert not any(member.said for member in members)
        victim = data.draw(st.integers(0, 2), "victim")
        expected = {}
        for base in range(last + 1):
            try:
                found = fetch(where.addresses[victim], "t", victim, last, base)
                expected[base] = plain(found)
            except lane.VaultLacks:
                continue
        where.lose(victim)
        found, _ = rebuild(where.alive, "t", victim, last)
        base = next(iter(found.units.values()))[0]
        assert plain(found) == expected[base]


def test_two_losses_in_a_group_are_too_many() -> None:
    with nodes() as where, ranks(where) as members:
        for member in members:
            member.step(0)
        where.lose(0)
        where.lose(1)
        with pytest.raises(NotRebuilt, match="no vault has anything of rank 0"):
            rebuild(where.alive, "t", 1, 1)


def test_a_loss_of_the_holder_and_a_member_is_too_much() -> None:
    with nodes() as where, ranks(where) as members:
        for member in members:
            member.step(0)
        where.lose(3)
        where.lose(1)
        with pytest.raises(NotRebuilt, match="no parity that rank 1 has a part in"):
            rebuild(where.alive, "t", 1, 1)


def test_a_holder_that_does_not_answer_is_not_taken_for_lost() -> None:
    with nodes() as where, ranks(where) as members:
        for member in members:
            member.step(0)
        gone = where.holder
        where.lose(3)
        where.lose(1)
        with pytest.raises(OSError):
            rebuild([*where.alive, gone], "t", 1, 1)


def test_a_rank_that_loses_the_holder_goes_on_and_begins_with_common_bases_at_the_next() -> None:
    with nodes() as where, nodes(0) as other, ranks(where) as members:
        for member in members:
            member.step(0)
        where.lose(3)
        for member in members:
            member.step(1)
            assert [type(one) for one in member.said] == [BuddyLost] and member.said[
                0
            ].parity == where.holder
            parity = member.live.channel.inbox.parity
            member.live.channel.inbox.parity = Parity(holder=other.holder, members=parity.members)
        for version in range(2, 6):
            for member in members:
                member.step(version)
        expected = plain(fetch(where.addresses[1], "t", 1, 6, 4))
        where.lose(1)
        found, _ = rebuild([*where.alive, other.holder], "t", 1, 6)
        assert plain(found) == expected
        assert all(len(member.said) == 1 for member in members)


def test_a_former_holder_that_can_not_help_does_not_hide_the_new_one() -> None:
    """It still has a parity, from bases that no vault has any more."""
    with nodes() as where, nodes(0) as other, ranks(where) as members:
        for version in range(3):
            for member in members:
                member.step(version)
        for member in members:
            parity = member.live.channel.inbox.parity
            member.live.channel.inbox.parity = Parity(holder=other.holder, members=parity.members)
            member.retried(2)
            member.begin(2, always=True)
        for member in members:
            member.fence(2)
        expected = plain(fetch(where.addresses[1], "t", 1, 3, 2))
        where.servers[2].vault.forget_before(2)  # a newcomer's: it begins with the last base
        where.lose(1)
        found, words = rebuild([*where.alive, other.holder], "t", 1, 3)
        assert plain(found) == expected
        assert f":{other.holder.port}" in words


def test_a_former_holder_is_asked_to_forget_when_all_are_at_the_new_one() -> None:
    with nodes() as where, nodes(0) as other, ranks(where) as members:
        for member in members:
            member.step(0)
            parity = member.live.channel.inbox.parity
            member.live.channel.inbox.parity = Parity(holder=other.holder, members=parity.members)
        for version in range(1, 5):
            for member in members:
                member.step(version)
        assert where.servers[-1].vault.held_of_parities()  # somebody might be without the new one
        for member in members:
            member.step(5)
        wait_until(lambda: not where.servers[-1].vault.held_of_parities())


def test_other_bytes_for_the_same_step_spoil_the_cell_and_are_said() -> None:
    with nodes() as where, ranks(where) as members:
        for member in members:
            member.begin(0)
        members[0].line.put_grad(0, 0, b"early")
        for member in members:
            member.fence(0)
        assert "two different ones" in members[0].said[0].error
        where.lose(0)
        with pytest.raises(NotRebuilt):
            rebuild(where.alive, "t", 0, 1)


def test_bytes_that_are_not_those_that_were_added_are_refused() -> None:
    with nodes() as where, ranks(where) as members:
        for member in members:
            member.step(0)
        VaultLine.put_all(members[2].line, "grad", 0, {0: [b"other"]})
        VaultLine.sync(members[2].line, 0, going_on)
        where.lose(1)
        with pytest.raises(NotRebuilt, match="of rank 2 is another one than that in the parity"):
            rebuild(where.alive, "t", 1, 1)


def test_what_the_parity_has_is_checked_against_the_digests_of_the_lost_rank() -> None:
    with nodes() as where, ranks(where) as members:
        for member in members:
            member.step(0)
        groups = where.servers[-1].vault._parity._groups
        groups[0, 1, 2].cells["base", 0, 1].segments[0][0] ^= 1
        where.lose(1)
        with pytest.raises(NotRebuilt, match="came out of the parity as another one"):
            rebuild(where.alive, "t", 1, 1)


def test_old_cells_go_when_a_member_is_past_the_next_common_bases() -> None:
    with nodes() as where, ranks(where) as members:
        for version in range(30):
            for member in members:
                member.step(version)
        cells = where.servers[-1].vault._parity._groups[0, 1, 2].cells
        assert min(version for _, version, _ in cells) == 28
        assert len(cells) == 1 + 2 * 2  # base 28, gradients and notes of 28 and 29
        size = sum(cell.size for cell in cells.values())
        assert where.servers[-1].vault.held_of_parities()[0, 1, 2][0] == size


def test_too_little_memory_at_the_holder_is_an_error_before_training() -> None:
    with nodes() as where:
        where.servers[-1].vault._available = lambda: 1000
        member = Rank(0, where, 1)
        with pytest.raises(UsageError, match=r"the parity of ranks .* takes 1.0 MiB"):
            member.open()
        member.close()


def test_a_later_writer_of_a_rank_fences_the_earlier_one() -> None:
    with nodes() as where, ranks(where) as members:
        late = Rank(0, where, 2, generation=2)
        late.open()
        with pytest.raises(PermanentError):
            members[0].parity._line.sync(0, going_on)  # type: ignore[union-attr]
        late.close()


# ---------------------------------------------------------------- who with whom


def spec(homes: int, more: int = 0, local: int = 1) -> JobSpec:
    return JobSpec(
        job="j",
        world=homes * local,
        local_world=local,
        nodes=[NodeSpec(name=f"n{i}", slots=local) for i in range(homes + more)],
        spares=0,
        stall_timeout_ns=1,
        script=["x"],
        directory="/tmp",
    )


@given(homes=st.integers(2, 40), more=st.integers(0, 3), local=st.integers(1, 4))
def test_groups_are_on_different_nodes_and_leave_one_for_the_parity(
    homes: int, more: int, local: int
) -> None:
    job = spec(homes, more, local)
    groups = [placement.parity_group(job, rank) for rank in range(job.world)]
    assert all(rank in group for rank, group in enumerate(groups))
    assert all(groups[mate] == group for group in groups for mate in group)
    for group in groups:
        assert len({rank // local for rank in group}) == len(group)
        assert len({rank % local for rank in group}) == 1
        assert len(group) <= min(placement.PARITY_MEMBERS, len(job.nodes) - 1)
    sizes = {len(group) for group in groups}
    assert max(sizes) - min(sizes) <= 1
    assert bool(placement.parity_trouble(job)) == (homes + more < 3)


def test_too_few_nodes_are_named() -> None:
    assert "there are 2 nodes, 2 of them with ranks" in placement.parity_trouble(spec(2))
    assert placement.parity_trouble(spec(2, 1)) == ""
