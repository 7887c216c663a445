"""Faults in jobs whose model is spread over the ranks: see layouts.py for what each of them is.

Where the state of a lost rank came from is asserted: other ranks that have the same shards, or the
vault that another node (or, with one node, the agent) keeps of shards that no other rank has.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from keepstep.model.views import IncidentView
from tests.chaos.shards import SHAPES
from tests.support.job import Job, inject
from tests.support.scripts import LAYOUTS
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]

KILLS = {
    "early": ["0,step=0,point=in_backward", "1,step=1,point=in_fence"],
    "compute": [
        "1,step=3,point=before_forward",
        "2,step=6,point=in_backward",
        "0,step=9,point=before_fence",
    ],
    "commit": [
        "2,step=2,point=in_fence",
        "1,step=5,point=in_optimizer",
        "0,step=9,point=after_step",
    ],
    "section": ["1,step=4,point=in_section", "0,step=8,point=in_section"],
}


def nodes(world: int, spares: int = 1) -> list[str]:
    """One rank per node, so that a buddy is on another one."""
    return ["--local-nodes", str(world), "--nproc-per-node", "1", "--spare-nodes", str(spares)]


def several_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a rank has many cores and large parameters."""
    monkeypatch.setenv("KEEPSTEP_VAULT_LANES", "3")
    monkeypatch.setenv("KEEPSTEP_VAULT_SLICE", "200")


def came_from(incidents: list[IncidentView], replicas: bool) -> None:
    for incident in incidents:
        vault = "vault" in incident.source or "as the script builds" in incident.source
        assert vault != replicas, incident.source


@pytest.mark.cost(30)
@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("layout", SHAPES)
def test_kill_in_the_layout(
    layout: str, kills: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    world, replicas = SHAPES[layout]
    faults = KILLS[kills]
    args = ["--layout", layout]
    job = start(
        *nodes(world), *inject(*(f"kill:rank={fault}" for fault in faults)),
        script=LAYOUTS, script_args=args, world=world,
    )  # fmt: skip
    job.finish()
    expected = reference(world, *args, script=LAYOUTS)
    seen = verdict.identical(job, expected, faults=len(faults), incidents=len(faults))
    came_from(seen, replicas)


@pytest.mark.cost(30)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("fsdp", ["--bf16"]),
        ("fsdp", ["--recompute", "--optimizer", "sgd"]),
        ("fsdp", ["--ema"]),
        ("hsdp", ["--bf16", "--recompute", "--ema"]),
        ("tp", ["--ema"]),
        ("fsdp-tp", ["--recompute"]),
        ("pipeline", ["--optimizer", "sgd"]),
        ("pipeline", ["--ema"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_kill_with(
    layout: str,
    options: list[str],
    start: Start,
    reference: Reference,
    verdict: Verdict,
) -> None:
    world, replicas = SHAPES[layout]
    args = ["--layout", layout, *options]
    faults = ["1,step=4,point=in_backward", "2,step=7,point=in_optimizer"]
    job = start(
        *nodes(world), *inject(*(f"kill:rank={fault}" for fault in faults)),
        script=LAYOUTS, script_args=args, world=world,
    )  # fmt: skip
    job.finish()
    expected = reference(world, *args, script=LAYOUTS)
    came_from(verdict.identical(job, expected, faults=2, incidents=2), replicas)


@pytest.mark.cost(30)
def test_kill_with_several_connections_to_each_vault(
    start: Start, reference: Reference, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    several_connections(monkeypatch)
    args, faults = ["--layout", "fsdp"], KILLS["commit"]
    job = start(
        *nodes(3), *inject(*(f"kill:rank={fault}" for fault in faults)),
        script=LAYOUTS, script_args=args, world=3,
    )  # fmt: skip
    job.finish()
    expected = reference(3, *args, script=LAYOUTS)
    seen = verdict.identical(job, expected, faults=len(faults), incidents=len(faults))
    came_from(seen, replicas=False)


@pytest.mark.cost(35)
@pytest.mark.parametrize("layout", SHAPES)
def test_loss_of_a_node(layout: str, start: Start, reference: Reference, verdict: Verdict) -> None:
    """The node and all that its agent kept; it is somebody's buddy, too."""
    world, replicas = SHAPES[layout]
    args = ["--layout", layout, "--steps", "40", "--slow", "yes"]
    job = start(*nodes(world, 2), script=LAYOUTS, script_args=args, world=world)
    for victim, step in ((1, 4), (0, 12)):
        job.until_step(step)
        job.spare_parked()
        node = job.rank(victim).node
        job.kill_node(node)
        job.until_closed(1 if victim else 2)
    job.hurry()
    job.finish()
    expected = reference(world, *args, script=LAYOUTS)
    came_from(verdict.identical(job, expected, faults=2, incidents=2), replicas)


@pytest.mark.cost(30)
@pytest.mark.parametrize("layout", SHAPES)
def test_planned_move(layout: str, start: Start, reference: Reference, verdict: Verdict) -> None:
    """The leaver itself hands its shards over."""
    world, _ = SHAPES[layout]
    args = ["--layout", layout, "--steps", "40", "--slow", "yes"]
    job = start(*nodes(world), script=LAYOUTS, script_args=args, world=world)
    job.until_step(3)
    job.spare_parked()
    job.post("migrate", {"ranks": [1]}).raise_for_status()
    job.until_closed(1)
    job.hurry()
    job.finish()
    expected = reference(world, *args, script=LAYOUTS)
    seen = verdict.identical(job, expected, faults=1, incidents=1)
    # What all ranks have may come from others as well.
    assert "rank 1" in seen[0].source and "vault" not in seen[0].source


@pytest.mark.cost(30)
def test_one_node_keeps_the_shards_in_its_agent(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = ["--layout", "fsdp", "--slow", "yes"]
    job = start("--nproc-per-node", "3", "--spares", "1", script=LAYOUTS, script_args=args, world=3)
    job.until_step(4)
    job.spare_parked()
    job.kill_rank(2, signal.SIGKILL)
    job.until_closed(1)
    job.hurry()
    job.finish()
    expected = reference(3, *args, script=LAYOUTS)
    came_from(verdict.identical(job, expected, faults=1, incidents=1), replicas=False)


# ---------------------------------------------------------------- parity

ALONE = [layout for layout, (_, replicas) in SHAPES.items() if not replicas]
PARITY = ["--redundancy", "parity"]
PARITY_KILLS = {
    "compute": ["1,step=3,point=in_backward", "0,step=8,point=before_fence"],
    "commit": ["2,step=2,point=in_fence", "0,step=6,point=in_optimizer"],
}


@pytest.mark.cost(30)
@pytest.mark.parametrize("kills", PARITY_KILLS)
@pytest.mark.parametrize("layout", ALONE)
def test_kill_with_parity(
    layout: str, kills: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    """The node is there, and its agent has what the process had."""
    world, faults = SHAPES[layout][0], PARITY_KILLS[kills]
    args = ["--layout", layout]
    job = start(
        *nodes(world), *PARITY, *inject(*(f"kill:rank={fault}" for fault in faults)),
        script=LAYOUTS, script_args=args, world=world,
    )  # fmt: skip
    job.finish()
    expected = reference(world, *args, script=LAYOUTS)
    for incident in verdict.identical(job, expected, faults=2, incidents=2):
        assert "from the vault of its own agent" in incident.source, incident.source


@pytest.mark.cost(35)
@pytest.mark.parametrize("layout", [*ALONE, "fsdp-sliced"])
def test_loss_of_a_node_with_parity(
    layout: str,
    start: Start,
    reference: Reference,
    verdict: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one is lost when the first one's successor has its part in another parity."""
    if layout == "fsdp-sliced":
        several_connections(monkeypatch)
        layout = "fsdp"
    world = SHAPES[layout][0]
    args = ["--layout", layout, "--steps", "40", "--slow", "yes"]
    job = start(*nodes(world, 2), *PARITY, script=LAYOUTS, script_args=args, world=world)
    for count, (victim, step) in enumerate(((1, 5), (0, 14)), 1):
        job.until_step(step)
        job.spare_parked()
        node = job.rank(victim).node
        job.kill_node(node)
        job.until_closed(count)
    job.hurry()
    job.finish()
    expected = reference(world, *args, script=LAYOUTS)
    for incident in verdict.identical(job, expected, faults=2, incidents=2):
        assert "from the parity at" in incident.source, incident.source


@pytest.mark.cost(30)
def test_loss_of_two_nodes_of_one_parity_falls_back(start: Start, verdict: Verdict) -> None:
    args = ["--layout", "fsdp", "--steps", "40", "--slow", "yes"]
    job = start(*nodes(3, 2), *PARITY, script=LAYOUTS, script_args=args, world=3)
    job.until_step(5)
    job.spare_parked(2)
    for node in ("n0", "n2"):  # side states are on n1 and n3
        job.kill_node(node)
    job.finish(code=4)
    reason = job.incidents()[-1].reason
    assert "a parity makes up for the loss of one member" in reason, reason
    verdict.note(2, "fell back, and said why")
