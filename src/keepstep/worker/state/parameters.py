"""Parameters and large objects that a step changes before its fence, or outside its optimizers.

Theory of operation
-------------------
Nothing before the fence may leave a trace when a step is retried. Parameters are not copied at
every step for that: hardly any script touches them before the update. Those that do (SAM and FGM
perturb them and put them back, hand-written updates need no optimizer) are found by their content,
in the first steps of a call site and now and then later: version counters do not see `p.data` and
views. From then on such a site pays for a copy of what it changes, made at the entry of each step,
and is told so once. Registered objects that are too large to be copied at every step are treated
alike. A site may begin with it late, in a step that nobody looks at. So of every parameter, and of
the tensors of large objects, the version counter and some elements are noted at each entry
(samples.py). A fence that finds others notes the site; a retry that does is refused.

A section is treated like a step (averages of the weights are put in for an evaluation). It has no
backward pass before which what is put back would be found: samples are read at its collectives
instead, in calls that are looked at, and version counters tell it at its end. It may leave weights
changed. Where no replica has them, the next entry refuses that, as between steps.

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

import torch
import xxhash

from keepstep.errors import UsageError
from keepstep.worker.device.digest import digest
from keepstep.worker.state import codec, samples, shards, step_inputs
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.tensors import memory, on_cpu

FIRST, EVERY = 3, 1024  # calls of a site in which content is looked at: all of it, three times

_OBJECT = "object "  # before the name of a registered one
_NORMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Signed(NamedTuple):
    """Signatures of what has no replica."""

    here: dict[str, str]  # in host memory, by name
    norms: dict[str, torch.Tensor]  # on devices, by device and dtype
    names: dict[str, list[str]]


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
        self._samples: samples.Samples | None = None
        self._objects = samples.Objects(me)
        self._step = True  # not a section
        self._site = ""
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
            if item.large and not item.per_rank:
                data, tensors = codec.dumps(item.save())
                hashed = xxhash.xxh3_128(data)
                for tensor in tensors:
                    hashed.update(content(tensor))
                found[_OBJECT + name] = hashed.digest()
        return found

    # ------------------------------------------------------------------ the life of a step

    def enter(self, site: str, step: bool = True) -> None:
        self._step, self._site = step, site
        self._calls[site] += 1
        looked = _is_looked_at(self._calls[site])
        self._entry = self._contents() if looked else None
        if step:
            if self._updated is not None and self._entry is not None:
                self._refuse(self._updated, self._entry, "between steps")
            self._updated = None
        if self._samples is None:
            self._samples = samples.Samples(self._all().keys(), self._all().values())
        self._samples.take()
        self._objects.enter(looked)
        self._queued = False
        changing = self._changing.get(site)
        self._copies = {}
        if changing:
            own = {name: p for name, p in self._all().items() if name in changing}
            self._copies = {n: shards.local(p).detach().clone() for n, p in own.items()}

    def fence(self, site: str, updating: bool) -> None:
        self.between()
        self.before_fence(site)
        if self._entry is not None and (self._vault.needed or not updating):
            how = "before the update" if updating else "without an optimizer"
            self._refuse(self._entry, self._contents(), f"in step {site!r} {how}")

    def before_fence(self, site: str) -> None:
        """What has begun to change in a call that is not looked at is found here at the latest."""
        self.midway(site)
        if self._entry is None:
            self._note(site, self._sampled(waits=False))

    def queued(self) -> None:
        """An update is queued on a device, which may yet leave it out."""
        self._queued = True

    def midway(self, site: str) -> None:
        """A backward begins. What is put back before the update is changed here."""
        if self._entry is not None:
            now = self._contents()
            names = {name for name, before in self._entry.items() if now.get(name) != before}
            self._note(site, names | self._sampled())  # or written to, or moved: the same content

    def collective(self, site: str) -> None:
        """In a section: what is put back before its end, and counts no version, is changed here."""
        if self._entry is not None:
            self._note(site, self._sampled())

    def _sampled(self, *, waits: bool = True) -> set[str]:
        """What has changed since the entry, as far as samples tell."""
        if self._samples is None:
            return set()
        found = self._samples.changed(self._queued, waits=waits)
        return found | self._objects.changed(self._queued, waits=waits)

    def objects_changed(self, site: str) -> set[str]:
        """Large ones that are copied at the entry of this site."""
        names = self._changing.get(site, ())
        return {name.removeprefix(_OBJECT) for name in names if name.startswith(_OBJECT)}

    def noted(self, others: dict[str, list[str]] | None = None) -> dict[str, list[str]]:
        """By site, what it changes early. On a newcomer: `others` have noted these."""
        for site, names in (others or {}).items():
            self._changing.setdefault(site, set()).update(names)
        return {site: sorted(names) for site, names in self._changing.items()}

    def _note(self, site: str, names: set[str]) -> None:
        new = names - self._changing.get(site, set())
        if not new:
            return
        self._changing.setdefault(site, set()).update(new)
        own = self._all()
        size = sum(shards.local(own[name]).nbytes for name in new if name in own)
        for name, item in self._me.objects.items():
            if _OBJECT + name in new:
                size += item.size
        kind, where = "step", " before its optimizer's update"
        if not self._step:
            kind, where = "section", ""
        self._me.warn(
            f"{kind} {site!r} changes {len(new)} tensors{where} (first: {min(new)}): "
            f"{size / 2**20:.1f} MiB are copied at its begin from now on, so that a retry finds "
            "them as they were"
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
        copied = self._changing.get(self._site, set())
        found = self._sampled() - copied
        return min(found or self._objects.moved() - copied, default="")


def _is_looked_at(calls: int) -> bool:
    """Often at first, and now and then: also in calls 4, 8, 16 and so on."""
    return calls <= FIRST or calls % EVERY == 0 or calls & (calls - 1) == 0


def content(tensor: Any) -> bytes:
    part = shards.local(tensor).detach()
    if part.device.type != "cpu":
        return digest(part)
    return xxhash.xxh3_128_digest(memory(on_cpu(part)))
