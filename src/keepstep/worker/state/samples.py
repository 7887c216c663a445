"""Whether tensors were written to or lie elsewhere, without reading them whole.

Of each tensor the version counter, the place and some elements are noted at one moment and compared
at another: version counters do not see `p.data`, and elements not what is written a second time.

Large registered objects are sampled by the tensors that saving them gives, which share memory and
version counter with theirs. Saving may take longer than a small step, so it is not done at every
entry: the list is made anew when contents are looked at, and when somebody has ceased to use memory
in it, as behind `p.data = ...` and `shadow[name] = ...`. So a step before whose fence that happens
has moved the object, and so has one whose retry finds it elsewhere. What moves again and again,
behind the fence or between steps, is left out of the list: like what an object gives as copies, it
is only looked at whole. Buffers of attached models are left out, too: these put them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy
import torch

from keepstep.worker.device import extension
from keepstep.worker.state import codec, shards
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.tensors import dense

COUNT = 8  # elements of a tensor
MOVES = 2  # of an object, before what moves of it is left out

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOTHING = torch.empty(0, device="cpu")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]

_users: Any = torch._C._storage_Use_Count


class Samples:
    """Of tensors, as of one moment. Several may have one name."""

    def __init__(self, names: Iterable[str], tensors: Iterable[torch.Tensor]) -> None:
        self._names = list(names)
        self._tensors = list(tensors)
        self._sharded = any(shards.local(x) is not x for x in self._tensors)
        self._parts = self._parts_now()
        self._views: dict[tuple[Any, Any], dict[int, torch.Tensor]] = {}  # of what a device has
        self._viewed: bytes | None = None
        self._records = b""
        self._elements: dict[tuple[Any, Any], torch.Tensor] = {}
        self._on_device = any(part.device.type != "cpu" for part in self._parts)

    def _parts_now(self) -> list[torch.Tensor]:
        found = [shards.local(x) for x in self._tensors]
        return [part if type(part) in _PLAIN else _NOTHING for part in found]

    def _records_now(self) -> bytes:
        if self._sharded:
            self._parts = self._parts_now()
        found: bytes = extension.load().sampled(self._tensors, self._parts, COUNT, True)
        return found

    def take(self) -> None:
        self._records = self._records_now()
        if self._on_device:
            self._take_elements()

    def _take_elements(self) -> None:
        places = _table(self._records)[:, 1].tobytes()
        if places != self._viewed:
            self._viewed = places
            self._views.clear()
            for index, part in enumerate(self._parts):
                if part.device.type != "cpu" and part.numel() and part.element_size() in _WORDS:
                    words = part.detach().view(_WORDS[part.element_size()])
                    kind = part.device, words.dtype
                    if dense(words):
                        self._views.setdefault(kind, {})[index] = _spread(words)
        self._elements = {kind: torch.cat([*v.values()]) for kind, v in self._views.items()}

    def changed(self, queued: bool, *, waits: bool = True) -> set[str]:
        """Since they were taken. `queued`: an update was, and the device has left it out; the
        version counters do not know that. Unless it `waits`, elements on a device are left out."""
        now = self._records_now()
        found: set[int] = set()
        if now != self._records:
            differ = _table(now) != _table(self._records)
            found.update(numpy.flatnonzero(differ[:, 1 if queued else 0 :].any(axis=1)).tolist())
        for kind, views in self._views.items() if waits else ():
            if torch.equal(self._elements[kind], torch.cat([*views.values()])):
                continue
            at = 0
            for index, view in views.items():
                before = self._elements[kind][at : at + len(view)]
                at += len(view)
                if not torch.equal(before, view):
                    found.add(index)
        return {self._names[index] for index in found}


def _table(records: bytes) -> Any:
    """Of each tensor its version counter, place and hash of elements (samples.h)."""
    return numpy.frombuffer(records, numpy.uint64).reshape(-1, 3)


def _spread(words: torch.Tensor) -> torch.Tensor:
    """Elements all over its memory."""
    count = min(words.numel(), COUNT)
    return words.as_strided((count,), (words.numel() // count,), words.storage_offset())


def _place(tensor: torch.Tensor) -> Place:
    part = shards.local(tensor)
    return part.data_ptr(), part.shape, part.stride(), part.dtype


def _tensors(item: Registered) -> list[torch.Tensor]:
    return codec.dumps(item.save())[1]


class _Listed:
    """The tensors of an object that lie where they do whenever it is saved."""

    def __init__(self, item: Registered, without: set[int]) -> None:
        found, again = _tensors(item), _tensors(item)  # both at once: copies lie elsewhere
        others = {_place(tensor) for tensor in again}
        kept = {place: tensor for tensor in found if (place := _place(tensor)) in others}
        self.tensors = {place: x for place, x in kept.items() if place[0] not in without}
        self._memory: dict[int, Any] = {}  # held, so that its users can be counted
        self._users: list[int] = []

    def count(self) -> None:
        """What is held here is held from now on."""
        storages = (shards.local(tensor).untyped_storage() for tensor in self.tensors.values())
        self._memory = {storage._cdata: storage for storage in storages}
        self._users = list(map(_users, self._memory))

    def let_go(self, *, entry: bool = False) -> bool:
        """Whether somebody has ceased to use its memory since the entry before. A graph of the
        step, which uses it for a while, does not count."""
        now = list(map(_users, self._memory))
        found = any(x < y for x, y in zip(now, self._users))
        if entry and not found:
            self._users = now
        return found

    def moved(self, item: Registered) -> bool:
        return not self.tensors.keys() <= {_place(tensor) for tensor in _tensors(item)}


class Objects:
    """Large registered objects, which are not copied at every entry."""

    def __init__(self, me: RankFacts) -> None:
        self._me = me
        self._items: dict[str, Registered] = {}
        self._listed: dict[str, _Listed] = {}
        self._moves: Counter[str] = Counter()
        self._samples = Samples((), ())

    def enter(self, looked: bool) -> None:
        """A step or section begins. `looked`: this is one in which saving them does not matter."""
        objects = self._me.objects.items()
        items = {n: item for n, item in objects if item.large and not item.per_rank}
        stale = {
            name
            for name, item in items.items()
            if looked
            or name not in self._listed
            or self._items.get(name) is not item
            or self._listed[name].let_go(entry=True)
        }
        fresh = stale or items.keys() != self._items.keys()
        self._items = items
        if fresh:
            self._list(stale)
        self._samples.take()
        if fresh:
            for one in self._listed.values():
                one.count()

    def _list(self, stale: set[str]) -> None:
        cells = {shards.local(x).data_ptr() for x in self._me.cells.tensors()}
        known = self._listed
        self._listed = {}
        for name, item in self._items.items():
            before = known.get(name)
            if before is not None and name not in stale:
                self._listed[name] = before
                continue
            now = self._listed[name] = _Listed(item, cells)
            if before is not None:
                self._moves[name] += not before.tensors.keys() <= now.tensors.keys()
                if self._moves[name] >= MOVES:
                    now.tensors = {p: x for p, x in now.tensors.items() if p in before.tensors}
        pairs = [
            (f"object {n}", x) for n, one in self._listed.items() for x in one.tensors.values()
        ]
        self._samples = Samples((name for name, _ in pairs), (tensor for _, tensor in pairs))

    def changed(self, queued: bool, *, waits: bool = True) -> set[str]:
        found = self._samples.changed(queued, waits=waits)
        return found | self._moved({n for n, one in self._listed.items() if one.let_go()})

    def moved(self) -> set[str]:
        """At a retry, where it may take a while."""
        return self._moved(self._listed.keys())

    def _moved(self, names: Collection[str]) -> set[str]:
        return {f"object {n}" for n in names if self._listed[n].moved(self._items[n])}
