"""Where checkpoints go, and which one is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli.checkpoints import HOUR_NS, PeriodicOptions, check_periodic, check_resume
from keepstep.cli.show import checkpoints_text
from keepstep.errors import UsageError
from keepstep.model.views import CheckpointsView


def made(path: Path, tick: int, at: float, world: int = 4) -> Path:
    path.mkdir(parents=True)
    manifest = {"format": 1, "tick": tick, "step": tick, "world": world, "written_at": at}
    (path / "manifest.json").write_text(json.dumps(manifest))
    for rank in range(world):
        (path / f"rank-{rank}.side").touch()
    return path


def test_the_newest_complete_one_is_resumed(tmp_path: Path) -> None:
    made(tmp_path / "a" / "checkpoint-900", 900, at=1.0)
    newest = made(tmp_path / "b" / "checkpoint-50", 50, at=3.0)
    older = made(tmp_path / "b" / "checkpoint-40", 40, at=2.0)
    (tmp_path / "b" / "checkpoint-60").mkdir()  # never sealed
    (tmp_path / "b" / "checkpoint-70").mkdir()
    (tmp_path / "b" / "checkpoint-70" / "manifest.json").write_text("{")
    half = made(tmp_path / "b" / "checkpoint-80", 80, at=4.0)
    (half / "rank-2.side").unlink()  # this rank has not written its part
    assert check_resume(str(tmp_path), 4) == str(newest), "by age: ticks of jobs do not compare"
    assert check_resume(str(tmp_path / "b"), 4) == str(newest)
    assert check_resume(str(older), 4) == str(older)
    assert check_resume(None, 4) == ""


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "checkpoint-9", 9, at=1.0, world=8)
    with pytest.raises(UsageError, match="written by 8 ranks, and this job has 4"):
        check_resume(str(tmp_path), 4)


def test_a_job_has_a_folder_of_its_own(tmp_path: Path) -> None:
    found = check_periodic(str(tmp_path / "saved"), "90", 24, "j", "")
    assert found == PeriodicOptions(
        directory=str(tmp_path / "saved" / "j"), interval_ns=90 * 10**9, mttf_ns=24 * HOUR_NS
    )
    assert check_periodic(str(tmp_path), "auto", None, "j", "").interval_ns == 0
    assert check_periodic(None, "auto", None, "j", "") == PeriodicOptions()


def test_checkpoints_of_an_earlier_job_are_not_overwritten_by_mistake(tmp_path: Path) -> None:
    old = made(tmp_path / "j" / "checkpoint-9", 9, at=1.0)
    with pytest.raises(UsageError, match="earlier job j"):
        check_periodic(str(tmp_path), "auto", None, "j", "")
    assert check_periodic(str(tmp_path), "auto", None, "j", str(old)).directory


def test_status_says_how_often_and_how_far_back() -> None:
    view = CheckpointsView(
        directory="/c/j",
        interval_s=812.4,
        mttf_h=1500.0,
        cost_ms=61.04,
        write_s=3.0,
        saving=True,
        put_off=2,
        newest="/c/j/checkpoint-9",
        step=8,
    )
    assert checkpoints_text(view) == (
        "checkpoints every 812 s (failures every 1500 h, one costs 61.0 ms), the newest of step 8: "
        "/c/j/checkpoint-9, one is being written; 2 put off by a slow disk"
    )
