"""ks.batches: one pass over a loader, from the committed position, exact after any fault."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.worker.position import Level, LoopPos, Tracker
from keepstep.worker.rng import torch_state


class Loop:
    """One ks.batches loop of this process: hands out batches and serves again those that an
    aborted step had pulled itself."""

    def __init__(self, tracker: Tracker, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.tracker = tracker
        self.level: Level
        self.level, self.pos, self.target = tracker.open_loop()
        self.pulled: list[Any] = []  # by the transaction in progress
        self.again: list[Any] = []  # to be served again
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
                if self.again:
                    batch = self.again.pop(0)
                else:
                    if not self.tracker.in_txn and hasattr(self.loader, "state_dict"):
                        self.pos.before = self.loader.state_dict()
                    self._skip_to_target(iterator)
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        return
                    self.fetched += 1
                if self.tracker.in_txn:
                    self.pulled.append(batch)
                else:
                    self._owed = False
                self.tracker.yielded(self.level, self.pos)
                yield batch
        finally:
            self.tracker.close_loop(self.level, self.pos)

    def aim(self, target: LoopPos) -> None:
        """A newcomer inside this loop is led on to a later batch."""
        self.target = target
        self._owed = target.outside > self.pos.outside

    def retry(self) -> None:
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
        while self.fetched < goal:
            next(iterator, None)
            self.fetched += 1
            self.pos.yields = self.fetched
        if not self._owed and self.fetched >= target.yields:
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


def _generators(loader: Any) -> dict[str, Any] | None:
    """The random state from which an iterator over this loader draws its seeds."""
    if not isinstance(loader, DataLoader):
        return None
    own = [g.get_state().numpy().tobytes() for g in _own_generators(loader)]
    return {"cpu": torch.get_rng_state().numpy().tobytes(), "own": own}


def _set_generators(loader: Any, states: dict[str, Any]) -> None:
    torch.set_rng_state(torch_state(states["cpu"]))
    for generator, state in zip(_own_generators(loader), states["own"], strict=False):
        generator.set_state(torch_state(state))
