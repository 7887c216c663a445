"""Every deliberate bug is found within a bounded number of worlds."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from keepstep.sim.many import run_task
from tests.sim import mutants
from tests.support import sampling

WORLDS_MAX = 400
SAMPLE = 60
SEEDS = Path(__file__).with_name("seeds.toml")


def killed(scenario: str, seed: int) -> str:
    try:
        return run_task((seed, scenario)).violation
    except Exception as error:  # a mutant may break the core in any way
        return repr(error)


def hunt(name: str) -> tuple[int, str]:
    """How many worlds it took, and what was found; (-1, "") if it survived."""
    next(m for m in mutants.every_mutant() if m.name == name).patch()
    hinted = [(hint, seed) for seed in range(80) for hint in mutants.HINTS.get(name, ())]
    tasks = itertools.chain(hinted, (("", seed) for seed in range(WORLDS_MAX)))
    for count, (scenario, seed) in enumerate(itertools.islice(tasks, WORLDS_MAX), 1):
        found = killed(scenario, seed)
        if found:
            return count, found
    return -1, ""


def relapse(name: str, scenario: str, seed: int) -> str:
    mutants.FIXED[name]()
    return killed(scenario, seed)


def pool() -> ProcessPoolExecutor:
    """A patched process is used once."""
    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1)


@pytest.mark.timeout(1800)
def test_every_mutant_is_killed(pytestconfig: pytest.Config) -> None:
    names = [m.name for m in mutants.every_mutant()]
    assert len(set(names)) == len(names)
    assert set(mutants.EQUIVALENT) <= set(names)
    assert set(mutants.UNKILLED) <= set(names) - set(mutants.EQUIVALENT)
    left_out = {*mutants.EQUIVALENT, *mutants.UNKILLED}
    wanted = [name for name in names if name not in left_out]
    if not pytestconfig.getoption("--sim-all"):
        chance = random.Random(sampling.seed_of(pytestconfig, "--sim-seed"))
        wanted = chance.sample(wanted, SAMPLE)
    with pool() as executor:
        found = dict(zip(wanted, executor.map(hunt, wanted)))
    survivors = [name for name, (count, _) in found.items() if count < 0]
    slowest = max(found, key=lambda name: found[name][0])
    print(
        f"{len(wanted)} mutants, {len(survivors)} of them alive, {len(mutants.UNKILLED)} known to "
        f"live, {len(mutants.EQUIVALENT)} change nothing; the last one killed "
        f"after {found[slowest][0]} worlds ({slowest})"
    )
    assert not survivors, survivors


def bugs() -> list[dict[str, str | int]]:
    return list(tomllib.loads(SEEDS.read_text())["bug"])


@pytest.mark.timeout(600)
def test_bugs_found_before_stay_fixed_and_would_be_found_again() -> None:
    kept = bugs()
    for bug in kept:
        assert not run_task((int(bug["seed"]), str(bug["scenario"]))).violation, bug
    again = [bug for bug in kept if "mutant" in bug]
    assert {str(bug["mutant"]) for bug in again} == set(mutants.FIXED)
    with pool() as executor:
        found = [
            executor.submit(relapse, str(b["mutant"]), str(b["scenario"]), int(b["seed"]))
            for b in again
        ]
        for bug, future in zip(again, found):
            assert future.result(), f"not found any more: {bug}"
