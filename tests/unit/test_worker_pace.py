"""What a rank does alone in a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keepstep.worker.step import pace


class FakePage:
    def __init__(self) -> None:
        self.fields: dict[str, int] = {}

    def set(self, name: str, value: int) -> None:
        self.fields[name] = value


class Steps:
    """Steps of a clock that only moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        self.page = FakePage()
        self.own = pace.OwnTime(self.page)  # type: ignore[arg-type]
        monkeypatch.setattr(pace.time, "monotonic_ns", lambda: self.now)

    def step(self, alone: int, shared: int = 50) -> None:
        self.own.begins()
        self.now += alone
        self.own.meets()
        self.now += shared
        self.own.passed()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    made = Steps(monkeypatch)
    made.own.passed()
    yield made


def test_only_what_lies_before_the_meeting_counts(steps: Steps) -> None:
    for _ in range(7):
        steps.step(10)
    assert steps.page.fields == {}, "every eighth step is shown"
    steps.step(10, shared=5_000)
    assert steps.page.fields == {"own_ns": 10, "own_steps": 8}


def test_a_pause_of_the_script_does_not_change_the_median(steps: Steps) -> None:
    for alone in (10, 10, 9_000, 10, 10, 11, 10, 10):
        steps.step(alone)
    assert steps.page.fields["own_ns"] == 10


def test_the_first_step_and_one_after_a_hold_are_not_measured(steps: Steps) -> None:
    for _ in range(8):
        steps.own.disturbed()
        steps.step(10_000)
    assert steps.page.fields == {}
    for _ in range(8):
        steps.step(20)
    assert steps.page.fields == {"own_ns": 20, "own_steps": 8}


def test_a_change_shows_when_it_has_lasted_for_half_of_what_is_kept(steps: Steps) -> None:
    for _ in range(32):
        steps.step(10)
    for _ in range(16):
        steps.step(40)
    assert steps.page.fields["own_ns"] == 10
    for _ in range(8):
        steps.step(40)
    assert steps.page.fields["own_ns"] == 40
