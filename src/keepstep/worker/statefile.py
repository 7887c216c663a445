"""A rank's state in a file: the just-in-time checkpoint of a job that holds without a spare.

    magic, header length (u64), header (meta; name, bytes and digest of each tensor), raw tensors

The file is complete under its name, or not there.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import xxhash

from keepstep.errors import PermanentError, UsageError
from keepstep.worker.state import Exported, StateSet, memory, on_cpu

_MAGIC = b"KSSTATE1"


class DigestMismatch(PermanentError):
    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message, hint="memory or network of one of the two nodes is faulty")
        self.rank = rank


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    meta: bytes
    tensors: list[tuple[str, int, bytes]]  # name, bytes, digest


_SIZE = struct.Struct("<Q")


def write_file(path: str | os.PathLike[str], export: Exported) -> int:
    """A just-in-time checkpoint: complete under its name, or not there. Returns its bytes."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: on_cpu(tensor) for name, tensor in export.tensors.items()}
    table = [(n, t.nbytes, xxhash.xxh3_128_digest(memory(t))) for n, t in plain.items()]
    header = msgspec.msgpack.encode(_Header(meta=export.meta, tensors=table))
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(_MAGIC + _SIZE.pack(len(header)) + header)
            for tensor in plain.values():
                file.write(memory(tensor))
            file.flush()
            os.fsync(file.fileno())
            total = file.tell()
        os.rename(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return total


def read_file(path: str | os.PathLike[str], state: StateSet) -> int:
    """Fill `state` from a file, finish_import included. Returns the bytes of its tensors."""
    with Path(path).open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UsageError(f"{path} is not a Keepstep state file")
        try:
            (length,) = _SIZE.unpack(file.read(_SIZE.size))
            header = msgspec.msgpack.decode(file.read(length), type=_Header)
        except (struct.error, msgspec.DecodeError) as error:
            raise PermanentError(f"{path} is damaged: {error}") from error
        landing = state.prepare_import(header.meta)
        if state.missing:
            names = ", ".join(sorted(state.missing)[:3])
            state.abandon_import()
            raise PermanentError(f"{path} was written by a rank that has other shards: no {names}")
        for name, size, digest in header.tensors:
            view = memory(landing[name])
            if len(view) != size or file.readinto(view) != size:
                raise PermanentError(f"{path} is damaged: {name} is cut short")
            if xxhash.xxh3_128_digest(view) != digest:
                raise DigestMismatch(-1, f"{path} is damaged: {name} has another digest")
    state.finish_import()
    return sum(size for _, size, _ in header.tensors)
