"""What a node's agent keeps in memory: side states, copies, vaults and parities.

Vaults and parities are the production ones (`core/agent/vault.py`, `core/agent/parity.py`).
`restored` is the way back from them to a rank's shard (worker/vault/rebuild.py). Digests are the
bytes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from keepstep.core.agent.blobs import BlobStore
from keepstep.core.agent.parity import ParityStore
from keepstep.core.agent.vault import Refusal, StoredPiece, VaultStore
from keepstep.model import vault as v
from keepstep.model.page import NEWEST, TICKS_KEPT
from keepstep.sim.ground import training

ROOM = 1 << 30
Blob = tuple[int, int, int]  # tick, version, own
Content = dict[tuple[v.Kind, int], bytes]


class NodeMemory:
    def __init__(self) -> None:
        self.pages: dict[str, dict[int, Blob]] = {}  # worker -> slot -> side state
        self.vault, self.parity = VaultStore(), ParityStore()
        self._ranks: dict[str, int] = {}  # of these workers
        self._copies = BlobStore()
        self._copied_in: dict[tuple[int, int], int] = {}  # (rank, tick) -> generation

    def publish(self, worker: str, rank: int, blob: Blob) -> None:
        self._ranks[worker] = rank
        self.pages.setdefault(worker, {})[blob[0] % TICKS_KEPT] = blob

    def drop(self, worker: str) -> None:
        self.pages.pop(worker, None)

    def keep_copy(self, rank: int, generation: int, blob: Blob) -> None:
        self._copies.put(rank, blob[0], blob)  # type: ignore[arg-type]
        self._copied_in[rank, blob[0]] = generation

    def drop_copies(self, before: int) -> None:
        """Those of older generations, and what vaults and parities have of them."""
        for (rank, tick), generation in list(self._copied_in.items()):
            if generation < before:
                del self._copied_in[rank, tick]
                if tick in self._copies.ticks(rank):
                    self._copies.drop(rank, tick)
        self.vault.forget_before(before)
        self.parity.forget_before(before)

    def blob(self, rank: int, tick: int) -> Blob | None:
        """As the agent's blob server: pages of all workers of the rank, then copies."""
        own = [
            blob
            for worker, slots in reversed(self.pages.items())
            if self._ranks[worker] == rank
            for blob in slots.values()
        ]
        copy = self._copies.get(rank, tick)
        found = newest(own, tick)
        if found is not None and (copy is None or found[0] >= copy[0]):
            return found
        return copy[1] if copy is not None else None  # type: ignore[return-value]


def newest(blobs: list[Blob], tick: int) -> Blob | None:
    if tick == NEWEST:
        return max(blobs, default=None)
    return next((blob for blob in blobs if blob[0] == tick), None)


class Put(NamedTuple):
    kind: v.Kind
    version: int
    data: bytes


def stored(into: Any, opening: v.VaultOpen, puts: Iterable[Put], settled: int) -> str:
    """Into a vault or a parity, as the agent's server does it; what was refused, in words."""
    try:
        writer = into.open(opening, ROOM)
        for kind, version, data in puts:
            put = v.VaultPut(kind=kind, version=version, sizes=[len(data)], digests=[data])
            into.admit(writer, put)
            into.keep(writer, put, (StoredPiece(memoryview(bytearray(data)), data),))
            into.done(writer, put)
        if settled >= 0:
            into.drop_before(writer, settled)
    except Refusal as refusal:
        return str(refusal)
    return ""


# ------------------------------------------------------------------ the way back


def restored(memories: Sequence[NodeMemory], rank: int, version: int) -> int | None:
    """The rank's shard, from what these nodes have; None if it cannot be had."""
    content = _from_vaults(memories, rank, version) or _from_parity(memories, rank, version)
    if content is None:
        return None
    first = min(at for kind, at in content if kind == "base")
    shard = _decoded(content["base", first])
    for step in range(first, version):
        shard = training.next_shard(shard, _decoded(content["grad", step]))
    return shard


def _decoded(data: bytes) -> int:
    return int.from_bytes(data[:8], "little", signed=True)


def _from_vaults(
    memories: Iterable[NodeMemory], rank: int, version: int, base: int = -1
) -> Content | None:
    for memory in memories:
        try:
            found, pieces = memory.vault.fetch(rank, version, base)
        except Refusal:
            continue
        keys: list[tuple[v.Kind, int]] = [("base", found.units[0].version)]
        keys += [("grad", step) for step, _, _ in found.units[0].log]
        keys += [("note", step) for step, _, _ in found.notes]
        return {key: bytes(piece.data) for key, piece in zip(keys, pieces, strict=True)}
    return None


def _from_parity(memories: Sequence[NodeMemory], rank: int, version: int) -> Content | None:
    """Whoever kept the parity before may still have it: each is asked, for all of its bases."""
    waiting = [(memory, -1) for memory in memories]
    while waiting:
        memory, base = waiting.pop(0)
        try:
            parity, segments = memory.parity.fetch(rank, version, base)
        except Refusal:
            continue
        if base < 0:
            waiting += [(memory, other) for other in parity.bases[1:]]
        found = _taken_apart(memories, parity, b"".join(segments), rank, version)
        if found is not None:
            return found
    return None


def _taken_apart(
    memories: Sequence[NodeMemory], parity: v.VaultParity, data: bytes, rank: int, version: int
) -> Content | None:
    others = {one for cell in parity.cells for one in cell.parts if one != rank}
    base = min(cell.version for cell in parity.cells)
    theirs = {one: _from_vaults(memories, one, version, base) for one in sorted(others)}
    content: Content = {}
    for cell in parity.cells:
        left, data = int.from_bytes(data[: cell.size], "little"), data[cell.size :]
        for one in cell.parts:
            mine = (theirs[one] or {}).get((cell.kind, cell.version)) if one != rank else b""
            if mine is None or (one != rank and [mine] != cell.parts[one][0].digests):
                return None
            left ^= int.from_bytes(mine, "little")
        (size,), digests = cell.parts[rank][0].sizes, cell.parts[rank][0].digests
        content[cell.kind, cell.version] = left.to_bytes(cell.size, "little")[:size]
        if [content[cell.kind, cell.version]] != digests:
            return None
    return content


@contextmanager
def unseen(memories: Iterable[NodeMemory]) -> Iterator[None]:
    """A look by nobody: a parity that is fetched takes no more, and these are as they were."""
    cells = [
        cell
        for memory in memories
        for group in memory.parity._groups.values()
        for cell in group.cells.values()
    ]
    before = [cell.fetched for cell in cells]
    yield
    for cell, fetched in zip(cells, before, strict=True):
        cell.fetched = fetched
