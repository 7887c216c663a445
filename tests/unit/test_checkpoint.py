"""A held rank whose disk is full goes on holding, and says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.model import messages as m
from keepstep.worker.recovery import Finished, Recovery


def test_a_checkpoint_that_can_not_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where a directory is needed")
    path = str(tmp_path / "taken" / "checkpoint-5")
    sent: list[Any] = []
    seat: Any = SimpleNamespace(channel=SimpleNamespace(send=sent.append))
    order = m.Checkpoint(generation=3, path=path, lead=False, tick=5, world=2)
    Recovery(seat)._checkpoint(order)
    (failed,) = sent
    assert isinstance(failed, m.CheckpointFailed)
    assert (failed.generation, failed.path) == (3, path) and "Not a directory" in failed.error


def test_a_leaver_is_told_to_leave_in_the_generation_in_which_its_move_is_over() -> None:
    commands = [m.Swap(generation=4, buddy=None), m.Leave(generation=4)]

    def wait(wanted: Any, newer_than: int) -> Any:
        return next(command for command in commands if wanted(command))

    seat: Any = SimpleNamespace(channel=SimpleNamespace(wait=wait), done=True)
    with pytest.raises(Finished):  # a process whose script has ended is not ended by hand
        Recovery(seat)._obey(3)


def test_a_part_of_the_shards_is_no_checkpoint(tmp_path: Path) -> None:
    """What another rank has alone can not be written by the one that leads."""
    path = str(tmp_path / "checkpoint-5")
    sent: list[Any] = []
    seat: Any = SimpleNamespace(
        channel=SimpleNamespace(send=sent.append),
        page=SimpleNamespace(held=lambda _: b"x"),
        state=SimpleNamespace(classes=lambda: {"plain", "shard"}),
        replicas=SimpleNamespace(ranks={"plain": (0, 1, 2), "shard": (0,)}),
        rank=0,
        world=3,
    )
    order = m.Checkpoint(generation=3, path=path, lead=True, tick=5, world=3)
    Recovery(seat)._checkpoint(order)
    (failed,) = sent
    assert isinstance(failed, m.CheckpointFailed) and "different shards" in failed.error
    assert not (tmp_path / "checkpoint-5" / "manifest.json").exists()
