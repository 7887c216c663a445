"""`keepstep demo`, the whole of it, and what it says when something is not as it should be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.cli import demo
from keepstep.cli.main import invoke
from keepstep.model.views import IncidentView

COMMAND = [sys.executable, "-m", "keepstep", "demo"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path), "KEEPSTEP_HOME": str(tmp_path / "untouched")}


def left_behind(tmp_path: Path) -> list[str]:
    """The demo's own home must be gone and the user's untouched. (torch makes its own caches.)"""
    return [p.name for p in tmp_path.iterdir() if not p.name.startswith("torch")]


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = 90.0) -> Any:
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.02)
    return value


def test_demo_survives_kill_drain_and_taint_bit_identically(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--json"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)  # nothing else is on stdout
    assert report["bit_identical"] is True
    assert report["steps_lost"] == 0
    assert report["last_loss"] < report["first_loss"] / 2  # it did learn something
    seen = [(one["trigger"], one["cause"], one["outcome"]) for one in report["incidents"]]
    assert seen == [
        ("unplanned", "process-exit", "RESOLVED"),
        ("planned", "drain", "RESOLVED"),
        ("pre-emptive", "taint", "RESOLVED"),
    ]
    assert all(one["moves"] for one in report["incidents"])
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing_running(tmp_path: Path, number: int) -> None:
    # In a group of its own: a terminal's Ctrl-C reaches the demo, but not the session of its run.
    demo_process = subprocess.Popen(
        COMMAND,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    me = psutil.Process(demo_process.pid)

    def workers() -> list[psutil.Process]:
        family: list[psutil.Process] = me.children(recursive=True)
        named = [p for p in family if "keepstep.worker" in _words(p)]
        return family if len(named) >= demo.RANKS else []

    family = wait_for(workers, "the ranks' processes")
    os.kill(demo_process.pid, number)
    assert demo_process.wait(20) == 128 + number
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left_behind(tmp_path) == []
    demo_process.communicate()


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.Error:
        return []


# --------------------------------------------------------------------------- the verdict alone


def result(**changed: str) -> demo.RankResult:
    digests = {"parameters": "a", "optimizer": "b", "rng": "c", **changed}
    return demo.RankResult(
        digests=digests, steps=200, first_loss=3.4, last_loss=0.5, parameters=345_917
    )


def incident(outcome: Any = "RESOLVED", steps_lost: int = 0) -> IncidentView:
    return IncidentView(
        id="demo-1", job="demo", trigger="unplanned", cause="process-exit", victims=[1],
        moves=["rank 1: n1/0 -> n4/0"], generation=1, opened_at_ns=1, phases=[], timings_ms={},
        source="", decision="RETRY", pause_ms=700.0, steps_lost=steps_lost, steps_recomputed=1,
        outcome=outcome, reason="",
    )  # fmt: skip


def verdict(
    monkeypatch: pytest.MonkeyPatch,
    plain: list[demo.RankResult],
    hurt: list[demo.RankResult],
    incidents: list[IncidentView],
    *options: str,
) -> int:
    runs = iter([(plain, 1.0, []), (hurt, 2.0, incidents)])
    monkeypatch.setattr(demo, "train", lambda *_: next(runs))
    return invoke(["demo", *options])


def test_equal_runs_with_three_resolved_incidents_are_a_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict(monkeypatch, [result()], [result()], [incident()] * 3) == 0
    said = capsys.readouterr().out
    assert "bit-identical: yes" in said
    assert "n1/0 -> n4/0" in said


def test_one_differing_digest_is_named_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hurt = [result(), result(rng="other")]
    assert verdict(monkeypatch, [result(), result()], hurt, [incident()] * 3) == 1
    said = capsys.readouterr().out
    assert "bit-identical: NO" in said
    assert "rank 1: rng" in said


@pytest.mark.parametrize(
    "incidents",
    [[incident()] * 2, [incident(), incident(), incident("FELL_BACK", steps_lost=5)]],
    ids=["an incident is missing", "an incident fell back"],
)
def test_equal_runs_without_three_resolved_incidents_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    incidents: list[IncidentView],
) -> None:
    assert verdict(monkeypatch, [result()], [result()], incidents, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["bit_identical"] is True
    assert report["steps_lost"] == sum(one.steps_lost for one in incidents)
