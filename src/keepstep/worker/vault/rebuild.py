"""What a lost member of a parity had in the vault of its agent: the way back from a parity.

The holder's cells (keepstep.core.agent.parity) are fetched, then from their own agents' vaults what
the other members have added to these; when that is taken out, what is left is the lost rank's. The
holder has the digests of all of it. One member at a time is held in memory besides the cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from keepstep.adapters.transport.blocking import landing, pieces
from keepstep.core.agent.parity import xor
from keepstep.errors import PermanentError, RemoteProtocolError
from keepstep.model import vault as v
from keepstep.model.messages import Address
from keepstep.worker.state.statefile import DigestMismatch
from keepstep.worker.vault.lane import VaultLacks, View, raise_refusal
from keepstep.worker.vault.vault import FetchedShards, asking, fetch


class NotRebuilt(PermanentError):
    """More was lost than a parity can make up for."""


_Key = tuple[v.Kind, int]


@dataclass
class _Cell:
    described: v.ParityCell
    data: memoryview


def rebuild(
    holders: Sequence[Address], token: str, rank: int, version: int
) -> tuple[FetchedShards, str]:
    """What `rank` had in the vault that was lost, and how, in words. Raises NotRebuilt, or OSError
    if somebody did not answer who might have made it possible."""
    why, silent = f"no parity that rank {rank} has a part in is kept", ""
    # Whoever kept the parity before may still have it, and of what it is made up no more: so each
    # is asked, for its best base first and then for its others.
    waiting = [(holder, -1) for holder in holders]
    while waiting:
        at, base = waiting.pop(0)
        try:
            reply, cells = _fetch_parity(at, token, rank, version, base)
            if base < 0:
                waiting += [(at, other) for other in reply.bases[1:]]
            others = sorted({r for cell in reply.cells for r in cell.parts if r != rank})
            for other in others:
                _take_out(holders, token, other, version, cells)
            fetched = _assembled(reply.layout, rank, cells)
        except (VaultLacks, DigestMismatch) as error:
            why = why if "kept here" in str(error) else str(error)
        except OSError as error:
            silent = str(error)
        else:
            names = ", ".join(map(str, others)) or "nobody else"
            where = f"the parity at {at.host}:{at.port} and the vaults of ranks {names}"
            return fetched, where
    if silent:
        raise OSError(silent)
    raise NotRebuilt(f"a parity makes up for the loss of one member, and {why}")


def _fetch_parity(
    holder: Address, token: str, rank: int, version: int, base: int
) -> tuple[v.VaultParity, dict[_Key, _Cell]]:
    ask = v.VaultFetch(token=token, rank=rank, version=version, base=base, parity=True)
    with asking(holder, ask) as frames:
        reply = frames.receive()
        if not isinstance(reply, v.VaultParity):
            raise_refusal(reply, rank)
        cells = {}
        for cell in reply.cells:
            memory = landing(_checked(cell, rank))
            for part in pieces(memory):
                frames.receive_into(part)
            cells[cell.kind, cell.version] = _Cell(cell, memory)
        return reply, cells


def _checked(cell: v.ParityCell, rank: int) -> int:
    sizes = [size for parts in cell.parts.values() for part in parts for size in part.sizes]
    longest = max(
        (sum(size for part in parts for size in part.sizes) for parts in cell.parts.values()),
        default=0,
    )
    if min(sizes, default=0) < 0 or longest != cell.size or rank not in cell.parts:
        raise RemoteProtocolError(f"a parity of rank {rank} that makes no sense")
    return cell.size


def _take_out(
    holders: Sequence[Address],
    token: str,
    rank: int,
    version: int,
    cells: dict[_Key, _Cell],
) -> None:
    """XOR the bytes of another member away, if they are those that were added."""
    base = min(at for _, at in cells)
    fetched = _from_vault(holders, token, rank, version, base)
    for (kind, at), cell in cells.items():
        start = 0
        for part in cell.described.parts.get(rank, ()):
            views = _bytes_of(fetched, kind, at, part.unit)
            if [xxhash.xxh3_128_digest(view) for view in views] != part.digests:
                what = f"{kind} {at} of unit {part.unit} of rank {rank}"
                raise DigestMismatch(rank, f"{what} is another one than that in the parity")
            for view in filter(len, views):
                xor(cell.data[start : start + len(view)], memoryview(view))
                start += len(view)


def _from_vault(
    holders: Sequence[Address], token: str, rank: int, version: int, base: int
) -> FetchedShards:
    why: Exception = VaultLacks(f"no vault has anything of rank {rank}")
    for holder in holders:
        try:
            return fetch(holder, token, rank, version, base)
        except VaultLacks as error:
            if not isinstance(why, OSError) and "nothing of rank" not in str(error):
                why = error
        except OSError as error:
            why = error
    raise why


def _bytes_of(fetched: FetchedShards, kind: v.Kind, version: int, unit: int) -> Sequence[View]:
    if kind == "note":
        return [fetched.notes[version]] if version in fetched.notes else []
    if unit not in fetched.units:
        return []
    _, tensors, log = fetched.units[unit]
    if kind == "base":
        return tensors
    gradient = log.get(version)
    return [] if gradient is None else [gradient]


def _assembled(layout: bytes, rank: int, cells: dict[_Key, _Cell]) -> FetchedShards:
    """What is left is the lost member's; its digests are on record."""
    units: dict[int, tuple[int, list[memoryview], dict[int, memoryview | None]]] = {}
    notes: dict[int, bytes] = {}
    total = 0
    for (kind, version), cell in cells.items():  # the base comes first
        start = 0
        for part in cell.described.parts[rank]:
            views = []
            for size, digest in zip(part.sizes, part.digests, strict=True):
                view = cell.data[start : start + size]
                if xxhash.xxh3_128_digest(view) != digest:
                    what = f"{kind} {version} of unit {part.unit} of rank {rank}"
                    raise DigestMismatch(rank, f"{what} came out of the parity as another one")
                views.append(view)
                start += size
            if kind == "note":
                notes[version] = bytes(views[0])
            elif kind == "base":
                units[part.unit] = (version, views, {})
            else:
                units[part.unit][2][version] = views[0] if views else None
        total += start
    return FetchedShards(layout, units, notes, total)
