"""How real jobs end, or go on, when they cannot just be carried on: numbers that differ, a death
that nothing protects from, and a signal to stop."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands as jobs
from tests.support.commands import SCRIPTS, Job

Start = Callable[..., Job]
DEADLINE_S = 240.0  # of a job that starts twice, on a machine with too much to do


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(jobs, "DEADLINE_S", DEADLINE_S)
    started: list[Job] = []

    def begin(*words: str) -> Job:
        job = Job(tmp_path / f"job-{len(started)}", *words)
        started.append(job)
        return job

    yield begin
    for job in started:
        job.kill()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def diverging(out: Path, *saved: Path) -> list[str]:
    return [str(SCRIPTS / "diverging.py"), str(out), *map(str, saved)]


def the_one(job: Job) -> dict[str, Any]:
    (incident,) = job.cli_json("incidents")
    return dict(incident)


def spoken_at(out: Path) -> int:
    """Both ranks found it, at the same step: else nothing was tested."""
    steps = {(out / f"spoken-{rank}").read_text() for rank in (0, 1)}
    assert len(steps) == 1
    return int(steps.pop())


def results(out: Path) -> list[Any]:
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_hold_ends_with_its_own_exit_code_when_nobody_looks(start: Start, out: Path) -> None:
    job = start("--nproc-per-node", "2", "--stall-timeout", "30", *diverging(out))
    job.until(lambda: "holds, because numbers differ" in job.err, "a word on stderr")
    (status,) = job.cli_json("status")
    assert status["state"] == "held" and "rank 1 has ff00" in status["divergence"]
    assert {rank["state"] for rank in status["ranks"]} == {"holding"}
    job.end(5)
    incident = the_one(job)
    assert incident["outcome"] == "DIVERGED" and incident["cause"] == "divergence"
    step = spoken_at(out)
    assert f"all ranks agreed at step {step}" in incident["reason"]
    assert "weight: rank 0 has ab12, rank 1 has ff00" in incident["reason"]
    assert "bias" not in incident["reason"]
    assert not (out / "rank-0.json").exists()
    (status,) = job.cli_json("status")
    assert (status["state"], status["exit_code"], status["committed_step"]) == ("diverged", 5, step)


def test_an_operator_lets_a_job_go_on(start: Start, out: Path) -> None:
    job = start("--nproc-per-node", "2", *diverging(out))
    job.until(lambda: "holds, because numbers differ" in job.err, "a word on stderr")
    job.cli("proceed")
    job.end(0)
    incident = the_one(job)
    assert incident["outcome"] == "DIVERGED" and incident["steps_lost"] == 0
    assert "went on all the same (an operator)" in incident["reason"]
    assert spoken_at(out) >= 6 and [one["steps"] for one in results(out)] == [40, 40]
    verified = job.cli("ledger", "verify")
    assert "ok" in verified


def test_continue_goes_on_and_says_so(start: Start, out: Path) -> None:
    job = start("--nproc-per-node", "2", "--on-divergence", "continue", *diverging(out))
    job.end(0)
    incident = the_one(job)
    assert incident["outcome"] == "DIVERGED", incident
    assert "an exception to the guarantee" in incident["reason"]
    assert spoken_at(out) >= 6 and [one["steps"] for one in results(out)] == [40, 40]


def test_fall_back_goes_to_the_checkpoint_before_it(
    start: Start, out: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    job = start(
        *("--nproc-per-node", "2", "--spares", "2", "--on-divergence", "fall-back"),
        *("--checkpoint-dir", str(saved), "--checkpoint-interval", "1"),
        *diverging(out, saved),
    )
    job.end(0)
    incident = the_one(job)
    assert incident["outcome"] == "DIVERGED", incident
    assert "back to" in incident["reason"]
    assert incident["steps_lost"] >= 0
    step = spoken_at(out)
    assert f"all ranks agreed at step {step}" in incident["reason"]
    first, second = results(out)
    assert first == second and first["steps"] == 40


def test_fall_back_needs_checkpoints(start: Start, out: Path) -> None:
    job = start("--nproc-per-node", "2", "--on-divergence", "fall-back", *diverging(out))
    assert job.process.wait(60) == 2
    assert "hint: --checkpoint-dir DIR" in job.err


# ------------------------------------------------------------------ deaths that nothing covers


def rank_pid(job: Job, rank: int) -> int:
    (status,) = job.cli_json("status")
    return int(status["ranks"][rank]["pid"])


def test_a_script_that_never_attaches_is_not_called_resolved(start: Start, out: Path) -> None:
    job = start(
        *("--nproc-per-node", "2", "--spares", "1", str(SCRIPTS / "endings.py")),
        *(str(out), "bare"),
    )
    job.until(lambda: (out / "starts-0").exists() and (out / "starts-1").exists(), "both ranks")
    os.kill(rank_pid(job, 1), signal.SIGKILL)
    started = lambda: (out / "starts-1").read_text().count("start") == 2  # noqa: E731
    job.until(started, "a second start")
    (out / "go").touch()
    job.end(0)
    incident = the_one(job)
    assert incident["outcome"] == "FELL_BACK", incident
    assert "never called keepstep.attach, so its progress is unknown" in incident["reason"]
    assert "FELL_BACK" in job.err and "RESOLVED" not in job.err


def test_the_steps_that_one_rank_alone_loses_are_counted(start: Start, out: Path) -> None:
    job = start("--nproc-per-node", "1", str(SCRIPTS / "endings.py"), str(out), "attached")
    step = lambda: int((out / "rank-0").read_text() or 0) if (out / "rank-0").exists() else 0  # noqa: E731
    pid = job.until(lambda: step() >= 1 and rank_pid(job, 0), "a first step")
    os.kill(pid, signal.SIGKILL)
    job.end(4)
    last = step()
    incident = the_one(job)
    assert incident["outcome"] == "FELL_BACK"
    # The note is written after the commit: the page may be one step ahead of it.
    assert last <= incident["steps_lost"] <= last + 1, (last, incident)
    assert f"about {incident['steps_lost']} steps" in incident["reason"]


# ------------------------------------------------------------------ a signal


def stopping(start: Start, out: Path, saved: Path, *more: str) -> Job:
    job = start(
        *("--nproc-per-node", "2", "--checkpoint-dir", str(saved), *more),
        *("--checkpoint-interval", "1000", str(SCRIPTS / "endings.py"), str(out), "attached"),
    )
    job.until(lambda: (out / "rank-0").exists() and (out / "rank-1").exists(), "steps")
    return job


def test_sigterm_writes_a_checkpoint_of_the_last_step(
    start: Start, out: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    job = stopping(start, out, saved)
    job.process.send_signal(signal.SIGTERM)
    job.end(128 + signal.SIGTERM)
    (path,) = saved.glob("*/checkpoint-*")
    step = json.loads((path / "manifest.json").read_text())["step"]
    assert {int((out / f"rank-{rank}").read_text()) for rank in (0, 1)} <= {step, step - 1}
    assert f"the state of step {step} is in {path}" in job.err
    assert "an older checkpoint" not in job.err
    (out / "enough").write_text(str(step + 3))
    again = start(
        *("--nproc-per-node", "2", "--resume", str(saved), str(SCRIPTS / "endings.py")),
        *(str(out), "attached"),
    )
    again.end(0)
    assert {(out / f"rank-{rank}").read_text() for rank in (0, 1)} == {str(step + 3)}


def test_keepstep_stop_does_the_same(start: Start, out: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    job = stopping(start, out, saved)
    job.cli("stop")
    job.end(3)
    (manifest,) = saved.glob("*/checkpoint-*/manifest.json")
    assert json.loads(manifest.read_text())["step"] >= 1
    (status,) = job.cli_json("status")
    assert status["state"] == "cancelled" and status["checkpoint"] == str(manifest.parent)
