"""Scripts that know nothing of Keepstep, moved as a whole: every bit as under plain torchrun."""

from __future__ import annotations

import pytest

from tests.support.moving import Launch
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict


@pytest.mark.always
@pytest.mark.timeout(280)
def test_every_rank_moves_in_turn_and_one_twice(
    launch: Launch, reference: Reference, verdict: Verdict
) -> None:
    it = launch(nodes=3)
    it.train()
    looked = it.job.cli("doctor", "--transparent", "n3")
    assert looked.returncode == 0 and "ranks of n0" in looked.stdout, looked.stderr + looked.stdout
    for rank in (0, 2, 1, 0):
        it.moved(rank)
    it.job.finish()
    verdict.identical(it.job, reference(3), faults=0, incidents=4)


@pytest.mark.timeout(280)
def test_loader_workers_and_what_taints_bring(
    launch: Launch, reference: Reference, verdict: Verdict
) -> None:
    words = ("--workers", "2")
    it = launch(*words)
    it.train()
    it.moved(1)
    before = len(it.incidents())
    old = it.node(0)
    it.job.spare_parked()
    assert it.job.post("taint", {"target": old, "reason": "test"}).status_code < 300
    incident = it.ended(before)
    assert (incident.trigger, incident.outcome) == ("pre-emptive", "RESOLVED"), incident
    assert it.node(0) != old
    it.job.finish()
    verdict.identical(it.job, reference(2, *words), faults=0, incidents=2)


@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    ("nodes", "ranks", "words"),
    [
        pytest.param(2, (0, 1), ("--layout", "fsdp", "--workers", "2"), id="fsdp-workers"),
        pytest.param(
            3,
            (2, 0),
            ("--layout", "fsdp", "--accumulate", "2", "--optimizers", "2"),
            id="fsdp-accumulation-two-optimizers",
        ),
        pytest.param(4, (3, 1), ("--layout", "hsdp"), id="hsdp"),
        pytest.param(4, (2,), ("--layout", "fsdp"), id="fsdp-four"),
        pytest.param(1, (0,), ("--workers", "2"), id="alone"),
    ],
)
def test_layouts(
    nodes: int,
    ranks: tuple[int, ...],
    words: tuple[str, ...],
    launch: Launch,
    reference: Reference,
    verdict: Verdict,
) -> None:
    it = launch(*words, nodes=nodes)
    it.train()
    for rank in ranks:
        it.moved(rank)
    it.job.finish()
    verdict.identical(it.job, reference(nodes, *words), faults=0, incidents=len(ranks))


@pytest.mark.timeout(290)
def test_a_drained_node_gives_two_processes_away_at_once(
    launch: Launch, reference: Reference, verdict: Verdict
) -> None:
    it = launch(nodes=2, each=2)
    it.train()
    it.job.spare_parked(2)
    before = len(it.incidents())
    assert it.job.post("drain", {"node": "n0"}).status_code < 300
    incident = it.ended(before)
    assert incident.outcome == "RESOLVED" and len(incident.moves) == 2, incident
    assert [it.node(rank) for rank in range(4)] == ["n2", "n2", "n1", "n1"]
    it.job.finish()
    verdict.identical(it.job, reference(4), faults=0, incidents=1)
