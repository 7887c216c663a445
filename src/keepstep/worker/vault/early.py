"""Gradients that go to the vault before the fence, while the backward pass computes.

Each is final, as a rule, when it was accumulated for the last time in a step. A hook puts it then
(FSDP2 calls the same hook when it has reduced a shard); which backward pass is a step's last one is
guessed from the step before. Nobody tells when a gradient is changed afterwards: versions of
tensors do not count writes through `.data`, by collectives, by foreign kernels, nor those of
`_foreach` operations on sharded tensors. So at the fence what is there now is compared with what
was sent. What differs is put again, under the same version, and takes the place of the early one: a
wrong guess costs time and nothing else.

Every word to a device or to a thread costs the main thread some time, however small the gradient
is. So gradients of which one follows the other go together: one copy, one comparison.

Clipping by the norm multiplies nearly all gradients of a step by one number. It is recognised, the
number goes into the step's note, and whoever replays the step multiplies by it in the same way.

How bytes get from a kind of device to the line, and how they are compared, is a `Way`: host.py has
that of host memory, staging.py that of a GPU. Hooks run in the main thread or, while that waits for
a backward pass, in threads of autograd's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from keepstep.worker.state import shards
from keepstep.worker.vault.units import same_order
from keepstep.worker.vault.vault import VaultLine

PAUSE = 64  # steps without a guess after a wrong one
SCALES_MAX = 64  # of one step

Scales = list[tuple[torch.Tensor, list[int]]]
"""Numbers that gradients of the vault are to be multiplied by, one after the other, and the units
that they belong to."""


class Way(Protocol):
    """Of gradients it is told the parts that are here."""

    patient: bool
    """It may be told of a gradient long after that was made: to do so for many at once takes less
    time, while a processor remembers how."""

    def suits(self, part: torch.Tensor) -> bool: ...
    def joins(self, last: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether it can go together with the one before."""

    def full(self, size: int) -> bool:
        """Whether so many bytes should wait for no more."""

    def here(self, before: Any) -> Any:
        """The moment at which a gradient was just made; `put` is told. `before`: that of the one
        that it goes together with, if there is one, and not needed any more."""

    def place(self, parts: Sequence[torch.Tensor]) -> Any:
        """What must be as it was when they were put, or nobody can look at them."""

    def put(self, line: VaultLine, version: int, parts: dict[int, torch.Tensor], made: Any) -> Any:
        """Gives a ticket, or None: it cannot be. They may be written to at any time."""

    def before_write(self) -> None:
        """All that was put is about to be written to, and shall be sent as it is now."""

    def look(self, groups: Sequence[Sequence[torch.Tensor]]) -> Sequence[Any]:
        """What those of each ticket are now, to be compared later."""

    def multiply(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        chosen: Sequence[Sequence[bool]],
        by: torch.Tensor,
    ) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """Those that are chosen, in place and as torch does it; gives looks before and after. None:
        nothing was done, torch has to."""

    def seen(self, look: Any) -> Any:
        """Behind the device: what a look has seen. Equal values, equal bytes."""

    def sent(self, line: VaultLine, ticket: Any) -> Any:
        """The same of what was sent. None: it was lost."""


@dataclass(eq=False)
class _Sent:
    """What went together."""

    way: Way
    parameters: dict[int, torch.Tensor] = field(default_factory=dict)  # by unit
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # not held when they were put
    size: int = 0
    place: Any = None
    made: Any = None
    ticket: Any = None
    # Before and after each clipping, and at the fence. Nobody else has written to it if the first
    # is what was sent, the third what the second was, and so on.
    looks: list[Any] = field(default_factory=list)

    def now(self) -> list[torch.Tensor] | None:
        """The gradients, if they can be looked at."""
        found = []
        for parameter in self.parameters.values():
            if (gradient := parameter.grad) is None:
                return None
            found.append(shards.local(gradient))
        return found if self.way.place(found) == self.place else None


_Now = dict[Way, list[tuple[_Sent, list[torch.Tensor]]]]


def _look(at: _Now) -> None:
    for way, some in at.items():
        for (sent, _), look in zip(some, way.look([now for _, now in some]), strict=True):
            sent.looks.append(look)


class Early:
    def __init__(self) -> None:
        self.ways: list[Way] = []
        self._line: VaultLine | None = None  # open for puts
        self._version = -1
        self._sent_by: VaultLine | None = None
        self._hooks: list[Any] = []
        # Hooks of parameters on several devices run at once.
        self._turn = threading.RLock()
        self._noted: list[tuple[int, torch.Tensor]] = []  # to be gathered
        self._noted_bytes = 0
        self._patient = False
        self._gathered: _Sent | None = None  # to be put
        self._sent: dict[int, _Sent] = {}  # by unit
        self._put = False  # anything, in this step
        self._scales: Scales = []
        self._wrong = False
        self._pause = 0

    def watch(self, unit: int, parameter: torch.nn.Parameter) -> None:
        register: Any = parameter.register_post_accumulate_grad_hook  # untyped in torch
        size = shards.local(parameter).nbytes
        self._hooks.append(register(lambda one: self._accumulated(unit, one, size)))

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def forget(self) -> None:
        """A step begins."""
        if self._wrong:
            self._pause = PAUSE
        self._pause = max(self._pause - 1, 0)
        self._line = self._sent_by = self._gathered = None
        self._noted.clear()
        self._noted_bytes = 0
        self._sent.clear()
        self._scales = []
        self._put = self._wrong = False

    def open(self, line: VaultLine, version: int) -> None:
        """The last backward pass of the step begins."""
        if self._pause == 0:
            self._line = self._sent_by = line
            self._version = version
            self._patient = all(way.patient for way in self.ways)

    def close(self) -> None:
        """It is over, or it was not the last one."""
        self.flush()
        self._line = None

    def _accumulated(self, unit: int, parameter: torch.Tensor, size: int) -> None:
        if self._line is None:
            return
        with self._turn:
            if not self._patient:
                self._gather(unit, parameter)
                return
            self._noted.append((unit, parameter))
            self._noted_bytes += size
            if any(way.full(self._noted_bytes) for way in self.ways):
                self.flush()

    def _gather(self, unit: int, parameter: torch.Tensor) -> None:
        gradient, gathered = parameter.grad, self._gathered
        if self._line is None or gradient is None or unit in self._sent:
            return
        part, like = shards.local(gradient), shards.local(parameter)
        if not (same_kind(like, part) and same_order(like, part)):
            return
        for way in self.ways:
            if way.suits(part):
                break
        else:
            return
        if gathered is not None and unit in gathered.parts:
            return
        if gathered is None or gathered.way is not way or not way.joins(_last(gathered), part):
            self.flush()
            gathered = self._gathered = _Sent(way)
        gathered.parameters[unit], gathered.parts[unit] = parameter, part
        gathered.made = way.here(gathered.made)
        gathered.size += part.nbytes
        if way.full(gathered.size):
            self.flush()

    def flush(self) -> None:
        """Nothing more is waited for."""
        with self._turn:
            noted, self._noted, self._noted_bytes = self._noted, [], 0
            for unit, parameter in noted:
                self._gather(unit, parameter)
            sent, self._gathered = self._gathered, None
            if sent is None or self._line is None:
                return
            sent.place = sent.way.place(list(sent.parts.values()))
            sent.ticket = sent.way.put(self._line, self._version, sent.parts, sent.made)
            sent.parts, sent.made = {}, None
            if sent.ticket is not None:
                self._put = True
                self._sent.update(dict.fromkeys(sent.parameters, sent))

    def _all_sent(self) -> list[_Sent]:
        return list(dict.fromkeys(self._sent.values()))

    # ------------------------------------------------------------------ clipping

    def clip(self, clip: Callable[[], Any]) -> Any:
        """In place of `clip`, which is about to multiply gradients by a number."""
        line = self._sent_by
        if line is None:
            return clip()
        self.close()
        for way in self.ways:
            way.before_write()
        with _Multiplications(self._multiplies):
            return clip()

    def _multiplies(
        self,
        gradients: Sequence[torch.Tensor],
        scale: torch.Tensor,
        multiply: Callable[[Sequence[torch.Tensor]], Any],
    ) -> None:
        parts = list(map(shards.local, gradients))
        ids = set(map(id, parts))
        once = len({part.data_ptr() or id(part) for part in parts}) == len(parts)
        if not once or len(self._scales) == SCALES_MAX:
            multiply(gradients)  # who is will be found changed
            return
        scale = scale.detach().clone()
        units: list[int] = []
        looked_at: _Now = {}
        for way, all_of_it in self._now(lambda sent: True).items():
            some = [one for one in all_of_it if any(id(part) in ids for part in one[1])]
            groups = [now for _, now in some]
            chosen = [[id(one) in ids for one in now] for now in groups]
            looks = way.multiply(groups, chosen, scale)
            if looks is None:
                whole = list(map(all, chosen))
                some = looked_at[way] = list(compress(some, whole))
                chosen = list(compress(chosen, whole))
            else:
                for (sent, now), which, *pair in zip(some, chosen, *looks, strict=True):
                    sent.looks += pair
                    ids.difference_update(map(id, compress(now, which)))
            for (sent, _), which in zip(some, chosen, strict=True):
                units += compress(sent.parameters, which)
        if units:
            self._scales.append((scale, units))
        _look(looked_at)
        left = [one for one, part in zip(gradients, parts, strict=True) if id(part) in ids]
        if left:
            multiply(left)
        _look(looked_at)

    def _now(self, wanted: Callable[[_Sent], bool]) -> _Now:
        found: _Now = {}
        for sent in self._all_sent():
            if wanted(sent) and (now := sent.now()) is not None:
                found.setdefault(sent.way, []).append((sent, now))
        return found

    # ------------------------------------------------------------------ at the fence

    def guessed(self, line: VaultLine) -> bool:
        """Whether the line has got what may not be final."""
        return self._put and line is self._sent_by

    def sent(self, line: VaultLine) -> set[int]:
        """The units of which something was put. Nothing more is, from here on."""
        self.close()
        if line is not self._sent_by:  # what was clipped goes as it is now
            self._sent.clear()
            self._scales = []
        return set(self._sent)

    def look(self, updated: Callable[[int], bool]) -> None:
        """Before the device is waited for. `updated`: the unit's gradient is used."""
        _look(self._now(lambda sent: all(map(updated, sent.parameters))))

    def bring(self, bring: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        """After all looks: numbers that lie on a device are replaced by what `bring` makes."""
        away = [at for at, (scale, _) in enumerate(self._scales) if scale.device.type != "cpu"]
        brought = bring([self._scales[at][0] for at in away])
        for at, scale in zip(away, brought, strict=True):
            self._scales[at] = (scale, self._scales[at][1])

    def changed(self, line: VaultLine) -> list[int]:
        """Behind the device: units of which the vault has not what was looked at last, but for
        `scales`, and will not get it with what was put."""
        if line is not self._sent_by:
            return []
        wrong = [sent for sent in self._all_sent() if not _same(line, sent)]
        changed = [unit for sent in wrong for unit in sent.parameters]
        for unit in changed:
            del self._sent[unit]
        self._wrong = self._wrong or (bool(changed) and not line.broken)
        return changed

    @property
    def scales(self) -> Scales:
        """Of what is not `changed`."""
        found = [(scale, [u for u in units if u in self._sent]) for scale, units in self._scales]
        return [(scale, units) for scale, units in found if units]


def _last(gathered: _Sent) -> torch.Tensor:
    return next(reversed(gathered.parts.values()))


def _same(line: VaultLine, sent: _Sent) -> bool:
    chain = [sent.way.sent(line, sent.ticket), *map(sent.way.seen, sent.looks)]
    if len(chain) % 2 or None in chain:
        return False
    return all(one == other for one, other in zip(chain[::2], chain[1::2], strict=True))


_watched = threading.Lock()


class _Multiplications:
    """Of many tensors by one, in place. A mode of torch's would see them as well, and every other
    word of the function's, which takes longer than to multiply."""

    def __init__(self, instead: Callable[..., Any]) -> None:
        self._instead = instead

    def __enter__(self) -> None:
        self._watching = _watched.acquire(blocking=False)  # otherwise somebody else does
        if self._watching:
            self._inner = torch._foreach_mul_
            torch._foreach_mul_ = self._multiply

    def __exit__(self, *_: object) -> None:
        if self._watching:
            torch._foreach_mul_ = self._inner
            _watched.release()

    def _multiply(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and isinstance(args[1], torch.Tensor):
            replicated = getattr(args[1], "placements", ())
            if all(placement.is_replicate() for placement in replicated):
                by = args[1]
                self._instead(args[0], shards.local(by), lambda some: self._inner(some, by))
                return args[0]
        return self._inner(*args, **kwargs)


def watch_clipping(early: Early) -> None:
    """`clip_grad_norm_` looks its other half up in its module, wherever it was imported to."""
    inner: Any = clip_grad._clip_grads_with_norm_

    @functools.wraps(inner)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)  # what it has changed will be found
        return early.clip(lambda: inner(*args, **kwargs))

    for module, name in (
        (clip_grad, "_clip_grads_with_norm_"),
        (torch.nn.utils, "clip_grads_with_norm_"),
    ):
        setattr(module, name, watched)


@torch.no_grad()
def multiply(gradients: dict[int, torch.Tensor], scales: Iterable[Any]) -> None:
    """What clipping did, to what the vault had; by unit."""
    for scale, units in scales:
        parts = [shards.local(gradients[unit]) for unit in units if unit in gradients]
        for device in {part.device for part in parts}:
            here = [part for part in parts if part.device == device]
            torch._foreach_mul_(here, scale.to(device))


def same_kind(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.dtype == parameter.dtype
