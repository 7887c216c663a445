"""What all ranks of a node are told and answer at once."""

from __future__ import annotations

import pytest

from keepstep.core.agent import actions, inputs
from keepstep.core.agent.machine import AgentMachine, MachineSetting
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model.page import Sample

S = 1_000_000_000
ABORT = commands.Abort(generation=3, reason="rank 9 died")


def start(worker: str, rank: int) -> agent_messages.StartWorker:
    return agent_messages.StartWorker(
        worker=worker,
        slot=0,
        rank=rank,
        generation=0,
        world=8,
        local_world=2,
        master=m.Address("h", 1),
        buddy=None,
        script=["train.py"],
    )


def report(generation: int = 3, **more: object) -> m.Report:
    said = {"tick": 5, "version": 5, "in_fence": False, "computing": True, **more}
    return m.Report(generation=generation, **said)  # type: ignore[arg-type]


class Node:
    """An agent with two ranks and a spare, connected."""

    def __init__(self) -> None:
        self.machine = AgentMachine(
            MachineSetting(job="j", node="n", slots=3, stall_timeout_ns=10 * S), 0
        )
        self.do(inputs.HelloTaken())
        for worker, rank in (("a", 0), ("b", 1), ("spare", -1)):
            self.do(inputs.Spawned(start(worker, rank), 7))

    def do(self, given: inputs.Given) -> list[actions.AnyEffect]:
        return self.machine.handle(S, given)

    def tell(self, *besides: str) -> list[str]:
        """Who was told."""
        command = agent_messages.TellRanks(command=ABORT, besides=list(besides))
        effects = self.do(inputs.Heard(command))
        return [one.worker for one in effects if isinstance(one, actions.Relay)]

    def says(self, worker: str, said: m.WorkerMessage) -> list[object]:
        """What goes to the orchestrator for it."""
        return words(self.do(inputs.Said(worker, said)))


def words(effects: list[actions.AnyEffect]) -> list[object]:
    said = [one.message for one in effects if isinstance(one, actions.SayUp)]
    return [
        [part.worker for part in message.said]
        if isinstance(message, agent_messages.WorkersSaid)
        else getattr(message, "worker", message)
        for message in said
    ]


def test_ranks_are_told_but_not_standbys_nor_whoever_is_excepted() -> None:
    node = Node()
    assert node.tell() == ["a", "b"]
    assert node.tell("b") == ["a"]


def test_whoever_is_to_be_killed_is_told_nothing_more() -> None:
    node = Node()
    node.do(inputs.Heard(agent_messages.KillWorker(worker="a")))
    assert node.tell() == ["b"]


def test_answers_wait_for_the_other_ranks_of_the_node() -> None:
    node = Node()
    node.tell()
    assert node.says("a", report()) == []
    assert node.says("b", report()) == [["a", "b"]]
    assert node.says("b", report()) == ["b"]  # once more, and nobody is awaited


def test_nobody_waits_for_a_rank_that_was_not_told() -> None:
    node = Node()
    node.tell("b")
    assert node.says("a", report()) == ["a"]


def test_an_exit_is_said_behind_the_answers_that_waited_for_it() -> None:
    node = Node()
    node.tell()
    assert node.says("a", report()) == []
    exited = agent_messages.WorkerExited(worker="b", rank=1, code=-9, tail="")
    assert words(node.do(inputs.Exited(exited))) == ["a", "b"]
    assert node.says("a", report()) == ["a"]


def test_a_look_ends_the_wait_for_a_rank_that_hangs() -> None:
    node = Node()
    node.tell()
    assert node.says("a", report()) == []
    assert words(node.do(inputs.Looked([])))[:1] == ["a"]


def test_errors_and_other_generations_do_not_wait() -> None:
    node = Node()
    node.tell()
    assert node.says("a", report(error_kind="device")) == ["a"]
    assert node.says("a", report(generation=2)) == ["a"]
    assert node.says("a", report(done=True)) == ["a"]


def test_what_waits_when_the_stream_breaks_follows_the_next_hello_in_order() -> None:
    node = Node()
    node.tell()
    assert node.says("a", report()) == []
    node.do(inputs.StreamLost())
    assert node.says("b", m.Staged(generation=3)) == []
    assert words(node.do(inputs.HelloTaken())) == ["a", "b"]


def holding(now_ns: int) -> Sample:
    return Sample(
        heartbeat_ns=now_ns,
        progress_ns=0,
        marks=9,
        version=5,
        tick=5,
        generation=1,
        where="held",
        stepping=True,
        commit_ns=0,
        step_ns=0,
        hold=True,
    )


@pytest.mark.parametrize(("generation", "ended"), [(2, False), (3, True)])
def test_a_holding_rank_is_ended_out_of_reach_only_if_it_was_sent_on(
    generation: int, ended: bool
) -> None:
    node = Node()
    node.tell()  # stop for generation 3
    for worker in ("a", "b"):
        tell = agent_messages.Tell(worker=worker, command=commands.Release(generation=generation))
        node.do(inputs.Heard(tell))
    node.do(inputs.StreamLost())
    effects: list[actions.AnyEffect] = []
    for second in range(2, 40):
        seen = [inputs.Seen(w, holding(second * S), cpu_ns=0, stopped=False) for w in ("a", "b")]
        effects += node.machine.handle(second * S, inputs.Looked(seen))
    assert any(isinstance(one, actions.EndNode) for one in effects) == ended
