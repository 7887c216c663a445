"""Just-in-time checkpoints: written by held ranks when no spare is left; reading any checkpoint.

A directory with `state` (replicated state, one file) and, for every rank, dead ones too,
`rank-N.side` (side state of the held tick), `rank-N.late` (what its rank added to it at the
transaction's end) and `rank-N.init` (record of init-time collectives), and `manifest.json`. Without
the manifest and the side state of all ranks it is not a checkpoint.

Where ranks have different shards there is no `state`, but `rank-N.state` and `rank-N.classes` (what
is in it) of as many ranks as it takes, and `rank-N.vault` of dead ones whose shards nobody else
has: what was kept for them (vaultfile.py).

Periodic checkpoints (periodic.py) have the same files, but `state` is a directory.
"""

from __future__ import annotations

import json
from pathlib import Path

from keepstep.errors import PermanentError, UsageError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model.page import INIT_TICK, late_tick
from keepstep.worker.checkpoint.files import FORMAT, put
from keepstep.worker.line import blobs
from keepstep.worker.state import statefile
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.vault import vault, vaultfile
from keepstep.worker.vault.redundancy import Redundancy


def write(me: RankFacts, redundancy: Redundancy, command: commands.Checkpoint) -> m.Checkpointed:
    """The side state comes last: once all ranks' are there, and the manifest, it is complete."""
    directory = Path(command.path)
    directory.mkdir(parents=True, exist_ok=True)
    written = 0
    if _sharded(me):
        written = _write_shards(directory, me, redundancy, command)
    elif command.lead:
        written = statefile.write_file(directory / "state", me.state.export())
    for rank in command.dead:
        _write_dead(directory, me, rank, command)
    held = me.page.held
    late = held(late_tick(command.tick))
    _write_side(directory, me.rank, held(INIT_TICK), late, held(command.tick))
    if command.lead:
        manifest = {
            "format": FORMAT,
            "tick": command.tick,
            "step": me.version,
            "world": command.world,
        }
        put(directory / "manifest.json", json.dumps(manifest, indent=1).encode())
    return m.Checkpointed(generation=command.generation, path=command.path, bytes_written=written)


def _sharded(me: RankFacts) -> bool:
    everybody = set(range(me.world))
    return any(set(me.replicas.ranks[kind]) != everybody for kind in me.state.classes())


def _write_shards(
    directory: Path, me: RankFacts, redundancy: Redundancy, command: commands.Checkpoint
) -> int:
    """Of those that have the same shards, the first one that is left writes."""
    written = 0
    for rank in command.kept:
        fetched, _ = redundancy.fetch(rank, command.dead[rank], me.version)
        written += vaultfile.write(directory / f"rank-{rank}.vault", fetched)
    classes, ranks, gone = me.state.classes(), me.replicas.ranks, set(command.gone)
    if any(min(set(ranks[kind]) - gone, default=-1) == me.rank for kind in classes):
        path = directory / f"rank-{me.rank}.state"
        written += statefile.write_file(path, me.state.export())
        put(path.with_suffix(".classes"), json.dumps(sorted(classes)).encode())
    return written


def _write_side(
    directory: Path, rank: int, init: bytes | None, late: bytes | None, side: bytes | None
) -> None:
    for kind, data in (("init", init), ("late", late), ("side", side)):
        if data is not None:
            put(directory / f"rank-{rank}.{kind}", data)


def _write_dead(directory: Path, me: RankFacts, rank: int, command: commands.Checkpoint) -> None:
    token, holders, tick = me.welcome.token, command.dead[rank], command.tick
    init = blobs.fetch(holders, token, rank, INIT_TICK)
    side = blobs.fetch(holders, token, rank, tick, everybody=False) if tick else None
    if tick and side is None:
        raise PermanentError(f"side state {tick} of rank {rank} is held by nobody")
    late = blobs.fetch(holders, token, rank, late_tick(tick), patience_s=0.0)
    data = [blob.data if blob else None for blob in (init, late, side)]
    _write_side(directory, rank, *data)


def read_side(directory: str, rank: int, kind: str) -> bytes | None:
    path = Path(directory) / f"rank-{rank}.{kind}"
    return path.read_bytes() if path.exists() else None


def read_state(directory: str, rank: int, state: StateSet) -> tuple[int, frozenset[str]]:
    """Fill `state`, finish_import included. Returns the bytes of its tensors, and what nobody had
    who wrote: `read_vault` has it."""
    path = Path(directory)
    if (path / "state").is_dir():
        from keepstep.worker.checkpoint import periodic

        return periodic.read_state(path, rank, state), frozenset()
    if (path / "state").exists():
        return statefile.read_files([path / "state"], state)
    return statefile.read_files(_parts_for(path, rank, state.classes()), state)


def _parts_for(path: Path, rank: int, wanted: frozenset[str]) -> list[Path]:
    """The most useful first, its own of equally useful ones; until all classes are there, or all
    that somebody has written."""
    have = {one: frozenset(json.loads(one.read_bytes())) for one in path.glob("rank-*.classes")}
    own = path / f"rank-{rank}.classes"
    order = sorted(have, key=lambda one: (-len(wanted & have[one]), one != own, one.name))
    chosen: list[Path] = []
    left = set(wanted)
    for one in order:
        if not chosen or left & have[one]:
            chosen.append(one.with_suffix(".state"))
            left -= have[one]
    if not chosen:
        raise PermanentError(f"{path} is damaged: it has no state")
    return chosen


def read_vault(directory: str, rank: int) -> tuple[vault.FetchedShards, str]:
    """And from where, in words."""
    path = Path(directory) / f"rank-{rank}.vault"
    if not path.exists():
        raise PermanentError(f"{directory} has no shards of rank {rank}")
    return vaultfile.read(path), "the checkpoint"


def tick_of(directory: str) -> int:
    try:
        manifest = json.loads((Path(directory) / "manifest.json").read_bytes())
        return int(manifest["tick"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{directory} is not a complete checkpoint: {error}",
            hint="give the directory that `keepstep run` named when it ran out of spares",
        ) from error
