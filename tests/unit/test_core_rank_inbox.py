"""What a rank keeps of what its agent says, and of the groups that it builds (core/rank)."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.rank.inbox import Inbox
from keepstep.core.rank.staging import Staging
from keepstep.model import commands
from keepstep.model import messages as m
from tests.support.rank import ASSIGN, HERE, THERE, abort, copied, copy, held, ready, swap

# ---------------------------------------------------------------------- staging


def test_groups_of_a_later_attempt_outlive_the_release_of_an_older_one() -> None:
    staging: Staging[str] = Staging()
    assert staging.begin(1) and staging.begin(2)
    assert staging.built(1, "one", -1) == (False, "one"), "a later one is asked for"
    assert staging.built(2, "two", -1) == (True, None)
    assert staging.drop(below=2) is None and staging.take(1) is None
    assert staging.take(2) == "two" and staging.take(2) is None


def test_groups_are_built_once_until_they_fail() -> None:
    staging: Staging[str] = Staging()
    assert staging.begin(1) and not staging.begin(1)
    assert staging.failed(1, -1), "it is said"
    assert staging.begin(1), "and may be tried again"
    assert not staging.failed(1, aborted=2), "nobody waits for it any more"
    assert not staging.failed(0, -1)
    assert staging.begin(3) and staging.built(3, "three", aborted=4) == (False, "three")
    assert staging.built(3, "a", -1) == (True, None) and staging.built(3, "b", -1) == (True, "a")
    assert staging.drop(below=4) == "b" and staging.ready is None


# ---------------------------------------------------------------------- inbox


def report(generation: int) -> m.Report:
    return m.Report(generation=generation, tick=1, version=1, in_fence=False, computing=False)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (abort(3), report(3)),
        (commands.Decide(generation=3, tick=7), held(3)),
        (commands.Hold(generation=3), held(3)),
        (commands.Stage(generation=3, store=HERE), m.Staged(generation=3)),
        (copy(3), copied(3)),
        (swap(3), m.Swapped(generation=3, swap_ns=1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_was_answered_is_answered_again_in_its_generation_only(
    command: Any, answer: Any
) -> None:
    inbox = Inbox()
    first, _ = inbox.take(command, True)
    assert first in ("kept", "now")
    inbox.said(answer)
    waiting = len(inbox.waiting)
    assert inbox.take(command, True) == ("again", answer)
    assert len(inbox.waiting) == waiting, "it is done with"
    later = type(command)(
        **{name: getattr(command, name) for name in command.__struct_fields__} | {"generation": 4}
    )
    assert inbox.take(later, True).verdict in ("kept", "now")


def test_a_newcomer_answers_once_whatever_the_generation() -> None:
    inbox = Inbox()
    assert inbox.take(ASSIGN, False).verdict == "kept"
    inbox.said(m.Arrived(generation=3))
    again = commands.Assign(rank=1, generation=9, master=HERE, buddy=HERE)
    assert inbox.take(again, False) == ("again", m.Arrived(generation=3))
    inbox.said(ready())
    position = commands.Position(generation=9, tick=7, final=True, holders=[])
    assert inbox.take(position, False) == ("again", ready())


def test_a_process_is_one_rank_in_its_life() -> None:
    inbox = Inbox()
    assert inbox.take(ASSIGN, False).verdict == "kept"
    other = commands.Assign(rank=2, generation=4, master=HERE, buddy=None)
    assert inbox.take(other, False).verdict == "wrong"


def test_a_hold_after_its_release_is_a_new_one() -> None:
    inbox = Inbox()
    inbox.said(held(3))
    assert inbox.take(commands.Hold(generation=3), holds=False).verdict == "kept"
    assert inbox.hold_generation == 3


def test_a_snapshot_is_known_by_its_number() -> None:
    inbox = Inbox()
    saved = m.Saved(number=4, tick=7, version=5, snapshot_ns=1, write_ns=1, bytes_written=1)
    inbox.said(saved)
    assert inbox.take(commands.Snapshot(generation=9, number=4), False) == ("again", saved)
    assert inbox.take(commands.Snapshot(generation=9, number=5), False).verdict == "kept"
    assert inbox.snapshot == 5


def test_an_abort_drops_what_is_older_but_no_facts() -> None:
    inbox = Inbox()
    facts = [
        swap(3),
        ASSIGN,
        commands.Position(generation=3, tick=7, final=True, holders=[]),
        commands.Leave(generation=3),
    ]
    for command in (commands.Decide(generation=3, tick=7), copy(3), *facts, commands.Finish()):
        inbox.take(command, False)
    inbox.take(commands.Hold(generation=3), False)
    inbox.take(commands.Snapshot(generation=3, number=1), False)
    assert inbox.take(abort(4), False).verdict == "now"
    assert inbox.waiting == [*facts, commands.Finish()]
    assert (inbox.hold_generation, inbox.snapshot, inbox.abort_generation) == (-1, -1, 4)
    assert inbox.take(commands.Decide(generation=3, tick=7), False).verdict == "stale"
    assert inbox.take(commands.Decide(generation=4, tick=7), False).verdict == "kept"


def test_a_swap_said_again_replaces_the_first() -> None:
    inbox = Inbox()
    for command in (swap(3), swap(2), commands.Swap(generation=3, buddy=THERE)):
        inbox.take(command, False)
    assert inbox.waiting == [swap(2), commands.Swap(generation=3, buddy=THERE)]
    inbox.said(m.Swapped(generation=3, swap_ns=1))
    inbox.take(commands.Swap(generation=3, buddy=HERE), False)
    assert inbox.buddy == HERE, "and its buddy counts even if it was obeyed before"


def test_a_release_takes_back_the_holds_up_to_it() -> None:
    inbox = Inbox()
    inbox.take(commands.Hold(generation=4), False)
    inbox.take(commands.Release(generation=3), False)
    assert inbox.hold_generation == 4
    inbox.take(commands.Release(generation=4), False)
    assert inbox.hold_generation == -1


@pytest.mark.parametrize(
    "command",
    [
        commands.Seal(number=1, tick=7, world=2),
        commands.Inspect(number=1),
        commands.Arm(inject="i", action="kill", step=1, point="x"),
        commands.Stage(generation=3, store=HERE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_some_do_not_wait_for_the_main_thread(command: commands.WorkerCommand) -> None:
    inbox = Inbox()
    assert inbox.take(command, False).verdict == "now" and inbox.waiting == []


def test_an_abort_is_unreported_until_its_report_or_the_next_groups() -> None:
    inbox = Inbox()
    inbox.take(abort(3), False)
    inbox.take(abort(4), False)
    inbox.said(report(3))
    assert inbox.unreported() == abort(4)
    inbox.said(report(4))
    assert inbox.unreported() is None
    inbox.take(abort(5), False)
    inbox.take(commands.Stage(generation=5, store=HERE), False)
    assert inbox.unreported() is None
