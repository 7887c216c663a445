"""Gradients that go to the vault before the fence, while the backward pass computes.

Each is final, as a rule, when it was accumulated for the last time in a step. A hook puts it then
(FSDP2 calls the same hook when it has reduced a shard); which backward pass is a step's last one is
guessed from the step before. Nobody tells when a gradient is changed afterwards: versions of
tensors do not count writes through `.data`, by collectives, by foreign kernels, nor those of
`_foreach` operations on sharded tensors. So at the fence what is there now is compared with what
was sent. What differs is put again, under the same version, and takes the place of the early one: a
wrong guess costs time and nothing else.

Every word to a device costs the main thread some time, however small the gradient is. So gradients
that lie side by side, as those of an FSDP2 module do, can go together: one copy, one comparison.

Clipping by the norm multiplies nearly all gradients of a step by one number. It is recognised, the
number goes into the step's note, and whoever replays the step multiplies by it in the same way.

How bytes get from a kind of device to the line, and how they are compared, is a `Way`: here the one
of host memory, in staging.py that of a GPU. Hooks run in the main thread or, while that waits for a
backward pass, in threads of autograd's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from keepstep.worker import shards
from keepstep.worker.units import view
from keepstep.worker.vault import VaultLine, digest

PAUSE = 64  # steps without a guess after a wrong one
SCALES_MAX = 64  # of one step

Scales = list[tuple[torch.Tensor, list[int]]]
"""Numbers that gradients of the vault are to be multiplied by, one after the other, and the units
that they belong to."""


class Way(Protocol):
    gathers: bool  # several gradients that lie side by side go together

    def suits(self, gradient: torch.Tensor) -> bool: ...
    def joins(self, last: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether it can go together with the one before."""

    def here(self, before: Any) -> Any:
        """The moment at which a gradient was just made; `put` is told. `before`: that of the one
        that it goes together with, if there is one, and not needed any more."""

    def put(
        self, line: VaultLine, version: int, gradients: dict[int, torch.Tensor], made: Any
    ) -> Any:
        """Gives a ticket, or None: it cannot be. They may be written to at any time."""

    def before_write(self, line: VaultLine, ticket: Any) -> None:
        """They are about to be written to, and what was sent shall be as it is now."""

    def look(self, ticket: Any, gradients: list[torch.Tensor]) -> Any:
        """What those of one ticket are now, to be compared later."""

    def seen(self, look: Any) -> Any:
        """Behind the device: what a look has seen. Equal values, equal bytes."""

    def sent(self, line: VaultLine, ticket: Any) -> Any:
        """The same of what was sent. None: it was lost."""


class HostWay:
    """The line reads it where it lies, and copies it, because it may be written to meanwhile."""

    gathers = False

    def suits(self, gradient: torch.Tensor) -> bool:
        return gradient.device.type == "cpu"

    def joins(self, last: torch.Tensor, gradient: torch.Tensor) -> bool:
        return False

    def here(self, before: Any) -> Any:
        return None

    def put(
        self, line: VaultLine, version: int, gradients: dict[int, torch.Tensor], made: Any
    ) -> Any:
        ((unit, gradient),) = gradients.items()
        return line.put_grad(unit, version, view(gradient), early=True)

    def before_write(self, line: VaultLine, ticket: Any) -> None:
        line.wait_read(ticket)

    def look(self, ticket: Any, gradients: list[torch.Tensor]) -> Any:
        (gradient,) = gradients
        return digest(view(gradient), ticket)

    def seen(self, look: Any) -> Any:
        return look

    def sent(self, line: VaultLine, ticket: Any) -> Any:
        return line.digest_sent(ticket)


@dataclass(eq=False)
class _Sent:
    """What went together."""

    way: Way
    parameters: dict[int, torch.Tensor]  # by unit
    gradients: dict[int, torch.Tensor]  # not held when they were put
    places: list[tuple[int, int]] = field(default_factory=list)
    made: Any = None
    ticket: Any = None
    # Looks before and after each clipping, and at the fence. Nobody else has written to it if the
    # first is what was sent, the third what the second was, and so on.
    looks: list[Any] = field(default_factory=list)

    def now(self) -> list[torch.Tensor] | None:
        """The gradients, if they are still there and together."""
        found = [parameter.grad for parameter in self.parameters.values()]
        here = [one for one in found if one is not None]
        if len(here) < len(found):
            return None
        if len(here) == 1:
            return here if self.way.suits(here[0]) else None
        return here if [_place(one) for one in here] == self.places else None


class Early:
    def __init__(self) -> None:
        self.ways: list[Way] = [HostWay()]
        self._line: VaultLine | None = None  # open for puts
        self._version = -1
        self._sent_by: VaultLine | None = None
        self._hooks: list[Any] = []
        # Hooks of parameters on several devices run at once.
        self._turn = threading.RLock()
        self._gathered: _Sent | None = None  # to be put
        self._sent: dict[int, _Sent] = {}  # by unit
        self._scales: Scales = []
        self._wrong = False
        self._pause = 0

    def watch(self, unit: int, parameter: torch.nn.Parameter) -> None:
        register: Any = parameter.register_post_accumulate_grad_hook  # untyped in torch
        self._hooks.append(register(lambda one: self._accumulated(unit, one)))

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
        self._sent.clear()
        self._scales = []
        self._wrong = False

    def open(self, line: VaultLine, version: int) -> None:
        """The last backward pass of the step begins."""
        if self._pause == 0:
            self._line = self._sent_by = line
            self._version = version

    def close(self) -> None:
        """It is over, or it was not the last one."""
        self.flush()
        self._line = None

    def _accumulated(self, unit: int, parameter: torch.Tensor) -> None:
        with self._turn:
            self._gather(unit, parameter)

    def _gather(self, unit: int, parameter: torch.Tensor) -> None:
        gradient, gathered = parameter.grad, self._gathered
        if self._line is None or gradient is None or unit in self._sent:
            return
        way = next((way for way in self.ways if way.suits(gradient)), None)
        if way is None or not same_kind(parameter, gradient):
            return
        if gathered is not None and unit in gathered.gradients:
            return
        if gathered is None or gathered.way is not way or not way.joins(_last(gathered), gradient):
            self.flush()
            gathered = self._gathered = _Sent(way, {}, {})
        gathered.parameters[unit], gathered.gradients[unit] = parameter, gradient
        gathered.made = way.here(gathered.made)
        if not way.gathers:
            self.flush()

    def flush(self) -> None:
        """Nothing more is waited for."""
        with self._turn:
            sent, self._gathered = self._gathered, None
            if sent is None or self._line is None:
                return
            sent.ticket = sent.way.put(self._line, self._version, sent.gradients, sent.made)
            if sent.ticket is None:
                return
            sent.places = [_place(one) for one in sent.gradients.values()]
            sent.gradients, sent.made = {}, None
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
        before = {}
        for sent in self._all_sent():
            if (now := sent.now()) is not None:
                sent.way.before_write(line, sent.ticket)
                before[sent] = sent.way.look(sent.ticket, now)
        with _Multiplications() as seen:
            result = clip()
        for gradients, scale in seen.found:
            if len(self._scales) == SCALES_MAX:
                break  # who is multiplied by more will be found changed
            ids = set(map(id, gradients))
            if len(set(map(_place, gradients))) < len(gradients):
                continue  # one of them is multiplied twice
            units: list[int] = []
            for sent in list(before):
                now = sent.now()
                if now is not None and all(id(one) in ids for one in now):
                    sent.looks += [before.pop(sent), sent.way.look(sent.ticket, now)]
                    units += sent.parameters
            if units:
                self._scales.append((scale.detach().clone(), units))
        return result

    # ------------------------------------------------------------------ at the fence

    def look(self, line: VaultLine, updated: Callable[[int], bool]) -> set[int]:
        """Before the device is waited for: the units of which something was sent. `updated`: the
        unit's gradient is used."""
        self.close()
        if line is not self._sent_by:  # what was clipped goes as it is now
            self._sent.clear()
            self._scales = []
            return set()
        for sent in self._all_sent():
            now = sent.now() if all(map(updated, sent.parameters)) else None
            if now is not None:
                sent.looks.append(sent.way.look(sent.ticket, now))
        return set(self._sent)

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


def _place(gradient: torch.Tensor) -> tuple[int, int]:
    part = shards.local(gradient)
    return part.data_ptr() or id(gradient), part.untyped_storage().data_ptr()


def _last(gathered: _Sent) -> torch.Tensor:
    return next(reversed(gathered.gradients.values()))


def _same(line: VaultLine, sent: _Sent) -> bool:
    chain = [sent.way.sent(line, sent.ticket), *map(sent.way.seen, sent.looks)]
    if len(chain) % 2 or None in chain:
        return False
    return all(one == other for one, other in zip(chain[::2], chain[1::2], strict=True))


class _Multiplications(TorchFunctionMode):
    """Of many tensors by one, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._foreach_mul_ and not kwargs and isinstance(args[1], torch.Tensor):
            replicated = getattr(args[1], "placements", ())
            if all(placement.is_replicate() for placement in replicated):
                self.found.append((list(args[0]), shards.local(args[1])))
        return func(*args, **(kwargs or {}))


def watch_clipping(early: Early) -> None:
    """`clip_grad_norm_` looks its other half up in its module, wherever it was imported to."""
    inner: Any = clip_grad._clip_grads_with_norm_

    @functools.wraps(inner)
    def watched(*args: Any, **kwargs: Any) -> Any:
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
