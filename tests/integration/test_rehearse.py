"""`keepstep rehearse` on real scripts: what it says, its exit code, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.commands import SCRIPTS, environment

DEADLINE_S = 850.0  # takes a minute; a machine that does much else may need ten
pytestmark = pytest.mark.timeout(900)


SLOW = pytest.mark.skipif(
    "KEEPSTEP_ALL" not in os.environ, reason="only make test-all has the time"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder: the script, and a file of an earlier run that the script appends to."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(SCRIPTS / "rehearsed.py", folder / "train.py")
    (folder / "log.txt").write_text("an earlier run\n")
    return folder


def rehearse(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    scratch = project.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    env = {**environment(project.parent / "home"), "TMPDIR": str(scratch)}
    before = files(project)
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "rehearse", *words],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert files(project) == before, "the user's own files were touched"
    assert list(scratch.iterdir()) == [], "the scratch folder was left behind"
    assert not (project.parent / "home").exists(), "the user's jobs and ledgers are elsewhere"
    left = [p for p in psutil.process_iter() if _in(p, str(scratch))]
    assert left == []
    return done


def _in(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get("TMPDIR", "").startswith(folder)
    except (psutil.Error, OSError):
        return False


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@SLOW
def test_a_good_script_is_identical_after_every_fault_and_its_folder_untouched(
    project: Path,
) -> None:
    done = rehearse(project, "--quick", "--json", "train.py")
    assert done.returncode == 0, done.stderr + done.stdout
    found = report(done)
    assert found["identical"] and found["reproducible"] and found["steps"] == 24
    points = [row["fault"]["point"] or row["fault"]["action"] for row in found["faults"]]
    assert sorted(points) == ["after_step", "in_backward", "in_optimizer", "in_section", "migrate"]
    for row in found["faults"]:
        assert row["verdict"]["word"] == "identical", row
        assert row["verdict"]["outcome"] == "RESOLVED", row
    assert {row["fault"]["rank"] for row in found["faults"]} == {0, 1}
    # Clocks and streams that nobody seeds differ by themselves, and are named for it.
    assert "variable elapsed" in found["not_compared"], found["not_compared"]


@SLOW
def test_state_that_nobody_carries_is_found_by_name(project: Path) -> None:
    done = rehearse(project, "--quick", "--json", "--steps", "12", "train.py", "--hidden")
    assert done.returncode == 1, done.stderr + done.stdout
    found = report(done)
    assert found["reproducible"] and not found["identical"]
    bad = [row["verdict"] for row in found["faults"] if row["verdict"]["word"] == "DIFFERS"]
    assert bad, found["faults"]
    assert "result" in bad[0]["detail"] or "tensor" in bad[0]["detail"], bad
    assert "ks.register" in bad[0]["cure"], bad


def test_a_script_that_is_not_reproducible_is_told_so(project: Path) -> None:
    done = rehearse(project, "--quick", "--steps", "6", "train.py", "--unseeded")
    assert done.returncode == 1, done.stderr
    assert "not reproducible by itself: tensor model/0/" in done.stdout
    assert "hint: seed" in done.stdout or "hint: look for" in done.stdout
    assert "kill" not in done.stderr, "nothing more is run"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node is 0"),
        (["--steps", "3", "train.py"], "--steps is 3"),
        (["nowhere.py"], "script nowhere.py does not exist"),
    ],
)
def test_bad_input_is_one_line_and_code_2(project: Path, words: list[str], error: str) -> None:
    done = rehearse(project, *words)
    assert done.returncode == 2 and error in done.stderr and done.stdout == ""


def test_without_mounts_a_small_folder_is_copied_and_a_script_without_steps_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = project.parent / "bin"
    programs.mkdir()
    for name in ("sh", "g++"):
        if where := shutil.which(name):
            (programs / name).symlink_to(where)
    monkeypatch.setenv("PATH", str(programs))  # unshare is not there
    done = rehearse(project, "train.py", "--never")
    assert "runs in copies of" in done.stderr, done.stderr
    assert "error: the script made no step that Keepstep protects\nhint: " in done.stderr
    assert done.returncode == 2 and done.stdout == ""
