"""A newcomer led along a position does exactly what the dead rank would have done next.

The scripts below are small training loops written against the tracker and the loop class alone.
One run is interrupted at every transaction in turn; another starts from the position published
there, and must perform the same transactions, with the same batches, from that one on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keepstep.errors import UsageError
from keepstep.worker.script.batches import Batches, Loop
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.tree import MISSING


class Died(Exception):
    pass


class World:
    """Just enough of a session to run a script: ticks, fences, positions, replay."""

    def __init__(self, die_at: int = -1, start: dict[str, Any] | None = None) -> None:
        self.tracker = Tracker()
        self.die_at = die_at
        self.tick = 0
        self.version = 0
        self.performed: list[tuple[int, str, Any]] = []
        self.published: dict[int, tuple[dict[str, Any], int]] = {}
        if start is not None:
            self.tick, self.version = start["tick"], start["version"]
            self.tracker.walk_to(start["position"])

    @property
    def committed_step(self) -> int:
        return self.version - self.tracker.steps_to_replay

    def run(self, site: str, step: bool, argument: Any) -> Any:
        known = self.tracker.begin(site, step)
        if known is not MISSING:
            return known[0]
        if self.tick == self.die_at:
            raise Died
        self.tracker.in_txn = True
        result = argument() if callable(argument) else argument
        self.published[self.tick + 1] = (self.tracker.position(site, step), self.version + step)
        self.performed.append((self.tick, site, result))
        self.tracker.in_txn = False
        self.tracker.commit(site, step, result)
        self.tick += 1
        self.version += step
        return result

    def step(self, argument: Any, site: str = "train") -> Any:
        return self.run(site, True, argument)

    def section(self, site: str) -> Any:
        return self.run(site, False, site)

    def batches(self, loader: Any) -> Iterator[Any]:
        return Batches(Loop(self.tracker, loader), lambda: None)

    def epochs(self, count: int) -> Iterator[int]:
        level, start = self.tracker.open_epochs()

        def go() -> Iterator[int]:
            if start < 0:
                return
            try:
                at = start
                while at < count:
                    epoch = self.tracker.next_epoch(level, at)
                    if epoch is None:
                        return
                    yield epoch
                    at = epoch + 1
            finally:
                self.tracker.close_epochs(level)

        return go()


def epochs_and_evaluation(w: World) -> None:
    w.section("initial")
    for epoch in w.epochs(3):
        w.section("epoch-start")
        for batch in w.batches([f"{epoch}.{i}" for i in range(3)]):
            w.step(batch)
            if w.committed_step % 2 == 0:
                w.section("mid")
        w.section("epoch-end")
    w.section("final")


def two_loaders_and_break(w: World) -> None:
    for epoch in w.epochs(2):
        for batch in w.batches([f"a{epoch}{i}" for i in range(5)]):
            w.step(batch)
            if w.committed_step % 3 == 0:
                break
        w.section("between")
        for batch in w.batches([f"b{epoch}{i}" for i in range(2)]):
            w.step(batch, "other")


def gan(w: World) -> None:
    for batch in w.batches(list(range(4))):
        w.step(("d", batch), "discriminator")
        w.step(("g", batch), "generator")


def twice_per_batch(w: World) -> None:
    for batch in w.batches(list(range(4))):
        w.step((1, batch))
        w.step((2, batch))


def zipped(w: World) -> None:
    for a, b in zip(w.batches("abcd"), w.batches([1, 2, 3, 4]), strict=True):
        w.step((a, b))
    w.section("end")


def nested(w: World) -> None:
    for outer in w.batches("ab"):
        for inner in w.batches(range(3)):
            w.step((outer, inner))
        w.section("inner done")


def no_loops(w: World) -> None:
    w.section("initial")
    while w.committed_step < 5:
        w.step(w.committed_step)
        if w.committed_step % 2:
            w.section("odd")
    w.section("end")


def pulls_inside_the_step(w: World) -> None:
    micro = w.batches(list(range(12)))
    while w.committed_step < 4:
        w.step(lambda: [next(micro) for _ in range(3)])
        w.section("after")


def drains_inside_the_step(w: World) -> None:
    micro = w.batches(list(range(8)))
    while w.committed_step < 3:
        w.step(lambda: [x for _, x in zip(range(3), micro, strict=False)])  # the last gets two
    w.section("after")
    for batch in w.batches("abc"):
        w.section(batch)


def check_first_then_break(w: World) -> None:
    for batch in w.batches(list(range(100))):
        if w.committed_step >= 4:
            break
        w.step(batch)
    w.section("evaluate")
    w.section("report")


SCRIPTS: list[Callable[[World], None]] = [
    epochs_and_evaluation,
    two_loaders_and_break,
    gan,
    twice_per_batch,
    zipped,
    nested,
    no_loops,
    pulls_inside_the_step,
    drains_inside_the_step,
    check_first_then_break,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.__name__)
def test_newcomer_continues_at_every_tick(script: Callable[[World], None]) -> None:
    whole = World()
    script(whole)
    assert len(whole.performed) >= 5
    for tick in range(1, len(whole.performed)):
        victim = World(die_at=tick)
        with pytest.raises(Died):
            script(victim)
        position, version = victim.published[tick]
        newcomer = World(start={"tick": tick, "version": version, "position": position})
        script(newcomer)
        assert newcomer.performed == whole.performed[tick:], f"after tick {tick}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.__name__)
def test_a_newcomers_newcomer_continues_too(script: Callable[[World], None]) -> None:
    whole = World()
    script(whole)
    for tick in range(1, len(whole.performed) - 1):
        first, second = World(die_at=tick), World()
        with pytest.raises(Died):
            script(first)
        position, version = first.published[tick]
        second = World(
            die_at=tick + 1, start={"tick": tick, "version": version, "position": position}
        )
        with pytest.raises(Died):
            script(second)
        position, version = second.published[tick + 1]
        third = World(start={"tick": tick + 1, "version": version, "position": position})
        script(third)
        assert third.performed == whole.performed[tick + 1 :]


class Retried(World):
    """Every transaction is run twice: the first time a fault hits it before its fence."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[Loop] = []

    def batches(self, loader: Any) -> Iterator[Any]:
        self.loops.append(Loop(self.tracker, loader))
        return Batches(self.loops[-1], lambda: None)

    def run(self, site: str, step: bool, argument: Any) -> Any:
        def twice() -> Any:
            first = argument()
            for loop in self.loops:
                loop.retry()
            assert argument() == first
            return first

        result = super().run(site, step, twice if callable(argument) else argument)
        for loop in self.loops:
            loop.end_transaction()
        return result


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.__name__)
def test_retried_transactions_get_the_same_batches_and_leave_the_same_position(
    script: Callable[[World], None],
) -> None:
    whole, retried = World(), Retried()
    script(whole)
    script(retried)
    assert retried.performed == whole.performed
    assert retried.published == whole.published


def test_a_loader_that_raised_is_not_asked_again_by_a_retry() -> None:
    """Asked again, a generator that raised has just ended: data would be missing silently."""

    def loader() -> Iterator[int]:
        yield 0
        raise OSError("disk")

    tracker = Tracker()
    loop = Loop(tracker, loader())
    batches = Batches(loop, lambda: None)
    tracker.in_txn = True
    for _ in range(2):
        assert next(batches) == 0
        with pytest.raises(OSError, match="disk"):
            next(batches)
        loop.retry()


def test_positions_stay_small_however_long_the_loop() -> None:
    world = World()
    for batch in world.batches(range(500)):
        world.step(batch)
    sizes = [len(repr(p)) for p, _ in world.published.values()]
    assert max(sizes[100:]) < 2 * sizes[0]


def test_a_script_that_goes_another_way_is_told_so() -> None:
    victim = World()
    for batch in victim.batches(range(3)):
        victim.step(batch)
    position, version = victim.published[2]
    newcomer = World(start={"tick": 2, "version": version, "position": position})
    with pytest.raises(UsageError, match="reached section evaluate"):
        newcomer.section("evaluate")


def test_loops_that_take_turns_and_are_begun_anew_are_refused() -> None:
    world = World()
    loaders = [range(3), range(2)]
    iterators = [iter(world.batches(loader)) for loader in loaders]
    with pytest.raises(UsageError, match="goes on in a loop that was over"):
        for turn in range(12):
            batch = next(iterators[turn % 2], None)
            if batch is None:
                iterators[turn % 2] = iter(world.batches(loaders[turn % 2]))
                batch = next(iterators[turn % 2])
            world.step(batch)


class Prepared(World):
    """A newcomer of a planned move: in its first step call it learns where the job is by now."""

    def __init__(self, job: World, at: int, final: int) -> None:
        position, version = job.published[at]
        super().__init__(start={"tick": at, "version": version, "position": position})
        self.job, self.final, self.joined = job, final, False
        self.loops: list[Loop] = []
        self.refused = False

    def batches(self, loader: Any) -> Iterator[Any]:
        self.loops.append(Loop(self.tracker, loader))
        return Batches(self.loops[-1], lambda: None)

    def run(self, site: str, step: bool, argument: Any) -> Any:
        if not self.joined and (step or self.tracker.replay is None):
            self.joined = True
            position, version = self.job.published[self.final]
            if not self.tracker.can_move_on_to(position, site):
                self.refused = True
                raise Died
            self.tracker.results = dict(self.job.tracker.results)
            for mine, theirs in self.tracker.move_on_to(position, site):
                for loop in self.loops:
                    if loop.pos is mine:
                        loop.aim(theirs)
            self.tick, self.version = self.final, version
        return super().run(site, step, argument)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.__name__)
def test_a_prepared_newcomer_is_led_on_to_any_later_position(
    script: Callable[[World], None],
) -> None:
    """Planned moves: it warmed up at one tick while the job trained on, through epochs and loops.
    Where it cannot be led on it says so before anything is changed."""
    job = World()
    script(job)
    led = refused = 0
    for at in range(1, len(job.performed)):
        for final in range(at + 1, len(job.performed)):
            newcomer = Prepared(job, at, final)
            try:
                script(newcomer)
            except Died:
                assert newcomer.refused
                refused += 1
                continue
            led += 1
            assert newcomer.performed == job.performed[final:], (at, final)
    # Nothing can lead it out of a loop of the script's own: that move is tried again from later on.
    assert led > (0 if script is drains_inside_the_step else 3 * refused)
