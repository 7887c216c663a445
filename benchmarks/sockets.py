"""Simulated agents on real streams, around a real `keepstep orchestrator` in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.agents import SLOTS, SPARES, Node, spec_of
from keepstep.adapters.transport.stream import Stream, StreamClosed, connect
from keepstep.model import agent_messages, commands
from keepstep.orchestrator import registry

CONNECTING_MAX = 64
START_S_MAX = 120.0


class Streams:
    """All agents of a job, in this process. They answer at once and say Progress once a second."""

    def __init__(self, ranks: int, entry: registry.Entry) -> None:
        self.spec = spec_of(ranks)
        self.nodes = [Node(node.name, index) for index, node in enumerate(self.spec.nodes)]
        self.entry = entry
        self.received = 0
        self.sent = 0
        self.beats = 0
        self.late_s = 0.0  # the most that a heartbeat was behind its time
        self.swaps = 0
        self.parked = 0
        self.planned_at: float | None = None  # first command of a plan since it was set to None
        self._streams: dict[str, Stream[agent_messages.AgentCommand]] = {}
        self._decoder: msgspec.msgpack.Decoder[agent_messages.AgentCommand]
        self._decoder = msgspec.msgpack.Decoder(agent_messages.AgentCommand)
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        gate = asyncio.Semaphore(CONNECTING_MAX)

        async def one(node: Node) -> None:
            async with gate:
                stream = await connect(self.entry.stream, self._decoder, timeout_s=60)
                stream.send(node.hello(self.entry.token))
                accepted = await stream.receive()
                assert isinstance(accepted, agent_messages.Accepted), accepted
            self._streams[node.name] = stream
            self._tasks.append(asyncio.create_task(self._listen(node, stream)))

        await asyncio.gather(*(one(node) for node in self.nodes))

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams.values():
            stream.abort()

    async def until(self, what: Callable[[], bool], timeout_s: float = START_S_MAX) -> None:
        async with asyncio.timeout(timeout_s):
            while not what():
                self._changed.clear()
                await self._changed.wait()

    def say(self, node: Node, messages: list[agent_messages.AgentMessage]) -> None:
        for message in messages:
            self._streams[node.name].send(message)
        self.sent += len(messages)

    async def _listen(self, node: Node, stream: Stream[agent_messages.AgentCommand]) -> None:
        with contextlib.suppress(StreamClosed):
            while True:
                command = await stream.receive()
                self.received += 1
                told = (
                    command.command
                    if isinstance(command, agent_messages.Tell | agent_messages.TellRanks)
                    else command
                )
                if self.planned_at is None and isinstance(
                    told, commands.Abort | agent_messages.OpenStore
                ):
                    self.planned_at = time.monotonic()
                self.swaps += len(node.meant(command)) if isinstance(told, commands.Swap) else 0
                self.parked += isinstance(told, agent_messages.StartWorker) and told.rank < 0
                self.say(node, node.take(command))
                self._changed.set()

    def beat(self) -> None:
        self._tasks.append(asyncio.create_task(self._beat()))

    async def _beat(self) -> None:
        """Spread over the second, as agents that were not started together are."""
        due = time.monotonic()
        while True:
            for node in self.nodes:
                due += 1 / len(self.nodes)
                wait_s = due - time.monotonic()
                if wait_s > 0.001:
                    await asyncio.sleep(wait_s)
                self.late_s = max(self.late_s, -wait_s)
                self.say(node, [node.progress()])
                self.beats += 1


@contextlib.asynccontextmanager
async def orchestrator() -> AsyncIterator[tuple[psutil.Process, registry.Entry]]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "keepstep", "orchestrator", "--id", "scale"],
            env={**os.environ, "KEEPSTEP_HOME": folder},
            stderr=(home / "log").open("w"),
        )
        try:
            async with asyncio.timeout(START_S_MAX):
                while (entry := registry.read(home, "scale")) is None:
                    assert process.poll() is None, (home / "log").read_text()
                    await asyncio.sleep(0.05)
            yield psutil.Process(process.pid), entry
        finally:
            process.terminate()
            process.wait(30)


async def ask(entry: registry.Entry, path: str, body: object) -> None:
    request = urllib.request.Request(
        entry.url + path,
        data=msgspec.json.encode(body),
        headers={"authorization": f"Bearer {entry.token}", "content-type": "application/json"},
    )
    answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
    json.loads(answer)


async def measure(agents: int, seconds: float, moves: int) -> dict[str, Any]:
    """CPU of the orchestrator while the job just trains, then signals under that load."""
    ranks = (agents - 1) * SLOTS
    async with orchestrator() as (process, entry):
        streams = Streams(ranks, entry)
        try:
            await ask(entry, "/v1/jobs", streams.spec)
            began = time.monotonic()
            await streams.join()
            await streams.until(lambda: streams.parked == SPARES)
            streams.beat()
            start_s = time.monotonic() - began
            idle = await _train(process, streams, seconds)
            kills = [await _kill(streams, process, number) for number in range(moves)]
            taints = [await _taint(streams, process, moves + number) for number in range(moves)]
            memory = process.memory_info().rss
        finally:
            await streams.leave()
    return {
        "agents": agents,
        "ranks": ranks,
        "start_s": start_s,
        "rss_mib": memory / 2**20,
        **idle,
        "kills": kills,
        "taints": taints,
    }


async def _train(process: psutil.Process, streams: Streams, seconds: float) -> dict[str, float]:
    await asyncio.sleep(2)  # what the start left to be done
    before, beats, began = process.cpu_times(), streams.beats, time.monotonic()
    streams.late_s = 0.0
    await asyncio.sleep(seconds)
    after, took = process.cpu_times(), time.monotonic() - began
    cpu_s = after.user + after.system - before.user - before.system
    count = streams.beats - beats
    return {
        "beats_per_s": count / took,
        "core_share": cpu_s / took,
        "beat_cpu_us": cpu_s / count * 1e6,
        "beat_late_ms_max": streams.late_s * 1e3,
    }


async def _kill(streams: Streams, process: psutil.Process, number: int) -> dict[str, float]:
    node = streams.nodes[number % (len(streams.nodes) - 1)]
    victim = next(p for p in node.processes.values() if p.rank >= 0)

    async def signal() -> None:
        streams.say(node, node.die(victim, -9))

    return await _move(streams, process, signal)


async def _taint(streams: Streams, process: psutil.Process, number: int) -> dict[str, float]:
    node = streams.nodes[number % (len(streams.nodes) - 1)]
    victim = next(p for p in node.processes.values() if p.rank >= 0)
    place = f"{node.name}/{victim.slot}"

    async def signal() -> None:
        body = {"target": place, "reason": "benchmark"}
        await ask(streams.entry, "/v1/jobs/scale/taint", body)

    async def over() -> None:
        await ask(streams.entry, "/v1/jobs/scale/untaint", {"target": place})

    return await _move(streams, process, signal, over)


async def _move(
    streams: Streams,
    process: psutil.Process,
    signal: Callable[[], Awaitable[None]],
    over: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, float]:
    swaps, parked = streams.swaps + streams.spec.world, streams.parked
    before = process.cpu_times()
    streams.planned_at = None
    began = time.monotonic()
    await signal()
    await streams.until(lambda: streams.swaps >= swaps)
    swapped = time.monotonic()
    assert streams.planned_at is not None
    if over is not None:
        await over()
    await streams.until(lambda: streams.parked > parked)  # the spare that was used is replaced
    after = process.cpu_times()
    return {
        "plan_ms": (streams.planned_at - began) * 1e3,
        "swapped_ms": (swapped - began) * 1e3,
        "cpu_s": after.user + after.system - before.user - before.system,
    }
