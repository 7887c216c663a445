"""Scripts written the way people write them, each killed at several points: what comes out is what
plain torchrun gives, or a refusal by name, or a witness that says what differs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.zoo import Case, Run, cases

CASES = cases()


def test_the_zoo_is_as_large_as_promised() -> None:
    assert len({case.script for case in CASES}) >= 60
    assert sum(bool(case.options) for case in CASES) >= 15


def test_every_script_says_what_it_is_and_is_killed_often() -> None:
    for case in CASES:
        assert case.style and case.treacherous, case.name
        kills = [kill.split() for kill in case.kills]
        assert len({step for _, step, _ in kills}) >= 4, case.name
        assert {rank for rank, _, _ in kills} == {"0", "1"}, case.name
        assert "after_step" in {point for _, _, point in kills}, case.name


@pytest.mark.timeout(900)
@pytest.mark.cost(20)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_script(case: Case, outcome: dict[str, dict[str, Any]], run: Callable[[Case], Run]) -> None:
    job, found = run(case)
    outcome[case.name] = {
        "style": case.style,
        "treacherous": case.treacherous,
        "expected": case.expected,
        "why": case.why,
        "outcome": found.kind,
        "detail": found.detail,
        "kills": found.kills,
        "incidents": found.incidents,
        "seconds": found.seconds,
    }
    assert found.kind == case.expected, f"{found.kind}: {found.detail}"
    job.nothing_left()
    shutil.rmtree(job.base, ignore_errors=True)
