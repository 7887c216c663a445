"""An agent as a real process, between an orchestrator and workers that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from keepstep.adapters.transport.stream import Stream, serve
from keepstep.model import agent_messages
from keepstep.model import messages as m

DEADLINE_S = 10.0
TOKEN = "a-secret-token"
M = TypeVar("M", bound=m.Message)
FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
FAKE_STORE = r"""
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
RUN_AGENT = r"""
import os, sys
from keepstep.agent.main import main
worker, store, *arguments = sys.argv[1:]
sys.exit(
    main(
        os.environ,
        arguments,
        worker_command=[sys.executable, worker],
        store_command=lambda: [sys.executable, "-c", store],
    )
)
"""


class Orchestrator:
    """Accepts agents and remembers what they say."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.hellos: list[agent_messages.Hello] = []
        self.answer: agent_messages.Accepted | agent_messages.Refused = agent_messages.Accepted()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._stream: Stream[agent_messages.AgentMessage] | None = None
        self._news = asyncio.Condition()

    async def open(self) -> None:
        decoder: Any = msgspec.msgpack.Decoder(agent_messages.AgentMessage)
        self._server = await serve(self._serve, decoder, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        assert self._server is not None
        self._server.close()
        if self._stream is not None:
            self._stream.abort()

    def send(self, command: m.Message) -> None:
        assert self._stream is not None
        self._stream.send(command)

    def tell(self, worker: str, command: Any) -> None:
        self.send(agent_messages.Tell(worker=worker, command=command))

    def send_raw(self, data: bytes) -> None:
        assert self._stream is not None
        self._stream._writer.write(data)

    async def expect(self, kind: type[M], **fields: Any) -> M:
        """The first message of `kind` with these fields, taken out of what was heard."""

        def found() -> M | None:
            for message in self.heard:
                if isinstance(message, kind) and all(
                    getattr(message, name) == value for name, value in fields.items()
                ):
                    self.heard.remove(message)
                    return message
            return None

        async with self._news:
            try:
                result = await asyncio.wait_for(self._news.wait_for(found), DEADLINE_S)
            except TimeoutError:
                pytest.fail(f"no {kind.__name__} {fields} among {self.heard}")
        assert result is not None
        return result

    async def _serve(self, stream: Stream[agent_messages.AgentMessage]) -> None:
        hello = await stream.receive()
        assert isinstance(hello, agent_messages.Hello)
        self.hellos.append(hello)
        self._stream = stream
        stream.send(self.answer)
        await self._note(hello)
        while True:
            await self._note(await stream.receive())

    async def _note(self, message: Any) -> None:
        async with self._news:
            self.heard.append(message)
            self._news.notify_all()


class Node:
    """An agent process of a test, and its orchestrator."""

    def __init__(self, directory: Path, stall_timeout_ns: int) -> None:
        self.directory = directory
        self.orchestrator = Orchestrator()
        self.stall_timeout_ns = stall_timeout_ns
        self.process: subprocess.Popen[str]
        self.hello: agent_messages.Hello

    def launch(self, token: str = TOKEN) -> None:
        arguments = [
            *("--orchestrator", f"127.0.0.1:{self.orchestrator.port}", "--job", "j", "--node"),
            *("n0", "--slots", "2", "--directory", str(self.directory), "--stall-timeout-ns"),
            str(self.stall_timeout_ns),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN_AGENT, str(FAKE_WORKER), FAKE_STORE, *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "KEEPSTEP_TOKEN": token},
        )

    def start(self, worker: str, mode: str, *, rank: int = 0, slot: int = 0, **env: str) -> None:
        self.orchestrator.send(
            agent_messages.StartWorker(
                worker=worker,
                slot=slot,
                rank=rank,
                generation=1,
                world=4,
                local_world=2,
                master=m.Address("127.0.0.1", 29500),
                buddy=None,
                script=[mode],
                env=env,
            )
        )

    async def start_up(self, worker: str, mode: str, **options: Any) -> tuple[int, str]:
        """Start it and wait until it speaks: its pid, and what it has to say."""
        self.start(worker, mode, **options)
        started = await self.orchestrator.expect(agent_messages.WorkerStarted, worker=worker)
        said = await self.orchestrator.expect(agent_messages.WorkerSaid, worker=worker)
        assert isinstance(said.said, m.Parked)
        return started.pid, said.said.where

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None, "the agent to end")
        return self.process.returncode

    def log(self) -> str:
        return (self.directory / "logs" / "agent-n0.log").read_text()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 2 * DEADLINE_S))


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited in vain for {what}")
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def session_of(leader: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    members.append(int(entry.name))
    return members
