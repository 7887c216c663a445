"""The stall detector, by tables: who stands still, who may, and what is said about it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.core.agent.stall import StallDetector
from keepstep.model.agent_messages import Stalled, Unstalled
from keepstep.model.page import Sample

S = 1_000_000_000
TIMEOUT = 10 * S
STEP = 2 * S  # between two samples

BASE = Sample(
    heartbeat_ns=0,
    progress_ns=0,
    marks=100,
    version=7,
    tick=9,
    generation=1,
    where="compute",
    stepping=True,
    commit_ns=0,
    step_ns=0,
    hold=False,
)


class Watched:
    """One worker under observation; time moves by STEP with every look."""

    def __init__(self) -> None:
        self.detector = StallDetector(TIMEOUT)
        self.now = 100 * S
        self.cpu = 0

    def look(
        self,
        *,
        step: int = STEP,
        cpu: int = 0,
        stopped: bool = False,
        beating: bool = True,
        **f: Any,
    ) -> Stalled | Unstalled | None:
        self.now += step
        self.cpu += cpu
        beat = self.now if beating else 100 * S
        sample = msgspec.structs.replace(BASE, heartbeat_ns=beat, **f)
        return self.detector.observe(self.now, "w0", 3, sample, cpu_ns=self.cpu, stopped=stopped)

    def stall(self, **fields: Any) -> Stalled:
        said = [self.look(**fields) for _ in range(6)]
        assert said[:5] == [None] * 5
        assert isinstance(said[5], Stalled)
        return said[5]


def test_stalled_is_said_once_after_the_timeout() -> None:
    watched = Watched()
    stalled = watched.stall()
    assert (stalled.worker, stalled.rank, stalled.version, stalled.tick) == ("w0", 3, 7, 9)
    assert (stalled.marks, stalled.where) == (100, "compute")
    assert not stalled.stopped and not stalled.cpu_busy and stalled.heartbeat_age_ns == 0
    assert [watched.look() for _ in range(10)] == [None] * 10


def test_progress_in_time_is_no_stall() -> None:
    watched = Watched()
    assert [watched.look(marks=n // 4) for n in range(100)] == [None] * 100


def test_progress_takes_the_report_back_and_starts_anew() -> None:
    watched = Watched()
    watched.stall()
    assert watched.look(marks=101) == Unstalled(worker="w0")
    said = [watched.look(marks=101) for _ in range(5)]
    assert said[:4] == [None] * 4 and isinstance(said[4], Stalled)


@pytest.mark.parametrize(
    "fields",
    [{"hold": True}, {"stepping": False}, {"where": "parked"}, {"where": "done"}],
    ids=str,
)
def test_some_may_stand_still(fields: dict[str, Any]) -> None:
    watched = Watched()
    assert [watched.look(**fields) for _ in range(50)] == [None] * 50
    # The time spent so does not count afterwards.
    watched.stall()
    assert watched.look(**fields) == Unstalled(worker="w0")
    assert watched.look(**fields) is None


def test_who_holds_by_itself_must_ask_again_and_again() -> None:
    watched = Watched()
    assert [watched.look(hold=True, asked_ns=n // 4) for n in range(8, 100)] == [None] * 92
    watched = Watched()
    watched.stall(hold=True, asked_ns=7)
    assert watched.look(hold=True, asked_ns=8) == Unstalled(worker="w0")
    assert [watched.look(hold=True) for _ in range(50)] == [None] * 50  # it was told to, at last


def test_a_page_that_is_not_there_yet_is_no_stall() -> None:
    detector = StallDetector(TIMEOUT)
    said = [detector.observe(t * S, "w", -1, None, cpu_ns=0, stopped=False) for t in range(99)]
    assert said == [None] * 99


@pytest.mark.parametrize(
    ("looks", "evidence"),
    [
        ({"stopped": True}, (True, False)),
        ({"cpu": STEP}, (False, True)),
        ({"cpu": STEP // 3}, (False, True)),
        ({"cpu": STEP // 20}, (False, False)),
    ],
    ids=str,
)
def test_evidence(looks: dict[str, Any], evidence: tuple[bool, bool]) -> None:
    stalled = Watched().stall(**looks)
    assert (stalled.stopped, stalled.cpu_busy) == evidence


def test_cpu_used_before_the_stall_does_not_count() -> None:
    watched = Watched()
    for marks in range(50):
        watched.look(marks=marks, cpu=STEP)
    said = [watched.look(marks=49) for _ in range(5)]
    assert isinstance(said[4], Stalled) and not said[4].cpu_busy


def test_it_is_said_again_when_the_evidence_changes() -> None:
    watched = Watched()
    watched.stall()
    again = watched.look(stopped=True)
    assert isinstance(again, Stalled) and again.stopped
    assert watched.look(stopped=True) is None


def test_a_heartbeat_that_goes_stale_later_is_said() -> None:
    watched = Watched()
    watched.look(beating=False)
    said = [watched.look(beating=False, marks=101) for _ in range(12)]
    stalls = [s for s in said if isinstance(s, Stalled)]
    assert stalls[-1].heartbeat_age_ns > TIMEOUT
    assert len(stalls) <= 2


def test_an_observer_that_was_away_saw_no_stall() -> None:
    watched = Watched()
    watched.look()
    assert watched.look(step=100 * S) is None
    said = [watched.look() for _ in range(5)]
    assert said[:4] == [None] * 4 and isinstance(said[4], Stalled)


def test_reports_and_all_stalled_follow_the_workers() -> None:
    watched = Watched()
    detector = watched.detector
    assert not detector.all_stalled([])
    assert not detector.all_stalled(["w0"])
    stalled = watched.stall()
    assert detector.reports() == [stalled]
    assert detector.all_stalled(["w0"])
    assert not detector.all_stalled(["w0", "w1"])
    detector.forget("w0")
    assert detector.reports() == [] and not detector.all_stalled(["w0"])
