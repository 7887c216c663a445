"""Just-in-time checkpoints: what is written, and what is said when that cannot be done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.core.rank.inbox import Inbox
from keepstep.errors import KeepstepError, PermanentError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.worker.checkpoint import checkpoint
from keepstep.worker.step.recovery import Recovery
from keepstep.worker.vault import vaultfile
from keepstep.worker.vault.replay import ShardsMissing
from keepstep.worker.vault.vault import FetchedShards


def test_a_checkpoint_that_can_not_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where a directory is needed")
    path = str(tmp_path / "taken" / "checkpoint-5")
    live: Any = SimpleNamespace(channel=SimpleNamespace(inbox=Inbox()), redundancy=None)
    order = commands.Checkpoint(generation=3, path=path, lead=False, tick=5, world=2)
    failed = Recovery(live)._write(order)
    assert isinstance(failed, m.CheckpointFailed)
    assert (failed.generation, failed.path) == (3, path) and "Not a directory" in failed.error


def test_shards_that_are_in_no_vault_make_no_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint-5")

    def fetch(rank: int, holders: Any, version: int) -> Any:
        raise ShardsMissing(f"state of rank {rank} at step {version} is in no vault")

    live: Any = SimpleNamespace(
        channel=SimpleNamespace(inbox=Inbox()),
        state=SimpleNamespace(classes=lambda: {"plain", "shard"}),
        replicas=SimpleNamespace(ranks={"plain": (0, 1, 2), "shard": (0,)}),
        redundancy=SimpleNamespace(fetch=fetch),
        rank=0,
        world=3,
        version=4,
    )
    order = commands.Checkpoint(
        generation=3, path=path, lead=True, tick=5, world=3, dead={1: []}, gone=[1], kept=[1]
    )
    failed = Recovery(live)._write(order)
    assert isinstance(failed, m.CheckpointFailed) and "rank 1 at step 4" in failed.error
    assert not (tmp_path / "checkpoint-5" / "manifest.json").exists()


def test_of_replicas_one_file_is_read(tmp_path: Path) -> None:
    for rank, classes in enumerate((["a", "p"], ["b", "p"], ["c", "p"])):
        (tmp_path / f"rank-{rank}.classes").write_text(json.dumps(classes))

    def names(rank: int, *wanted: str) -> list[str]:
        return [path.name for path in checkpoint._parts_for(tmp_path, rank, frozenset(wanted))]

    assert names(1, "b", "p") == ["rank-1.state"]
    assert names(5, "b", "p") == ["rank-1.state"], "that of a replica"
    assert names(5, "d", "p") == ["rank-0.state"], "its shards are elsewhere"
    assert names(5, "a", "c", "p") == ["rank-0.state", "rank-2.state"]
    with pytest.raises(PermanentError, match="has no state"):
        checkpoint._parts_for(tmp_path / "nowhere", 0, frozenset("a"))


def kept() -> FetchedShards:
    views = [memoryview(bytearray(os.urandom(size))) for size in (40_000, 0, 8, 12_000)]
    units = {0: (3, views[:2], {3: views[3], 4: None}), 7: (4, views[2:3], {})}
    return FetchedShards(
        b"layout", units, {3: b"note", 4: b""}, sum(len(view) for view in views) + 4
    )


def test_what_a_vault_had_in_a_file(tmp_path: Path) -> None:
    before = kept()
    vaultfile.write(tmp_path / "rank-1.vault", before)
    assert vaultfile.read(tmp_path / "rank-1.vault") == before
    assert checkpoint.read_vault(str(tmp_path), 1) == (before, "the checkpoint")
    with pytest.raises(PermanentError, match="no shards of rank 2"):
        checkpoint.read_vault(str(tmp_path), 2)


@pytest.mark.parametrize("damage", ["cut", "flip", "magic", "header"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "rank-1.vault"
    vaultfile.write(file, kept())
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[-100:]
    else:
        data[{"flip": len(data) - 9000, "magic": 0, "header": 10}[damage]] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(KeepstepError):
        vaultfile.read(file)
