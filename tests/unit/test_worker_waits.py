"""What a rank does while it waits: for another buddy, for its next groups, for a Swap."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from keepstep.core.rank import asks, recovering
from keepstep.core.rank.inbox import Inbox
from keepstep.model import commands, wire
from keepstep.model import messages as m
from keepstep.worker.device import cuda
from keepstep.worker.groups import stager as stager_module
from keepstep.worker.groups.stager import Stager
from keepstep.worker.line import channel as channel_module
from keepstep.worker.line.channel import Channel
from keepstep.worker.line.page import Page
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.step import failures
from keepstep.worker.step import publishing as publishing_module
from keepstep.worker.step.publishing import Publisher

OLD, NEW = m.Address("h", 1), m.Address("h", 2)


@pytest.fixture
def page() -> Iterator[Page]:
    fd = os.memfd_create("page")
    yield Page(fd)
    os.close(fd)


@pytest.fixture
def channel(page: Page, monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """One that reads nothing by itself: its thread would end the process with the line."""
    monkeypatch.setattr(Channel, "_run", lambda _: None)
    mine, theirs = socket.socketpair()
    welcome = commands.Welcome(
        job="j", node="n", worker="w", token="t", blobs=OLD, stall_timeout_ns=1, interface="::1"
    )
    mine.sendall(wire.frame(welcome))
    with mine:
        yield Channel(theirs.detach(), page)


def swap(address: m.Address) -> commands.Swap:
    return commands.Swap(generation=3, buddy=address)


def test_a_swap_said_again_brings_its_buddy(channel: Channel) -> None:
    for command in (swap(OLD), commands.Swap(generation=2, buddy=OLD), swap(NEW)):
        channel._take(command)
    assert channel.inbox.waiting == [commands.Swap(generation=2, buddy=OLD), swap(NEW)]
    channel.send(m.Swapped(generation=3, swap_ns=1))
    channel._take(swap(OLD))
    assert channel.inbox.buddy == OLD
    assert len(channel.inbox.waiting) == 2, "it is done with"


def test_an_abort_is_repeated_until_the_rank_has_left_its_groups(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that was just being made is not cut by the first."""
    aborts: list[commands.Abort] = []
    now = [100.0]
    channel.on_abort = aborts.append
    monkeypatch.setattr(channel_module.time, "monotonic", lambda: now[0])
    channel._take(commands.Abort(generation=3, reason=""))
    channel._insist()
    assert len(aborts) == 1
    now[0] += channel_module.ABORT_AGAIN_S
    channel._insist()
    channel._insist()
    assert len(aborts) == 2
    report = m.Report(generation=3, tick=1, version=1, in_fence=False, computing=True)
    channel.send(report)
    now[0] += channel_module.ABORT_AGAIN_S
    channel._insist()
    assert len(aborts) == 2, "its groups are gone, and the next ones may be on their way"


def test_what_the_script_raises_does_not_end_a_protocol(channel: Channel) -> None:
    """A `load_state_dict` that runs into the end of an iterator is called in a roll-back."""
    rolls_back = recovering.Recovering(
        SimpleNamespace(tick=1, version=1, generation=0, done=False), channel.inbox
    )
    protocol = rolls_back.interrupted("", "", in_fence=True, computing=True)
    channel._take(commands.Abort(generation=1, reason=""))
    channel._take(commands.Decide(generation=1, tick=1))

    def perform(ask: asks.Ask) -> None:
        if isinstance(ask, asks.RollBack):
            next(iter(()))

    with pytest.raises(StopIteration):
        channel.drive(protocol, perform)


def test_keepstep_can_be_imported_whatever_device_is_the_default() -> None:
    code = "import torch; torch.set_default_device('meta'); import keepstep.worker.api.session"
    subprocess.run([sys.executable, "-c", code], check=True)


def publishing(page: Page, answers: list[Any]) -> tuple[Publisher, list[tuple[int, bool]]]:
    """One whose buddy answers like this, and what its page shows while it waits."""
    rank, shown = MagicMock(spec=RankFacts), []
    rank.page, rank.rank, rank.generation = page, 0, 3
    rank.welcome, rank.channel = MagicMock(token="t"), MagicMock()
    rank.channel.inbox.buddy = OLD
    rank.aborted = lambda: False

    def wait_until(_condition: Any, _timeout_s: float) -> bool:
        shown.append((page.get("asked_ns"), bool(page.get("hold"))))
        return False

    rank.channel.wait_until = wait_until
    publisher = Publisher(rank, MagicMock())
    publisher._line = MagicMock()
    publisher._line.put.side_effect = answers
    return publisher, shown


def test_a_rank_without_a_buddy_holds_and_shows_that_it_asks(page: Page) -> None:
    publisher, shown = publishing(page, [OSError("refused"), OSError("refused"), None])
    publisher.publish(7, b"side state")
    asked = [at for at, hold in shown if hold]
    assert len(asked) == len(shown) == 2 * publishing_module.BUDDY_AGAIN_S
    assert asked[0] > 0 and sorted(set(asked)) == asked, "each time anew"
    assert (page.get("hold"), page.get("asked_ns")) == (0, 0)


def test_a_hold_that_was_told_is_not_ended_by_publishing(page: Page) -> None:
    publisher, _ = publishing(page, [None])
    page.set("hold", 1)
    publisher.publish(7, b"side state")
    assert page.get("hold") == 1


def test_groups_of_a_later_attempt_outlive_the_release_of_an_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: dict[int, MagicMock] = {}
    monkeypatch.setattr(
        stager_module.groups,
        "stage",
        lambda generation, *_: built.setdefault(generation, MagicMock()),
    )
    channel = MagicMock(inbox=Inbox())
    stager = Stager(channel, 0, 2)
    for generation in (1, 2):
        stager._staging.begin(generation)
        stager._build(commands.Stage(generation=generation, store=OLD))
    stager._build(commands.Stage(generation=1, store=OLD))  # was asked for first, and took longer
    stager.discard(below=2)
    assert stager.take(2) is built[2]
    built[2].discard.assert_not_called()


class Never:
    def query(self) -> bool:
        return False


def test_waiting_for_a_device_ends_when_its_communicator_has_failed() -> None:
    before = cuda._trouble
    cuda.ask_in_waits(lambda: "NCCL: remote process exited or there was a network error")
    try:
        with pytest.raises(ConnectionResetError, match="network error") as caught:
            cuda.wait_for(Never(), lambda: False)
    finally:
        cuda.ask_in_waits(before)
    assert failures.classify(caught.value) == "comm"


def test_waiting_for_a_device_ends_with_an_abort() -> None:
    with pytest.raises(ConnectionAbortedError):
        cuda.wait_for(Never(), lambda: True)
