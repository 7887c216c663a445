"""The protocol of a rank (core/rank), driven at once: each test is the agent and the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from keepstep.core.rank import asks, joining, recovering
from keepstep.core.rank.inbox import Inbox
from keepstep.core.rank.joining import Joining
from keepstep.core.rank.recovering import Recovering
from keepstep.errors import LocalProtocolError
from keepstep.model import commands
from keepstep.model import messages as m
from tests.support.rank import ASSIGN, HERE, THERE, abort, copied, copy, held, ready, swap


@dataclass
class Place:
    tick: int = 7
    version: int = 5
    generation: int = 2
    done: bool = False


class Driver:
    """Does at once what is asked, and notes it. A command of the agent comes when the rank waits
    and finds none: one after the other, as the test has named them."""

    def __init__(
        self, *commands: commands.WorkerCommand | None, place: Place | None = None
    ) -> None:
        """None: the time is up."""
        self.place = place or Place()
        self.inbox = Inbox()
        self.rank = Recovering(self.place, self.inbox)
        self.commands = list(commands)
        self.holds = False
        self.staged = True
        self.copies: list[m.Copied | m.CopyFailed] = []
        self.settled: list[m.CopyFailed | None] = []
        self.log: list[Any] = []

    @property
    def said(self) -> list[m.WorkerMessage]:
        return [one.message for one in self.log if isinstance(one, asks.Say)]

    @property
    def did(self) -> list[str]:
        return [type(one).__name__ for one in self.log if not isinstance(one, asks.Await)]

    def takes(self, command: commands.WorkerCommand) -> None:
        answer = self.inbox.take(command, self.holds).answer
        if answer is not None:
            self.inbox.said(answer)

    def run(self, protocol: asks.Protocol[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                ask = protocol.send(answer)
            except StopIteration as end:
                return end.value
            self.log.append(ask)
            assert len(self.log) < 1000, "it asks for ever"
            answer = self._answer(ask)
            if isinstance(ask, asks.LeaveJob):
                return "left"

    def _answer(self, ask: asks.Ask) -> Any:
        match ask:
            case asks.Say():
                self.inbox.said(ask.message)
            case asks.Await():
                return self._awaited(ask)
            case asks.ShowWaiting():
                self.holds = True
            case asks.ShowBusy() | asks.StopServing():
                self.holds = False
            case asks.Serve():
                self.holds = True
                return held(ask.generation)
            case asks.Write():
                return m.Checkpointed(
                    generation=ask.command.generation, path=ask.command.path, bytes_written=1
                )
            case asks.Enter():
                self.place.generation = ask.command.generation
                return asks.Entered(self.staged, 4)
            case asks.Take():
                return self.copies.pop(0)
            case asks.Settle():
                return self.settled.pop(0) if self.settled else None
        return None

    def _awaited(self, ask: asks.Await) -> commands.WorkerCommand | None:
        while True:
            found = self.inbox.pop(ask.accept)
            if found is not None:
                return found
            if ask.newer_than is not None and self.inbox.aborted(ask.newer_than):
                return None
            assert self.commands, f"waits for ever, after {self.did}"
            command = self.commands.pop(0)
            if command is None:
                assert ask.seconds is not None
                return None
            self.takes(command)


def interrupted(driver: Driver, kind: recovering.Kind = "", **more: bool) -> Any:
    words = {"in_fence": False, "computing": True} | more
    return driver.run(driver.rank.interrupted(kind, "why", **words))


# ---------------------------------------------------------------------- interrupted


def test_roll_back_comes_behind_the_groups_and_before_the_hold() -> None:
    driver = Driver(commands.Decide(generation=3, tick=7), swap(3))
    driver.takes(abort(3))
    assert interrupted(driver) == "RETRY"
    assert driver.did == [
        *("ShowWaiting", "LeaveGroups", "Say", "RollBack", "Serve", "Say"),
        *("Enter", "Say", "Republish", "StopServing"),
    ]
    report, answer, swapped = driver.said
    assert isinstance(report, m.Report) and isinstance(swapped, m.Swapped)
    assert (report.generation, report.tick, report.version) == (3, 7, 5)
    assert (report.in_fence, report.computing, report.done) == (False, True, False)
    assert answer == held(3)
    assert (swapped.generation, swapped.swap_ns) == (3, 4)


def test_a_step_that_all_had_reached_is_applied_and_then_held_for() -> None:
    driver = Driver(commands.Decide(generation=3, tick=8))
    driver.takes(abort(3))
    assert interrupted(driver, in_fence=True) == "COMMIT"
    assert driver.did[-1] == "ShowBusy" and "RollBack" not in driver.did
    assert driver.rank.owes and driver.rank.pay() == 3 and not driver.rank.owes


def test_a_rank_outside_of_its_fence_can_not_be_told_to_apply() -> None:
    driver = Driver(commands.Decide(generation=3, tick=8))
    driver.takes(abort(3))
    with pytest.raises(LocalProtocolError, match="at tick 7 told to go to 8"):
        interrupted(driver)


def test_a_newer_abort_is_answered_in_place_of_the_older_decision() -> None:
    driver = Driver(
        abort(4),
        commands.Decide(generation=3, tick=8),
        commands.Decide(generation=4, tick=7),
        swap(4),
    )
    driver.takes(abort(3))
    assert interrupted(driver, "device", in_fence=True) == "RETRY"
    reports = [word for word in driver.said if isinstance(word, m.Report)]
    assert [report.generation for report in reports] == [3, 4]
    assert [report.error_kind for report in reports] == ["device"] * 2, "it is not answered yet"
    assert [report.in_fence for report in reports] == [True] * 2


def test_an_abort_in_a_hold_is_answered_from_the_boundary() -> None:
    driver = Driver(
        commands.Decide(generation=3, tick=7),
        abort(4),
        commands.Decide(generation=4, tick=7),
        swap(4),
    )
    driver.takes(abort(3))
    assert interrupted(driver, "device", in_fence=True) == "RETRY"
    first, second = (word for word in driver.said if isinstance(word, m.Report))
    assert (first.in_fence, first.error_kind) == (True, "device")
    assert (second.in_fence, second.error_kind, second.error) == (False, "", "")
    assert driver.did.count("StopServing") == 2


def test_a_failure_is_said_until_it_is_answered() -> None:
    driver = Driver(None, None, abort(3), commands.Decide(generation=3, tick=7), swap(3))
    assert interrupted(driver, "user") == "RETRY"
    assert [type(word).__name__ for word in driver.said[:4]] == ["Failure"] * 3 + ["Report"]
    failure = driver.said[0]
    assert isinstance(failure, m.Failure)
    assert (failure.generation, failure.error_kind, failure.version) == (2, "user", 5)
    waits = [one.seconds for one in driver.log if isinstance(one, asks.Await)][:3]
    assert waits == [recovering.FAILURE_AGAIN_S] * 3
    assert asks.ShowWaiting(asking=True) in driver.log


def test_a_broken_connection_is_no_news_if_the_abort_is_on_its_way() -> None:
    driver = Driver(abort(3), commands.Decide(generation=3, tick=7), swap(3))
    assert interrupted(driver, "comm") == "RETRY"
    assert not any(isinstance(word, m.Failure) for word in driver.said)
    (grace,) = [one for one in driver.log[:1] if isinstance(one, asks.Await)]
    assert grace.seconds == recovering.GRACE_S
    late = Driver(None, abort(3), commands.Decide(generation=3, tick=7), swap(3))
    assert interrupted(late, "comm") == "RETRY"
    assert sum(isinstance(word, m.Failure) for word in late.said) == 1


@pytest.mark.parametrize("command", [commands.Leave(generation=3), commands.Finish()])
def test_a_rank_that_waits_for_a_decision_can_be_sent_away(command: commands.WorkerCommand) -> None:
    driver = Driver(commands.Leave(generation=9), command)
    driver.takes(abort(3))
    assert interrupted(driver) == "left"
    assert driver.commands == [], "a Leave of another attempt is none of its business"


# ---------------------------------------------------------------------- holding


def obeys(driver: Driver, generation: int = 3) -> Any:
    return driver.run(driver.rank.hold(generation))


def test_a_release_of_a_later_attempt_ends_a_hold_and_one_of_an_older_does_not() -> None:
    driver = Driver(commands.Release(generation=2), commands.Release(generation=4))
    assert obeys(driver) is None
    assert driver.commands == [] and asks.DropStaged(5) in driver.log
    assert driver.did[-1] == "StopServing"


def test_a_swap_and_a_checkpoint_of_another_attempt_are_not_obeyed() -> None:
    def order(generation: int) -> commands.Checkpoint:
        return commands.Checkpoint(
            generation=generation, path=f"/{generation}", lead=False, tick=7, world=2
        )

    driver = Driver(swap(4), order(4), order(3), swap(3))
    assert obeys(driver) is None
    assert [one.command for one in driver.log if isinstance(one, asks.Write)] == [order(3)]
    written = [word for word in driver.said if isinstance(word, m.Checkpointed)]
    assert [word.path for word in written] == ["/3"]
    assert driver.place.generation == 3


def test_a_leaver_is_told_in_the_generation_in_which_its_move_is_over() -> None:
    driver = Driver(swap(4), commands.Leave(generation=4))
    assert obeys(driver) == "left"


def test_groups_that_an_abort_has_taken_away_are_reported_for_later() -> None:
    driver = Driver(swap(3))
    driver.staged = False
    with pytest.raises(LocalProtocolError, match="no groups are staged for generation 3"):
        obeys(driver)
    driver = Driver()
    driver.staged = False
    driver.takes(swap(3))
    driver.takes(abort(4))
    driver.run(driver.rank.swap(swap(3)))
    assert isinstance(driver.said[-1], m.Swapped), "it is committed all the same"


def test_behind_a_swap_nothing_is_left_of_the_hold_before() -> None:
    driver = Driver()
    for command in (
        commands.Hold(generation=3),
        commands.Snapshot(generation=2, number=6),
        commands.Buddy(address=THERE),
    ):
        driver.takes(command)
    assert (driver.inbox.hold_generation, driver.inbox.snapshot) == (3, 6)
    driver.run(driver.rank.swap(swap(3, same_buddy=True)))
    assert (driver.inbox.hold_generation, driver.inbox.snapshot) == (-1, -1)
    assert driver.inbox.buddy == THERE
    driver.takes(commands.Hold(generation=5))
    driver.run(driver.rank.swap(swap(4)))
    assert driver.inbox.hold_generation == 5, "it belongs to a later attempt"
    assert driver.inbox.buddy == HERE


def test_a_rank_whose_script_is_over_publishes_nothing() -> None:
    driver = Driver(place=Place(done=True))
    driver.run(driver.rank.swap(swap(3)))
    assert "Republish" not in driver.did


# ---------------------------------------------------------------------- numbers differ


def word(number: int = 1) -> m.Diverged:
    return m.Diverged(
        generation=2,
        tick=7,
        version=5,
        agreed=4,
        witness="replicas",
        site="train_step",
        table={"all|weight": "ab"},
        number=number,
    )


def test_only_the_answer_to_this_finding_lets_it_pass() -> None:
    driver = Driver(
        commands.Proceed(generation=2, number=1), None, commands.Proceed(generation=2, number=2)
    )
    assert driver.run(driver.rank.diverged(word(2), joining=False)) is True
    assert driver.commands == [] and driver.did[-1] == "ShowBusy"
    assert driver.did[0] == "ShowWaiting", "before anybody hears of it"


def test_an_abort_takes_a_rank_out_of_its_fence_but_not_a_newcomer() -> None:
    driver = Driver(abort(3))
    assert driver.run(driver.rank.diverged(word(), joining=False)) is False
    assert driver.did[-1] == "ShowBusy"
    newcomer = Driver(abort(3), commands.Proceed(generation=3, number=1))
    assert newcomer.run(newcomer.rank.diverged(word(), joining=True)) is True
    leaver = Driver(commands.Finish())
    assert leaver.run(leaver.rank.diverged(word(), joining=False)) == "left"


def test_a_finding_is_repeated_and_its_table_now_and_then() -> None:
    driver = Driver(*[None] * 5 * 13, commands.Proceed(generation=2, number=1))
    assert driver.run(driver.rank.diverged(word(), joining=False)) is True
    tables = [bool(one.table) for one in driver.said if isinstance(one, m.Diverged)]
    assert tables == [True] * 2 + [False] * 10 + [True] * 2


# ---------------------------------------------------------------------- the end


def test_whoever_is_done_stays_as_a_source_until_all_are() -> None:
    driver = Driver(
        abort(3),
        commands.Decide(generation=3, tick=7),
        swap(3),
        commands.Finish(),
        place=Place(done=True),
    )
    assert driver.run(driver.rank.linger()) is None
    kinds = [type(one).__name__ for one in driver.said]
    assert kinds == ["Done", "Report", "Held", "Swapped", "Done"]
    (report,) = (one for one in driver.said if isinstance(one, m.Report))
    assert report.done and not report.computing


# ---------------------------------------------------------------------- joining


def failed(generation: int) -> m.CopyFailed:
    return m.CopyFailed(generation=generation, reason="source-lost", error="gone")


def test_from_its_park_to_its_first_step() -> None:
    driver = Driver(
        ASSIGN,
        commands.Position(generation=3, tick=7, final=True, holders=[]),
        copy(3),
        swap(3),
    )
    parked = m.Parked(where="train.py:7", warm_ns=1)
    assert driver.run(joining.park(driver.inbox, parked)) == ASSIGN
    assert driver.inbox.buddy == HERE
    newcomer = Joining(driver.inbox, ASSIGN)
    assert driver.run(newcomer.arrive()).tick == 7
    driver.copies = [copied(3)]
    driver.run(newcomer.ready(ready()))
    assert driver.run(newcomer.enter()) == swap(3)
    assert driver.said == [parked, m.Arrived(generation=3), ready(), copied(3)]


def test_a_buddy_that_it_was_told_of_stays() -> None:
    driver = Driver(commands.Buddy(address=THERE), ASSIGN)
    driver.run(joining.assigned(driver.inbox))
    assert driver.inbox.buddy == THERE


def test_of_two_assignments_the_buddy_of_the_second_counts() -> None:
    """The first came to nothing: nobody could say what the rank has been told before."""
    again = commands.Assign(rank=1, generation=4, master=HERE, buddy=THERE)
    driver = Driver(ASSIGN, again)
    for _ in range(2):
        driver.run(joining.assigned(driver.inbox))
    assert driver.inbox.buddy == THERE


def test_a_copy_that_fails_is_followed_by_another() -> None:
    driver = Driver(copy(3), copy(4))
    driver.copies = [failed(3), copied(4)]
    newcomer = Joining(driver.inbox, ASSIGN)
    driver.run(newcomer.ready(ready()))
    assert driver.said == [ready(), failed(3)], "Copied is said at the entry, and not before"


def test_an_abort_ends_the_attempt_and_not_the_newcomer() -> None:
    driver = Driver(copy(3), swap(2), abort(4), copy(4), swap(4))
    driver.copies = [copied(3), copied(4)]
    newcomer = Joining(driver.inbox, ASSIGN)
    driver.run(newcomer.ready(ready()))
    assert driver.run(newcomer.enter()) == swap(4)
    assert driver.said[1:] == [copied(3), copied(4)]


def test_what_the_way_has_changed_is_copied_again_and_may_fail() -> None:
    driver = Driver(copy(3), copy(4), swap(4))
    driver.copies, driver.settled = [copied(3), copied(4)], [failed(3), None]
    newcomer = Joining(driver.inbox, ASSIGN)
    driver.run(newcomer.ready(ready()))
    assert driver.run(newcomer.enter()) == swap(4)
    assert driver.said[1:] == [failed(3), copied(4)]


@pytest.mark.parametrize("command", [commands.Leave(generation=3), commands.Finish()])
def test_a_newcomer_can_be_sent_away_wherever_it_waits(command: commands.WorkerCommand) -> None:
    def waits(inbox: Inbox) -> list[Callable[[], asks.Protocol[Any]]]:
        newcomer, installed = Joining(inbox, ASSIGN), Joining(inbox, ASSIGN)
        installed._installed = copy(3), copied(3)
        return [
            lambda: joining.assigned(inbox),
            newcomer.arrive,
            lambda: newcomer.ready(ready()),
            installed.enter,
        ]

    for index in range(4):
        driver = Driver(command)
        assert driver.run(waits(driver.inbox)[index]()) == "left"
