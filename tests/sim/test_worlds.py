"""The simulation: ten thousand worlds, every cell of the fault table among them, or a sample."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from keepstep.sim.many import Summary, Task, failure_lines, run_many
from keepstep.sim.plans.scenario import draw_plan, find_plan
from keepstep.sim.plans.stories import STORIES
from keepstep.sim.plans.stories_machines import MACHINES
from keepstep.sim.plans.table import cells, impossible, plan_cell
from keepstep.sim.play.reasons import sentences
from tests.support import sampling

WORLDS = 10_000
SEEDS_PER_CELL = 4
SEEDS_PER_STORY = 30
# In a sample, which has every cell and every story.
SAMPLE = 2_000
SAMPLE_PER_STORY = 3

UNHEARD: dict[str, str] = tomllib.loads(Path(__file__).with_name("unheard.toml").read_text())


def every_task() -> list[Task]:
    named = [(seed, "/".join(cell)) for seed in range(SEEDS_PER_CELL) for cell in cells()]
    named += [(s, story) for s in range(SEEDS_PER_STORY) for story in (*STORIES, *MACHINES)]
    return named + [(seed, "") for seed in range(WORLDS - len(named))]


def sampled(drawn_by: str) -> list[Task]:
    chance = random.Random(drawn_by)
    of_name: dict[str, list[Task]] = {}
    for task in every_task():
        of_name.setdefault(task[1], []).append(task)
    drawn = of_name.pop("")
    named = {name: SAMPLE_PER_STORY if name in (*STORIES, *MACHINES) else 1 for name in of_name}
    found = itertools.chain.from_iterable(chance.sample(of_name[n], k) for n, k in named.items())
    kept = list(found)
    return kept + chance.sample(drawn, SAMPLE - len(kept))


@pytest.fixture(scope="module")
def tasks(pytestconfig: pytest.Config) -> list[Task]:
    if pytestconfig.getoption("--sim-all"):
        return every_task()
    return sampled(sampling.seed_of(pytestconfig, "--sim-seed"))


@pytest.fixture(scope="module")
def summary(tasks: list[Task]) -> Summary:
    found = run_many(tasks, jobs=2)
    rate = found.worlds / found.seconds
    print(
        f"\n{found.worlds} worlds in {found.seconds:.0f} s ({rate:.1f} a second), median "
        f"{found.events_median} events, {dict(found.outcomes)}"
    )
    return found


@pytest.mark.timeout(1800)
def test_no_world_breaks_a_rule(summary: Summary, tasks: list[Task]) -> None:
    assert summary.worlds == len(tasks) >= SAMPLE
    assert not summary.failures, "\n".join(failure_lines(one) for one in summary.failures[:10])


def test_worlds_are_large_enough_and_their_faults_fire(summary: Summary) -> None:
    assert summary.events_median >= 500
    assert summary.unfired == 0
    assert min(draw_plan(seed)[1].ranks for seed in range(1000)) >= 8


@pytest.mark.all_worlds
def test_every_cell_of_the_table_strikes_in_its_phase(summary: Summary) -> None:
    never = [cell for cell in map("/".join, cells()) if not summary.struck[cell]]
    assert not never, never


@pytest.mark.all_worlds
def test_every_reason_of_the_core_is_heard_or_explained(summary: Summary) -> None:
    unheard = set(sentences()) - summary.reasons
    assert unheard <= set(UNHEARD), sorted(unheard - set(UNHEARD))


def test_what_is_explained_is_said() -> None:
    assert set(UNHEARD) <= set(sentences())


def test_cells_that_cannot_exist_say_why() -> None:
    for phase, actor in (("HOLD", "victim"), ("RETIRE", "victim")):
        assert impossible((phase, "unplanned", actor, "crash"))
    assert len(list(cells())) == 628
    assert plan_cell(next(cells()), 0).faults


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_is_one_history_whatever_the_hash_seed(seed: int) -> None:
    command = [sys.executable, "-m", "keepstep", "sim", "--seed", str(seed), "--json"]
    digests = set()
    for hash_seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        digests.add(json.loads(out.stdout)["digest"])
    assert len(digests) == 1


def test_a_trace_changes_nothing_and_has_a_column_for_each_rank() -> None:
    from keepstep.sim.run_world import run_plan

    name, plan = find_plan(5, "HOLD/planned/source/crash")
    lines: list[str] = []
    traced = run_plan(plan, name, lines.append)
    assert traced.digest == run_plan(plan, name).digest
    assert all(len(line.split()) > plan.ranks for line in lines)
