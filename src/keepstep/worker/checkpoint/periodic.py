"""Periodic checkpoints: taken at a boundary, written beside training, read when all else is lost.

    <directory>/checkpoint-<tick>/
        state/              a torch.distributed.checkpoint: __<rank>_0.distcp, .metadata
        rank-<n>.part       what rank n has, and which of it is in its file
        rank-<n>.meta, .side, .late, .init
        index               where each piece is, with its digest
        manifest.json       written last: without it this is no checkpoint

Theory of operation. PyTorch plans a checkpoint by collectives among all ranks. Those would need a
process group beside training's, stop when a rank dies, and be in the way of the next generation.
But there is nothing to negotiate: every rank knows who else has the same tensors (shards.py), so
each can say by itself which pieces are its to write (`owners_of`). So ranks plan alone, write alone
and never wait for each other; the one that seals joins the plans, and looks whether every piece
that some rank needs has been written. An abort has nothing to cancel: parts that will never be
sealed are removed by whoever wrote them, at the next checkpoint, or with the rest by its sealer.

The format is that of PyTorch and can be read with its tools. Keepstep itself reads by `index`, so
that nothing is unpickled but tensors, by a loader that accepts nothing else.

Threads: `take` in the main thread, `seal` from the channel's; both start one that writes.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from keepstep.errors import KeepstepError, PermanentError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model.page import INIT_TICK, late_tick
from keepstep.worker.checkpoint.files import FORMAT, put
from keepstep.worker.state import codec, shards
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.statefile import DigestMismatch
from keepstep.worker.state.tensors import describe, memory

PRIORITY = 10  # of the writing thread: behind the one that trains
OWN = "object/keepstep/"  # state of Keepstep's own, which need not be equal on all ranks

NAMED_MAX = 8  # ranks whose numbers are part of a name

Shape = tuple[int, ...]


class FileChunk(msgspec.Struct, frozen=True):
    """A tensor, or one rank's shard of it."""

    name: str
    offsets: Shape
    sizes: Shape
    size: Shape  # of the whole tensor
    dtype: str

    @property
    def whole(self) -> bool:
        return self.sizes == self.size

    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size(self.offsets))

    def item(self) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        properties = TensorProperties(dtype=codec.dtype_named(self.dtype))
        return WriteItem(
            index=self.index(),
            type=WriteItemType.TENSOR if self.whole else WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(self.size)),
        )


class FilePiece(msgspec.Struct, frozen=True):
    """A chunk that was written: where, and what it was."""

    chunk: FileChunk
    file: str
    at: int
    length: int
    digest: bytes


class Part(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    tick: int
    version: int
    needs: dict[str, FileChunk]  # name of the rank's tensor -> what it is
    pieces: list[FilePiece]


class HostSnapshot:
    """A rank's part in host memory."""

    def __init__(self, number: int, tick: int, version: int) -> None:
        self.number, self.tick, self.version = number, tick, version
        self.needs: dict[str, FileChunk] = {}
        self.tensors: dict[MetadataIndex, tuple[FileChunk, Tensor]] = {}  # to be written here
        self.files: dict[str, bytes] = {}  # meta, side, late, init
        self.snapshot_ns = 0


_parts: msgspec.msgpack.Decoder[Part] = msgspec.msgpack.Decoder(Part)
_indexes: msgspec.msgpack.Decoder[list[FilePiece]] = msgspec.msgpack.Decoder(list[FilePiece])


# --------------------------------------------------------------------------------------- taking


def chunk_of(
    name: str,
    part: Tensor,
    described: shards.Spec | None,
    ranks: Sequence[int],
    world: int,
) -> FileChunk:
    """`part` is what is here of the tensor, and `ranks` have the same bytes. Tensors of one name
    may differ between ranks (stages of a pipeline): then the ranks are part of the name."""
    dtype, shape = codec.dtype_name(part.dtype), tuple(part.shape)
    found = shards.box(described) if described is not None else None
    if described is not None and found is not None:
        full = prefix(shards.mesh_ranks(described), world) + name
        return FileChunk(full, found[1], found[0], tuple(described[2]), dtype)
    full = prefix(ranks, world) + name
    return FileChunk(full, (0,) * len(shape), shape, shape, dtype)


def prefix(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return ""
    if len(ranks) <= NAMED_MAX:
        return f"rank-{'-'.join(map(str, ranks))}/"
    return f"ranks-{xxhash.xxh3_64_hexdigest(repr(tuple(ranks)).encode())}/"


def owners_of(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Who of these ranks, which all hold them, writes tensors of these names and sizes. They all
    come to the same answer.

    The largest first, each to whoever has least. The number of tensors in registered objects may
    differ between ranks: each of them has its owner whatever else there is."""
    owners: dict[str, int] = {}
    loads = [(0, rank) for rank in sorted(ranks)]
    for name, size in sorted(sizes.items(), key=lambda one: (-one[1], one[0])):
        if name.startswith("object/"):
            owners[name] = ranks[zlib.crc32(name.encode()) % len(ranks)]
            continue
        load, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (load + size, rank))
    return owners


class Periodic:
    def __init__(self, me: RankFacts, directory: str) -> None:
        self._me = me
        self._directory = Path(directory)
        self._newest = -1  # number
        self._host: dict[str, Tensor] = {}  # kept: fresh memory would make each snapshot slower
        self._writer: threading.Thread | None = None
        self._last: Path | None = None

    def take(self, number: int) -> None:
        """At the boundary behind the fence in which the word was heard."""
        if number <= self._newest:
            return
        self._newest = number
        if self._me.channel.inbox.snapshot == number:
            self._me.channel.inbox.snapshot = -1
        if self._writer is not None and self._writer.is_alive():
            self._failed(number, "the one before is still being written here")
            return
        began = time.monotonic_ns()
        try:
            snapshot = self._snapshot(number)
        except (KeepstepError, RuntimeError, MemoryError) as error:
            self._host.clear()
            self._failed(number, str(error))
            return
        snapshot.snapshot_ns = time.monotonic_ns() - began
        self._writer = _thread(self._write, snapshot)

    def _snapshot(self, number: int) -> HostSnapshot:
        me = self._me
        snapshot = HostSnapshot(number, me.tick, me.version)
        exported = me.state.export()
        alike: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {}  # class -> ranks, sizes
        for name, part in exported.tensors.items():
            if not part.numel():
                continue
            kind = OWN if name.startswith(OWN) else exported.classes[name]
            ranks = (me.rank,) if kind == OWN else me.replicas.ranks[kind]
            snapshot.needs[name] = chunk_of(name, part, exported.specs[name], ranks, me.world)
            alike.setdefault(kind, (ranks, {}))[1][name] = part.nbytes
        for ranks, sizes in alike.values():
            for name, owner in owners_of(sizes, ranks).items():
                if owner == me.rank:
                    chunk, copy = snapshot.needs[name], self._copy(name, exported.tensors[name])
                    snapshot.tensors[chunk.index()] = chunk, copy
        if any(part.is_cuda for part in exported.tensors.values()):
            torch.cuda.synchronize()
        self._host = {name: self._host[name] for name in snapshot.needs if name in self._host}
        snapshot.files["meta"] = exported.meta
        for kind, tick in (("side", me.tick), ("late", late_tick(me.tick)), ("init", INIT_TICK)):
            data = me.page.held(tick)
            if data is not None:
                snapshot.files[kind] = data
        return snapshot

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        _, shape, stride, device = describe(tensor)
        host = self._host.get(name)
        same = host is not None and host.dtype == tensor.dtype and host.stride() == stride
        if host is None or not same or tuple(host.shape) != shape:
            pinned = device == "cuda"
            host = torch.empty_strided(shape, stride, dtype=tensor.dtype, pin_memory=pinned)
            self._host[name] = host
        host.copy_(tensor.detach(), non_blocking=True)
        return host

    def _failed(self, number: int, error: str) -> None:
        self._me.channel.send(m.SaveFailed(number=number, error=error[:2000]))

    # ------------------------------------------------------------------ writing

    def _write(self, snapshot: HostSnapshot) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)
        me, began = self._me, time.monotonic_ns()
        if self._last is not None and not (self._last / "manifest.json").exists():
            remove_part(self._last, me.rank)
        self._last = directory = self._directory / f"checkpoint-{snapshot.tick}"
        try:
            size = write_part(directory, me.rank, snapshot)
        except Exception as error:  # whatever it is, training has nothing to do with it
            remove_part(directory, me.rank)
            self._failed(snapshot.number, f"{type(error).__name__}: {error}")
            return
        me.channel.send(
            m.Saved(
                number=snapshot.number,
                tick=snapshot.tick,
                version=snapshot.version,
                snapshot_ns=snapshot.snapshot_ns,
                write_ns=time.monotonic_ns() - began,
                bytes_written=size,
            )
        )

    def seal(self, command: commands.Seal) -> None:
        _thread(self._seal, command)

    def _seal(self, command: commands.Seal) -> None:
        directory = self._directory / f"checkpoint-{command.tick}"
        try:
            seal(directory, command.number, command.world)
            remove_others(self._directory, {str(directory), *command.keep})
        except Exception as error:
            self._failed(command.number, f"{type(error).__name__}: {error}")
            return
        self._me.channel.send(m.Sealed(number=command.number, path=str(directory)))


def _thread(work: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, name="keepstep-save", daemon=True)
    thread.start()
    return thread


class _Writing(DefaultSavePlanner):
    def __init__(self, tensors: Mapping[MetadataIndex, tuple[FileChunk, Tensor]]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index][1]


def write_part(directory: Path, rank: int, snapshot: HostSnapshot) -> int:
    """Returns the bytes of its tensors."""
    writer: Any = FileSystemWriter(directory / "state")
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    items = [chunk.item() for chunk, _ in snapshot.tensors.values()]
    plan = writer.prepare_local_plan(SavePlan(items))
    (directory / f"rank-{rank}.part").unlink(missing_ok=True)  # of one that was never sealed
    results = writer.write_data(plan, _Writing(snapshot.tensors)).value()
    pieces = []
    for result in results:
        chunk, tensor = snapshot.tensors[result.index]
        where: _StorageInfo = result.storage_data
        file, at, length = where.relative_path, where.offset, where.length
        pieces.append(FilePiece(chunk, file, at, length, _digest(tensor)))
    for kind, data in snapshot.files.items():
        put(directory / f"rank-{rank}.{kind}", data)
    part = Part(
        number=snapshot.number,
        tick=snapshot.tick,
        version=snapshot.version,
        needs=snapshot.needs,
        pieces=pieces,
    )
    put(directory / f"rank-{rank}.part", msgspec.msgpack.encode(part))
    return sum(tensor.nbytes for _, tensor in snapshot.tensors.values())


def _digest(tensor: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(memory(tensor.contiguous()))


def remove_part(directory: Path, rank: int) -> None:
    own = [*directory.glob(f"state/__{rank}_*"), *directory.glob(f"rank-{rank}.*")]
    for path in own:
        path.unlink(missing_ok=True)
    for folder in (directory / "state", directory):
        with contextlib.suppress(OSError):  # others' parts are there, or it is gone
            folder.rmdir()


def remove_others(parent: Path, keep: set[str]) -> None:
    for path in parent.glob("checkpoint-*"):
        if str(path) not in keep:
            (path / "manifest.json").unlink(missing_ok=True)  # from here on it is none
            shutil.rmtree(path, ignore_errors=True)


# -------------------------------------------------------------------------------------- sealing


def seal(directory: Path, number: int, world: int) -> None:
    """Join the parts. A piece that several ranks have written is taken from the first."""
    pieces: dict[MetadataIndex, FilePiece] = {}
    parts = []
    for rank in range(world):
        part = _parts.decode((directory / f"rank-{rank}.part").read_bytes())
        if part.number != number:
            raise PermanentError(f"{directory} has a part of rank {rank} for another checkpoint")
        parts.append(part)
        for piece in part.pieces:
            pieces.setdefault(piece.chunk.index(), piece)
    for rank, part in enumerate(parts):
        for name, chunk in part.needs.items():
            found = pieces.get(chunk.index())
            if found is None or found.chunk != chunk:
                what = "nobody has written" if found is None else "another rank has otherwise"
                raise PermanentError(
                    f"{name} of rank {rank} is a tensor that {what}",
                    hint="models, optimizers and registered objects must be equal on all ranks",
                )
    _write_metadata(directory, pieces.values())
    put(directory / "index", msgspec.msgpack.encode(list(pieces.values())))
    manifest = {
        "format": FORMAT,
        "tick": parts[0].tick,
        "step": parts[0].version,
        "world": world,
        "written_at": time.time(),
    }
    put(directory / "manifest.json", json.dumps(manifest, indent=1).encode())


def _write_metadata(directory: Path, pieces: Iterable[FilePiece]) -> None:
    """For PyTorch's own tools."""
    found = list(pieces)
    (plan,), metadata = create_default_global_save_plan(
        [SavePlan([piece.chunk.item() for piece in found])]
    )
    results = [
        WriteResult(item.index, piece.length, _StorageInfo(piece.file, piece.at, piece.length))
        for item, piece in zip(plan.items, found, strict=True)
    ]
    writer: Any = FileSystemWriter(directory / "state")
    writer.finish(metadata, [results])


# -------------------------------------------------------------------------------------- reading


class _Reading(DefaultLoadPlanner):
    def __init__(self, landing: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._landing = landing

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._landing[read_item.dest_index]


def read_state(directory: Path, rank: int, state: StateSet) -> int:
    """Fill `state` as it was on this rank, finish_import included. Returns its bytes."""
    part = _parts.decode((directory / f"rank-{rank}.part").read_bytes())
    pieces = {
        piece.chunk.index(): piece for piece in _indexes.decode((directory / "index").read_bytes())
    }
    places = state.prepare_import((directory / f"rank-{rank}.meta").read_bytes())
    wanted = {name: part.needs[name] for name, tensor in places.items() if tensor.numel()}
    reader: Any = FileSystemReader(directory / "state")
    storage = {
        index: _StorageInfo(piece.file, piece.at, piece.length) for index, piece in pieces.items()
    }
    reader.set_up_storage_reader(Metadata({}, storage_data=storage), False)
    landing = {chunk.index(): places[name] for name, chunk in wanted.items()}
    plan = LoadPlan([_read_item(chunk) for chunk in wanted.values()])
    reader.read_data(plan, _Reading(landing)).wait()
    for name, chunk in wanted.items():
        if _digest(places[name]) != pieces[chunk.index()].digest:
            raise DigestMismatch(-1, f"{directory} is damaged: {name} has another digest")
    state.finish_import()
    return sum(places[name].nbytes for name in wanted)


def _read_item(chunk: FileChunk) -> ReadItem:
    index, zero = chunk.index(), torch.Size((0,) * len(chunk.sizes))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=zero,
        storage_index=index,
        storage_offsets=zero,
        lengths=torch.Size(chunk.sizes),
    )
