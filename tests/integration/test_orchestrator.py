"""The shell around the core: order of durability and effects, the agents' streams, restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.adapters.transport.stream import Stream, StreamClosed, connect
from keepstep.core.control import Outcome, Send
from keepstep.errors import PermanentError, TransientError, UsageError
from keepstep.model.agent_messages import (
    Accepted,
    AgentCommand,
    CloseStore,
    Hello,
    PathsSeen,
    Progress,
    Refused,
)
from keepstep.model.job import AgentSaid, AgentsSaid, CoreInput, JobSpec, NodeSpec, Submit, Wake
from keepstep.model.messages import PROTOCOL, Address
from keepstep.model.records import Record, Warned
from keepstep.orchestrator import registry
from keepstep.orchestrator.main import Orchestrator
from keepstep.runtime.driver import Driver


def spec(job: str = "job-1", directory: str = "/nonexistent") -> JobSpec:
    return JobSpec(
        job=job,
        world=1,
        local_world=1,
        nodes=[NodeSpec(name="n0", slots=1)],
        spares=0,
        stall_timeout_ns=10**11,
        script=["train.py"],
        directory=directory,
    )


def hello(orchestrator: Orchestrator, **changed: Any) -> Hello:
    given = Hello(
        protocol=PROTOCOL,
        token=orchestrator.token,
        job="job-1",
        node="n0",
        pid=1000,
        session=1000,
        blobs=Address("127.0.0.1", 1),
        slots=1,
    )
    return msgspec.structs.replace(given, **changed)


async def dial(orchestrator: Orchestrator) -> Stream[AgentCommand]:
    decoder: msgspec.msgpack.Decoder[AgentCommand] = msgspec.msgpack.Decoder(AgentCommand)
    return await connect(orchestrator.stream, decoder)


async def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        await asyncio.sleep(0.01)


def node_state(orchestrator: Orchestrator, node: str = "n0") -> str:
    states = [n.state for view in orchestrator.jobs() for n in view.nodes if n.node == node]
    return states[0] if states else "unknown"


# --------------------------------------------------------------------------- driver


class FakeCore:
    """Decides one record and one send per input, and wants to be woken once."""

    def __init__(self) -> None:
        self.inputs: list[CoreInput] = []
        self.times: list[int] = []
        self.wake_at: int | None = None
        self.replayed: list[Record] = []

    def handle(self, now_ns: int, given: CoreInput) -> Outcome:
        self.times.append(now_ns)
        self.inputs.append(given)
        if isinstance(given, Wake):
            self.wake_at = None
        if isinstance(given, Wake | AgentSaid | AgentsSaid):
            return Outcome(records=[], sends=[])
        assert isinstance(given, Submit)
        if given.spec.world < 0:
            raise UsageError("refused")
        if given.spec.world == 0:
            raise AssertionError("a bug")
        record = Warned(job=given.spec.job, at_ns=now_ns, message="decided")
        send = Send(job=given.spec.job, node="n0", command=CloseStore(generation=1))
        return Outcome(records=[record], sends=[send])

    def deadline(self, now_ns: int | None = None) -> int | None:
        return self.wake_at

    def replay(self, records: Iterable[Record]) -> None:
        self.replayed = list(records)


class Journal:
    """A ledger and a delivery that write one common diary."""

    def __init__(self, past: Sequence[Record] = ()) -> None:
        self.diary: list[str] = []
        self.past = list(past)
        self.broken = False

    def append(self, records: Sequence[Record]) -> None:
        if self.broken:
            raise PermanentError("disk full")
        self.diary += [f"durable {record.job}" for record in records]

    def read(self) -> Iterator[Record]:
        return iter(self.past)

    def close(self) -> None:
        pass

    def deliver(self, sends: Iterable[Send]) -> None:
        self.diary += [f"sent {send.job}" for send in sends]


def driver_of(core: FakeCore, journal: Journal, **more: Any) -> Driver:
    return Driver(core, journal, journal, **more)  # type: ignore[arg-type]


def test_records_are_durable_before_effects_run() -> None:
    async def scenario() -> None:
        core, journal = FakeCore(), Journal()
        driver = driver_of(core, journal)
        driver.submit(Submit(spec=spec("a")))
        driver.submit(Submit(spec=spec("b")))
        assert journal.diary == ["durable a", "sent a", "durable b", "sent b"]

    asyncio.run(scenario())


def test_nothing_is_sent_when_the_ledger_fails_and_the_driver_stops() -> None:
    async def scenario() -> None:
        core, journal = FakeCore(), Journal()
        driver = driver_of(core, journal)
        journal.broken = True
        with pytest.raises(PermanentError, match="disk full"):
            driver.submit(Submit(spec=spec("a")))
        assert journal.diary == []
        assert isinstance(driver.failed.result(), PermanentError)
        journal.broken = False
        with pytest.raises(PermanentError, match="stopped"):
            driver.submit(Submit(spec=spec("b")))
        assert journal.diary == [] and len(core.inputs) == 1

    asyncio.run(scenario())


def test_a_refusal_of_the_core_stops_nothing_but_its_bug_does() -> None:
    async def scenario() -> None:
        core, journal = FakeCore(), Journal()
        driver = driver_of(core, journal)
        with pytest.raises(UsageError):
            driver.submit(Submit(spec=msgspec.structs.replace(spec(), world=-1)))
        assert driver.running
        with pytest.raises(AssertionError):
            driver.submit(Submit(spec=msgspec.structs.replace(spec(), world=0)))
        assert not driver.running

    asyncio.run(scenario())


def test_the_core_is_woken_at_its_deadline() -> None:
    async def scenario() -> None:
        core, journal = FakeCore(), Journal()
        driver = driver_of(core, journal)
        core.wake_at = time.time_ns() + 50_000_000
        due = core.wake_at
        driver.submit(Submit(spec=spec()))
        await until(lambda: Wake() in core.inputs, "wake")
        assert core.times[-1] >= due
        driver.close()

    asyncio.run(scenario())


def test_what_agents_say_is_looked_at_together_and_before_what_comes_next() -> None:
    async def scenario() -> None:
        core, journal = FakeCore(), Journal()
        driver = driver_of(core, journal)
        one, two = (AgentSaid(job=job, node="n0", message=PathsSeen(paths=[])) for job in "ab")
        for said in (one, one, two, one):
            driver.hear(said)
        assert not core.inputs
        await asyncio.sleep(0)
        assert core.inputs == [AgentsSaid(job="a", said=[one, one]), two, one]
        driver.hear(two)
        driver.submit(Submit(spec=spec("a")))
        assert core.inputs[3:] == [two, Submit(spec=spec("a"))]
        await asyncio.sleep(0)
        assert len(core.inputs) == 5

    asyncio.run(scenario())


def test_what_was_said_to_a_driver_that_paused_is_not_used() -> None:
    async def scenario() -> None:
        core, journal = FakeCore(), Journal()
        driver = driver_of(core, journal)
        said = AgentSaid(job="a", node="n0", message=PathsSeen(paths=[]))
        driver.hear(said)
        driver.pause(TransientError("out of reach"))
        driver.hear(said)
        driver.resume(core, [])  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not core.inputs
        driver.hear(said)
        await asyncio.sleep(0)
        assert core.inputs == [said]

    asyncio.run(scenario())


def test_time_never_runs_behind_the_ledger() -> None:
    async def scenario() -> None:
        future = time.time_ns() + 3_600 * 10**9
        past = [Warned(job="a", at_ns=future, message="written before the clock was set back")]
        core, journal = FakeCore(), Journal(past)
        driver = driver_of(core, journal)
        assert driver.replay() == 1
        driver.submit(Submit(spec=spec()))
        assert core.times[0] >= future
        assert core.replayed == past

    asyncio.run(scenario())


def test_watchers_are_told_of_changes_of_their_job_only() -> None:
    async def scenario() -> None:
        core, journal = FakeCore(), Journal()
        driver = driver_of(core, journal)
        driver.submit(Submit(spec=spec("a")))
        waiting = asyncio.create_task(driver.wait_change("a", driver.change("a"), 5.0))
        await asyncio.sleep(0)
        driver.submit(Submit(spec=spec("b")))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        driver.submit(Submit(spec=spec("a")))
        assert await waiting == 3
        assert await driver.wait_change("a", 3, 0.01) == 3

    asyncio.run(scenario())


# --------------------------------------------------------------------------- streams


def with_orchestrator(home: Path, scenario: Callable[[Orchestrator], Any], **more: Any) -> None:
    async def body() -> None:
        orchestrator = await Orchestrator.start(home, id="test", **more)
        try:
            if not orchestrator.jobs():
                orchestrator.driver.submit(Submit(spec=spec(directory=str(home / "jobs" / "x"))))
            await scenario(orchestrator)
        finally:
            await orchestrator.stop()

    asyncio.run(body())


def test_an_agent_with_the_token_joins_and_leaves(tmp_path: Path) -> None:
    async def scenario(orchestrator: Orchestrator) -> None:
        stream = await dial(orchestrator)
        stream.send(hello(orchestrator))
        assert isinstance(await stream.receive(), Accepted)
        await until(lambda: node_state(orchestrator) == "connected", "joined")
        stream.close()
        await until(lambda: node_state(orchestrator) == "disconnected", "gone")

    with_orchestrator(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token": "wrong"}, "wrong token"),
        ({"token": "wrong", "job": "nobody"}, "wrong token"),
        ({"job": "nobody"}, "no such job"),
        ({"protocol": PROTOCOL + 1}, "protocol"),
    ],
)
def test_a_wrong_hello_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    async def scenario(orchestrator: Orchestrator) -> None:
        stream = await dial(orchestrator)
        stream.send(hello(orchestrator, **changed))
        answer = await stream.receive()
        assert isinstance(answer, Refused) and said in answer.error
        with pytest.raises(StreamClosed):
            await stream.receive()
        assert node_state(orchestrator) != "connected"

    with_orchestrator(tmp_path, scenario)


def test_frames_before_hello_are_refused(tmp_path: Path) -> None:
    async def scenario(orchestrator: Orchestrator) -> None:
        stream = await dial(orchestrator)
        stream.send(Progress(workers=[]))
        assert isinstance(await stream.receive(), Refused)

    with_orchestrator(tmp_path, scenario)


def test_a_second_agent_cannot_take_a_connected_nodes_name(tmp_path: Path) -> None:
    async def scenario(orchestrator: Orchestrator) -> None:
        first, second = await dial(orchestrator), await dial(orchestrator)
        first.send(hello(orchestrator))
        assert isinstance(await first.receive(), Accepted)
        second.send(hello(orchestrator, pid=2000, session=2000))
        answer = await second.receive()
        assert isinstance(answer, Refused) and "already" in answer.error
        # The same agent may come back on a new stream before the old one is known to be gone.
        again = await dial(orchestrator)
        again.send(hello(orchestrator))
        assert isinstance(await again.receive(), Accepted)
        await asyncio.sleep(0.05)
        assert node_state(orchestrator) == "connected"

    with_orchestrator(tmp_path, scenario)


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x04\xde\xad\xbe\xef",
]
LARGE_FOR_A_STRANGER = b"\x00\x20\x00\x01" + b"x" * 100  # says 2 MiB


@pytest.mark.parametrize(
    ("garbage", "joined"),
    [(LARGE_FOR_A_STRANGER, False), *((g, j) for g in GARBAGE for j in (False, True))],
)
def test_garbage_closes_its_stream_only(tmp_path: Path, garbage: bytes, joined: bool) -> None:
    async def scenario(orchestrator: Orchestrator) -> None:
        healthy = await dial(orchestrator)
        healthy.send(hello(orchestrator))
        assert isinstance(await healthy.receive(), Accepted)
        host, port = orchestrator.stream.host, orchestrator.stream.port
        reader, writer = await asyncio.open_connection(host, port)
        if joined:
            bad = Stream(reader, writer, msgspec.msgpack.Decoder(AgentCommand))
            bad.send(hello(orchestrator, node="n7", pid=7))
            await bad.receive()
        writer.write(garbage)
        await asyncio.wait_for(drained(reader), 5.0)
        await until(lambda: node_state(orchestrator, "n7") != "connected", "bad stream closed")
        assert node_state(orchestrator) == "connected"
        healthy.send(Progress(workers=[]))
        await asyncio.sleep(0.02)
        assert not healthy.closed and orchestrator.driver.running
        writer.close()

    with_orchestrator(tmp_path, scenario)


async def drained(reader: asyncio.StreamReader) -> None:
    """Until the other side has closed, by FIN or by reset."""
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass


# --------------------------------------------------------------------------- starts and restarts


def test_restart_with_the_same_id_keeps_ports_token_and_jobs(tmp_path: Path) -> None:
    seen: list[tuple[str, str, Address]] = []

    async def scenario(orchestrator: Orchestrator) -> None:
        assert [view.job for view in orchestrator.jobs()] == ["job-1"]
        seen.append((orchestrator.url, orchestrator.token, orchestrator.stream))
        entry = registry.read(tmp_path, "test")
        assert entry is not None and entry.token == orchestrator.token
        mode = registry.entry_path(tmp_path, "test").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600

    with_orchestrator(tmp_path, scenario)
    # Stopped with a live job: the file stays for the one that takes over.
    assert registry.read(tmp_path, "test") is not None
    with_orchestrator(tmp_path, scenario)
    assert seen[0] == seen[1]


def test_clean_end_removes_the_file_and_the_token(tmp_path: Path) -> None:
    async def body() -> None:
        orchestrator = await Orchestrator.start(tmp_path, id="empty")
        assert registry.live(tmp_path)[0].id == "empty"
        await orchestrator.stop()

    asyncio.run(body())
    assert registry.read(tmp_path, "empty") is None


def test_port_in_use_and_id_in_use_are_usage_errors(tmp_path: Path) -> None:
    async def scenario(orchestrator: Orchestrator) -> None:
        port = int(orchestrator.url.rpartition(":")[2])
        with pytest.raises(UsageError, match=f"port {port}"):
            await Orchestrator.start(tmp_path, id="other", port=port)
        with pytest.raises(UsageError, match="in use"):
            await Orchestrator.start(tmp_path, id="test")
        # Neither attempt left anything behind that the other would trip over.
        other = await Orchestrator.start(tmp_path, id="other")
        await other.stop()

    with_orchestrator(tmp_path, scenario)


def test_a_corrupted_ledger_is_one_clear_error(tmp_path: Path) -> None:
    registry.prepare_home(tmp_path)
    registry.ledger_path(tmp_path, "bad").write_bytes(b"garbage" * 1000)

    async def body() -> None:
        with pytest.raises(PermanentError, match="not a ledger"):
            await Orchestrator.start(tmp_path, id="bad")

    asyncio.run(body())


def start_alone(home: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "KEEPSTEP_HOME": str(home)}
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep", "orchestrator", "--id", "alone"],
        env=env,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 20
    while not any(entry.pid == process.pid for entry in registry.live(home)):
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < end, "the orchestrator did not start"
        time.sleep(0.02)
    return process


def test_killed_orchestrator_comes_back_where_it_was(tmp_path: Path) -> None:
    import httpx

    processes = [start_alone(tmp_path)]
    try:
        before = registry.live(tmp_path)[0]
        auth = {"authorization": f"Bearer {before.token}"}
        body = msgspec.json.encode(spec(directory=str(tmp_path / "x")))
        answer = httpx.post(f"{before.url}/v1/jobs", content=body, headers=auth)
        assert answer.status_code == 201, answer.text
        processes[0].kill()
        processes[0].wait()
        assert registry.live(tmp_path) == []
        processes.append(start_alone(tmp_path))
        after = registry.live(tmp_path)[0]
        assert (after.url, after.token, after.stream) == (before.url, before.token, before.stream)
        jobs = json.loads(httpx.get(f"{after.url}/v1/jobs", headers=auth).content)
        assert [one["job"] for one in jobs] == ["job-1"]
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(10) == 0
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
