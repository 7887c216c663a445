"""Where a rank stands in its script, so that another process can walk to the same place.

Theory of operation
-------------------
A newcomer runs the user's script from the top and must arrive where the dead rank was: in the
same epoch, the same loop, with the same batch, between the same two transactions. It cannot jump;
it can only be *led* by the answers it gets from `ks.epochs`, `ks.batches`, `@ks.step` and
`@ks.section`. The position is therefore a tree that mirrors the script's control flow:

    program > epochs (epoch e) > loops (one per ks.batches, with counts) > ...

Every open level keeps a log of what was *finished* in its current iteration: transactions, and
scopes (loops, epochs) that were left. A new epoch or a new batch clears the log of its level, so
the tree stays small however long the job runs.

To walk to a position is to replay it: a transaction found in the log returns at once with its
recorded result, a finished scope yields nothing, the open one yields its current epoch or batch
again. The walk ends with the last committed transaction, which is always the last entry of the
deepest level, because positions are taken at fences.

One finished scope is special: the one that holds the last committed *step*. It is kept whole
("frozen") and re-entered, because the newcomer needs one call of the step function with real
arguments to warm up.

A script may hold batches back: a prefetcher pulls the next one before it hands out the last. How
many shows when the first step of a loop begins (`ahead`). The newcomer then gets as many earlier
ones first, and a loop that has come to its end stays open for the steps that are still to come.

Nothing here does I/O or knows torch. `Tree` values are plain dicts and lists (worker.codec).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from keepstep.errors import UsageError
from keepstep.worker.script.tree import (
    MISSING,
    Encoded,
    Level,
    LoopPos,
    Replay,
    Scope,
    Seek,
    Tree,
    Txn,
    level_from,
)

LOG_ENTRIES_MAX: Final = 10_000
LOG_BYTES_MAX: Final = 4 << 20  # of results: they are part of every position


class _Before(NamedTuple):
    """What closing a scope changes, as it was before the first one a transaction closed."""

    stack: list[Level]
    levels: list[tuple[Level, Level | None, list[Txn | Scope]]]  # with child and log
    loops: list[tuple[LoopPos, bool]]  # with closed
    frozen: tuple[Scope, Level | None] | None
    replay: tuple[list[tuple[Level, int]], Seek | None] | None


class Tracker:
    """The live position of this rank, and the walk to a given one.

    One method for each thing that the script may do next, and for each answer: hence so many."""

    def __init__(self) -> None:
        self.root = Level("program")
        self.stack: list[Level] = [self.root]
        self.replay: Replay | None = None
        self.in_txn = False
        self.behind_fence = False
        self.finishing = False  # a newcomer makes the rest of a step that others have behind them
        self.results: dict[str, Any] = {}  # newest of every step and section, by site
        self.unkept: dict[str, str] = {}  # site -> why its result cannot travel
        self._siblings_to_skip = 0
        self._skipped: bytes | None = None
        self._frozen: Scope | None = None
        self._before: _Before | None = None

    # ------------------------------------------------------------------ transactions

    def begin(self, site: str, step: bool) -> Any:
        """MISSING: run it. Anything else in a one-tuple: it is done already, with that result."""
        self._before = None
        if self.replay is not None:
            return self._replay_txn(site, step)
        level = self.stack[-1]
        if level.kind == "loops" and not level.log:
            for loop in level.loops:
                if loop.ahead < 0:
                    loop.ahead = max(loop.outside - 1, 0)
                loop.varies = loop.varies or loop.first not in ("", site)
                loop.first = site
        if step:
            self._truncate(site)
        self._refuse_too_much(site)
        return MISSING

    def _refuse_too_much(self, site: str) -> None:
        log = self.stack[-1].log
        size = sum(entry.size for entry in log)
        if size > LOG_BYTES_MAX:
            raise UsageError(
                f"{len(log)} transactions inside one batch or epoch at {site} have results and "
                f"variables of {size >> 20} MiB: a newcomer must get all of them",
                hint="return less, or put the loop around these sections into one section",
            )
        if len(log) >= LOG_ENTRIES_MAX:
            raise UsageError(
                f"more than {LOG_ENTRIES_MAX} transactions inside one batch or epoch at {site}",
                hint="iterate with ks.batches or ks.epochs so that positions stay small",
            )

    def _truncate(self, site: str) -> None:
        """A loop that is not ours (`while ks.committed_step < n`) runs the same step again: only
        the latest round is needed, since its position hangs on the committed step."""
        level = self.stack[-1]
        if level.kind == "loops" and any(loop.outside for loop in level.loops):
            return
        for index in range(len(level.log) - 1, -1, -1):
            entry = level.log[index]
            if isinstance(entry, Txn) and entry.step and entry.site == site:
                del level.log[index:]
                return

    def position(
        self, site: str, step: bool, result: bytes | None = None, variables: bytes | None = None
    ) -> Tree:
        """The tree as it will be when the transaction in progress has committed; with its encoded
        result, if that is known already."""
        level = self.stack[-1]
        frozen, self_frozen = self._frozen, None
        if step and frozen is not None:
            self_frozen, frozen.frozen = frozen.frozen, None
        level.log.append(Txn(site, step, result, variables))
        try:
            return self.root.tree()
        finally:
            level.log.pop()
            if step and frozen is not None:
                frozen.frozen = self_frozen

    def learned(
        self,
        result: bytes | Callable[[], bytes] | None,
        variables: bytes | None,
        mark: str = "",
    ) -> None:
        """On a newcomer: what has become known of the last transaction since it was published."""
        entry = self.stack[-1].log[-1] if self.stack[-1].log else None
        if isinstance(entry, Txn):
            entry.result, entry.variables, entry.mark = result, variables, mark

    def commit(
        self,
        site: str,
        step: bool,
        result: Any,
        encoded: bytes | Callable[[], bytes] | None = None,
        variables: bytes | None = None,
        mark: str = "",
    ) -> None:
        self._before = None
        self.stack[-1].log.append(Txn(site, step, encoded, variables, mark))
        self.results.pop(site, None)
        if result is not MISSING:
            self.results[site] = result
        if step and self._frozen is not None:
            self._frozen.frozen = None
            self._frozen = None

    # ------------------------------------------------------------------ scopes

    def open_epochs(self) -> tuple[Level, int]:
        """A ks.epochs loop begins; returns its level and the first epoch, or -1: skip it all."""
        level = Level("epochs")
        start = 0
        if self.replay is not None and self.replay.seek is not None:
            return level, -1
        if self.replay is not None:
            target = self._replay_scope("epochs")
            if target is None:
                return level, -1
            start = target.epoch
        self._push(level)
        return level, start

    def next_epoch(self, level: Level, epoch: int) -> int | None:
        """The epoch that comes now, usually `epoch`; None: the loop is over."""
        self._pop_to(level)
        seek = self.replay.seek if self.replay is not None else None
        if self.replay is not None and seek is not None:
            if self._doomed(level):
                return None
            if seek.until == "epoch" and seek.level is level:
                epoch = self.replay.path[-1][0].epoch
                self.replay.seek = None
        level.epoch = epoch
        level.log.clear()
        return epoch

    def open_loop(self) -> tuple[Level, LoopPos, LoopPos | None]:
        """A ks.batches loop begins; returns its level, its live position and, when it is to be
        re-entered, the position to walk to. A loop to be skipped is marked closed."""
        loop = LoopPos()
        self._close_ended()
        top = self.stack[-1]
        if self._siblings_to_skip:
            self._siblings_to_skip -= 1
            loop.closed = True
            return Level("loops", loops=[loop]), loop, None
        if self.replay is not None and self.replay.seek is not None:
            loop.closed = True  # a loop on the way to somewhere later: nothing is left of it
            return Level("loops", loops=[loop]), loop, None
        if top.kind == "loops" and not any(x.begun for x in top.loops):
            sibling = len(top.loops)  # zip(ks.batches(a), ks.batches(b))
            top.loops.append(loop)
            target = self.replay.path[-1][0] if self.replay is not None else None
            if target is not None and target.kind == "loops" and sibling < len(target.loops):
                loop.closed = target.loops[sibling].closed
                return top, loop, target.loops[sibling]
            return top, loop, None
        level = Level("loops", loops=[loop])
        if self.replay is not None:
            target = self._replay_scope("loops")
            if target is None:
                loop.closed = True
                return level, loop, None
            self._push(level)
            loop.closed = target.loops[0].closed and len(target.loops) > 1
            return level, loop, target.loops[0]
        self._push(level)
        return level, loop, None

    def _close_ended(self) -> None:
        """A loop whose steps are all done; not one whose sibling in a zip is still to open."""
        top = self.stack[-1]
        over = all(x.ended or x.closed for x in top.loops)
        if not self.in_txn and over and any(x.ended for x in top.loops):
            for loop in top.loops:
                loop.closed = True
            self._close(top)

    def yielded(self, level: Level, loop: LoopPos) -> None:
        loop.yields += 1
        loop.begun = True
        if self.in_txn:
            return
        loop.outside = loop.yields
        if level not in self.stack:
            raise UsageError(
                "ks.batches goes on in a loop that was over when another one began or ended",
                hint="open loops one inside the other, or side by side: zip(ks.batches(a), "
                "ks.batches(b))",
            )
        self._pop_to(level)
        level.log.clear()
        seek = self.replay.seek if self.replay is not None else None
        if self.replay is not None and seek is not None and seek.level is level:
            there = self.replay.path[-1][0].loops
            if all(x.outside >= y.outside for x, y in zip(level.loops, there, strict=False)):
                self.replay.seek = None

    def over(self, level: Level) -> bool:
        """Is this loop to end now, because the target is beyond it?"""
        return self.replay is not None and self._doomed(level)

    def _doomed(self, level: Level) -> bool:
        """Inside the scope that a seek wants closed, or below the one it wants to turn over."""
        assert self.replay is not None
        seek = self.replay.seek
        if seek is None or level not in self.stack or seek.level not in self.stack:
            return False
        depth, sought = self.stack.index(level), self.stack.index(seek.level)
        return depth > sought or (depth == sought and seek.until == "close")

    def close_loop(self, level: Level, loop: LoopPos) -> None:
        self._remember()
        loop.closed = True
        if level not in self.stack or not all(x.closed for x in level.loops):
            return
        self._close(level)

    def left(self, level: Level, variables: Callable[[], bytes]) -> None:
        """A loop came to its end outside of transactions: with these variables of the script."""
        log = self.stack[-1].log
        if level not in self.stack and log and isinstance(log[-1], Scope) and self.replay is None:
            log[-1].variables = variables()

    def skipped(self) -> bytes | None:
        """Variables of the script at the end of the scope that was skipped just now."""
        variables, self._skipped = self._skipped, None
        return variables

    def _remember(self) -> None:
        if not self.in_txn or self._before is not None:
            return
        frozen, replay = self._frozen, self.replay
        self._before = _Before(
            stack=list(self.stack),
            levels=[(x, x.child, list(x.log)) for x in self.stack],
            loops=[(loop, loop.closed) for x in self.stack for loop in x.loops],
            frozen=(frozen, frozen.frozen) if frozen is not None else None,
            replay=(list(replay.path), replay.seek) if replay is not None else None,
        )

    def reopen(self) -> None:
        """A transaction that pulled a loop's last batch is retried: the loop is open again."""
        before, self._before = self._before, None
        if before is None:
            return
        self.stack = before.stack
        for level, child, log in before.levels:
            level.child, level.log = child, log
        for loop, closed in before.loops:
            loop.closed = closed
        self._frozen, frozen = before.frozen or (None, None)
        if self._frozen is not None:
            self._frozen.frozen = frozen
        if before.replay is not None and self.replay is not None:
            self.replay.path, self.replay.seek = before.replay

    def close_epochs(self, level: Level) -> None:
        if level in self.stack:
            self._close(level)

    def _push(self, level: Level) -> None:
        self.stack[-1].child = level
        self.stack.append(level)

    def _pop_to(self, level: Level) -> None:
        while self.stack[-1] is not level:
            self._close(self.stack[-1])

    def _close(self, level: Level) -> None:
        while self.stack[-1] is not level:
            self._close(self.stack[-1])
        self.stack.pop()
        parent = self.stack[-1]
        parent.child = None
        scope = Scope(level.kind, width=max(len(level.loops), 1))
        if level.steps():
            if self._frozen is not None:
                self._frozen.frozen = None
            scope.frozen = level
            self._frozen = scope
        parent.log.append(scope)
        if self.replay is not None and len(self.replay.path) > len(self.stack):
            del self.replay.path[len(self.stack) :]
            self.replay.advance()
            if self.replay.seek is not None and self.replay.seek.level is level:
                self.replay.seek = None

    # ------------------------------------------------------------------ replay

    def walk_to(self, tree: Tree) -> None:
        self.replay = Replay(level_from(tree))

    def can_move_on_to(self, tree: Tree, site: str) -> bool:
        """Can a newcomer that was led to its call of `site` be led on to this later position?"""
        return self._route(level_from(tree), site) is not None

    def move_on_to(self, tree: Tree, site: str) -> list[tuple[LoopPos, LoopPos]]:
        """Called inside the newcomer's first call of `site`, which then begins (again). Returns
        the loops it stays in, each with its target."""
        target = level_from(tree)
        route = self._route(target, site)
        assert route is not None
        replay = Replay(target)
        replay.path, replay.seek = route
        for live, (level, index) in zip(self.stack, replay.path, strict=False):
            live.log = list(level.log[:index])
        self.replay = replay
        return [
            pair
            for live, (level, _) in zip(self.stack, replay.path, strict=False)
            if live.kind == "loops" and level.kind == "loops"
            for pair in zip(live.loops, level.loops, strict=True)
        ]

    def _route(
        self, target: Level, site: str
    ) -> tuple[list[tuple[Level, int]], Seek | None] | None:
        """Compare the open scopes with the target's, from the outside in, and see where they part.

        Scopes of one iteration are numbered by how many were finished before them. A loop whose
        batches are pulled by the steps themselves is driven by a loop of the script's own, which
        no answer of ours could end: from there only a later call of `site` can be reached."""
        here = self.stack[-1]
        pulled = here.kind == "loops" and not any(loop.outside for loop in here.loops)
        route = self._compare(target, site)
        return None if pulled and route is not None and route[1] is not None else route

    def _compare(
        self, target: Level, site: str
    ) -> tuple[list[tuple[Level, int]], Seek | None] | None:
        path: list[tuple[Level, int]] = []
        level = target
        for live, inner in zip(self.stack, [*self.stack[1:], None], strict=True):
            if inner is None:  # a loop of the script's own: the call it stands in comes again
                sites = [x.site if isinstance(x, Txn) else "" for x in level.log]
                return ([*path, (level, sites.index(site))], None) if site in sites else None
            done = [i for i, x in enumerate(level.log) if isinstance(x, Scope)]
            number = sum(isinstance(x, Scope) for x in live.log)
            if number < len(done):  # the target is past it
                return [*path, (level, done[number]), (Level("gone"), 0)], Seek("close", inner)
            there = level.child
            if number > len(done) or there is None or there.kind != inner.kind:
                return None
            path.append((level, len(level.log)))
            if inner.kind == "epochs" and inner.epoch != there.epoch:
                if inner.epoch > there.epoch:
                    return None  # the job was rolled back behind us: epochs only go forward
                return [*path, (there, 0)], Seek("epoch", inner)
            if inner.kind == "loops":
                if len(inner.loops) != len(there.loops):
                    return None
                pairs = list(zip(inner.loops, there.loops, strict=True))
                if any(x.outside > y.outside or x.yields > y.yields for x, y in pairs):
                    return None  # likewise: a batch that was handed out cannot be taken back
                if any(mine.outside != theirs.outside for mine, theirs in pairs):
                    return [*path, (there, 0)], Seek("batch", inner)
            level = there
        return None

    @property
    def steps_to_replay(self) -> int:
        return self.replay.remaining_steps() if self.replay is not None else 0

    def _replay_txn(self, site: str, step: bool) -> Any:
        replay = self.replay
        assert replay is not None
        entry = replay.expected()
        if replay.seek is not None:
            replay.stand_ins += 1
            if replay.stand_ins > LOG_ENTRIES_MAX:
                raise self._mismatch(f"{site} again and again", entry)
            return (self.results.get(site, MISSING),)
        if isinstance(entry, Txn) and entry.site == site:
            replay.advance()
            known = entry.known()
            self.stack[-1].log.append(Txn(site, step, known, entry.variables, entry.mark))
            if replay.over():
                self.replay = None
            return (Encoded(known, entry.variables, entry.mark),)
        raise self._mismatch(f"{'step' if step else 'section'} {site}", entry)

    def _replay_scope(self, kind: str) -> Level | None:
        replay = self.replay
        assert replay is not None
        entry = replay.expected()
        if isinstance(entry, Scope) and entry.kind == kind:
            if entry.frozen is None:
                replay.advance()
                self.stack[-1].log.append(Scope(kind, width=entry.width, variables=entry.variables))
                self._skipped = entry.variables
                self._siblings_to_skip = entry.width - 1
                return None
            replay.path.append((entry.frozen, 0))
            return entry.frozen
        if isinstance(entry, Level) and entry.kind == kind:
            replay.path.append((entry, 0))
            return entry
        raise self._mismatch(f"ks.{'batches' if kind == 'loops' else kind}", entry)

    @staticmethod
    def _mismatch(got: str, expected: Txn | Scope | Level | None) -> UsageError:
        match expected:
            case Txn():
                want = f"{'step' if expected.step else 'section'} {expected.site}"
            case Scope() | Level():
                want = f"ks.{'batches' if expected.kind == 'loops' else expected.kind}"
            case _:
                want = "nothing more"
        return UsageError(
            f"a newcomer's script reached {got} where the other ranks had {want}",
            hint="control flow after attach must depend on ks.committed_step and registered state, "
            "not on private counters or on the rank",
        )
