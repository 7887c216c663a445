"""Deliberate faults in the worker: every one is found by a script of the zoo, in a real job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.zoo import SOURCE, Mutant, Run, mutants

MUTANTS = mutants()


def test_there_are_as_many_mutants_as_promised() -> None:
    assert len(MUTANTS) >= 74
    assert len({(mutant.file, mutant.old) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_mutant_still_fits_the_code() -> None:
    counts = {one.name: (SOURCE / one.file).read_text().count(one.old) for one in MUTANTS}
    assert not {name: count for name, count in counts.items() if count != 1}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant(
    case: Mutant, death: dict[str, dict[str, Any]], run: Callable[[Mutant], Run]
) -> None:
    job, found = run(case)
    alive = found.kind == "identical"
    fired = found.kills > 0
    death[case.name] = {
        "file": case.file,
        "script": case.case.name,
        "points": list(case.case.kills),
        "expected": "dead",
        "outcome": "alive" if alive else "dead" if fired else "never hurt",
        "by": found.kind,
        "detail": found.detail[:400],
        "kills": found.kills,
    }
    assert fired, f"its kill never fired: {found.detail}"
    assert not alive, "nobody notices"
    shutil.rmtree(job.base, ignore_errors=True)
