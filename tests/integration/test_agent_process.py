"""The agent as a real process, between a fake orchestrator and fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from keepstep.adapters.transport.stream import connect
from keepstep.model import agent_messages, blob_messages, commands
from keepstep.model import messages as m
from keepstep.model.wire import HEADER
from tests.support.agents import (
    DEADLINE_S,
    TOKEN,
    Node,
    alive,
    run,
    session_of,
    until,
)


@contextlib.asynccontextmanager
async def node(tmp_path: Path, stall_timeout_s: float = 30.0) -> AsyncIterator[Node]:
    it = Node(tmp_path, int(stall_timeout_s * 1e9))
    await it.orchestrator.open()
    it.launch()
    try:
        it.hello = await it.orchestrator.expect(agent_messages.Hello)
        yield it
    finally:
        it.process.kill()
        it.process.communicate()
        it.orchestrator.close()
        await until(lambda: not session_of(it.process.pid), "the session to be empty")


async def ask(address: m.Address, request: blob_messages.BlobRequest) -> blob_messages.BlobReply:
    decoder: msgspec.msgpack.Decoder[blob_messages.BlobReply] = msgspec.msgpack.Decoder(
        blob_messages.BlobReply
    )
    stream = await connect(address, decoder)
    try:
        stream.send(request)
        return await stream.receive()
    finally:
        stream.close()


# --------------------------------------------------------------------------- start and exit


def test_hello_names_the_node_its_session_and_its_blob_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            hello = n.hello
            assert (hello.protocol, hello.token, hello.job) == (m.PROTOCOL, TOKEN, "j")
            assert (hello.node, hello.slots, hello.workers) == ("n0", 2, [])
            assert hello.pid == hello.session == n.process.pid
            with socket.create_connection((hello.blobs.host, hello.blobs.port), DEADLINE_S):
                pass

    run(scenario)


def test_a_rank_gets_torchruns_environment_and_no_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            _, said = await n.start_up("w0", "env", rank=3, slot=1, MINE="x", RANK="77")
            env = json.loads(said)
            expected = {
                "RANK": "3",
                "GROUP_RANK": "1",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "j",
                "KEEPSTEP_GENERATION": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "MINE": "x",
            }
            assert {name: env.get(name) for name in expected} == expected
            assert "KEEPSTEP_TOKEN" not in env
            _, said = await n.start_up("w1", "env", rank=-1)
            assert not {"RANK", "GROUP_RANK"} & set(json.loads(said))

    run(scenario)


def test_exit_is_told_after_the_last_words_with_the_end_of_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            n.start("w0", "exit", rank=2)
            exited = await n.orchestrator.expect(agent_messages.WorkerExited)
            assert (exited.worker, exited.rank, exited.code) == ("w0", 2, 7)
            assert exited.tail.splitlines() == [f"line {i}" for i in range(60, 100)]
            # It was heard before: nothing waits for it any more.
            said = [x for x in n.orchestrator.heard if isinstance(x, agent_messages.WorkerSaid)]
            assert isinstance(said[-1].said, m.Failure)
            assert (tmp_path / "logs" / "w0.log").read_text().startswith("line 0\n")

    run(scenario)


def test_start_and_kill_are_idempotent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            pid, _ = await n.start_up("w0", "idle")
            n.start("w0", "idle")
            assert (await n.orchestrator.expect(agent_messages.WorkerStarted)).pid == pid
            for _ in range(2):
                n.orchestrator.send(agent_messages.KillWorker(worker="w0"))
                assert (
                    await n.orchestrator.expect(agent_messages.WorkerExited, worker="w0")
                ).code == -9
            n.start("w0", "idle")
            await n.orchestrator.expect(agent_messages.WorkerExited, worker="w0")
            n.orchestrator.send(agent_messages.KillWorker(worker="never-seen"))
            await n.orchestrator.expect(agent_messages.WorkerExited, worker="never-seen")
            n.start("../evil", "idle")
            assert (
                await n.orchestrator.expect(agent_messages.WorkerExited, worker="../evil")
            ).code == 127

    run(scenario)


def test_kill_minus_nine_of_a_worker_ends_its_children(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            pid, child = await n.start_up("w0", "child")
            assert alive(int(child))
            os.kill(pid, signal.SIGKILL)
            assert (await n.orchestrator.expect(agent_messages.WorkerExited)).code == -9
            await until(lambda: not alive(int(child)), "the child to end")

    run(scenario)


# --------------------------------------------------------------------------- relay


def test_commands_are_relayed_and_assign_names_the_rank(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            o = n.orchestrator
            await n.start_up("w0", "idle", rank=-1)
            o.tell("w0", commands.Arm(inject="i1", action="kill", step=1, point="in_fence"))
            assert (await o.expect(agent_messages.WorkerSaid)).rank == -1
            master = m.Address("127.0.0.1", 1)
            o.tell("w0", commands.Assign(rank=5, generation=2, master=master, buddy=None))
            o.tell("w0", commands.Arm(inject="i2", action="kill", step=1, point="in_fence"))
            said = await o.expect(agent_messages.WorkerSaid)
            assert said.rank == 5 and isinstance(said.said, m.InjectFired)
            o.tell("nobody", commands.Finish())
            o.tell("w0", commands.Leave(generation=2))
            exited = await o.expect(agent_messages.WorkerExited)
            assert (exited.rank, exited.code) == (5, 0)

    run(scenario)


@pytest.mark.parametrize("mode", ["flood", "garbage"])
def test_a_worker_that_breaks_the_protocol_is_killed_alone(tmp_path: Path, mode: str) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            other, _ = await n.start_up("good", "idle", slot=1)
            n.start("bad", mode)
            exited = await n.orchestrator.expect(agent_messages.WorkerExited)
            assert (exited.worker, exited.code) == ("bad", -9)
            assert "does not speak the worker protocol" in exited.tail
            n.orchestrator.tell("good", commands.Arm(inject="i", action="kill", step=1, point="x"))
            await n.orchestrator.expect(agent_messages.WorkerSaid, worker="good")
            assert alive(other)

    run(scenario)


def test_a_stopped_worker_never_blocks_the_agent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            o = n.orchestrator
            await n.start_up("stopped", "idle")
            await n.start_up("good", "idle", slot=1)
            o.send(agent_messages.SendSignal(worker="stopped", signal=signal.SIGSTOP))
            for _ in range(20):  # more than its socket takes, then more than the agent keeps
                o.tell("stopped", commands.Abort(generation=1, reason="x" * 500_000))
            o.tell("good", commands.Arm(inject="i", action="kill", step=1, point="x"))
            await o.expect(agent_messages.WorkerSaid, worker="good")
            assert "unread" in (await o.expect(agent_messages.WorkerExited, worker="stopped")).tail

    run(scenario)


def test_signal_stops_and_continues_a_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            o = n.orchestrator
            pid, _ = await n.start_up("w0", "idle")
            stat = Path(f"/proc/{pid}/stat")
            o.send(
                agent_messages.SendSignal(
                    worker="w0", signal=signal.SIGSTOP, resume_after_ns=150_000_000
                )
            )
            await until(lambda: ") T " in stat.read_text(), "the worker to stop")
            await until(lambda: ") T " not in stat.read_text(), "the worker to go on")

    run(scenario)


# --------------------------------------------------------------------------- blobs


def test_side_state_outlives_a_killed_worker_until_it_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            blobs = n.hello.blobs
            pid, _ = await n.start_up("w0", "blobs", rank=1)

            async def get(tick: int, token: str = TOKEN) -> blob_messages.BlobReply:
                return await ask(blobs, blob_messages.BlobGet(token=token, rank=1, tick=tick))

            assert await get(4) == blob_messages.BlobData(
                tick=4, data=b"tick four" * 1000, own=True
            )
            os.kill(pid, signal.SIGKILL)
            await n.orchestrator.expect(agent_messages.WorkerExited)
            assert await get(-2) == blob_messages.BlobData(tick=5, data=b"tick five", own=True)
            assert await get(-1) == blob_messages.BlobData(tick=-1, data=b"init", own=True)
            assert await get(9) == blob_messages.BlobMissing(held=[-1, 4, 5])
            assert isinstance(await get(5, token="wrong"), blob_messages.BlobRefused)
            put = blob_messages.BlobPut(token=TOKEN, rank=1, tick=6, data=b"copy")
            assert await ask(blobs, put) == blob_messages.BlobOk()
            assert await get(-2) == blob_messages.BlobData(tick=6, data=b"copy", own=False)
            n.orchestrator.send(agent_messages.Forget(workers=["w0"]))
            n.orchestrator.send(
                agent_messages.KillWorker(worker="w0")
            )  # answered after Forget was done
            await n.orchestrator.expect(agent_messages.WorkerExited)
            assert await get(5) == blob_messages.BlobMissing(held=[6])

    run(scenario)


def test_a_hostile_blob_connection_disturbs_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            blobs = n.hello.blobs
            for nonsense in (HEADER.pack(1 << 31), HEADER.pack(2) + b"\xc1\xc1", b"GET / HTTP/1.1"):
                reader, writer = await asyncio.open_connection(blobs.host, blobs.port)
                writer.write(nonsense)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
                writer.close()
            reply = await ask(blobs, blob_messages.BlobGet(token=TOKEN, rank=0, tick=1))
            assert reply == blob_messages.BlobMissing(held=[])

    run(scenario)


# --------------------------------------------------------------------------- stores


def test_stores_open_once_and_close_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            o = n.orchestrator
            o.send(agent_messages.OpenStore(generation=3))
            store = (await o.expect(agent_messages.StoreOpened, generation=3)).store
            o.send(agent_messages.OpenStore(generation=3))
            assert (await o.expect(agent_messages.StoreOpened)).store == store
            reader, writer = await asyncio.open_connection(store.host, store.port)
            o.send(agent_messages.CloseStore(generation=3))
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            writer.close()
            await until(lambda: session_of(n.process.pid) == [n.process.pid], "the store to end")

    run(scenario)


def test_a_store_that_ends_by_itself_is_told_and_can_be_opened_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            o = n.orchestrator
            o.send(agent_messages.OpenStore(generation=3))
            await o.expect(agent_messages.StoreOpened, generation=3)
            (store,) = [pid for pid in session_of(n.process.pid) if pid != n.process.pid]
            os.kill(store, signal.SIGKILL)
            assert "-9" in (await o.expect(agent_messages.StoreFailed, generation=3)).error
            o.send(agent_messages.OpenStore(generation=3))
            await o.expect(agent_messages.StoreOpened, generation=3)
            o.send(agent_messages.CloseStore(generation=3))
            await until(lambda: session_of(n.process.pid) == [n.process.pid], "the store to end")
            o.send(agent_messages.OpenStore(generation=4))
            await o.expect(agent_messages.StoreOpened, generation=4)
            assert not [x for x in o.heard if isinstance(x, agent_messages.StoreFailed)], (
                "it was closed"
            )

    run(scenario)


# --------------------------------------------------------------------------- watching


def test_progress_is_shown_and_a_stall_is_reported_with_its_evidence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path, stall_timeout_s=0.5) as n:
            o = n.orchestrator
            await n.start_up("w0", "train", rank=0)

            def fast() -> bool:
                shown = [x for x in o.heard if isinstance(x, agent_messages.Progress)]
                return any(s.version > 20 and s.steps_per_s > 1 for x in shown for s in x.workers)

            await until(fast, "progress")
            o.send(agent_messages.SendSignal(worker="w0", signal=signal.SIGSTOP))
            # On a busy machine a stall may be told before; told again is what has changed in it.
            stalled = await o.expect(
                agent_messages.Stalled, worker="w0", stopped=True, cpu_busy=False
            )
            assert stalled.marks > 20
            o.send(agent_messages.SendSignal(worker="w0", signal=signal.SIGCONT))
            await o.expect(agent_messages.Unstalled, worker="w0")
            await n.start_up("w1", "spin", rank=1, slot=1)
            await o.expect(agent_messages.Stalled, worker="w1", cpu_busy=True)

    run(scenario)


def test_node_fences_itself_only_without_orchestrator_and_progress(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path, stall_timeout_s=0.4) as n:
            o = n.orchestrator
            await n.start_up("w0", "stall", rank=0)
            await n.start_up("w1", "train", rank=1, slot=1)
            await o.expect(agent_messages.Stalled, worker="w0")
            o.close()
            await until(lambda: "no orchestrator" in n.log(), "the disconnect")
            # One rank trains: away for several timeouts, and still there.
            with pytest.raises(subprocess.TimeoutExpired):
                await asyncio.to_thread(n.process.wait, 1.2)
            await o.open()
            await o.expect(agent_messages.Hello, token=TOKEN)
            await o.expect(agent_messages.Stalled, worker="w0")  # told again to who missed it
            o.send(agent_messages.KillWorker(worker="w1"))
            await o.expect(agent_messages.WorkerExited, worker="w1")
            o.close()
            assert await n.ended() == 3
            assert session_of(n.process.pid) == []

    run(scenario)


def test_a_held_rank_is_not_fenced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path, stall_timeout_s=0.3) as n:
            o = n.orchestrator
            await n.start_up("w0", "stall", rank=0)
            o.tell("w0", commands.Hold(generation=2))
            await o.expect(agent_messages.WorkerSaid)
            o.close()
            with pytest.raises(subprocess.TimeoutExpired):
                await asyncio.to_thread(n.process.wait, 1.0)

    run(scenario)


# --------------------------------------------------------------------------- the link


def test_reconnects_with_an_inventory_and_what_was_not_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            o = n.orchestrator
            alive_pid, _ = await n.start_up("w0", "train", rank=0)
            dead_pid, _ = await n.start_up("w1", "blobs", rank=1, slot=1)
            o.close()
            await until(lambda: "no orchestrator" in n.log(), "the disconnect")
            os.kill(dead_pid, signal.SIGKILL)
            await until(lambda: not alive(dead_pid), "the death")
            o.heard.clear()
            await o.open()
            hello = await o.expect(agent_messages.Hello)
            assert [(w.worker, w.rank, w.pid) for w in hello.workers] == [("w0", 0, alive_pid)]
            assert hello.workers[0].version > 0
            assert hello.retained == [("w1", 1)]
            assert (await o.expect(agent_messages.WorkerExited)).worker == "w1"
            o.tell("w0", commands.Arm(inject="i", action="kill", step=1, point="x"))
            await o.expect(agent_messages.WorkerSaid, worker="w0")

    run(scenario)


@pytest.mark.parametrize("nonsense", [HEADER.pack(1 << 31), HEADER.pack(3) + b"\xff\xff\xff"])
def test_nonsense_from_the_orchestrators_side_only_costs_the_stream(
    tmp_path: Path, nonsense: bytes
) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            pid, _ = await n.start_up("w0", "idle")
            n.orchestrator.send_raw(nonsense)
            hello = await n.orchestrator.expect(agent_messages.Hello)
            assert hello.workers[0].pid == pid and alive(pid)

    run(scenario)


def test_refused_says_why_and_exits_with_2(tmp_path: Path) -> None:
    async def scenario() -> None:
        n = Node(tmp_path, 10**10)
        n.orchestrator.answer = agent_messages.Refused(error="wrong token", hint="ask the operator")
        await n.orchestrator.open()
        n.launch(token="wrong")
        assert await n.ended() == 2
        _, errors = n.process.communicate()
        assert "wrong token" in errors and "hint: ask the operator" in errors
        n.orchestrator.close()

    run(scenario)


def test_without_a_token_nothing_starts(tmp_path: Path) -> None:
    n = Node(tmp_path, 10**10)
    n.launch(token="")
    _, errors = n.process.communicate(timeout=DEADLINE_S)
    assert n.process.returncode == 2 and "KEEPSTEP_TOKEN" in errors


# --------------------------------------------------------------------------- ending


def test_stop_ends_even_stubborn_workers_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as n:
            o = n.orchestrator
            await n.start_up("polite", "idle")
            await n.start_up("stubborn", "stubborn", slot=1)
            o.send(agent_messages.OpenStore(generation=1))
            await o.expect(agent_messages.StoreOpened)
            o.send(agent_messages.Stop(grace_ns=200_000_000))
            assert (
                await o.expect(agent_messages.WorkerExited, worker="polite")
            ).code == -signal.SIGTERM
            assert (
                await o.expect(agent_messages.WorkerExited, worker="stubborn")
            ).code == -signal.SIGKILL
            await o.expect(agent_messages.StopDone)
            assert await n.ended() == 0
            assert session_of(n.process.pid) == []

    run(scenario)


@pytest.mark.parametrize("how", ["sigterm", "launcher", "kill-node", "kill -9"])
def test_however_the_agent_ends_nothing_of_its_node_is_left(tmp_path: Path, how: str) -> None:
    codes = {"sigterm": 0, "launcher": 1, "kill-node": -9, "kill -9": -9}

    async def scenario() -> None:
        async with node(tmp_path) as n:
            await n.start_up("w0", "idle")
            # Only PDEATHSIG and stdin's end can help when the agent can not: no escapee then.
            await n.start_up("w1", "idle" if how == "kill -9" else "escapee", slot=1)
            n.orchestrator.send(agent_messages.OpenStore(generation=1))
            await n.orchestrator.expect(agent_messages.StoreOpened)
            expected = 4 if how == "kill -9" else 5
            assert len(session_of(n.process.pid)) == expected
            if how == "sigterm":
                n.process.terminate()
            elif how == "launcher":
                assert n.process.stdin is not None
                n.process.stdin.close()
                n.process.stdin = None
            elif how == "kill-node":
                n.orchestrator.send(agent_messages.KillNode())
            else:
                n.process.kill()
            assert await n.ended() == codes[how]
            await until(lambda: not session_of(n.process.pid), "the session to be empty")

    run(scenario)


def test_the_agent_never_imports_torch() -> None:
    code = "import sys, keepstep.agent.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
