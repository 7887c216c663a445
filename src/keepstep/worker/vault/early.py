"""Gradients of a GPU that go to the vault before the fence, while the backward pass computes.

Each is final, as a rule, when it was accumulated for the last time in a step. A hook sends it then
(FSDP2 calls the same hook when it has reduced a shard); which backward pass is a step's last one is
guessed from the step before. Nobody tells when a gradient is changed afterwards: versions of
tensors do not count writes through `.data`, by collectives, by foreign kernels, nor those of
`_foreach` operations on sharded tensors. So at the fence the fingerprint of what is there now is
compared with that of what was sent. What differs is put again, under the same version, and takes
the place of the early one: a wrong guess costs time and nothing else.

Every word to a device costs the main thread some time, however small the gradient is. So gradients
of which one follows the other in memory go together: one copy, one comparison.

Clipping by the norm multiplies nearly all gradients of a step by one number. It is recognised, the
number goes into the step's note, and whoever replays the step multiplies by it in the same way.

gpu_staging.py copies the bytes and computes the fingerprints. Gradients in host memory are put at
the fence (redundancy.py). Hooks run in the main thread or, while that waits for a backward pass, in
threads of autograd's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils import clip_grad

from keepstep.worker.state import shards
from keepstep.worker.vault.gpu_staging import SCALES_MAX, PinnedStaging, StagedCopy
from keepstep.worker.vault.units import same_order
from keepstep.worker.vault.vault import VaultLine

PAUSE = 64  # steps without a guess after a wrong one

Scales = list[tuple[torch.Tensor, list[int]]]
"""Numbers that gradients of the vault are to be multiplied by, one after the other, and the units
that they belong to."""


@dataclass(eq=False)
class _Sent:
    """What went together."""

    parameters: dict[int, torch.Tensor] = field(default_factory=dict)  # by unit
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # not held when they were put
    places: Any = None
    made: Any = None  # event behind the last of them
    copy: StagedCopy | None = None
    # Places of fingerprints: before and after each clipping, and at the fence. Nobody else has
    # written to it if the first is that of the copy, the third what the second was, and so on.
    fingerprints: list[int] = field(default_factory=list)


_Current = list[tuple[_Sent, list[torch.Tensor]]]
"""What went together, and the gradients that are there now."""


class EarlyPuts:
    def __init__(self, staging: PinnedStaging) -> None:
        self.staging = staging
        self._line: VaultLine | None = None  # open for puts
        self._version = -1
        self._sent_by: VaultLine | None = None
        self._hooks: list[Any] = []
        # Hooks of parameters on several devices run at once.
        self._turn = threading.RLock()
        self._gathered: _Sent | None = None  # to be put
        self._sent: dict[int, _Sent] = {}  # by unit
        self._put = False  # anything, in this step
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

    # ------------------------------------------------------------------ in the backward pass

    def begin_step(self) -> None:
        if self._wrong:
            self._pause = PAUSE
        self._pause = max(self._pause - 1, 0)
        self._line = self._sent_by = self._gathered = None
        self._sent.clear()
        self._scales = []
        self._put = self._wrong = False

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
        if self._line is None:
            return
        with self._turn:
            gradient, gathered = parameter.grad, self._gathered
            if self._line is None or gradient is None or unit in self._sent:
                return
            part, like = shards.local(gradient), shards.local(parameter)
            if not (same_kind(like, part) and same_order(like, part)):
                return
            if not self.staging.can_copy(part):
                return
            if gathered is not None and unit in gathered.parts:
                return
            if gathered is None or not self.staging.adjoins(_last(gathered), part):
                self.flush()
                gathered = self._gathered = _Sent()
            gathered.parameters[unit], gathered.parts[unit] = parameter, part
            gathered.made = self.staging.record_event(gathered.made)

    def flush(self) -> None:
        """Nothing more is waited for."""
        with self._turn:
            sent, self._gathered = self._gathered, None
            if sent is None or self._line is None:
                return
            sent.places = self.staging.places(list(sent.parts.values()))
            sent.copy = self.staging.put(self._line, self._version, sent.parts, sent.made)
            sent.parts, sent.made = {}, None
            if sent.copy is not None:
                self._put = True
                self._sent.update(dict.fromkeys(sent.parameters, sent))

    # ------------------------------------------------------------------ clipping

    def watch_clip(self, clip: Callable[[], Any]) -> Any:
        """Runs `clip`, which is about to multiply gradients by a number."""
        if self._sent_by is None:
            return clip()
        self.close()
        self.staging.make_stream_wait()
        with _Multiplications(self._multiplies):
            return clip()

    def _multiplies(
        self,
        gradients: Sequence[torch.Tensor],
        scale: torch.Tensor,
        multiply: Callable[[], Any],
    ) -> None:
        parts = list(map(shards.local, gradients))
        ids = set(map(id, parts))
        once = len({part.data_ptr() or id(part) for part in parts}) == len(parts)
        if not once or len(self._scales) == SCALES_MAX:
            multiply()  # the fence finds that they have changed
            return
        scale = scale.detach().clone()
        clipped = [
            (sent, now)
            for sent, now in self._current(lambda sent: True)
            if all(id(part) in ids for part in now)
        ]
        if clipped:
            self._scales.append((scale, [unit for sent, _ in clipped for unit in sent.parameters]))
        self._queue_fingerprints(clipped)
        multiply()
        self._queue_fingerprints(clipped)

    def _current(self, wanted: Callable[[_Sent], bool]) -> _Current:
        """Of what was sent and is wanted: all whose gradients are where they were."""
        found: _Current = []
        for sent in self._all_sent():
            if wanted(sent):
                gradients = [parameter.grad for parameter in sent.parameters.values()]
                parts = [shards.local(one) for one in gradients if one is not None]
                if len(parts) == len(gradients) and self.staging.places(parts) == sent.places:
                    found.append((sent, parts))
        return found

    def _queue_fingerprints(self, current: _Current) -> None:
        places = self.staging.queue_fingerprints([parts for _, parts in current])
        for (sent, _), place in zip(current, places, strict=True):
            sent.fingerprints.append(place)

    def _all_sent(self) -> list[_Sent]:
        return list(dict.fromkeys(self._sent.values()))

    # ------------------------------------------------------------------ at the fence

    def has_put(self, line: VaultLine | None) -> bool:
        """Whether the line has got what may not be final."""
        return self._put and line is self._sent_by

    def end_puts(self, line: VaultLine) -> set[int]:
        """The units of which something was put. Nothing more is, from here on."""
        self.close()
        if line is not self._sent_by:  # what was clipped goes as it is now
            self._sent.clear()
            self._scales = []
        return set(self._sent)

    def queue_comparison(self, used: Callable[[int], bool]) -> None:
        """Before the device is waited for: it computes what `find_changed` compares, and brings it
        to the host together with the numbers that clipping has multiplied by. `used`: the unit's
        gradient is."""
        self._queue_fingerprints(self._current(lambda sent: all(map(used, sent.parameters))))
        away = [at for at, (scale, _) in enumerate(self._scales) if scale.device.type != "cpu"]
        copies = self.staging.queue_readback([self._scales[at][0] for at in away])
        for at, copy in zip(away, copies, strict=True):
            self._scales[at] = (copy, self._scales[at][1])
        self.staging.make_stream_wait()

    def find_changed(self, line: VaultLine) -> list[int]:
        """Behind the device: units of which the vault has not what was there at the fence, but for
        `scales`, and will not get it with what was put."""
        if line is not self._sent_by:
            return []
        wrong = [sent for sent in self._all_sent() if not _unchanged(self.staging, line, sent)]
        changed = [unit for sent in wrong for unit in sent.parameters]
        for unit in changed:
            del self._sent[unit]
        self._wrong = self._wrong or (bool(changed) and not line.broken)
        return changed

    @property
    def scales(self) -> Scales:
        """Of what has not changed."""
        found = [(scale, [u for u in units if u in self._sent]) for scale, units in self._scales]
        return [(scale, units) for scale, units in found if units]


def _last(gathered: _Sent) -> torch.Tensor:
    return next(reversed(gathered.parts.values()))


def _unchanged(staging: PinnedStaging, line: VaultLine, sent: _Sent) -> bool:
    assert sent.copy is not None
    chain: list[Any] = [staging.copy_fingerprint(line, sent.copy)]
    chain += map(staging.fingerprint_at, sent.fingerprints)
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
                gradients, by = args
                self._instead(gradients, shards.local(by), lambda: self._inner(gradients, by))
                return gradients
        return self._inner(*args, **kwargs)


def watch_clipping(early: EarlyPuts) -> None:
    """`clip_grad_norm_` looks its other half up in its module, wherever it was imported to."""
    inner: Any = clip_grad._clip_grads_with_norm_

    @functools.wraps(inner)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)  # what it has changed will be found
        return early.watch_clip(lambda: inner(*args, **kwargs))

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
