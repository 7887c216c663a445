"""ks.batches: one pass over a loader, from the committed position, exact after any fault."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.errors import UsageError
from keepstep.worker import codec, rng
from keepstep.worker.position import Tracker
from keepstep.worker.rng import torch_state
from keepstep.worker.tree import Level, LoopPos


class _Pulled(NamedTuple):
    batch: Any
    rng: bytes | None  # right after it was fetched by a step: fetching may draw
    before: Any  # stateful loaders: state before it was fetched
    error: Exception | None = None  # what the loader raised instead; the end, if StopIteration


class Loop:
    """One ks.batches loop of this process: hands out batches and serves again those that an
    aborted step had pulled itself, with the end of the loader if it came to that."""

    def __init__(self, tracker: Tracker, loader: Iterable[Any]) -> None:
        _refuse_races(loader)
        self.loader = loader
        self.tracker = tracker
        self.level: Level
        self.level, self.pos, self.target = tracker.open_loop()
        self.pulled: list[_Pulled] = []  # by the transaction in progress
        self.again: list[_Pulled] = []  # to be served again
        self.fetched = 0
        self._watched = not isinstance(loader, DataLoader) and not hasattr(loader, "state_dict")
        self._iterator: Iterator[Any] | None = None
        self._owed = False  # the target's batch must be handed out (again) before anything else
        if self.target is not None:
            self.aim(self.target)
            self.pos.yields, self.pos.outside = self.target.yields, self.target.outside
            self.pos.entry, self.pos.before = self.target.entry, self.target.before

    def next(self) -> Any:
        if self.pos.closed or self.tracker.over(self.level):
            self.close()
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._open()
        self._skip_to_target(self._iterator)
        in_txn = self.tracker.in_txn
        if self.again:
            item = self.again.pop(0)
            if in_txn and item.rng is not None:
                rng.restore(item.rng)
        else:
            item = self._fetch(self._iterator)
        if in_txn:
            self.pulled.append(item)
        if item.error is not None:
            if isinstance(item.error, StopIteration):
                self.close()
            raise item.error
        if not in_txn:
            self._owed = False
            self.pos.before = item.before
        self.tracker.yielded(self.level, self.pos)
        return item.batch

    def _fetch(self, iterator: Iterator[Any]) -> _Pulled:
        state_of = getattr(self.loader, "state_dict", None)
        before = state_of() if state_of is not None else None
        batch, error = None, None
        drawn = rng.capture() if self._watched and self.fetched else None
        try:
            batch = next(iterator)
            self.fetched += 1
        except Exception as raised:  # an iterator that raised may be finished: do not ask again
            error = raised
        if drawn is not None and rng.capture() != drawn:
            self._watched = False
            _warn_of_draws(self.loader)
        return _Pulled(batch, rng.capture() if self.tracker.in_txn else None, before, error)

    def close(self) -> None:
        self.tracker.close_loop(self.level, self.pos)
        if not self.tracker.in_txn:
            self._iterator = None  # with its DataLoader workers

    def aim(self, target: LoopPos) -> None:
        """A newcomer inside this loop is led on to a later batch."""
        self.target = target
        self._owed = target.outside > self.pos.outside
        self.again = [item._replace(rng=None) for item in self.again]

    def retry(self, *, other_rng: bool = False) -> None:
        """`other_rng`: pulled by a warm-up, whose random numbers are not those of the job."""
        if other_rng:
            self.pulled = [item._replace(rng=None) for item in self.pulled]
        self.tracker.reopen()
        self.again = self.pulled + self.again
        self.pos.yields -= sum(item.error is None for item in self.pulled)
        self.pulled = []

    def settle(self) -> None:
        """The transaction is over, one way or the other: what it has pulled is gone."""
        self.pulled.clear()
        if self.pos.closed:
            self._iterator = None

    # ------------------------------------------------------------------ newcomer

    def _open(self) -> Iterator[Any]:
        target = self.target
        if target is not None and target.entry is not None:
            _set_generators(self.loader, target.entry)
        self.pos.entry = _generators(self.loader)
        if target is None:
            return iter(self.loader)
        skip = max(target.outside - 1, 0) if target.outside else target.yields
        if target.before is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(target.before)
            iterator = iter(self.loader)
        else:
            iterator = _iterate_from(self.loader, skip)
        self.fetched = self.pos.yields = skip
        return iterator

    def _skip_to_target(self, iterator: Iterator[Any]) -> None:
        """Drop batches up to the target: first the one the script's own loop had last, and after
        it those that committed steps had pulled themselves."""
        target = self.target
        if target is None:
            return
        goal = target.outside - 1 if self._owed else target.yields
        if self.fetched - len(self.again) < goal:
            state = rng.capture()
            while self.fetched - len(self.again) < goal:
                if self.again:
                    del self.again[0]
                    continue
                next(iterator, None)
                self.fetched += 1
            self.pos.yields = goal
            rng.restore(state)
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


class _SkipOnce:
    """A sampler that begins later the first time it is iterated; persistent DataLoader workers
    keep it, and later epochs start at the beginning."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        yield from itertools.islice(iter(self._sampler), skip, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _iterate_from(loader: Iterable[Any], skip: int) -> Iterator[Any]:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        original = getattr(loader, name)
        # DataLoader refuses assignment to these after construction, and rightly so for users.
        loader.__dict__[name] = _SkipOnce(original, skip)
        try:
            return iter(loader)
        finally:
            loader.__dict__[name] = original
    iterator = iter(loader)
    for _ in itertools.islice(iterator, skip):
        pass
    return iterator


def _own_generators(loader: Any) -> list[torch.Generator]:
    found = [getattr(loader, "generator", None), getattr(_sampler_of(loader), "generator", None)]
    return [g for g in found if isinstance(g, torch.Generator)]


def _sampler_of(loader: Any) -> Any:
    return getattr(loader, "sampler", None)


def _generators(loader: Any) -> bytes:
    """The random state from which an iterator over this loader draws: a sampler may shuffle with
    any of the process's generators."""
    own = [g.get_state().numpy().tobytes() for g in _own_generators(loader)]
    return codec.dumps_inline({"global": rng.capture(), "own": own})


def _set_generators(loader: Any, encoded: bytes) -> None:
    states = codec.loads_inline(encoded)
    rng.restore(states["global"])
    for generator, state in zip(_own_generators(loader), states["own"], strict=False):
        generator.set_state(torch_state(state))


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
