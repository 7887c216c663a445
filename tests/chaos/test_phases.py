"""Cells of the simulator's table of faults, with real processes.

A cell is phase/kind of migration/actor/fault, as in `keepstep sim --scenario`, and means the same
here: while a migration of that kind is in that phase, the process of that actor is killed (crash),
stopped for good or for longer than the limits (hang), or stopped for less (pause). The orchestrator
strikes by itself (striking_orchestrator.py), so it is that phase and no other. Cells of one row
share a job, one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from keepstep.model.views import JobView
from keepstep.sim.plans.scenario import find_plan
from keepstep.sim.plans.table import ACTORS, KINDS, MIGRATIONS, PHASES
from tests.support.brain import Brain
from tests.support.job import Job, wait_for
from tests.support.scripts import CHAOS, ROOT
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]

ARGS = ["--epochs", "3", "--steps-per-epoch", "160", "--evaluate-every", "10", "--slow", "yes"]
STALL_S = 8
PAUSE_S = 3.0
HANG_S = 12.0  # of agents and orchestrators, which nobody fences: longer than any answer may take
PAGE = ROOT / "docs" / "internals" / "simulation.md"
RANK = 1  # that is moved, or dies first

ONE_NODE = ("--nproc-per-node", "3", "--spares", "2")
NO_SPARE = ("--nproc-per-node", "3")
FIVE_NODES = ("--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "2")

# A cell of an agent says behind a blank whose agent. Missing on purpose: a spare that hangs before
# COMMIT has a minute to join, and a node that is cut off needs a network of its own.
TABLE: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (
        ONE_NODE,
        (
            "RESERVE/planned/victim/crash",
            "HOLD/planned/source/crash",
            "COPY/planned/spare/crash",
        ),
    ),
    (
        ONE_NODE,
        (
            "COMMIT/planned/bystander/crash",
            "REWIRE/planned/victim/crash",
            "RESUME/planned/spare/crash",
            "RETIRE/planned/source/crash",
        ),
    ),
    (
        ONE_NODE,
        (
            "RESERVE/pre-emptive/bystander/crash",
            "HOLD/pre-emptive/victim/crash",
            "COMMIT/pre-emptive/spare/crash",
        ),
    ),
    (
        ONE_NODE,
        (
            "HOLD/unplanned/source/crash",
            "COPY/unplanned/spare/crash",
            "COMMIT/unplanned/spare/crash",
        ),
    ),
    (
        ONE_NODE,
        (
            "REWIRE/unplanned/bystander/crash",
            "RESUME/unplanned/source/crash",
            "RETIRE/unplanned/spare/crash",
        ),
    ),
    (
        NO_SPARE,
        (
            "RESERVE/unplanned/spare/crash",
            "RESERVE/unplanned/bystander/crash",
            "RESERVE/unplanned/source/pause",
        ),
    ),
    (
        ONE_NODE,
        (
            "HOLD/planned/bystander/hang",
            "COPY/planned/source/hang",
            "REWIRE/planned/spare/hang",
        ),
    ),
    (
        ONE_NODE,
        (
            "RESERVE/planned/victim/hang",
            "COPY/pre-emptive/victim/hang",
            "RETIRE/pre-emptive/source/hang",
        ),
    ),
    (
        ONE_NODE,
        (
            "HOLD/unplanned/source/hang",
            "COMMIT/unplanned/bystander/hang",
            "RESUME/unplanned/spare/hang",
        ),
    ),
    (
        ONE_NODE,
        (
            "RESERVE/planned/spare/pause",
            "HOLD/planned/bystander/pause",
            "COPY/planned/victim/pause",
            "RESUME/planned/source/pause",
        ),
    ),
    (
        ONE_NODE,
        (
            "HOLD/unplanned/bystander/pause",
            "COPY/unplanned/source/pause",
            "COMMIT/pre-emptive/bystander/pause",
            "REWIRE/unplanned/spare/pause",
        ),
    ),
    (
        ONE_NODE,
        (
            "RESERVE/planned/orchestrator/crash",
            "COPY/planned/orchestrator/crash",
            "COMMIT/pre-emptive/orchestrator/crash",
            "REWIRE/planned/orchestrator/crash",
        ),
    ),
    (
        ONE_NODE,
        (
            "HOLD/unplanned/orchestrator/crash",
            "COPY/unplanned/orchestrator/pause",
            "RESUME/unplanned/orchestrator/crash",
        ),
    ),
    (
        ONE_NODE,
        (
            "HOLD/unplanned/orchestrator/hang",
            "HOLD/planned/orchestrator/hang",
            "RESUME/planned/orchestrator/pause",
        ),
    ),
    (
        FIVE_NODES,
        (
            "HOLD/planned/agent/pause victim",
            "COPY/unplanned/agent/pause spare",
            "HOLD/unplanned/agent/crash source",
        ),
    ),
    (
        FIVE_NODES,
        (
            "REWIRE/planned/agent/hang bystander",
            "RESERVE/planned/agent/crash spare",
            "COPY/unplanned/agent/crash bystander",
        ),
    ),
    (
        FIVE_NODES,
        (
            "HOLD/pre-emptive/agent/hang source",
            "COPY/planned/agent/crash victim",
            "COMMIT/unplanned/agent/crash spare",
        ),
    ),
    (
        ONE_NODE,
        (
            "COPY/unplanned/source/hang",
            "REWIRE/unplanned/source/hang",
            "RESUME/planned/bystander/hang",
        ),
    ),
    (
        ONE_NODE,
        (
            "RETIRE/planned/orchestrator/crash",
            "REWIRE/unplanned/orchestrator/hang",
            "RESUME/pre-emptive/orchestrator/crash",
        ),
    ),
    (
        FIVE_NODES,
        (
            "RESERVE/planned/agent/pause bystander",
            "RESUME/planned/agent/crash spare",
            "REWIRE/unplanned/agent/crash source",
        ),
    ),
]


class Struck(msgspec.Struct):
    """What striking_orchestrator.py tells of its blow."""

    phase: str
    pid: int


class Striker(Brain):
    """An orchestrator that can be told whom to strike when."""

    program = CHAOS / "striking_orchestrator.py"

    def arm(self, cell: str) -> None:
        name, _, agent_of = cell.partition(" ")
        phase, kind, actor, fault = name.split("/")
        self.report.unlink(missing_ok=True)
        plan = {"phase": phase, "kind": kind, "actor": actor, "fault": fault, "agent_of": agent_of}
        self.give_plan(json.dumps(plan))

    @property
    def report(self) -> Path:
        return self.plan.with_name("struck")


@pytest.fixture
def striker(tmp_path: Path) -> Iterator[Striker]:
    made = Striker(tmp_path)
    yield made
    made.end()


def begin_migration(job: Job, kind: str) -> str:
    """Returns what is tainted for it. It may be the orchestrator's last request."""
    slot = job.rank(RANK).slot
    try:
        if kind == "planned":
            job.post("migrate", {"ranks": [RANK], "reason": "test"}).raise_for_status()
        elif kind == "pre-emptive":
            job.post("taint", {"target": slot, "reason": "test"}).raise_for_status()
        else:
            job.kill_rank(RANK)
    except httpx.TransportError:
        job.disconnect()
    return slot if kind == "pre-emptive" else ""


def play(job: Job, striker: Striker, cell: str) -> None:
    phase, kind, actor, fault = cell.partition(" ")[0].split("/")
    before = len(job.live_incidents() or [])
    striker.arm(cell)
    tainted = begin_migration(job, kind)
    wait_for(striker.report.exists, f"the fault of {cell}")
    struck = msgspec.json.decode(striker.report.read_bytes(), type=Struck)
    assert struck.phase == phase
    if actor == "orchestrator" and fault == "crash":
        striker.process.wait(30)
        striker.start()
    elif fault == "pause" or (fault == "hang" and actor in ("agent", "orchestrator")):
        time.sleep(PAUSE_S if fault == "pause" else HANG_S)  # the length of the fault
        os.kill(struck.pid, signal.SIGCONT)
    else:
        job.until(lambda status: replaced(status, struck.pid), f"a successor of {struck}")
    settle(job, before)
    if fault == "pause":  # nobody has lost the rank for it
        assert len(job.live_incidents() or []) == before + 1, job.live_incidents()
    if tainted:
        job.post("untaint", {"target": tainted}).raise_for_status()


def replaced(status: JobView, pid: int) -> bool:
    """It is gone, and nobody counts on it any more."""
    nodes = [node for node in status.nodes if node.state != "dead"]
    ranks, spares = {one.pid for one in status.ranks}, {one.pid for one in status.spares}
    there = ranks | spares | {node.pid for node in nodes}
    return pid not in there and not runs(pid)


def settle(job: Job, before: int) -> None:
    def closed() -> bool:
        seen = job.live_incidents() or []
        return len(seen) > before and all(one.outcome != "OPEN" for one in seen)

    wait_for(closed, "the end of the migration")
    job.until(lambda status: status.state == "running", "training")
    job.until_step(job.step() + 2)
    wait_for(closed, "the end of what followed")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def row(options: tuple[str, ...], cells: tuple[str, ...]) -> Any:
    costs = {"crash": 7, "pause": 9, "hang": 18}
    cost = 25 + sum(costs[cell.partition(" ")[0].split("/")[3]] for cell in cells)
    return pytest.param(options, cells, marks=pytest.mark.cost(cost), id=", ".join(cells))


@pytest.mark.parametrize(("options", "cells"), [row(*given) for given in TABLE])
def test_fault_in_a_phase(
    options: tuple[str, ...],
    cells: tuple[str, ...],
    start: Start,
    reference: Reference,
    verdict: Verdict,
    striker: Striker,
) -> None:
    job = start(
        *options, "--stall-timeout", str(STALL_S), "--orchestrator", "brain",
        script_args=ARGS, home=striker.home,
    )  # fmt: skip
    job.until_step(3)
    for cell in cells:
        began = time.monotonic()
        job.spare_parked(spares_possible(job, options))
        play(job, striker, cell)
        print(f"{cell}: {time.monotonic() - began:.1f} s")
    job.finish()
    seen = verdict.identical(job, reference(3, *ARGS), faults=2 * len(cells))
    assert all(incident.outcome == "RESOLVED" for incident in seen), seen


def spares_possible(job: Job, options: tuple[str, ...]) -> int:
    """Nodes that died have taken their slots with them."""
    slots = sum(n.slots for n in job.status().nodes if n.state != "dead")
    return min(0 if options is NO_SPARE else 2, slots - job.world)


@pytest.mark.always
@pytest.mark.cost(0)
def test_every_cell_is_one_of_the_simulators_and_on_its_page() -> None:
    cells = [cell.partition(" ")[0] for _, row in TABLE for cell in row]
    assert len(cells) == len(set(cells))
    for cell in cells:
        find_plan(0, cell)  # refuses what is no cell
    assert page(cells) in PAGE.read_text(), f"{PAGE.name} should say:\n{page(cells)}"


def page(cells: list[str]) -> str:
    def listed(phase: str, kind: str) -> str:
        mine = [c.split("/")[2:] for c in cells if c.startswith(f"{phase}/{kind}/")]
        actors = [(a, [f for f in KINDS if [a, f] in mine]) for a in ACTORS]
        return "; ".join(f"{actor} {', '.join(faults)}" for actor, faults in actors if faults)

    lines = [["phase", *MIGRATIONS], ["---"] * (1 + len(MIGRATIONS))]
    lines += [[phase, *(listed(phase, kind) for kind in MIGRATIONS)] for phase in PHASES]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
