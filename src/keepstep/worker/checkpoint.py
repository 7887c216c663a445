"""Just-in-time checkpoints: written by held ranks when no spare is left; reading any checkpoint.

A directory with `state` (replicated state, one file), `rank-N.side` (side state of the held tick)
and `rank-N.init` (record of init-time collectives) for every rank, dead ones too, and
`manifest.json`, written last. A directory without a manifest is not a checkpoint. Periodic ones
(periodic.py) have the same files, but `state` is a directory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.errors import PermanentError, UsageError
from keepstep.model import messages as m
from keepstep.worker import blobs, transfer

if TYPE_CHECKING:
    from keepstep.worker.seat import Seat
    from keepstep.worker.state import StateSet

FORMAT = 1


def put(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write(seat: Seat, command: m.Checkpoint) -> None:
    directory = Path(command.path)
    directory.mkdir(parents=True, exist_ok=True)
    _refuse_shards(seat)
    _write_side(directory, seat.rank, seat.page.held(-1), seat.page.held(command.tick))
    written = 0
    if command.lead:
        for rank in command.dead:
            _write_dead(directory, seat, rank, command)
        written = transfer.write_file(directory / "state", seat.state.export())
        manifest = {
            "format": FORMAT,
            "tick": command.tick,
            "step": seat.version,
            "world": command.world,
        }
        put(directory / "manifest.json", json.dumps(manifest, indent=1).encode())
    seat.channel.send(
        m.Checkpointed(generation=command.generation, path=command.path, bytes_written=written)
    )


def _refuse_shards(seat: Seat) -> None:
    """One rank writes for all, so what it writes must be what all have."""
    everybody = set(range(seat.world))
    if any(set(seat.replicas.ranks[kind]) != everybody for kind in seat.state.classes()):
        raise PermanentError(
            "ranks of this job have different shards, which one cannot write",
            hint="--checkpoint-dir writes all of them while all ranks live",
        )


def _write_side(directory: Path, rank: int, init: bytes | None, side: bytes | None) -> None:
    if init is not None:
        put(directory / f"rank-{rank}.init", init)
    if side is not None:
        put(directory / f"rank-{rank}.side", side)


def _write_dead(directory: Path, seat: Seat, rank: int, command: m.Checkpoint) -> None:
    token, holders, tick = seat.welcome.token, command.dead[rank], command.tick
    init = blobs.fetch(holders, token, rank, -1)
    side = blobs.fetch(holders, token, rank, tick, everybody=False) if tick else None
    if tick and side is None:
        raise PermanentError(f"side state {tick} of rank {rank} is held by nobody")
    _write_side(directory, rank, init.data if init else None, side.data if side else None)


def read_side(directory: str, rank: int, kind: str) -> bytes | None:
    path = Path(directory) / f"rank-{rank}.{kind}"
    return path.read_bytes() if path.exists() else None


def read_state(directory: str, rank: int, state: StateSet) -> int:
    """Fill `state`, finish_import included. Returns the bytes of its tensors."""
    path = Path(directory)
    if (path / "state").is_dir():
        from keepstep.worker import periodic  # PyTorch's checkpoints take a while to be imported

        return periodic.read_state(path, rank, state)
    return transfer.read_file(path / "state", state)


def tick_of(directory: str) -> int:
    try:
        manifest = json.loads((Path(directory) / "manifest.json").read_bytes())
        return int(manifest["tick"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{directory} is not a complete checkpoint: {error}",
            hint="give the directory that `keepstep run` named when it ran out of spares",
        ) from error
