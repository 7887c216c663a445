"""Many worlds: a pool of processes, what they add up to, and what to do about a failure."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED as FIRST
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice

from keepstep.sim.plans.scenario import find_plan
from keepstep.sim.run_world import Result, commit, run_plan

Task = tuple[int, str]  # seed, scenario ("": whatever the seed gives)
BATCH = 25


@dataclass(slots=True)
class Summary:
    worlds: int = 0
    seconds: float = 0.0
    events: list[int] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    scenarios: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)  # scenarios whose faults hit in phase
    unfired: int = 0
    reasons: set[str] = field(default_factory=set)
    failures: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.worlds += 1
        self.events.append(result.events)
        self.outcomes[result.outcome] += 1
        self.scenarios[result.scenario] += 1
        self.struck[result.scenario] += result.in_phase
        self.unfired += not result.fired
        self.reasons |= result.reasons
        if result.violation:
            self.failures.append(result)

    @property
    def events_median(self) -> int:
        return int(statistics.median(self.events)) if self.events else 0


def replay_command(result: Result) -> str:
    scenario = "" if result.scenario_given == "" else f" --scenario {result.scenario_given}"
    return f"keepstep sim --seed {result.seed}{scenario} --trace"


def failure_lines(result: Result) -> str:
    return (
        f"seed {result.seed} ({result.scenario}) at commit {commit()}: {result.violation}\n"
        f"  replay: {replay_command(result)}"
    )


def run_task(task: Task) -> Result:
    seed, wanted = task
    name, plan = find_plan(seed, wanted)
    try:
        return run_plan(plan, name, given=wanted)
    except Exception as error:  # a mistake of the simulator's own
        error.add_note(f"in the world of seed {seed} ({name})")
        raise


def _run_batch(tasks: list[Task]) -> list[Result]:
    """Cycles are collected once for all: worlds are small, and looking at everything that lives
    in one again and again takes a tenth of its time."""
    gc.disable()
    try:
        return [run_task(task) for task in tasks]
    finally:
        gc.enable()
        gc.collect()


def run_many(
    tasks: Iterable[Task],
    jobs: int,
    seconds: float | None = None,
    on_result: Callable[[Result], None] = lambda _: None,
) -> Summary:
    """All tasks, or as many as can be begun in `seconds`."""
    summary = Summary()
    began = time.monotonic()
    for result in _results(tasks, jobs, None if seconds is None else began + seconds):
        summary.add(result)
        on_result(result)
    summary.seconds = time.monotonic() - began
    return summary


def _results(tasks: Iterable[Task], jobs: int, until: float | None) -> Iterator[Result]:
    queue = iter(tasks)

    def more() -> list[Task]:
        over = until is not None and time.monotonic() >= until
        return [] if over else list(islice(queue, BATCH))

    if jobs == 1:
        while batch := more():
            yield from _run_batch(batch)
        return
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[list[Result]]] = set()
        while True:
            while len(running) < 2 * jobs and (batch := more()):
                running.add(pool.submit(_run_batch, batch))
            if not running:
                return
            done, running = wait(running, return_when=FIRST)
            for future in done:
                yield from future.result()
