"""What a vault had of a lost rank, in a file of a just-in-time checkpoint.

    magic, header length (u64), header (layout; versions, sizes and digests), raw bytes

Replay brings whoever reads it to the version of the checkpoint, as after a fetch from the vault.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from keepstep.worker.state.statefile import read_header, read_part, write_parts
from keepstep.worker.vault.vault import FetchedShards

_MAGIC = b"KSVAULT2"


class _Part(msgspec.Struct, frozen=True):
    size: int
    digest: bytes


class _Unit(msgspec.Struct, frozen=True):
    index: int
    version: int
    tensors: list[_Part]
    log: list[tuple[int, _Part | None]]  # step, its gradient


class _Header(msgspec.Struct, frozen=True):
    layout: bytes
    units: list[_Unit]
    notes: list[tuple[int, _Part]]  # step, and what may be as large as all its gradients


def _part(view: memoryview | bytes) -> _Part:
    return _Part(len(view), xxhash.xxh3_128_digest(view))


def write(path: Path, fetched: FetchedShards) -> int:
    units, views = [], list[memoryview | bytes]()
    for index, (version, tensors, log) in fetched.units.items():
        given = [(step, None if view is None else _part(view)) for step, view in log.items()]
        units.append(_Unit(index, version, [_part(view) for view in tensors], given))
        views += [*tensors, *(view for view in log.values() if view is not None)]
    notes = [(step, _part(note)) for step, note in fetched.notes.items()]
    views += fetched.notes.values()
    header = _Header(fetched.layout, units, notes)
    return write_parts(path, _MAGIC, msgspec.msgpack.encode(header), views)


def read(path: Path) -> FetchedShards:
    total = 0
    with path.open("rb") as file:
        header = read_header(file, _MAGIC, _Header)

        def take(part: _Part, what: str) -> memoryview:
            nonlocal total
            view = memoryview(bytearray(part.size))
            read_part(file, view, part.size, part.digest, what)
            total += part.size
            return view

        units = {}
        for unit in header.units:
            tensors = [take(part, f"base of unit {unit.index}") for part in unit.tensors]
            log = {
                step: None if part is None else take(part, f"gradient of unit {unit.index}")
                for step, part in unit.log
            }
            units[unit.index] = (unit.version, tensors, log)
        notes = {step: bytes(take(part, f"note {step}")) for step, part in header.notes}
    return FetchedShards(header.layout, units, notes, total)
