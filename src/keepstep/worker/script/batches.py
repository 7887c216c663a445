"""ks.batches: one pass over a loader, from the committed position, exact after any fault.

Theory of operation
-------------------
A newcomer must see the batches that the rank it replaces would have seen, sample by sample. The
position of a loop therefore holds, besides counts, all random streams of the rank (script/) at two
moments:

    entry   when the iterator was made, with the script's variables: whatever shuffles or weighs,
            does it again in the same way
    drawn   before the batch was fetched that the script's own loop holds: a dataset that draws in
            this process draws the same again, and so does the script until its next step

A newcomer sets the streams of `entry`, makes the iterator and passes over the earlier batches:

    map-style, no workers     the sampler runs, no sample is fetched
    map-style, with workers   likewise; workers begin with the streams of those they replace
    iterables                 are read; what is read is dropped, and draws as it did

and then sets the streams of `drawn`. An iterable whose own streams are elsewhere by then shares
them with other code, and no reading alone repeats its order: it is refused. A digest of the batch
is part of the position: a newcomer that gets another one is stopped before it trains (newcomer.py).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from torch.utils.data import DataLoader, IterableDataset

from keepstep.errors import UsageError
from keepstep.worker.script import loader_workers
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.rank_streams import RankStreams
from keepstep.worker.script.tree import Level, LoopPos
from keepstep.worker.state import codec, rng
from keepstep.worker.state.step_inputs import differences, inputs_of

FIRST_ROUNDS: Final = 16


class _Pulled(NamedTuple):
    batch: Any
    rng: bytes | None  # right after it was fetched by a step: fetching may draw
    before: Any  # stateful loaders: state before it was fetched
    drawn: bytes | None  # streams before it was fetched by the script's own loop
    error: Exception | None = None  # what the loader raised instead; the end, if StopIteration


class ScriptVariables(Protocol):
    def captured(self) -> bytes: ...
    def put(self, data: bytes) -> None: ...
    def handed_out(self, batch: Any) -> None: ...


class Loop:
    """One ks.batches loop of this process: hands out batches and serves again those that an
    aborted step had pulled itself, with the end of the loader if it came to that."""

    def __init__(
        self,
        tracker: Tracker,
        loader: Iterable[Any],
        streams: RankStreams | None = None,
        variables: ScriptVariables | None = None,
    ) -> None:
        """`variables` of the script: where rounds begin with different steps or sections, which
        one comes next may depend on them."""
        _refuse_races(loader)
        self.variables = variables
        self.loader = loader
        self.tracker = tracker
        self.streams = streams if streams is not None else RankStreams()
        self.level: Level
        self.level, self.pos, self.target = tracker.open_loop()
        self.pulled: list[_Pulled] = []  # by the transaction in progress
        self.again: list[_Pulled] = []  # to be served again
        self.fetched = 0
        self._thread = threading.get_ident()
        self._watched = not isinstance(loader, DataLoader) and not hasattr(loader, "state_dict")
        self._iterator: Iterator[Any] | None = None
        self._owed = False  # the target's batch must be handed out (again) before anything else
        self._led_to: LoopPos | None = None  # the last target
        if self.target is not None:
            self.aim(self.target)
            self.pos.yields, self.pos.outside = self.target.yields, self.target.outside
            self.pos.entry, self.pos.before = self.target.entry, self.target.before
            self.pos.ahead = self.target.ahead
            self.pos.drawn, self.pos.workers = self.target.drawn, self.target.workers
            self.pos.varies, self.pos.first = self.target.varies, self.target.first
        self._left_with = tracker.skipped()  # variables of the script where this loop was left
        self.other: list[str] = []  # what differs in a batch that the rank before had, too

    def next(self) -> Any:
        self._refuse_other_thread()
        if self.pos.closed or self.tracker.over(self.level):
            self.close()
            if self._left_with and self.variables is not None:
                self.variables.put(self._left_with)
                self._left_with = None
            raise StopIteration
        if self.pos.ended:
            raise StopIteration
        if self.tracker.behind_fence:  # where the rank stands was published in the fence
            raise UsageError(
                "a step takes a batch of ks.batches behind its update",
                hint="take it before the optimizer's update, or between steps",
            )
        if self.tracker.finishing:
            raise UsageError(
                "a rank was lost behind the update of a step that takes its batches itself: the "
                "rest of the step cannot be made by another process",
                hint="hand batches to the step as arguments",
            )
        if self._iterator is None:
            self._iterator = self._open()
        self._skip_to_target(self._iterator)
        in_txn = self.tracker.in_txn
        if self.again:
            item = self.again.pop(0)
            if in_txn and item.rng is not None:
                self.streams.restore(item.rng)
        else:
            item = self._fetch(self._iterator)
        if in_txn:
            self.pulled.append(item)
        if item.error is not None:
            if isinstance(item.error, StopIteration) and not in_txn and self.pos.ahead > 0:
                self.pos.ended = True
            elif isinstance(item.error, StopIteration):
                self.close()
                if not in_txn and self.variables is not None:
                    self.tracker.left(self.level, self.variables.captured)
            raise item.error
        if not in_txn:
            if not self._owed or self._last_owed():
                self._note_variables()
                self._note_batch(item.batch)
                self._owed = False
            self.pos.before, self.pos.drawn = item.before, item.drawn
        self.tracker.yielded(self.level, self.pos)
        if self.variables is not None:
            self.variables.handed_out(item.batch)
        return item.batch

    def _last_owed(self) -> bool:
        """Whether the batch that comes now is the last that the rank before had."""
        return self.target is not None and self.pos.yields + 1 >= self.target.outside

    def _note_variables(self) -> None:
        """The script's own loop is about to get a batch. Whether its rounds differ shows in the
        first ones; until then they are taken to differ."""
        if self.variables is None:
            return
        target = self.target if self._owed else None
        if target is not None and target.variables is not None:
            self.variables.put(target.variables)
            self.pos.variables = target.variables
        elif self.pos.varies or self.pos.outside < FIRST_ROUNDS:
            self.pos.variables = self.variables.captured()
        else:
            self.pos.variables = None

    def _note_batch(self, batch: Any) -> None:
        digests = inputs_of(batch, kept=True)
        if self._owed and self.target is not None and self.target.batch is not None:
            self.other = differences(self.target.batch, digests)
        self.pos.batch = digests

    def _fetch(self, iterator: Iterator[Any]) -> _Pulled:
        state_of = getattr(self.loader, "state_dict", None)
        before = state_of() if state_of is not None else None
        batch, error = None, None
        in_txn = self.tracker.in_txn
        if self._owed and self._last_owed() and self.target and self.target.drawn is not None:
            self._go_to(self.target.drawn)
        drawn = None if in_txn else self.streams.capture()
        watched = rng.capture() if self._watched and self.fetched else None
        try:
            batch = next(iterator)
            self.fetched += 1
        except Exception as raised:  # an iterator that raised may be finished: do not ask again
            error = raised
        if watched is not None and rng.capture() != watched:
            self._watched = False
            _warn_of_draws(self.loader)
        after = self.streams.capture() if in_txn else None
        return _Pulled(batch, after, before, drawn, error)

    def close(self) -> None:
        left = not self.pos.closed
        self.tracker.close_loop(self.level, self.pos)
        if not self.tracker.in_txn:
            if left and self._iterator is not None and not sys.is_finalizing():
                loader_workers.drain(self._iterator)
            self._release()

    def _release(self) -> None:
        self._iterator = None  # with its DataLoader workers
        self.pos.told = None

    def aim(self, target: LoopPos) -> None:
        """A newcomer inside this loop is led on to a later batch."""
        self.target = self._led_to = target
        self._owed = target.outside > self.pos.outside
        self.again = [item._replace(rng=None) for item in self.again]

    def retry(self, *, other_rng: bool = False) -> None:
        """`other_rng`: pulled by a warm-up, whose random numbers are not those of the job."""
        pulled, self.pulled = self.pulled, []
        self.tracker.reopen()
        self.pos.yields -= sum(item.error is None for item in pulled)
        if not other_rng:
            self.again = pulled + self.again
        elif pulled and self._iterator is self.loader:  # cannot be made a second time
            self.again = [item._replace(rng=None) for item in pulled] + self.again
        elif pulled:
            self._release()
            self.again, self.fetched, self.target = [], 0, self._led_to
            if self.target is None:
                self.pos.entry = None

    def end_transaction(self) -> None:
        """The transaction is over, one way or the other: what it has pulled is gone."""
        self.pulled.clear()
        if self.pos.closed:
            self._release()
        record = loader_workers.record_of(self._iterator)
        if record is not None:
            record.forget(self._first_fetched(self.pos.begin))

    def _refuse_other_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise UsageError(
                f"ks.batches is pulled by another thread ({threading.current_thread().name}) than "
                "the one that called it: which batch a step trains on would depend on timing",
                hint="pull batches in the main thread; for prefetching give the DataLoader workers "
                "(num_workers)",
            )

    # ------------------------------------------------------------------ opening

    def _open(self) -> Iterator[Any]:
        self.streams.loop_opens()
        target = self.target
        if target is None or target.entry is None:
            self.pos.entry = self._entry()
            iterator = loader_workers.open_iterator(self.loader)
            self._listen(iterator, 0)
            return iterator
        before = self.streams.capture()
        entry = codec.loads_inline(target.entry)
        if entry["variables"] and self.variables is not None:
            self.variables.put(entry["variables"])  # weights of a sampler, a stage of a curriculum
        if target.before is not None and hasattr(self.loader, "load_state_dict"):
            self._go_to(entry["streams"])
            self.loader.load_state_dict(target.before)
            iterator = iter(self.loader)
            self.fetched = max(target.outside - 1, 0) if target.outside else target.yields
        else:
            iterator = self._open_at(target, entry)
            if self._owed and target.drawn is not None and target.ahead <= 0:
                self._refuse_shared(target.drawn)
        if not self._owed:
            if self.tracker.replay is None:
                self._refuse_shared(before)
            self.streams.restore(before, others=True)
        self.pos.yields = self.fetched
        return iterator

    def _entry(self) -> bytes:
        kept = (
            loader_workers.kept(self.loader) if loader_workers.keeps_workers(self.loader) else None
        )
        outside = self.variables is not None and not self.tracker.in_txn
        return codec.dumps_inline(
            {
                "streams": self.streams.capture(),
                "kept": None if kept is None else tuple(kept),
                "variables": self.variables.captured() if self.variables and outside else None,
            }
        )

    def _open_at(self, target: LoopPos, entry: dict[str, Any]) -> Iterator[Any]:
        """A newcomer: the iterator as it was before the batch to be handed out next."""
        loader: Any = self.loader
        begin = self._first_fetched(target.begin)
        passing = _Passing(loader, begin) if _is_map_style(loader) else None
        if loader_workers.keeps_workers(loader):
            loader._iterator = None  # of another epoch: nothing of it is left
            if entry["kept"] is not None:
                base_seed, states = entry["kept"]
                stand_in = loader_workers.keep(loader, (base_seed, target.workers or states))
                assert stand_in is not None
                stand_in.replacement = passing
        self._go_to(entry["streams"])
        with _sampler_replaced(loader, passing):
            iterator = loader_workers.open_iterator(loader, None, target.workers)
        if passing is not None:
            passing.pass_over()
        self._listen(iterator, begin)
        goal = target.begin if self._owed else target.yields
        for _ in itertools.islice(iterator, goal - begin):
            pass
        self.fetched = goal
        return iterator

    def _first_fetched(self, batch: int) -> int:
        """The first that a newcomer fetches to hand out this one. Workers take turns, and the
        first turn is always the first worker's."""
        loader: Any = self.loader
        if not _is_map_style(loader):
            return 0
        return batch - batch % loader.num_workers if loader.num_workers else batch

    def _listen(self, iterator: Any, offset: int) -> None:
        """The streams of map-style workers belong to the position. Those of iterables do not: a
        newcomer's workers read them from the begin of the epoch."""
        record = loader_workers.record_of(iterator)
        if record is not None:
            record.offset = offset
            if _is_map_style(self.loader):
                self.pos.told = lambda batch: record.before(self._first_fetched(batch))

    def _go_to(self, state: bytes) -> None:
        """All streams as in this state. A sampler or dataset may make its own when it is first
        asked: then it is asked once, and what that does is undone with the rest."""
        loader: Any = self.loader
        if isinstance(loader, DataLoader) and self.streams.missing(state):
            next(iter(loader._index_sampler if loader.num_workers else loader), None)
        self.streams.restore(state, others=True)

    def _refuse_shared(self, expected: bytes) -> None:
        """An iterable was read from its begin: its own streams must be where they were."""
        loader: Any = self.loader
        if _is_map_style(loader) or (isinstance(loader, DataLoader) and loader.num_workers):
            return
        theirs = self.streams.of_loader(expected, self.loader)
        mine = self.streams.of_loader(self.streams.capture(), self.loader)
        other = sorted(path for path in theirs if mine.get(path, theirs[path]) != theirs[path])
        if other:
            raise UsageError(
                f"{other[0]} is drawn from by a {type(self.loader).__name__} that is iterated and "
                "by other code too: no other process can repeat the order of its batches",
                hint="give what is iterated a generator of its own, or state_dict and "
                "load_state_dict",
            )

    def _skip_to_target(self, iterator: Iterator[Any]) -> None:
        """Drop batches up to the target: first the one the script's own loop had last, and after
        it those that committed steps had pulled themselves."""
        target = self.target
        if target is None:
            return
        goal = target.begin if self._owed else target.yields
        if self.fetched - len(self.again) < goal:
            state = self.streams.capture()
            while self.fetched - len(self.again) < goal:
                if self.again:
                    del self.again[0]
                    continue
                next(iterator, None)
                self.fetched += 1
            self.pos.yields = goal
            self.streams.restore(state, others=True)
        if not self._owed and self.fetched - len(self.again) >= target.yields:
            self.target = None


class Batches(Iterator[Any]):
    """What the script iterates over. No generator: that is finished once it has raised, and a step
    that saw the end of its loader may have to be retried."""

    def __init__(self, loop: Loop, mark: Callable[[], None]) -> None:
        self._loop = loop
        self._mark = mark

    def __next__(self) -> Any:
        batch = self._loop.next()
        self._mark()
        return batch

    def close(self) -> None:
        self._loop.close()

    def __del__(self) -> None:
        """A loop that the script has left (`break`) is over."""
        self.close()


class _Passing:
    """A sampler that begins later the first time it is iterated; persistent DataLoader workers
    keep it, and later epochs start at the beginning."""

    def __init__(self, loader: Any, count: int) -> None:
        self._sampler = loader._index_sampler
        self._count = count
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        # At once, as torch does, and as often: a sampler may count how often it is iterated.
        self._iterator = iter(self._sampler)
        return self._rest(self._iterator)

    def _rest(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self.pass_over()
        yield from iterator

    def pass_over(self) -> None:
        """Not when it is iterated: the iterator of the loader draws before it asks its sampler."""
        count, self._count = self._count, 0
        for _ in itertools.islice(self._iterator, count):
            pass

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


@contextlib.contextmanager
def _sampler_replaced(loader: Any, stand_in: Any) -> Iterator[None]:
    if stand_in is None:
        yield
        return
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    original = getattr(loader, name)
    # DataLoader refuses assignment to these after construction, and rightly so for users.
    loader.__dict__[name] = stand_in
    try:
        yield
    finally:
        loader.__dict__[name] = original


def _is_map_style(loader: Any) -> bool:
    return loader_workers.is_plain(loader) and not isinstance(loader.dataset, IterableDataset)


# ---------------------------------------------------------------------- orders that nobody repeats


def _refuse_races(loader: Any) -> None:
    if isinstance(loader, DataLoader) and loader.num_workers > 1 and not loader.in_order:
        raise UsageError(
            "this DataLoader hands out batches in the order in which its workers finish "
            "(in_order=False): no other process can repeat it, so a moved rank would train on "
            "some samples twice and never on others",
            hint="leave in_order at True",
        )


def _warn_of_draws(loader: Any) -> None:
    print(
        f"keepstep: {type(loader).__name__} draws from the process's random generators while it is "
        "iterated, as training does: if the order of its batches depends on that, a moved rank "
        "gets other batches (hint: draw from a generator of its own, or give it state_dict and "
        "load_state_dict)",
        file=sys.stderr,
        flush=True,
    )
