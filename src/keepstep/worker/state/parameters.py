"""Parameters and large objects that a step changes before its fence, or outside its optimizers.

Theory of operation
-------------------
Nothing before the fence may leave a trace when a step is retried. Parameters are not copied at
every step for that: hardly any script touches them before the update. Those that do (SAM and FGM
perturb them and put them back, hand-written updates need no optimizer) are found by their content,
in the first steps of a call site and now and then later: version counters do not see `p.data` and
views. From then on such a site pays for a copy of what it changes, made at the entry of each step,
and is told so once. Registered objects that are too large to be copied at every step are treated
alike. A site may begin with it late, in a step that nobody looks at and that must be retried. So of
every parameter the version counter and some elements are noted at each entry; a retry that finds
others is refused.

What has no replica is rebuilt by the optimizer from the gradients (redundancy.py). So there nothing
but the optimizer may change it: a change behind the update, or between steps, is refused by name.
Such a change may come rarely (at an epoch's end, every fifth step). So besides what is looked at in
full, every update is followed by a signature of these parameters, which must be the same at the
next entry: samples of what is in host memory, norms of what is on a device, where nothing waits for
them until it matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
import xxhash

from keepstep.errors import UsageError
from keepstep.worker.device import extension
from keepstep.worker.device.digest import digest
from keepstep.worker.state import codec, shards, step_inputs
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.tensors import dense, memory, on_cpu

FIRST, EVERY = 3, 1024  # calls of a site in which content is looked at: all of it, three times
SAMPLES = 8  # elements of a parameter, in every call

_RECORD = 24  # bytes: version counter, place, hash of elements (samples.h)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOTHING = torch.empty(0, device="cpu")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NORMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Signed(NamedTuple):
    """Signatures of what has no replica."""

    here: dict[str, str]  # in host memory, by name
    norms: dict[str, torch.Tensor]  # on devices, by device and dtype
    names: dict[str, list[str]]


class _Samples:
    """Version counters, places and some elements of parameters, as of one moment."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._sharded = any(shards.local(p) is not p for p in self._parameters)
        self._parts = self._parts_now()
        self._views: dict[tuple[Any, Any], dict[int, torch.Tensor]] = {}  # of what a device has
        self._viewed: bytes | None = None
        self._records = b""
        self._elements: dict[tuple[Any, Any], torch.Tensor] = {}
        self._on_device = any(part.device.type != "cpu" for part in self._parts)

    def _parts_now(self) -> list[torch.Tensor]:
        found = [shards.local(p) for p in self._parameters]
        return [part if type(part) in _PLAIN else _NOTHING for part in found]

    def _records_now(self) -> bytes:
        if self._sharded:
            self._parts = self._parts_now()
        found: bytes = extension.load().sampled(self._parameters, self._parts, SAMPLES, True)
        return found

    def take(self) -> None:
        self._records = self._records_now()
        if self._on_device:
            self._take_elements()

    def _take_elements(self) -> None:
        places = numpy.frombuffer(self._records, numpy.uint64)[1::3].tobytes()
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

    def changed(self, queued: bool) -> set[str]:
        """Since they were taken. `queued`: an update was, and the device has left it out; the
        version counters do not know that."""
        skip = 8 if queued else 0
        pairs = zip(_split(self._records), _split(self._records_now()))
        found = {i for i, (before, now) in enumerate(pairs) if before[skip:] != now[skip:]}
        for kind, views in self._views.items():
            at = 0
            for index, view in views.items():
                before = self._elements[kind][at : at + len(view)]
                at += len(view)
                if not torch.equal(before, view):
                    found.add(index)
        return {self._names[index] for index in found}


def _split(records: bytes) -> list[bytes]:
    return [records[at : at + _RECORD] for at in range(0, len(records), _RECORD)]


def _spread(words: torch.Tensor) -> torch.Tensor:
    """Elements all over its memory."""
    count = min(words.numel(), SAMPLES)
    return words.as_strided((count,), (words.numel() // count,), words.storage_offset())


class _Unit(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> torch.nn.Parameter | None: ...


class _Vault(Protocol):
    """Of what no other rank has."""

    @property
    def needed(self) -> bool: ...

    @property
    def units(self) -> Sequence[_Unit]: ...


class Parameters:
    def __init__(self, me: RankFacts, vault: _Vault) -> None:
        self._me = me
        self._vault = vault
        self._samples: _Samples | None = None
        self._queued = False
        self._calls: Counter[str] = Counter()
        self._changing: dict[str, set[str]] = {}  # site -> names of what it changes early
        self._copies: dict[str, torch.Tensor] = {}
        self._entry: dict[str, bytes] | None = None  # contents, if this call is looked at
        self._updated: dict[str, bytes] | None = None  # contents behind the last update
        self._names: dict[str, torch.nn.Parameter] = {}
        self._alone: dict[str, torch.nn.Parameter] | None = None
        self._signed: _Signed | None = None  # behind the last update
        self._differ: dict[str, torch.Tensor] = {}  # on a device: which have ever differed

    def _without_replica(self) -> dict[str, torch.nn.Parameter]:
        if self._alone is None:
            units = self._vault.units
            self._alone = {u.name: u.parameter for u in units if u.parameter is not None}
        return self._alone

    def _all(self) -> dict[str, torch.nn.Parameter]:
        if not self._names:
            self._names = dict(self._me.state.parameters())
        return self._names

    def _contents(self) -> dict[str, bytes]:
        found = {name: content(p) for name, p in self._all().items()}
        for name, item in self._me.objects.items():
            if not item.undoable and not item.per_rank:
                data, tensors = codec.dumps(item.save())
                hashed = xxhash.xxh3_128(data)
                for tensor in tensors:
                    hashed.update(content(tensor))
                found[f"object {name}"] = hashed.digest()
        return found

    # ------------------------------------------------------------------ the life of a step

    def enter(self, site: str) -> None:
        self._calls[site] += 1
        calls = self._calls[site]
        looked = calls <= FIRST or calls % EVERY == 0
        self._entry = self._contents() if looked else None
        if self._updated is not None and self._entry is not None:
            self._refuse(self._updated, self._entry, "between steps")
        self._updated = None
        if self._samples is None:
            self._samples = _Samples(self._all())
        self._samples.take()
        self._queued = False
        changing = self._changing.get(site)
        self._copies = {}
        if changing:
            own = {name: p for name, p in self._all().items() if name in changing}
            self._copies = {n: shards.local(p).detach().clone() for n, p in own.items()}

    def fence(self, site: str, updating: bool) -> None:
        self.between()
        if self._entry is None:
            return
        self.midway(site)
        if self._vault.needed or not updating:
            how = "before the update" if updating else "without an optimizer"
            self._refuse(self._entry, self._contents(), f"in step {site!r} {how}")

    def queued(self) -> None:
        """An update is queued on a device, which may yet leave it out."""
        self._queued = True

    def midway(self, site: str) -> None:
        """A backward begins. What is put back before the update is changed here."""
        if self._entry is not None:
            now = self._contents()
            names = {name for name, before in self._entry.items() if now.get(name) != before}
            if self._samples is not None:  # written to, or moved, with the same content
                names |= self._samples.changed(self._queued)
            new = names - self._changing.setdefault(site, set())
            if new:
                self._note(site, new)

    def export(self) -> dict[str, list[str]]:
        return {site: sorted(names) for site, names in self._changing.items()}

    def load(self, changing: dict[str, list[str]]) -> None:
        """A newcomer: what others have noted."""
        for site, names in changing.items():
            self._changing.setdefault(site, set()).update(names)
            for name, item in self._me.objects.items():
                if f"object {name}" in names:
                    item.undoable = True

    def _note(self, site: str, new: set[str]) -> None:
        self._changing[site] |= new
        own = self._all()
        size = sum(shards.local(own[name]).nbytes for name in new if name in own)
        for name, item in self._me.objects.items():
            if f"object {name}" in new:
                item.undoable = True
                size += item.size
        first = min(new)
        self._me.warn(
            f"step {site!r} changes {len(new)} tensors before its optimizer's update (first: "
            f"{first}): {size / 2**20:.1f} MiB are copied at its begin from now on, so that a "
            "retry finds them as they were"
        )

    def updated(self) -> None:
        """Behind an optimizer's update."""
        if not self._vault.needed:
            return
        self._signed = self._signatures()
        if self._entry is not None:
            self._updated = self._contents()

    def _signatures(self) -> _Signed:
        here: dict[str, str] = {}
        away: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in self._without_replica().items():
            part = shards.local(parameter).detach()
            if part.device.type == "cpu":
                here[name] = step_inputs.content(part)
            elif part.dtype in _NORMED:
                away.setdefault(f"{part.device} {part.dtype}", []).append((name, part))
        norms = {
            kind: torch.stack(torch._foreach_norm([part for _, part in found]))
            for kind, found in away.items()
        }
        return _Signed(here, norms, {kind: [n for n, _ in found] for kind, found in away.items()})

    @torch.no_grad()
    def between(self) -> None:
        """At the entry of a step or section, whatever came before, and at its fence."""
        before = self._signed
        if before is None:
            return
        now = self._signatures()
        for kind, norms in now.norms.items():
            differ = before.norms[kind] != norms
            known = self._differ.get(kind)
            self._differ[kind] = differ if known is None else known | differ
        self._refuse_changed([n for n, one in now.here.items() if before.here[n] != one])

    def forget(self) -> None:
        """State was installed."""
        self._signed = None

    def confirm(self) -> None:
        """A rank is to be rebuilt: nothing on this one has changed otherwise than by updates."""
        self.between()
        if self._signed is not None:
            for kind, differ in self._differ.items():
                names = self._signed.names[kind]
                self._refuse_changed([n for n, one in zip(names, differ.tolist()) if one])

    def _refuse_changed(self, names: list[str]) -> None:
        if names:
            self._say_refused(sorted(names), "outside the update")

    def exit(self, site: str) -> None:
        if self._updated is not None:
            self._refuse(self._updated, self._contents(), f"behind the update in step {site!r}")

    def _refuse(self, before: dict[str, bytes], now: dict[str, bytes], where: str) -> None:
        alone = {unit.name for unit in self._vault.units if unit.parameter is not None}
        changed = sorted(n for n in alone if n in before and before[n] != now.get(n))
        if changed:
            self._say_refused(changed, where)

    def _say_refused(self, changed: list[str], where: str) -> None:
        raise UsageError(
            f"{len(changed)} parameters that no other rank has (first: {changed[0]}) are "
            f"changed {where}: after a loss they are rebuilt by the optimizer alone",
            hint="let an optimizer make the change, or use a layout with replicas",
        )

    @torch.no_grad()
    def undo(self) -> None:
        own = self._all()
        for name, copy in self._copies.items():
            shards.local(own[name]).detach().copy_(copy)

    def left_changed(self) -> str:
        """The first name of what a retry could not put back, as far as this call was looked at."""
        if self._entry is not None:
            now = self._contents()
            return min((n for n, was in self._entry.items() if now.get(n) != was), default="")
        if self._samples is None:
            return ""
        return min(self._samples.changed(self._queued) - self._copies.keys(), default="")


def content(tensor: Any) -> bytes:
    part = shards.local(tensor).detach()
    if part.device.type != "cpu":
        return digest(part)
    return xxhash.xxh3_128_digest(memory(on_cpu(part)))
