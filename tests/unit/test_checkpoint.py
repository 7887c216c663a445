"""A held rank whose disk is full goes on holding, and says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from keepstep.model import messages as m
from keepstep.worker.recovery import Recovery


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
