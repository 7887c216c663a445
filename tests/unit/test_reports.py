"""`make reports`: which reports are older than the code under them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import reports


def commit(root: Path, message: str) -> str:
    for words in (["add", "-A"], ["commit", "-qm", message]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=b", *words], cwd=root, check=True
        )
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True)
    return done.stdout.decode().strip()


def test_a_report_is_older_once_the_code_under_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    code = tmp_path / "src" / "keepstep" / "worker" / "a.py"
    code.parent.mkdir(parents=True)
    code.write_text("1")
    made_on = commit(tmp_path, "code")
    results = tmp_path / "results"
    results.mkdir()
    (results / "zoo.json").write_text(json.dumps({"commit": made_on}))
    (results / "sim-soak.json").write_text(json.dumps({"source": f"the tree of commit {made_on}"}))
    (results / "pause.json").write_text(json.dumps({"date": "2026-11-15"}))
    commit(tmp_path, "reports")
    assert reports.look(results / "zoo.json", tmp_path).changed == []
    code.write_text("2")
    commit(tmp_path, "other code")
    assert reports.look(results / "zoo.json", tmp_path).changed == ["src/keepstep/worker/a.py"]
    assert reports.look(results / "sim-soak.json", tmp_path).changed == []
    assert reports.look(results / "pause.json", tmp_path).changed is None
    (results / "zoo.json").write_text(json.dumps({"commit": f"{made_on}-dirty"}))
    assert reports.look(results / "zoo.json", tmp_path).changed is None
    reports.main(results, tmp_path)
    assert "1 of 3 reports are true of this commit" in capsys.readouterr().out
