"""Telling all ranks at once, and finding the few that are not like the others."""

from __future__ import annotations

from keepstep.core.ranks import Ranks
from keepstep.core.state import EVERY_NODE
from keepstep.model import agent_messages, commands
from keepstep.model import records as r
from keepstep.model.job import AgentSaid
from tests.support.core import World, job_spec


def trained(world_size: int = 8) -> World:
    nodes = " ".join(f"n{number}:2" for number in range(world_size // 2 + 1))
    world = World(job_spec(nodes=nodes, world=world_size)).start()
    world.step()
    return world


def test_ranks_without_some() -> None:
    ranks = Ranks(6, [1, 4])
    assert list(ranks) == [0, 2, 3, 5] and len(ranks) == 4
    assert 2 in ranks and 4 not in ranks and 6 not in ranks and -1 not in ranks
    assert ranks == Ranks(6, {4, 1}) and ranks != Ranks(6, [1])
    assert not Ranks(2, [0, 1])


def test_a_tally_knows_whose_answer_is_missing() -> None:
    tally = Ranks(6, [1, 4]).tally(without=[5])
    assert tally.left == 3 and list(tally.missing()) == [0, 2, 3]
    tally.note(2)
    tally.note(2)
    assert tally.left == 2 and not tally.lacks(2) and list(tally.missing(1)) == [3]
    tally.note(2, False)
    assert tally.left == 3 and tally.lacks(2)


def test_a_death_is_one_command_for_all_and_the_dead_one_is_excepted() -> None:
    world = trained()
    victim = world.rank(3)
    victim.alive = False
    exited = agent_messages.WorkerExited(worker=victim.id, rank=3, code=-9, tail="")
    outcome = world.core.handle(world.now, AgentSaid(job="j", node=victim.node, message=exited))
    told = [send for send in outcome.sends if isinstance(send.command, agent_messages.TellRanks)]
    assert [send.node for send in told] == [EVERY_NODE]
    assert isinstance(told[0].command.command, commands.Abort)  # type: ignore[union-attr]
    alone = [
        send.command for send in outcome.sends if isinstance(send.command, agent_messages.Tell)
    ]
    assert [type(tell.command) for tell in alone] == [commands.Assign]
    assert len(outcome.sends) < 5


def test_ranks_whose_agent_was_away_are_asked_alone_when_it_is_back() -> None:
    world = trained()
    away = world.rank(0).node
    world.lose_agent(away)
    world.kill(3)
    world.pump()
    told = {worker for worker, _ in world.told(commands.Abort)}
    assert told.isdisjoint({"n0.w0", "n0.w1"}) and len(told) == 5
    world.join(away)
    assert {worker for worker, _ in world.told(commands.Abort)} - told == {"n0.w0", "n0.w1"}
    world.run()
    world.assert_training()


def test_a_commit_names_only_who_moved() -> None:
    world = trained()
    world.kill(3)
    world.run()
    (committed,) = world.recorded(r.Committed)
    assert isinstance(committed, r.Committed) and list(committed.placement) == [3]
    world.assert_training()


def test_a_rank_that_may_have_missed_its_buddy_is_told_again_with_the_swap() -> None:
    world = trained()
    world.lose_agent("n0")
    world.join("n0")
    world.kill(3)
    world.run()
    swaps = dict(world.told(commands.Swap))
    alone = {worker for worker, swap in swaps.items() if not swap.same_buddy}  # type: ignore[attr-defined]
    assert {"n0.w0", "n0.w1"} <= alone
    assert len(alone) < 5
    world.assert_training()
