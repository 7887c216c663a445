"""A rank's state in a file: the just-in-time checkpoint of a job that holds without a spare.

    magic, header length (u64), header (meta; name, bytes and digest of each tensor), raw tensors

The file is complete under its name, or not there.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from keepstep.errors import PermanentError, UsageError
from keepstep.worker.state.export import Exported
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.tensors import memory, on_cpu

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
    plain = {name: on_cpu(tensor) for name, tensor in export.tensors.items()}
    table = [(n, t.nbytes, xxhash.xxh3_128_digest(memory(t))) for n, t in plain.items()]
    header = msgspec.msgpack.encode(_Header(meta=export.meta, tensors=table))
    return write_parts(Path(path), _MAGIC, header, (memory(tensor) for tensor in plain.values()))


def write_parts(
    target: Path, magic: bytes, header: bytes, parts: Iterable[memoryview | bytes]
) -> int:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(magic + _SIZE.pack(len(header)) + header)
            for part in parts:
                file.write(part)
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


def read_header(file: BinaryIO, magic: bytes, kind: type[Any]) -> Any:
    if file.read(len(magic)) != magic:
        raise UsageError(f"{file.name} is not a Keepstep state file")
    try:
        (length,) = _SIZE.unpack(file.read(_SIZE.size))
        return msgspec.msgpack.decode(file.read(length), type=kind)
    except (struct.error, msgspec.DecodeError) as error:
        raise PermanentError(f"{file.name} is damaged: {error}") from error


def read_files(paths: Sequence[Path], state: StateSet) -> tuple[int, frozenset[str]]:
    """Fill `state` from the files of one or several ranks, finish_import included: each class from
    the first that has it. Returns the bytes of its tensors, and what none of them has."""
    total = 0
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(path.open("rb")) for path in paths]
        headers = [read_header(file, _MAGIC, _Header) for file in files]
        landing = state.prepare_import([header.meta for header in headers])
        missing, sources = frozenset(state.missing), state.sources()
        for at, (file, header) in enumerate(zip(files, headers, strict=True)):
            for name, size, digest in header.tensors:
                if sources.get(name) == at:
                    read_part(file, memory(landing[name]), size, digest, name)
                    total += size
                else:
                    file.seek(size, os.SEEK_CUR)
    state.finish_import()
    return total, missing


def read_part(file: BinaryIO, view: memoryview, size: int, digest: bytes, name: str) -> None:
    if len(view) != size or file.readinto(view) != size:  # type: ignore[attr-defined]
        raise PermanentError(f"{file.name} is damaged: {name} is cut short")
    if xxhash.xxh3_128_digest(view) != digest:
        raise DigestMismatch(-1, f"{file.name} is damaged: {name} has another digest")
