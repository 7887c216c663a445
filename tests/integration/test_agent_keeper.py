"""An agent that is started again under living workers, and what happens when none is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from keepstep.agent import keeper
from keepstep.agent.processes import Order
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from tests.support.agents import (
    DEADLINE_S,
    FAKE_STORE,
    FAKE_WORKER,
    RUN_AGENT,
    TOKEN,
    Node,
    alive,
    run,
    session_of,
    until,
)


class KeptNode(Node):
    """The same, with a keeper beside the agent."""

    def __init__(self, directory: Path, lease_s: float) -> None:
        super().__init__(directory, int(30e9))
        self.folder = directory / "node"
        self.folder.mkdir(mode=0o700)
        (directory / "logs").mkdir()
        command = [sys.executable, "-m", "keepstep.agent.keeper", str(self.folder)]
        self.keeper = subprocess.Popen([*command, str(int(lease_s * 1e9))], start_new_session=True)

    def launch(self, token: str = TOKEN) -> None:
        arguments = [
            *("--orchestrator", f"127.0.0.1:{self.orchestrator.port}", "--job", "j", "--node"),
            *("n0", "--slots", "2", "--directory", str(self.directory), "--stall-timeout-ns"),
            *(str(self.stall_timeout_ns), "--keeper", str(self.folder)),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN_AGENT, str(FAKE_WORKER), FAKE_STORE, *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "KEEPSTEP_TOKEN": token},
        )

    async def again(self) -> agent_messages.Hello:
        """Kill the agent and start another."""
        self.process.kill()
        self.process.communicate()
        self.orchestrator.heard.clear()
        self.launch()
        return await self.orchestrator.expect(agent_messages.Hello)


@contextlib.asynccontextmanager
async def kept(tmp_path: Path, lease_s: float = 20.0) -> AsyncIterator[KeptNode]:
    it = KeptNode(tmp_path, lease_s)
    await it.orchestrator.open()
    try:
        await until(lambda: keeper.living(it.folder), "the keeper")
        it.launch()
        it.hello = await it.orchestrator.expect(agent_messages.Hello)
        yield it
    finally:
        it.process.kill()
        it.process.communicate()
        it.keeper.kill()
        it.keeper.wait()
        it.orchestrator.close()
        await until(lambda: not session_of(it.keeper.pid), "the session to be empty")


def test_a_restarted_agent_finds_its_workers_and_they_do_not_notice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as n:
            assert n.hello.session == n.keeper.pid != n.hello.pid
            first, _ = await n.start_up("w0", "echo", rank=3)
            second, _ = await n.start_up("w1", "echo", rank=-1, slot=1)
            hello = await n.again()
            assert hello.session == n.keeper.pid and hello.pid == n.process.pid
            told = [(w.worker, w.slot, w.rank, w.pid) for w in hello.workers]
            assert told == [("w0", 0, 3, first), ("w1", 1, -1, second)]
            n.orchestrator.tell("w0", commands.Hold(generation=7))
            said = await n.orchestrator.expect(agent_messages.WorkerSaid, worker="w0")
            assert said.said == m.Swapped(generation=7, swap_ns=1)
            # A spare that became a rank is one for the next agent, too.
            assign = commands.Assign(
                rank=5, generation=1, master=m.Address("127.0.0.1", 1), buddy=None
            )
            n.orchestrator.tell("w1", assign)
            n.orchestrator.tell("w1", commands.Hold(generation=1))
            await n.orchestrator.expect(agent_messages.WorkerSaid, worker="w1")
            hello = await n.again()
            assert [(w.worker, w.rank) for w in hello.workers] == [("w0", 3), ("w1", 5)]

    run(scenario)


def test_exits_are_told_with_their_codes_also_to_the_next_agent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            other, _ = await n.start_up("w1", "echo", rank=1, slot=1)
            os.kill(pid, signal.SIGTERM)
            exited = await n.orchestrator.expect(agent_messages.WorkerExited, worker="w0")
            assert exited.code == -signal.SIGTERM
            n.process.kill()
            n.process.communicate()
            os.kill(other, signal.SIGKILL)
            await until(lambda: not alive(other), "the worker's end")
            hello = await n.again()
            assert hello.workers == [] and sorted(hello.retained) == [("w0", 0), ("w1", 1)]
            exited = await n.orchestrator.expect(agent_messages.WorkerExited, worker="w1")
            assert exited.code == -signal.SIGKILL
            n.orchestrator.send(agent_messages.Forget(workers=["w0", "w1"]))
            await n.start_up("w2", "echo", rank=0)
            hello = await n.again()
            assert hello.retained == [] and [w.worker for w in hello.workers] == ["w2"]

    run(scenario)


def test_an_agent_whose_launcher_is_gone_leaves_its_workers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            assert n.process.stdin is not None
            n.process.stdin.close()
            n.process.stdin = None
            assert await n.ended() == 1
            assert alive(pid)
            hello = await n.again()
            assert [w.pid for w in hello.workers] == [pid]

    run(scenario)


def test_without_an_agent_the_workers_end_within_the_lease_even_stopped_ones(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with kept(tmp_path, lease_s=1.0) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            other, _ = await n.start_up("w1", "echo", rank=1, slot=1)
            os.kill(other, signal.SIGSTOP)
            n.process.kill()
            killed = time.monotonic()
            n.process.communicate()
            await until(lambda: not alive(pid) and not alive(other), "the workers to end")
            assert time.monotonic() - killed < 4.0
            assert n.keeper.wait(5) == keeper.EXIT_LEASE

    run(scenario)


def test_an_agent_that_never_reaches_the_orchestrator_does_not_renew_the_lease(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with kept(tmp_path, lease_s=1.5) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            n.orchestrator.close()
            n.process.kill()
            n.process.communicate()
            n.launch()
            await until(lambda: not alive(pid), "the worker to end")
            assert await n.ended() == 4  # the keeper is lost

    run(scenario)


def test_a_live_agent_that_lost_the_orchestrator_keeps_its_workers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path, lease_s=0.5) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            n.orchestrator.close()
            end = time.monotonic() + 2.0
            await until(lambda: time.monotonic() > end, "several leases")
            assert alive(pid) and n.process.poll() is None
            await n.orchestrator.open()
            hello = await n.orchestrator.expect(agent_messages.Hello)
            assert hello.pid == n.process.pid

    run(scenario)


def test_stop_ends_workers_keeper_and_agent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            await n.again()
            n.orchestrator.send(agent_messages.Stop(grace_ns=10**9))
            await n.orchestrator.expect(agent_messages.StopDone)
            assert await n.ended() == 0
            assert not alive(pid) and n.keeper.wait(5) == 0

    run(scenario)


def test_workers_die_with_their_keeper_and_the_agent_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            n.keeper.kill()
            await until(lambda: not alive(pid), "the worker to end")
            assert await n.ended() == 4

    run(scenario)


def test_a_keeper_started_by_hand_ends_nobody_else(tmp_path: Path) -> None:
    """It kills its whole session, so it must have one of its own."""
    command = f"sleep 60 & {sys.executable} -m keepstep.agent.keeper {tmp_path} 300000000; echo $?"
    shell = subprocess.Popen(
        ["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert shell.stdout is not None
    end = time.monotonic() + DEADLINE_S
    while keeper.living(tmp_path) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    order = Order(
        worker="w", slot=0, rank=0, command=["sleep", "60"], env={},
        log=str(tmp_path / "log"), greeting=b"",
    )  # fmt: skip
    with keeper.connect(tmp_path) as agent:
        agent.sendall(msgspec.msgpack.encode(keeper.Start(order=order)))
        for _ in ("complete", "started"):
            assert agent.recv(keeper.MESSAGE_BYTES_MAX)
    assert shell.stdout.readline().strip() == str(keeper.EXIT_LEASE)
    assert [pid for pid in session_of(shell.pid) if pid != shell.pid]  # the bystander
    os.killpg(shell.pid, signal.SIGKILL)
    shell.communicate()


def test_a_second_agent_is_turned_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as n:
            pid, _ = await n.start_up("w0", "echo", rank=0)
            first = n.process
            n.launch()
            try:
                assert await n.ended() == 2
                assert alive(pid) and first.poll() is None
            finally:
                n.process.communicate()
                n.process = first

    run(scenario)
