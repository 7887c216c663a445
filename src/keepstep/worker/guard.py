"""The guarded optimizer: an update that is queued on the device before it is decided.

Waiting for the fence before the update is queued would let the device run dry at every step: the
host falls back to it and has nothing queued behind the gradients. So, where the optimizer can be
told on the device to do nothing (fused optimizers, by `found_inf`, as a GradScaler does it):

    pre-hook    an event E behind the gradients; then the stream waits for a word in pinned host
                memory, copies it to the device and hands it to the optimizer as found_inf
    optimizer   queues its kernels behind that
    post-hook   waits for E, meets all ranks in the fence, and writes the word: GO or SKIP

The device is idle only for the time of the fence. It follows what the host decides and never
guesses; a skipped update leaves parameters and optimizer state as they were, bit by bit, and can
be made good from the gradients, which nobody has touched.

GO is -0.0 and SKIP is 1.0, both unlike the 0.0 of an undecided word, so that verdict and signal
are one word and no order of two stores has to be relied on.

Between the hooks nothing may wait for the device: it waits for us. Hence the list of optimizers
whose step() is known not to, the demand that their state exists, and no guard beside hooks of the
user's. The words are never freed; one is used again only when its copy is known to be over.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from keepstep.worker import cuda

GO, SKIP = 0x8000_0000, 0x3F80_0000  # -0.0 and 1.0 as float32
WORDS = 8
PROBE_S = 2.0
_WAIT_AND = 2  # CU_STREAM_WAIT_VALUE_AND: until (word & mask) != 0


class Guard:
    def __init__(self) -> None:
        self._usable: bool | None = None  # not tried yet
        self._guarded: Optimizer | None = None
        self._theirs: Any = None  # found_inf of a GradScaler
        self._turn = 0

    def holds(self, optimizer: Optimizer) -> bool:
        return self._guarded is optimizer

    def suits(self, optimizer: Optimizer) -> bool:
        if cuda.home is None or type(optimizer) not in (Adam, AdamW, SGD):
            return False
        if not all(group.get("fused") for group in optimizer.param_groups):
            return False
        if _hooked(optimizer) or not all(map(_ready(optimizer), _parameters(optimizer))):
            return False
        if self._usable is None:
            self._usable = self._set_up()
        return self._usable and self._copied[self._turn].query()

    def _set_up(self) -> bool:
        """Whether streams can wait for host memory is a matter of driver and device: tried once,
        with a word that is decided already."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._wait_value = driver.cuStreamWaitValue32_v2
        except (OSError, AttributeError):
            return False
        self._wait_value.argtypes = [
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        ]  # fmt: skip
        pinned = torch.full((WORDS,), -0.0, pin_memory=True)
        self._pinned = list(pinned)
        self._raw = (ctypes.c_uint32 * WORDS).from_address(pinned.data_ptr())
        self._address = pinned.data_ptr()
        self._found = torch.ones((), device=cuda.home)
        self._event = cuda.new_event()
        self._copied = [cuda.new_event() for _ in range(WORDS)]
        self._keep = pinned
        if not self._queue_wait():
            return False
        deadline = time.monotonic() + PROBE_S
        while not self._copied[self._turn].query():
            if time.monotonic() > deadline:
                return False
        return True

    def _queue_wait(self) -> bool:
        stream = torch.cuda.current_stream(cuda.home)
        where = self._address + 4 * self._turn
        if self._wait_value(stream.cuda_stream, where, GO | SKIP, _WAIT_AND) != 0:
            return False
        self._found.copy_(self._pinned[self._turn], non_blocking=True)
        self._copied[self._turn].record(stream)
        return True

    # ------------------------------------------------------------------ around one update

    def begin(self, optimizer: Optimizer) -> bool:
        """Pre-hook. False: the driver does not want to; nothing was done."""
        self._turn = (self._turn + 1) % WORDS
        self._event.record(torch.cuda.current_stream(cuda.home))
        self._raw[self._turn] = 0
        if not self._queue_wait():
            self._usable = False
            return False
        self._theirs = getattr(optimizer, "found_inf", None)
        found = self._found
        optimizer.found_inf = (  # type: ignore[attr-defined]
            found if self._theirs is None else torch.maximum(self._theirs, found)
        )
        self._guarded = optimizer
        return True

    def wait(self, stop: Callable[[], bool]) -> None:
        """Until the gradients are complete; ConnectionAbortedError if `stop` says so before."""
        cuda.wait_for(self._event, stop)

    def decide(self, word: int) -> None:
        """Idempotent: the first word counts."""
        if self._guarded is None:
            return
        self._raw[self._turn] = word
        if self._theirs is None:
            del self._guarded.found_inf  # type: ignore[attr-defined]
        else:
            self._guarded.found_inf = self._theirs  # type: ignore[attr-defined]
        self._guarded = self._theirs = None


def apply_unguarded(optimizer: Optimizer) -> None:
    """The update itself, without hooks: of Keepstep's, of the profiler's, of a scheduler's."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _ready(optimizer: Optimizer) -> Callable[[torch.Tensor], bool]:
    """State that step() would have to allocate first could make the allocator wait."""
    state, home = optimizer.state, cuda.home
    return lambda p: p.grad is None or (p in state and p.device == home)


def _hooked(optimizer: Optimizer) -> bool:
    ours = 1
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(torch_optimizer._global_optimizer_pre_hooks) > ours
        or len(torch_optimizer._global_optimizer_post_hooks) > ours
    )
