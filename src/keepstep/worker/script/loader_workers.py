"""Worker processes of a DataLoader: their random streams travel too.

Theory of operation
-------------------
A worker process draws from streams of its own: the process-wide ones, which torch seeds with
base seed + worker number, and those that its copy of the dataset holds. Which numbers come next
depends on the samples that this worker has served, maybe since the first epoch. So every batch
comes with the worker's streams as they were after it (only those that have moved since the worker
began; none, and no cost, for a dataset that draws nothing). The position of a loop keeps them as
of the batch at which a newcomer begins, and the newcomer's workers begin from there.

Batches go to workers in turn, so a newcomer begins at a multiple of the number of workers and
drops what it does not need.

Persistent workers outlive an epoch. A second epoch draws no base seed, so a newcomer that enters
it first makes the workers with the base seed of those it replaces, then iterates as in any later
epoch.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import fetch as fetchers
from torch.utils.data._utils.worker import _generate_state, _IterableDatasetStopIteration

from keepstep.worker.script.roots import Roots
from keepstep.worker.script.streams import Streams

_encoder = msgspec.msgpack.Encoder()


class WorkerBatch(NamedTuple):
    """What a worker sends. A named tuple, because torch pins the memory of its parts."""

    data: Any
    worker: int
    state: bytes | None


class KeptWorkers(NamedTuple):
    """Persistent workers: what another process needs to have them too."""

    base_seed: int
    states: dict[int, bytes]


# ---------------------------------------------------------------------- inside a worker process


class Begin:
    """worker_init_fn of a loader that ks.batches opens; it may be pickled (`spawn`)."""

    def __init__(
        self, function: Any, collate: Any, base_seed: int | None, states: dict[int, bytes]
    ) -> None:
        self._function = function
        self._collate = collate
        self._base_seed = base_seed
        self._states = states

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        if self._base_seed is not None:
            _seed(self._base_seed, worker)
            object.__setattr__(info, "seed", self._base_seed + worker)  # it is frozen
        if self._function is not None:
            self._function(worker)
        _Watch(info.dataset, self._collate, worker, self._states.get(worker)).install()


def _seed(base_seed: int, worker: int) -> None:
    """As torch does when a worker begins."""
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


class _Watch:
    def __init__(self, dataset: Any, collate: Any, worker: int, state: bytes | None) -> None:
        self._worker = worker
        roots = {"dataset": dataset, "collate_fn": collate}
        self._streams = Streams(lambda: Roots(roots, {}, ()))
        self._streams.discover()
        self._start = _parts(self._streams.capture())
        self._owed = state

    def install(self) -> None:
        self._wrap_fetch(fetchers._MapDatasetFetcher)
        self._wrap_fetch(fetchers._IterableDatasetFetcher)
        self._wrap_iter(fetchers._IterableDatasetFetcher)

    def _wrap_iter(self, kind: Any) -> None:
        """Persistent workers of an iterable: the first pass is one over nothing (`Empty`), and
        the second is the epoch that these streams belong to."""
        original, passes = kind.__init__, itertools.count(1)

        def init(fetcher: Any, *args: Any, **kwargs: Any) -> None:
            if next(passes) > 1 and self._owed is not None:
                self._settle(lambda: None)
            original(fetcher, *args, **kwargs)

        kind.__init__ = init

    def _wrap_fetch(self, kind: Any) -> None:
        original = kind.fetch

        def fetch(fetcher: Any, index: Any) -> WorkerBatch:
            if self._owed is not None:
                self._settle(lambda: original(fetcher, index))
            data = original(fetcher, index)
            self._streams.entering("")
            return WorkerBatch(data, self._worker, self._moved())

        kind.fetch = fetch

    def _settle(self, rehearse: Any) -> None:
        """A dataset may make its generators when it is first asked: ask it, then set them."""
        owed, self._owed = self._owed, None
        assert owed is not None
        state = _joined(self._start, _parts(owed))
        if self._streams.missing(state):
            rehearse()
            made = _parts(self._streams.capture())
            self._start = {**made, **self._start}
            state = _joined(self._start, _parts(owed))
        self._streams.restore(state)

    def _moved(self) -> bytes | None:
        now = _parts(self._streams.capture())
        moved = {name: part for name, part in now.items() if self._start.get(name) != part}
        return _encoder.encode(moved) if moved else None


def _parts(data: bytes) -> dict[str, Any]:
    """A captured state in pieces that move one by one."""
    state = msgspec.msgpack.decode(data)
    if "process" not in state:
        return dict(state)  # in pieces already
    parts = {f"process/{k}": v for k, v in msgspec.msgpack.decode(state["process"]).items()}
    parts |= {f"streams/{path}": value for path, value in state.get("streams", {}).items()}
    if "numbers" in state:
        parts["numbers"] = state["numbers"]
    return parts


def _joined(start: dict[str, Any], moved: dict[str, Any]) -> bytes:
    parts = {**start, **moved}
    state: dict[str, Any] = {
        "process": _encoder.encode(_below(parts, "process/")),
        "streams": _below(parts, "streams/"),
    }
    if "numbers" in parts:
        state["numbers"] = parts["numbers"]
    return _encoder.encode(state)


def _below(parts: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in parts.items() if k.startswith(prefix)}


# ---------------------------------------------------------------------- in the rank


class WorkerRecord:
    """What the workers of one iterator have told, by the number of the batch in its epoch."""

    def __init__(self, iterator: Any, base_seed: int, states: dict[int, bytes]) -> None:
        self.base_seed = base_seed
        self.offset = 0  # batches of the epoch that this iterator did not fetch
        self._start = dict(states)  # at the begin of the epoch, or where a newcomer began
        self._told: dict[int, list[tuple[int, bytes | None]]] = {}
        # Weakly: an iterator ends its workers as soon as nobody refers to it.
        self._iterator = weakref.ref(iterator)
        kind = type(iterator)

        def unpacked() -> Any:
            index, data = kind._get_data(self._iterator())
            if type(data) is WorkerBatch:
                self._told.setdefault(data.worker, []).append((index, data.state))
                data = data.data
            return index, data

        iterator._get_data = unpacked
        iterator._reset = self._reset

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Another epoch of persistent workers. What was under way arrives before it begins."""
        iterator: Any = self._iterator()
        type(iterator)._reset(iterator, loader, first_iter)
        self._start, self._told, self.offset = self.latest(), {}, 0

    def latest(self) -> dict[int, bytes]:
        return self._at(None)

    def before(self, batch: int) -> dict[int, bytes]:
        """Of all workers, before batch number `batch` of the epoch and all later ones."""
        return self._at(batch - self.offset)

    def _at(self, limit: int | None) -> dict[int, bytes]:
        found = dict(self._start)
        for worker, told in self._told.items():
            known = [state for index, state in told if limit is None or index < limit]
            if known and known[-1] is not None:
                found[worker] = known[-1]
        return found

    def forget(self, batch: int) -> None:
        """Nobody will ask for what was before this batch."""
        limit = batch - self.offset
        for told in self._told.values():
            while len(told) > 1 and told[1][0] < limit:
                del told[0]


def record_of(iterator: Any) -> WorkerRecord | None:
    found = getattr(iterator, "__dict__", {}).get("_keepstep_record")
    return found if isinstance(found, WorkerRecord) else None


def is_plain(loader: Any) -> bool:
    """A DataLoader that is iterated in torch's own way. Others are read like any iterable."""
    kind: Any = type(loader)
    return isinstance(loader, DataLoader) and (
        kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
    )


def is_parallel(loader: Any) -> bool:
    return is_plain(loader) and loader.num_workers > 0


def keeps_workers(loader: Any) -> bool:
    return is_parallel(loader) and bool(loader.persistent_workers)


def open_iterator(
    loader: Any, base_seed: int | None = None, states: dict[int, bytes] | None = None
) -> Iterator[Any]:
    """iter(loader), with workers that tell their streams. `base_seed` overrules the one that is
    drawn here; `states` are those of workers that have served batches already."""
    if not is_parallel(loader) or (loader.persistent_workers and loader._iterator is not None):
        return iter(loader)
    own = loader.worker_init_fn
    begin = Begin(own, loader.collate_fn, base_seed, states or {})
    loader.__dict__["worker_init_fn"] = begin
    try:
        iterator: Any = iter(loader)
    finally:
        loader.__dict__["worker_init_fn"] = own
    if base_seed is not None:
        iterator._base_seed = base_seed
    iterator._keepstep_record = WorkerRecord(iterator, iterator._base_seed, states or {})
    return iterator  # type: ignore[no-any-return]


def kept(loader: Any) -> KeptWorkers | None:
    iterator = loader._iterator
    if iterator is None:
        return None
    record = record_of(iterator)
    return KeptWorkers(iterator._base_seed, record.latest() if record is not None else {})


class Empty:
    """Stands for a sampler while persistent workers are made; then it is what it stood for."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.replacement: Any = None  # for one epoch
        self.open = False

    def __iter__(self) -> Iterator[Any]:
        if not self.open:
            return iter(())
        chosen, self.replacement = self.replacement or self._sampler, None
        return iter(chosen)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def keep(loader: Any, what: Any) -> Empty | None:
    """Persistent workers as in the process that is replaced, or as they were when an aborted
    section began. None: they are so already."""
    base_seed, states = what
    states = {int(worker): state for worker, state in states.items()}
    existing = loader._iterator
    if existing is not None:
        record = record_of(existing)
        if record is None or record.latest() == states:
            return None
        loader._iterator = None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    empty = Empty(sampler)
    loader.__dict__[name] = empty
    try:
        open_iterator(loader, base_seed, states)
    finally:
        loader.__dict__[name] = sampler
    empty.open = True
    return empty


def drain(iterator: Any) -> None:
    """A loop was left early: what persistent workers have begun moves their streams, and belongs
    to the state in which the next epoch begins."""
    record = record_of(iterator)
    if record is None or not iterator._persistent_workers or not record.latest():
        return
    waiting = {i: info[0] for i, info in iterator._task_info.items() if len(info) == 1}
    ended: set[int] = {w for w, runs in enumerate(iterator._workers_status) if not runs}
    while any(worker not in ended for worker in waiting.values()):
        index, data = iterator._get_data()
        iterator._tasks_outstanding -= 1
        waiting.pop(index, None)
        if isinstance(data, _IterableDatasetStopIteration):
            ended.add(data.worker_id)  # it answers nothing more in this epoch
