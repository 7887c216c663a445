"""One world from its plan to its result."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.sim.plans.world_plan import Plan
from keepstep.sim.play.reasons import heard
from keepstep.sim.play.several import Several
from keepstep.sim.play.single import Hopeless, Run
from keepstep.sim.times import SECOND


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    scenario: str
    scenario_given: str  # as it was asked for; empty: drawn from the seed
    events: int
    inputs: int
    virtual_s: float
    digest: str
    fired: tuple[str, ...]
    in_phase: bool  # every fault struck in the phase it was meant for
    outcome: str
    reasons: frozenset[str]
    violation: str = ""


def run_plan(
    plan: Plan,
    scenario: str = "",
    tracing: Callable[[str], None] | None = None,
    given: str = "",
) -> Result:
    run = Several(plan, tracing) if plan.beside else Run(plan, tracing)
    violation = ""
    try:
        run.play()
    except Hopeless:
        run.world.trace("all state is gone")
    except AssertionError as error:  # a checker's, or the core's own
        violation = f"{type(error).__name__}: {error}"
        run.world.trace(violation)
    world = run.world
    ended = world.book.job_ended
    return Result(
        seed=plan.seed,
        scenario=scenario,
        scenario_given=given,
        events=world.clock.events,
        inputs=world.orchestrator.inputs,
        virtual_s=world.now / SECOND,
        digest=world.history.digest(),
        fired=tuple(fault for one in run.worlds.values() for fault in one.fired_faults),
        in_phase=run.missed == 0,
        outcome=ended.view.state if ended is not None else "running",
        reasons=heard(world.history.said),
        violation=violation,
    )


@functools.cache
def commit() -> str:
    """Which code this is, for the line that says how to replay."""
    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return out.stdout.strip() or "unknown"
