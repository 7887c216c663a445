"""What a rank does whose witness has found that numbers differ: it says so, and waits."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from keepstep.core.rank import recovering
from keepstep.model import commands, wire
from keepstep.model import messages as m
from keepstep.worker.line.channel import Channel
from keepstep.worker.line.page import Page
from keepstep.worker.step import recovery as recovery_module
from keepstep.worker.step.recovery import Recovery

NOWHERE = m.Address("h", 1)


class Process:
    assigned: commands.Assign | None = None


class Seat:
    """As much of one as a wait needs."""

    def __init__(self, channel: Channel, page: Page) -> None:
        self.channel, self.page, self.process = channel, page, Process()
        self.tick, self.version, self.generation, self.done = 7, 5, 2, False

    def aborted(self) -> bool:
        return self.channel.inbox.aborted(self.generation)


class Agent:
    """The other end of the line."""

    def __init__(self, mine: socket.socket) -> None:
        self._mine = mine
        self._mine.settimeout(20)
        self._decoder = msgspec.msgpack.Decoder(m.WorkerMessage)

    def heard(self) -> m.Diverged:
        length = wire.body_length(self._exactly(wire.HEADER.size))
        message = wire.decode(self._decoder, self._exactly(length))
        assert isinstance(message, m.Diverged)
        return message

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._mine.recv(count - len(data))
            assert part
            data += part
        return data

    def drain(self, thread: threading.Thread) -> None:
        """Whatever it says until it goes on: a full line would keep it from that."""
        self._mine.settimeout(0.5)
        while thread.is_alive():
            with contextlib.suppress(TimeoutError):
                self._mine.recv(1 << 16)

    def says(self, *commands: commands.WorkerCommand) -> None:
        self._mine.sendall(b"".join(wire.frame(command) for command in commands))


@pytest.fixture
def page() -> Iterator[Page]:
    fd = os.memfd_create("page")
    yield Page(fd)
    os.close(fd)


@pytest.fixture
def live(page: Page, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Seat, Agent]]:
    """A real line with a real thread behind it. The thread ends with the test, not the process."""
    over = threading.Event()

    def run(channel: Channel) -> None:
        while not over.is_set():
            try:
                channel._take(channel._read())
            except (SystemExit, OSError):
                return

    def ends(_: int) -> None:
        raise SystemExit

    monkeypatch.setattr(Channel, "_run", run)
    monkeypatch.setattr("keepstep.worker.line.channel.os._exit", ends)
    mine, theirs = socket.socketpair()
    mine.sendall(
        wire.frame(
            commands.Welcome(
                job="j",
                node="n",
                worker="w",
                token="t",
                blobs=NOWHERE,
                stall_timeout_ns=1,
                interface="::1",
            )
        )
    )
    channel = Channel(theirs.detach(), page)
    yield Seat(channel, page), Agent(mine)
    over.set()
    mine.close()
    channel._thread.join(10)


def in_thread(recovery: Recovery, **more: Any) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            recovery.diverged("replicas", "train_step", agreed=4, **more)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, raised


def test_it_says_what_it_has_and_goes_on_when_it_is_told_to(live: tuple[Any, Agent]) -> None:
    rank, agent = live
    rank.page.where("fence")
    thread, raised = in_thread(Recovery(rank), table={"all|weight": "ab"}, words="other bytes")
    word = agent.heard()
    assert (word.generation, word.tick, word.version, word.agreed) == (2, 7, 5, 4)
    assert (word.number, word.words, word.table) == (1, "other bytes", {"all|weight": "ab"})
    assert rank.page.get("hold") == 1 and rank.page.get("asked_ns") > 0, "it is no hang"
    agent.says(commands.Proceed(generation=9, number=1))
    thread.join(10)
    assert not thread.is_alive() and not raised
    assert rank.page.get("hold") == rank.page.get("asked_ns") == 0
    assert rank.page.get("where") == 5, "in its fence again"


def test_an_answer_that_was_said_twice_does_not_let_the_next_finding_pass(
    live: tuple[Any, Agent],
) -> None:
    rank, agent = live
    recovery = Recovery(rank)
    first, _ = in_thread(recovery)
    agent.heard()
    agent.says(commands.Proceed(generation=2, number=1), commands.Proceed(generation=2, number=1))
    first.join(10)
    second, raised = in_thread(recovery)
    assert agent.heard().number == 2
    agent.says(commands.Proceed(generation=2, number=1))
    second.join(1.5)
    assert second.is_alive()
    agent.says(commands.Proceed(generation=2, number=2))
    second.join(10)
    assert not second.is_alive() and not raised


def test_it_repeats_itself_and_the_table_only_now_and_then(
    live: tuple[Any, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovering, "DIVERGED_AGAIN_S", 0)
    rank, agent = live
    thread, _ = in_thread(Recovery(rank), table={"all|weight": "ab"}, words="other bytes")
    words = [agent.heard() for _ in range(14)]
    assert [bool(word.table) for word in words] == [True] * 2 + [False] * 10 + [True] * 2
    assert {(word.number, word.words) for word in words} == {(1, "other bytes")}
    monkeypatch.setattr(recovering, "DIVERGED_AGAIN_S", 5)
    agent.says(commands.Proceed(generation=2, number=1))
    agent.drain(thread)
    assert not thread.is_alive()


def test_an_abort_takes_it_out_of_its_fence(live: tuple[Any, Agent]) -> None:
    rank, agent = live
    thread, raised = in_thread(Recovery(rank))
    agent.heard()
    agent.says(commands.Abort(generation=3, reason="rank 1 died"))
    thread.join(10)
    assert [type(error) for error in raised] == [ConnectionAbortedError]
    assert rank.page.get("hold") == 0


def test_a_newcomer_waits_through_aborts_and_speaks_for_its_attempt(
    live: tuple[Any, Agent],
) -> None:
    rank, agent = live
    rank.process.assigned = commands.Assign(rank=1, generation=3, master=NOWHERE, buddy=None)
    thread, raised = in_thread(Recovery(rank))
    assert agent.heard().generation == 3
    agent.says(commands.Abort(generation=4, reason="rank 1 died"))
    thread.join(1.5)
    assert thread.is_alive()
    agent.says(commands.Proceed(generation=4, number=1))
    thread.join(10)
    assert not thread.is_alive() and not raised


def test_tables_are_bounded(live: tuple[Any, Agent]) -> None:
    rank, agent = live
    table = {f"all|{n:06}{'x' * 500}": "v" * 500 for n in range(m.TABLE_ENTRIES_MAX + 10)}
    thread, _ = in_thread(Recovery(rank), table=table, words="w" * 10_000)
    word = agent.heard()
    assert len(word.table) == m.TABLE_ENTRIES_MAX
    assert max(map(len, word.table)) == m.TABLE_NAME_CHARS_MAX
    assert set(map(len, word.table.values())) == {m.TABLE_VALUE_CHARS_MAX}
    assert len(word.words) == recovery_module.TEXT_CHARS_MAX
    agent.says(commands.Proceed(generation=2, number=1))
    thread.join(10)
    assert not thread.is_alive()
