"""A rank's line to the vault that keeps its state (keepstep.core.agent.vault), and the way back.

The main thread says what is to be kept and goes on; senders read the memory that they were given,
hash it and send it, each over a connection of its own (lane.py). A unit, or each slice of a large
one, has its lane: what is put of it comes in this order. Nothing is copied, so a view must not be
written to before it was read: every put gives a ticket, and `wait_read` waits for it.

Nothing of the network is raised by a put, which may be called in the middle of a backward pass. A
line that breaks takes no more, all its tickets count as read, and the next `sync` says why. What
was put since the last `sync` that returned may be lost then: `open` tells which version the vault
can bring all units to.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import xxhash

from keepstep.adapters.transport.blocking import PIECE_BYTES, Frames, landing, pieces
from keepstep.adapters.transport.stream import configure
from keepstep.errors import KeepstepError, RemoteProtocolError, UsageError
from keepstep.model import vault as v
from keepstep.model import wire
from keepstep.model.messages import Address
from keepstep.worker.line import peers
from keepstep.worker.state.statefile import DigestMismatch
from keepstep.worker.vault.lane import (
    BATCH_BYTES,
    CHUNK_BYTES,
    CONNECT_TIMEOUT_S,
    SILENCE_S,
    Chunk,
    Lane,
    View,
    raise_refusal,
    replies,
)

LANES_MAX = 4
LANES_SAID_MAX = 16
LANE_BYTES = 8 << 20  # less is not worth a lane of its own
LANE_CORES = 4  # for each lane of a rank, which needs the others for its training
SLICE_BYTES = 2 << 20  # of a parameter; less is not worth a put of its own
SLICES_MAX = 8  # of a unit
ALIGN = 64

_serials = itertools.count(1)  # of this process: a later line drives out an earlier one


def lanes_of(sizes: Mapping[int, int], local_ranks: int, said: str = "auto") -> dict[int, int]:
    """unit -> its lane: as many lanes as there are cores for, with about the same bytes each."""
    hint = "leave it out, and there are as many as the cores allow"
    wanted = _number("KEEPSTEP_VAULT_LANES", said, 0, LANES_SAID_MAX, hint)
    cores = len(os.sched_getaffinity(0)) // max(local_ranks, 1)
    count = min(cores // LANE_CORES, LANES_MAX, sum(sizes.values()) // LANE_BYTES)
    load = [0] * (wanted or max(count, 1))
    found = {}
    for unit in sorted(sizes, key=lambda one: (-sizes[one], one % v.SLICES, one)):
        found[unit] = load.index(min(load))
        load[found[unit]] += sizes[unit]
    return found


def sliced(
    sizes: Mapping[int, int],
    parameters: Mapping[int, int],
    default: int = SLICE_BYTES,
    said: str = "auto",
) -> dict[int, int]:
    """Bytes of all units, and of the parameters among them -> bytes of all slices. How a unit is
    cut must not depend on the machine, for its next process has to find the same. `default`: bytes
    of a slice if nothing is `said`; 0: nothing is cut."""
    hint = f"leave it out for {SLICE_BYTES}"
    least = _number("KEEPSTEP_VAULT_SLICE", said, default, 1 << 40, hint)
    found: dict[int, int] = {}
    for unit, size in sizes.items():
        most = min(max(parameters.get(unit, 0) // least, 1), SLICES_MAX) if least else 1
        count = 1 << (most.bit_length() - 1)  # as lanes are, so that all have the same of it
        found |= dict.fromkeys((unit + n * v.SLICES for n in range(count)), size // count)
    return found


def _number(name: str, said: str, default: int, most: int, hint: str) -> int:
    if said == "auto":
        return default
    if not (said.isdecimal() and 1 <= int(said) <= most):
        raise UsageError(f"{name}={said} is not a number from 1 to {most}", hint=hint)
    return int(said)


def cut(view: memoryview, count: int) -> list[memoryview]:
    """What each slice has of it. What is small has the first."""
    size = len(view) if len(view) < ALIGN * count else -(-len(view) // (ALIGN * count)) * ALIGN
    return [view[n * size : (n + 1) * size] for n in range(count)]


Ticket = tuple[tuple[int, int], ...]  # of each slice: its lane, and the lane's ticket


class VaultLine:
    """Opened, closed and asked by one thread. Others may put; `interrupt` frees it from any."""

    def __init__(
        self,
        address: Address,
        token: str,
        rank: int,
        generation: int,
        group: Sequence[int] = (),
        own: bool = False,
        lanes: Mapping[int, int] | None = None,
    ) -> None:
        """`group`: ranks whose parity is kept, instead of what this one puts. `own`: it is the
        vault of the rank's own agent. `lanes`: unit or slice -> its lane, of several."""
        self.address, self.rank, self.generation = address, rank, generation
        self._group, self._own = list(group), own
        self._token = token
        self._lane_of = dict(lanes or {})
        self._slices: dict[int, list[int]] = {}
        for number in sorted(self._lane_of):
            self._slices.setdefault(number % v.SLICES, []).append(number)
        count = max(self._lane_of.values(), default=0) + 1
        self._lanes = [Lane(address, rank, BATCH_BYTES // count) for _ in range(count)]

    # ----------------------------------------------------------------- opening and ending

    def open(
        self,
        layout: bytes,
        units: Collection[int],
        reserve: int,
        *,
        fresh: bool = False,
        version: int | None = None,
    ) -> int:
        """Anew, if it was open. Returns the newest version that the vault can bring all units to,
        or -1. `reserve`: bytes to be held at most: bases, a second one of each unit that is sent
        between two fences, and the log. `version`: that of the rank. Raises OSError, UsageError if
        there is not enough memory, PermanentError if a later generation has the vault, or it holds
        another layout."""
        self.close()
        ask = v.VaultOpen(
            token=self._token,
            rank=self.rank,
            generation=self.generation,
            serial=next(_serials),
            layout=layout,
            units=sorted(units),
            reserve=reserve,
            fresh=fresh,
            version=version,
            own=self._own,
            group=self._group,
        )
        try:
            opened = self._lanes[0].open(ask)
            for lane in self._lanes[1:]:  # more streams of the same writer
                lane.open(msgspec.structs.replace(ask, fresh=False))
        except BaseException:
            self.close()
            raise
        return opened.reaches

    @property
    def broken(self) -> bool:
        """It takes nothing any more: to be opened again."""
        return any(lane.broken for lane in self._lanes)

    def interrupt(self) -> None:
        """Whoever waits here stops waiting; the line is to be opened again."""
        for lane in self._lanes:
            lane.interrupt()

    def close(self) -> None:
        """What was not sent yet is dropped; afterwards nothing here looks at it any more."""
        self.interrupt()
        for lane in self._lanes:
            lane.close()

    # ----------------------------------------------------------------- what is to be kept

    def put_base(self, unit: int, version: int, tensors: Sequence[View]) -> Ticket:
        return self._put("base", unit, version, tensors)

    def put_grad(self, unit: int, version: int, view: View) -> Ticket:
        return self._put("grad", unit, version, [view])

    def put_absent(self, unit: int, version: int) -> Ticket:
        return self._put("absent", unit, version, [])

    def note(self, version: int, data: bytes) -> Ticket:
        return self._put("note", 0, version, [data])

    def _put(self, kind: v.Kind, unit: int, version: int, data: Sequence[View]) -> Ticket:
        return self.put_all(kind, version, {unit: data})[unit]

    def put_all(
        self, kind: v.Kind, version: int, data: Mapping[int, Sequence[View]]
    ) -> dict[int, Ticket]:
        """Of many units, whose tickets it gives."""
        found: dict[int, Ticket] = {}
        for lane, chunk in self._chunks(kind, data):
            ticket = self._lanes[lane].enqueue(kind, version, chunk)
            for number in chunk.units:
                unit = number if number in data else number % v.SLICES
                found[unit] = (*found.get(unit, ()), (lane, ticket))
        return found

    def _chunks(self, kind: v.Kind, data: Mapping[int, Sequence[View]]) -> list[tuple[int, Chunk]]:
        """With their lanes. Those of a lane are in the order in which they are to be sent."""
        enough = BATCH_BYTES // len(self._lanes)
        found: list[tuple[int, Chunk]] = []
        filling: dict[int, Chunk] = {}  # by lane
        for unit, tensors in data.items():
            slices = self._slices.get(unit, [unit]) if kind != "note" else [unit]
            whole = [_flat(one) for one in tensors]
            parts = [cut(one, len(slices)) for one in whole] if len(slices) > 1 else []
            for n, number in enumerate(slices):
                lane = self._lane_of.get(number, 0)
                chunk = filling.get(lane)
                if chunk is None or chunk.size >= enough:
                    chunk = filling[lane] = Chunk()
                    found.append((lane, chunk))
                chunk.add(number, [part[n] for part in parts] if parts else whole)
        return found

    def ask(self, version: int) -> None:
        """At the fence of step `version`: `synced` will tell when all that was put is stored."""
        for lane in self._lanes:
            lane.ask(version)

    def sync(self, version: int, aborted: Callable[[], bool]) -> None:
        self.ask(version)
        self.synced(version, aborted)

    def synced(self, version: int, aborted: Callable[[], bool]) -> None:
        """Returns when all that was put before `ask` is stored. Raises OSError when the line is
        lost or interrupted, and what `open` raises."""
        if aborted():  # it may have come before there was anything to interrupt
            raise ConnectionAbortedError("writing to the vault was aborted")
        for lane in self._lanes:
            lane.wait_answered()
        failures = [found for lane in self._lanes if (found := lane.failure()) is not None]
        if not failures:
            return
        for error, _ in failures:
            if isinstance(error, KeepstepError):
                raise error
        error = failures[0][0]
        if any(interrupted for _, interrupted in failures):
            raise ConnectionAbortedError("writing to the vault was aborted") from error
        where = f"{self.address.host}:{self.address.port}"
        raise ConnectionError(f"rank {self.rank} lost its vault at {where}: {error}") from error

    def drained(self) -> bool:
        """Nothing that was put is still to be read."""
        return all(lane.drained() for lane in self._lanes)

    def wait_read(self, ticket: Ticket) -> None:
        for lane, number in ticket:
            self._lanes[lane].wait_read(number)

    def wait_all_read(self) -> None:
        for lane in self._lanes:
            lane.wait_read(lane.last)


def _flat(data: View) -> memoryview:
    view = data if type(data) is memoryview else memoryview(data)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


# ------------------------------------------------------------------------------------ way back


@dataclass(frozen=True)
class FetchedShards:
    layout: bytes
    # unit or slice -> version of its base, its tensors, and the gradient of each step from there on
    units: dict[int, tuple[int, list[memoryview], dict[int, memoryview | None]]]
    notes: dict[int, bytes]  # those that there are
    bytes: int

    def whole(self) -> dict[int, Whole]:
        """The same of units whose slices lie side by side."""
        slices: dict[int, list[int]] = {}
        for number in sorted(self.units):
            slices.setdefault(number % v.SLICES, []).append(number)
        return {unit: self._joined(numbers) for unit, numbers in slices.items()}

    def _joined(self, numbers: list[int]) -> Whole:
        versions, tensors, logs = zip(*(self.units[number] for number in numbers), strict=True)
        steps = {step: [log[step] for log in logs] for step in logs[0]}
        if len(set(versions)) > 1 or len(set(map(len, tensors))) > 1:
            raise RemoteProtocolError(f"slices of unit {numbers[0]} do not belong together")
        return Whole(
            versions[0],
            [list(parts) for parts in zip(*tensors, strict=True)],
            {
                step: [part for part in parts if part is not None] if None not in parts else None
                for step, parts in steps.items()
            },
        )


@dataclass(frozen=True)
class Whole:
    """Of each tensor the bytes, in pieces."""

    version: int
    tensors: list[list[memoryview]]
    log: dict[int, list[memoryview] | None]


def fetch(address: Address, token: str, rank: int, version: int, base: int = -1) -> FetchedShards:
    """What brings all units of `rank` to `version`, with bases of version `base` if that is given.
    Raises OSError, VaultLacks, DigestMismatch."""
    ask = v.VaultFetch(token=token, rank=rank, version=version, base=base)
    with asking(address, ask) as frames:
        reply = frames.receive()
        if not isinstance(reply, v.VaultFetched):
            raise_refusal(reply, rank)
        landed = _Landing(frames, reply, rank)
        with landed.checking():
            units = {one.unit: _unit(landed, one) for one in reply.units}
            notes = {
                step: bytes(landed.take(size, digest, f"note {step}"))
                for step, size, digest in reply.notes
            }
        return FetchedShards(reply.layout, units, notes, landed.total)


def _unit(
    landed: _Landing, one: v.VaultUnit
) -> tuple[int, list[memoryview], dict[int, memoryview | None]]:
    tensors = [
        landed.take(size, digest, f"base {one.version} of unit {one.unit}")
        for size, digest in zip(one.sizes, one.digests, strict=True)
    ]
    log = {
        step: landed.take(size, digest, f"gradient {step} of unit {one.unit}") if digest else None
        for step, size, digest in one.log
    }
    return one.version, tensors, log


class _Landing:
    """One block of memory for all that was announced, filled in the order it comes. It is hashed
    by another thread: receiving is what one core can just do."""

    def __init__(self, frames: Frames[v.VaultReply], announced: v.VaultFetched, rank: int) -> None:
        sizes = [size for unit in announced.units for size in unit.sizes]
        sizes += [size for unit in announced.units for _, size, _ in unit.log]
        sizes += [size for _, size, _ in announced.notes]
        if min(sizes, default=0) < 0:
            raise RemoteProtocolError(f"the vault of rank {rank} announced a negative size")
        self.total = sum(sizes)
        self._frames, self._rank, self._done = frames, rank, 0
        self._memory = landing(self.total)
        self._hasher = ThreadPoolExecutor(1, "keepstep-hash")
        self._checks: list[tuple[xxhash.xxh3_128, bytes, str]] = []

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        with self._hasher:
            yield
        for digest, expected, what in self._checks:
            if digest.digest() != expected:
                raise DigestMismatch(
                    self._rank, f"{what} of rank {self._rank} left the vault with another digest"
                )

    def take(self, size: int, expected: bytes, what: str) -> memoryview:
        view = self._memory[self._done : self._done + size]
        self._done += size
        digest = xxhash.xxh3_128()
        for part in pieces(view, CHUNK_BYTES):
            self._frames.receive_into(part)
            if size >= PIECE_BYTES:
                self._hasher.submit(digest.update, part)  # in this order: it is one thread
            else:
                digest.update(part)
        self._checks.append((digest, expected, what))
        return view


def forget(address: Address, token: str, rank: int, generation: int, parity: bool = False) -> None:
    """Free the memory of a vault that is not this rank's any more, or of its group's parity."""
    ask = v.VaultForget(token=token, rank=rank, generation=generation, parity=parity)
    with asking(address, ask) as frames:
        reply = frames.receive()
        if not isinstance(reply, v.VaultForgotten):
            raise_refusal(reply, rank)


@contextlib.contextmanager
def asking(
    address: Address, request: v.VaultFetch | v.VaultForget
) -> Iterator[Frames[v.VaultReply]]:
    with peers.connect(address, CONNECT_TIMEOUT_S) as connection:
        configure(connection)
        connection.settimeout(SILENCE_S)
        connection.sendall(wire.frame(request))
        yield Frames(connection, replies)
