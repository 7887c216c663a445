"""What is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import command

SCRIPT = Path(__file__).parent / "train.py"
pytestmark = pytest.mark.always


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--understudies", "1", "--spares", "1"], "no understudies"),
        (["--checkpoint-dir", "checkpoints"], "no checkpoints"),
        (["--inject", "kill:rank=0,step=3"], "no steps to inject"),
    ],
)
def test_options_of_the_other_mode(words: list[str], said: str, tmp_path: Path) -> None:
    done = command(
        ["-m", "keepstep", "run", "--mode", "transparent", *words, str(SCRIPT), "--out", "x"],
        tmp_path / "home",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and said in done.stderr and "hint:" in done.stderr, done.stderr


def test_a_machine_without_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_CRIU", "/bin/true")
    run = ["-m", "keepstep", "run", "--mode", "transparent", str(SCRIPT), "--out", "x"]
    done = command(run, tmp_path)
    assert done.returncode == 2 and "there is no CRIU >= 4.2" in done.stderr, done.stderr
    looked = command(["-m", "keepstep", "doctor", "--transparent"], tmp_path)
    assert looked.returncode == 1 and "missing" in looked.stdout


def test_a_doctor_without_a_patient(tmp_path: Path) -> None:
    assert command(["-m", "keepstep", "doctor"], tmp_path).returncode == 2
    looked = command(["-m", "keepstep", "doctor", "--transparent", "n1"], tmp_path)
    assert looked.returncode == 2 and "hint:" in looked.stderr, looked.stderr
