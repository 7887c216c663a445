"""Who is told to write its parity where, and when that changes."""

from __future__ import annotations

import msgspec

from keepstep.core import processes
from keepstep.core.state import Out, Outcome
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from tests.support.core import World, job_spec


def trained(nodes: str = "n0:1 n1:1 n2:1 n3:1", redundancy: str = "parity") -> World:
    spec = job_spec(nodes, world=3, local_world=1)
    world = World(msgspec.structs.replace(spec, redundancy=redundancy)).start()
    world.step(3)
    return world


def at(world: World, name: str) -> commands.Parity:
    return commands.Parity(holder=world.nodes[name].blobs, members=[0, 1, 2])


def told_by_start(world: World) -> dict[int, commands.Parity | None]:
    starts = [c for _, c in world.sent if isinstance(c, agent_messages.StartWorker)]
    return {start.rank: start.parity for start in starts if start.rank >= 0}


def test_all_members_begin_with_a_holder_that_none_of_them_is_on() -> None:
    assert told_by_start(world := trained()) == dict.fromkeys((0, 1, 2), at(world, "n3"))
    assert told_by_start(trained(redundancy="buddy")) == dict.fromkeys((0, 1, 2))


def test_a_holder_that_gets_a_member_hands_over_to_another_node_with_the_swap() -> None:
    world = trained()
    world.kill(1)
    world.run()
    assert world.rank(1).node == "n3"
    swaps = {id: c.parity for id, c in world.told(commands.Swap) if isinstance(c, commands.Swap)}
    assert swaps == {world.rank(rank).id: at(world, "n1") for rank in (0, 1, 2)}
    world.assert_training()


def test_a_lost_holder_is_replaced_for_all_members_once() -> None:
    world = trained("n0:1 n1:1 n2:1 n3:1 n4:1")
    old = world.nodes["n3"].blobs
    lost = m.BuddyLost(generation=0, error="gone", parity=old)
    for rank in (0, 1, 2):
        world.say(world.rank(rank), lost)
    world.pump()
    told = [(id, c.parity) for id, c in world.told(commands.Buddy) if isinstance(c, commands.Buddy)]
    assert all(parity == at(world, "n4") for _, parity in told)
    assert {id for id, _ in told} == {world.rank(rank).id for rank in (0, 1, 2)}
    world.assert_training()


def test_the_only_holder_there_is_is_tried_again() -> None:
    world = trained()
    world.say(world.rank(0), m.BuddyLost(generation=0, error="?", parity=world.nodes["n3"].blobs))
    world.pump()
    told = [c.parity for _, c in world.told(commands.Buddy) if isinstance(c, commands.Buddy)]
    assert told == [at(world, "n3")] * 3


def test_status_says_when_no_node_is_left_for_the_parity() -> None:
    world = trained()
    for worker in world.owners():
        world.say(worker, m.Attached(
            generation=0, groups=["0"], parameters=1, bytes_state=4, redundant=True, kept_bytes=8
        ))  # fmt: skip
    world.pump()
    assert world.view.node_loss_protected, world.view.protection
    assert "kept by its agent and a parity" in world.view.protection
    world.kill_node("n3")
    world.run()
    assert not world.view.node_loss_protected
    assert "no node is left that could keep the parity of ranks 0, 1, 2" in world.view.protection


def test_a_node_that_comes_back_is_offered_to_who_has_none() -> None:
    world = trained("n0:1 n1:1 n2:1 n3:1")
    lost = m.BuddyLost(generation=0, error="gone", parity=world.nodes["n3"].blobs)
    world.say(world.rank(0), lost)
    world.pump()
    for name in ("n3", "n0", "n1", "n2"):
        world.lose_agent(name)
    world.run(world.spec.stall_timeout_ns / 1e9 + 1)
    for name in ("n0", "n1", "n2", "n3"):
        world.join(name)
        world.pump()
    told: dict[str, commands.Buddy] = {}
    for id, command in world.told(commands.Buddy):
        assert isinstance(command, commands.Buddy)
        told[id] = command
    first = told[world.rank(0).id]
    assert first.address == world.nodes["n1"].blobs and first.parity == at(world, "n3")


def test_a_swap_that_is_said_again_names_the_holder_of_now() -> None:
    world = trained()
    core = world.core.state("j")
    worker = core.workers[world.rank(0).id]
    worker.swap = commands.Swap(generation=0, buddy=None, solo=False)
    out = Out(world.now, core, Outcome())
    assert processes.swap_of(core, out, worker).parity == at(world, "n3")


def test_ranks_that_are_not_started_at_home_do_not_keep_their_own_parity() -> None:
    spec = job_spec("n0:1 n1:1 n2:1 n3:1 n4:1", world=3, local_world=1)
    world = World(msgspec.structs.replace(spec, redundancy="parity"))
    world.kill_node("n2")
    world.run(90)
    assert world.rank(2).node == "n3"
    assert told_by_start(world) == dict.fromkeys((0, 1, 2), at(world, "n4"))
