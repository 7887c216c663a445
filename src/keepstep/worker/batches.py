"""ks.batches: one pass over a loader, from the committed position, exact after any fault."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.worker import codec, rng
from keepstep.worker.position import Level, LoopPos, Tracker
from keepstep.worker.rng import torch_state


class _Pulled(NamedTuple):
    batch: Any
    rng: bytes | None  # right after it was fetched by a step: fetching may draw
    before: Any  # stateful loaders: state before it was fetched


class Loop:
    """One ks.batches loop of this process: hands out batches and serves again those that an
    aborted step had pulled itself."""

    def __init__(self, tracker: Tracker, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.tracker = tracker
        self.level: Level
        self.level, self.pos, self.target = tracker.open_loop()
        self.pulled: list[_Pulled] = []  # by the transaction in progress
        self.again: list[_Pulled] = []  # to be served again
        self.fetched = 0
        self._owed = False  # the target's batch must be handed out (again) before anything else
        if self.target is not None:
            self.aim(self.target)
            self.pos.yields, self.pos.outside = self.target.yields, self.target.outside
            self.pos.entry, self.pos.before = self.target.entry, self.target.before

    def batches(self) -> Iterator[Any]:
        try:
            if self.pos.closed:
                return
            iterator = self._open()
            while not self.tracker.over(self.level):
                self._skip_to_target(iterator)
                in_txn = self.tracker.in_txn
                if self.again:
                    item = self.again.pop(0)
                    if in_txn and item.rng is not None:
                        rng.restore(item.rng)
                else:
                    state_of = getattr(self.loader, "state_dict", None)
                    before = state_of() if state_of is not None else None
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        return
                    self.fetched += 1
                    item = _Pulled(batch, rng.capture() if in_txn else None, before)
                    del batch
                if in_txn:
                    self.pulled.append(item)
                else:
                    self._owed = False
                    self.pos.before = item.before
                self.tracker.yielded(self.level, self.pos)
                yield item.batch
        finally:
            self.tracker.close_loop(self.level, self.pos)

    def aim(self, target: LoopPos) -> None:
        """A newcomer inside this loop is led on to a later batch."""
        self.target = target
        self._owed = target.outside > self.pos.outside
        self.again = [item._replace(rng=None) for item in self.again]

    def retry(self, *, other_rng: bool = False) -> None:
        """`other_rng`: pulled by a warm-up, whose random numbers are not those of the job."""
        if other_rng:
            self.pulled = [item._replace(rng=None) for item in self.pulled]
        self.again = self.pulled + self.again
        self.pos.yields -= len(self.pulled)
        self.pulled = []

    def commit(self) -> None:
        self.pulled.clear()

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


def _generators(loader: Any) -> bytes | None:
    """The random state from which an iterator over this loader draws its seeds."""
    if not isinstance(loader, DataLoader):
        return None
    own = [g.get_state().numpy().tobytes() for g in _own_generators(loader)]
    return codec.dumps_inline({"cpu": torch.get_rng_state().numpy().tobytes(), "own": own})


def _set_generators(loader: Any, encoded: bytes) -> None:
    states = codec.loads_inline(encoded)
    torch.set_rng_state(torch_state(states["cpu"]))
    for generator, state in zip(_own_generators(loader), states["own"], strict=False):
        generator.set_state(torch_state(state))
