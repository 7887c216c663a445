"""Witnesses: what must be equal is compared, so that nothing goes wrong without a word.

Theory of operation
-------------------
Three things are compared while training runs, and whatever differs stops the job before the next
update (Recovery.diverged), with the names of what differs:

    inputs      A digest of a step's arguments is left with the own agent when the step begins. A
                newcomer that repeats the step must come to the same ones (step_inputs.py).
    agreement   Every fence carries three words more: which update follows, which collectives the
                transaction has made, and the learning rates. Whether an update follows must be the
                same on all ranks. Stages of a pipeline differ in the other two, so those count only
                for calls in which all ranks have agreed before (`comparable`).
    replicas    What several ranks must have alike (parameters, optimizer state, registered objects,
                buffers that follow from the update) is hashed: a few kilobytes at every step, in
                turn, and everything at the first fence after a recovery. Ranks compare what they
                found through the fence, early in a job, after recoveries and every PERIOD ticks:
                a hash of each class and, if any differs, one of all that is in each; then the
                names in those classes that differ. Only the least and the greatest hash of each
                are passed on, so that many ranks have no more to say than two.

Small registered objects are compared at every fence: two words of it are a digest of them as they
were when the transaction began. One that comes to differ while nothing disturbs the job is each
rank's own from then on. So is one that only some ranks have registered: it can neither be compared
nor copied. Where ranks with different parts of the model have registered different objects, the
parts take turns. A newcomer brings to its first fence the digests that its rank has left with its
inputs, beside its own where they are others. A rank lost before that may have changed an object for
the first time, and nobody knows how: there the newcomer keeps what the script has built, or what
was copied if that has never changed, and what its walk does to it, which is compared.

The slice of a step is read again when the step is rolled back: if it has changed, something was
changed before the fence that nobody has noted, and a retry would begin from there.

On a device nothing here waits: sums are queued behind the work and read with the exchange.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Literal

import torch
import xxhash

from keepstep.worker.device import digest
from keepstep.worker.state import shards
from keepstep.worker.state.objects import hashed
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.step_inputs import LEAVES_MAX, block, summed
from keepstep.worker.state.tensors import memory, on_cpu, plain

PERIOD = 256  # ticks
EARLY = (1, 2, 3, 8)  # ticks at which a script that is wrong from the start is told
SLICE_BYTES = 16 << 10  # of one tensor, per class and step
ROLE = "|role"  # beside names of registered objects
WRONG = "!"  # between what a newcomer's rank had, and what it has
NO_TURN = 1 << 62  # a word of a rank whose part of the model has no turn at this fence
DIFFERS = "differs between ranks"
ELSEWHERE_NOT = "is not registered on all ranks"
AGREEING_MIN = 2  # fences in which all ranks agreed before a difference counts

Words = tuple[int, int, int]
Kind = Literal["", "update", "collectives", "learning-rate"]


# ----------------------------------------------------------------------------------- agreement


class Agreement:
    """What a transaction did that all ranks must have done."""

    def __init__(self) -> None:
        self.comparable: dict[str, list[int]] = {}  # site -> agreeing fences by word; -1: never
        self._collectives: list[str] = []

    def begin(self) -> None:
        self._collectives = []

    def collective(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        self._collectives.append(f"{name}{[list(tensor.shape) for tensor in tensors]}")

    def words(self, updating: str, rates: list[Any]) -> Words:
        return (
            zlib.crc32(updating.encode()),
            zlib.crc32("\n".join(self._collectives).encode()),
            zlib.crc32(repr(rates).encode()),
        )

    def judge(self, site: str, low: tuple[int, ...], high: tuple[int, ...]) -> Kind:
        """Which kind of thing differs, or nothing."""
        if low[0] != high[0]:
            return "update"
        counts = self.comparable.setdefault(site, [0, 0])
        kinds: tuple[Kind, Kind] = ("collectives", "learning-rate")
        for index, kind in enumerate(kinds):
            equal = low[index + 1] == high[index + 1]
            if counts[index] >= AGREEING_MIN and not equal:
                counts[index] = -1  # if the job is told to go on, it is not stopped again
                return kind
            if counts[index] >= 0:
                counts[index] = counts[index] + 1 if equal else -1
        return ""

    def table(self, updating: str, rates: list[Any]) -> dict[str, str]:
        """For those who name the difference; the same names on all ranks."""
        found = {"agree|update": updating or "none", "agree|learning rates": repr(rates)[:64]}
        found["agree|number of collectives"] = str(len(self._collectives))
        for index, made in enumerate(self._collectives[:LEAVES_MAX]):
            found[f"agree|collective {index}"] = made[:64]
        return found


# ------------------------------------------------------------------------------------ replicas


class Replicated:
    """The rolling hash of what replicas share."""

    def __init__(self, me: RankFacts, make_own: Callable[[str, str], None]) -> None:
        self._me = me
        self._make_own = make_own
        self._items: dict[str, _Tensors] = {}  # class -> its tensors, by name
        self._hashes: dict[str, Any] = {}  # class -> running hash (on a device: a tensor)
        self._slices: dict[str, str] = {}  # class -> of this tick, on the host
        self._looked = False
        self._tick = -1
        self.ignored: set[str] = set()  # classes that differ, and the job was told to go on
        self.fresh = True  # everything is to be compared at the next fence
        self.unmet = True  # objects of this rank that others may not have
        self.objects: dict[str, str] = {}  # digests of small ones, as the transaction began
        # Likewise, of the rank that this newcomer replaces, with the tick.
        self._inherited: tuple[int, dict[str, str]] = (-1, {})
        self.first: set[str] = (
            set()
        )  # that have changed since the transaction before, as never before
        self.changing: set[str] = set()  # that have changed, and were compared behind it
        self._entered = -1  # tick
        # Ranks with different parts of the model, if they have different ones.
        self._roles: list[str] = []
        self._role = ""  # of this rank
        self._uncertain: set[str] = set()  # that only some ranks take for small
        self.wrong: set[str] = set()  # that a newcomer has otherwise than its rank had them
        self.agreed = -1  # version

    def due(self, tick: int) -> bool:
        return self.fresh or tick in EARLY or tick % PERIOD == 0

    def forget(self) -> None:
        """A recovery: all ranks begin again."""
        self._hashes.clear()
        self._items.clear()
        self._looked = False
        self._tick, self.fresh, self.unmet = -1, True, True

    def enter(self, tick: int) -> None:
        if not self._looked or self.due(tick):
            self._refresh()
        if tick == self._tick:
            return
        self._tick = tick
        self._slices.clear()
        for kind, tensors in self._items.items():
            if tensors.on_device:
                self._fold(kind, tensors, tick)
                continue
            found = self._slices[kind] = tensors.digest(tick)
            before = self._hashes.get(kind, "")
            self._hashes[kind] = xxhash.xxh3_64_hexdigest(f"{before}{tick}{found}".encode())

    def changed_since_entry(self, tick: int) -> bool:
        """Whether a rolled-back step left something changed that `enter` has read."""
        if tick != self._tick:
            return False
        return any(self._items[kind].digest(tick) != found for kind, found in self._slices.items())

    def _refresh(self) -> None:
        self._looked = True
        tensors, classes = self._me.state.parts()
        buffers = self._me.cells.buffers() - self._me.cells.late
        found: dict[str, list[tuple[str, torch.Tensor]]] = {}
        buffers |= self._own_tensors()
        for name, tensor in tensors.items():
            own = name.startswith(("grad/", "object/keepstep/")) or name in buffers
            kind = classes[name]
            if not own and len(self._me.replicas.ranks[kind]) > 1 and tensor.numel():
                found.setdefault(f"{kind}/{tensor.device.type}", []).append((name, tensor))
        self._items = {
            kind: _Tensors([tensor for _, tensor in sorted(pairs, key=lambda pair: pair[0])])
            for kind, pairs in found.items()
        }

    def _own_tensors(self) -> set[str]:
        return {
            f"object/{name}/{place}"
            for name, item in self._me.objects.items()
            for place in item.own
        }

    def _fold(self, kind: str, tensors: _Tensors, tick: int) -> None:
        words = tensors.words(tick)
        if words is not None:
            value = summed(words)
            before = self._hashes.get(kind)
            self._hashes[kind] = value if before is None else before * 31 + value

    def found(self, full: bool) -> dict[str, str]:
        """Class -> hash, for the exchange; waits for the device."""
        if full:
            hashes = by_class(self.table())
        else:
            hashes = {
                kind: value if isinstance(value, str) else str(int(value.item()))
                for kind, value in self._hashes.items()
            }
        self._hashes.clear()
        return {k: value for k, value in hashes.items() if k.partition("/")[0] not in self.ignored}

    def keep_apart(self, names: set[str]) -> set[str]:
        """Of these names, which differ between ranks in a job that nothing has disturbed, those of
        registered objects are each rank's own from now on. Returns the others."""
        left: set[str] = set()
        for full in sorted(names):
            name = full.partition("|")[2]
            if name.startswith("object/"):
                owner, _, place = name.removeprefix("object/").rpartition("/")
                if owner not in self._me.objects:
                    continue  # only others have come to register it
                if self._me.objects[owner].late:
                    self._make_own(owner, DIFFERS)
                    continue
                self._me.objects[owner].own.add(int(place))
                self._me.warn(
                    f"{name} of registered object {owner!r} differs between ranks: it is carried "
                    "as each rank's own"
                )
            elif name.startswith("object "):
                owner = name.removeprefix("object ")
                if owner in self.wrong:
                    left.add(full)
                elif owner in self._me.objects:
                    self._make_own(owner, DIFFERS)
            else:
                left.add(full)
        return left

    def enter_objects(self, found: dict[str, str]) -> None:
        """Digests of small objects: a transaction begins, perhaps again."""
        if self._me.tick != self._entered:
            known = self.objects if self._entered >= 0 else found
            names = {n for n in known.keys() | found.keys() if known.get(n) != found.get(n)}
            changed = {name for name in names if self._shares(name)}
            self.first = (self.first | changed) - self.changing
            self._entered = self._me.tick
        self.objects = found

    def leave(self, name: str) -> None:
        """The object is no longer registered, on any rank."""
        self.first.discard(name)
        self.changing.discard(name)
        self.objects.pop(name, None)
        self._looked = False

    def unchanged(self) -> set[str]:
        return self.objects.keys() - self.changing - self.first

    def _shares(self, name: str) -> bool:
        return name in self._me.objects and not self._me.objects[name].per_rank

    def met(self) -> None:
        """A fence was passed."""
        if self._has_turn():
            self.changing |= self.first
            self.first = set()

    def _has_turn(self) -> bool:
        return not self._roles or self._roles[self._me.tick % len(self._roles)] == self._role

    def first_changes(self) -> dict[str, bytes]:
        """Small objects that this transaction has changed, as nothing has before."""
        found: dict[str, bytes] = {}
        for name in sorted(self.unchanged()):
            item = self._me.objects[name]
            snapshot = None if item.alike or item.per_rank else item.small_snapshot()
            if snapshot is not None and hashed(snapshot) != self.objects[name]:
                found[name] = snapshot
        return found

    def inherit(self, digests: dict[str, str]) -> None:
        """On a newcomer: its rank had these when it began the transaction that comes next."""
        self._inherited = self._me.tick, digests

    def small(self) -> dict[str, str]:
        """Digests of small objects as the transaction began; a newcomer tells its rank's, too."""
        tick, inherited = self._inherited
        found = dict(self.objects)
        for name, told in inherited.items() if tick == self._me.tick else ():
            found[name] = told if told == found.get(name, told) else f"{told}{WRONG}{found[name]}"
        return found

    def words(self) -> tuple[int, int]:
        """Of small objects, to be compared at every fence: the least of each word is the least and
        the greatest of all ranks, if ranks that have a turn agree."""
        if not self._has_turn():
            return NO_TURN, NO_TURN
        told = sorted((n, x) for n, x in self.small().items() if n not in self._uncertain)
        word = zlib.crc32(repr(told).encode())
        return word, -word

    @staticmethod
    def agree(low: tuple[int, ...]) -> bool:
        return low[0] == NO_TURN or low[0] == -low[1]

    def holdings(self) -> dict[str, str]:
        """The registered objects that this rank shares, with digests of small ones."""
        small = self.small()
        self._role = self._role_of(self._me.state.parts()[1])
        return {ROLE: self._role} | {
            name: small.get(name, "") for name, x in self._me.objects.items() if not x.per_rank
        }

    def keep_alone(self, everybody: list[dict[str, str]], undisturbed: bool) -> bool:
        """Objects that a rank lacks although it has the same part of the model as one that has them
        or, in a job that nothing has disturbed, has otherwise, are each rank's own from now on. So
        are those of a rank that has its part alone, if others lack them or have them otherwise, and
        they are without tensors (the vault's business). Whether this rank has any."""
        self.unmet = False
        parts: dict[str, list[dict[str, str]]] = {}
        for one in everybody:
            parts.setdefault(one[ROLE], []).append(one)
        names = {name for one in everybody for name in one} - {ROLE}
        self._uncertain = {name for name in names if any(one.get(name) == "" for one in everybody)}
        self.wrong = {name for one in everybody for name in one if WRONG in one[name]}
        why: dict[str, str] = {}
        for name in sorted(names):
            for alike in parts.values():
                found = {one.get(name) for one in alike}
                if None in found and len(found) > 1:
                    why[name] = ELSEWHERE_NOT
                elif undisturbed and len(found - {""}) > 1 and name not in self.wrong:
                    why.setdefault(name, DIFFERS)
        if len(parts) > 1 and len(parts[self._role]) == 1:
            for name, value in parts[self._role][0].items():
                if name == ROLE or name in self.wrong or not self._me.objects[name].plain:
                    continue
                if any(name not in one for one in everybody):
                    why[name] = ELSEWHERE_NOT
                elif undisturbed and any(one[name] not in ("", value) for one in everybody):
                    why[name] = DIFFERS
        told = [{n: x for n, x in one.items() if n != ROLE and n not in why} for one in everybody]
        self._roles = sorted(parts) if any(one != told[0] for one in told) else []
        mine = {name for name, item in self._me.objects.items() if not item.per_rank}
        made = [name for name in why if name in mine]
        for name in made:
            self._make_own(name, why[name])
        return bool(made)

    def _role_of(self, classes: dict[str, str]) -> str:
        """The same on ranks that have the same part of the model."""
        parts = {kind for name, kind in classes.items() if not name.startswith("object/")}
        shared = sorted(kind for kind in parts if len(self._me.replicas.ranks[kind]) > 1)
        return str(xxhash.xxh3_64_hexdigest(repr(shared).encode()))

    def table(self) -> dict[str, str]:
        """Of everything replicas must share, as "class|name" -> digest."""
        me = self._me
        tensors, classes = me.state.parts()
        buffers = (me.cells.buffers() - me.cells.late) | self._own_tensors()
        small = self.small()
        found: dict[str, str] = {}
        for name, tensor in tensors.items():
            kind = classes[name]
            own = name.startswith(("grad/", "object/keepstep/")) or name in buffers
            if not own and len(me.replicas.ranks[kind]) > 1:
                found[f"{kind}|{name}"] = _digest(tensor)
        role = self._role_of(classes)
        for name, item in me.objects.items():
            if not item.per_rank:
                found[f"{role}|object {name}"] = small.get(name) or item.digest()
        return found


def _digest(tensor: torch.Tensor) -> str:
    if tensor.device.type != "cpu":
        return digest.digest(tensor).hex()[:16]
    return xxhash.xxh3_64_hexdigest(memory(on_cpu(tensor)))


def by_class(table: Mapping[str, str]) -> dict[str, str]:
    """Of each class in `table`."""
    classes: dict[str, Any] = {}
    for name in sorted(table):
        kind = name.partition("|")[0]
        classes.setdefault(kind, xxhash.xxh3_64()).update(f"{name}{table[name]}".encode())
    return {kind: hashed.hexdigest() for kind, hashed in classes.items()}


def of_classes(table: Mapping[str, str], classes: Set[str]) -> dict[str, str]:
    """What of `table` is told if these differ; in any case what a newcomer has otherwise than
    its rank, which may be the only one of its class."""
    return {
        name: value
        for name, value in table.items()
        if name.partition("|")[0] in classes or WRONG in value
    }


def differing(everybody: Iterable[Mapping[str, str]]) -> set[str]:
    """Classes, or names, whose hashes differ between ranks that have them, or from what the
    rank had whose newcomer has them. It does for `everybody` what is least and what is greatest
    of all ranks."""
    values: dict[str, set[str]] = {}
    for one in everybody:
        for kind, value in one.items():
            values.setdefault(kind, set()).update(value.split(WRONG))
    return {kind for kind, found in values.items() if len(found) > 1}


class _Tensors:
    """Of one class, in the order of their names; read in slices, which take turns."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = [shards.local(tensor) for tensor in tensors]
        self._ends = list(itertools.accumulate(-(-t.nbytes // SLICE_BYTES) for t in tensors))
        self.on_device = tensors[0].device.type != "cpu"

    def _turn(self, tick: int) -> tuple[torch.Tensor, int]:
        """Whose turn it is, and from which byte on."""
        number = tick % self._ends[-1]
        index = bisect.bisect_right(self._ends, number)
        before = self._ends[index - 1] if index else 0
        return self._tensors[index], (number - before) * SLICE_BYTES

    def digest(self, tick: int) -> str:
        tensor, start = self._turn(tick)
        size = min(tensor.nbytes - start, SLICE_BYTES)
        if size <= 0 or not tensor.is_contiguous() or not plain(tensor):
            return ""
        return str(xxhash.xxh3_64_hexdigest(block(size).from_address(tensor.data_ptr() + start)))

    def words(self, tick: int) -> torch.Tensor | None:
        """On a device, if they can be read in place."""
        tensor, start = self._turn(tick)
        if not tensor.is_contiguous() or not plain(tensor):
            return None
        raw = tensor.detach().view(-1).view(torch.uint8)[start : start + SLICE_BYTES]
        return raw[: raw.numel() // 4 * 4].view(torch.int32)
