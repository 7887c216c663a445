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

Between the hooks nothing may wait for the device, because it waits for us:

* Only optimizers whose step() is known not to, whose state exists, and without hooks of the user's.
* A kernel is loaded when it is first launched, and that waits for the device. So the first update
  that could be guarded is a rehearsal: decided before it is queued, otherwise the same.
* Whoever else makes the device wait (communicators being built or taken down) holds
  `cuda.exclusive`; the guard is not used meanwhile.
* An abort does not wait for the post-hook but writes SKIP itself (`skip_open`), and so does a
  sentinel if the post-hook is not reached in time. The first word counts; a skipped update whose
  fence was passed is made good by the host.

The words are never freed; one is used again only when its copy is known to be over.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from keepstep.worker.device import cuda

GO, SKIP = 0x8000_0000, 0x3F80_0000  # -0.0 and 1.0 as float32
WORDS = 8
PROBE_S = 2.0
BETWEEN_HOOKS_S = 10.0  # a launch may have to wait for room in the device's queue
_WAIT_AND = 2  # CU_STREAM_WAIT_VALUE_AND: until (word & mask) != 0

_current: Guard | None = None


def skip_open() -> None:
    """Any thread: an update that is held back and not decided yet is not to be."""
    if _current is not None:
        _current._write(SKIP)


def used() -> bool:
    """Whether an update of this process was ever queued before it was decided."""
    return _current is not None


class Guard:
    def __init__(self) -> None:
        self._usable: bool | None = None  # not tried yet
        self._lock = threading.Lock()  # guards the two below; never held while anything blocks
        self._open = False  # a word is undecided
        self._opened = 0.0  # when, while the post-hook has not been reached
        self._waiting = False  # begun, and not decided by the main thread yet
        self._guarded: Optimizer | None = None
        self._theirs: Any = None  # found_inf of a GradScaler
        self._rehearsed: set[Any] = set()
        self._turn = 0

    # ------------------------------------------------------------------ whether

    def suits(self, optimizer: Optimizer) -> bool:
        """And was rehearsed."""
        return (
            self._usable is not False
            and cuda.home is not None
            and self._kind(optimizer) in self._rehearsed
            and self._possible(optimizer)
        )

    def _kind(self, optimizer: Optimizer) -> Any:
        """Updates of one kind launch the same kernels."""
        dtypes = {(p.dtype, p.grad.dtype) for p in _parameters(optimizer) if p.grad is not None}
        return id(optimizer), frozenset(dtypes), hasattr(optimizer, "found_inf")

    def _possible(self, optimizer: Optimizer) -> bool:
        if type(optimizer) not in (Adam, AdamW, SGD) or hooked(optimizer):
            return False
        if not all(group.get("fused") for group in optimizer.param_groups):
            return False
        state, home = optimizer.state, cuda.home
        parameters = [p for p in _parameters(optimizer) if p.grad is not None]
        return all(p in state and p.device == home for p in parameters)

    # ------------------------------------------------------------------ around one update

    def rehearse(self, optimizer: Optimizer) -> None:
        """Pre-hook, of an update whose fence is passed."""
        if self._usable is False or cuda.home is None or not self._possible(optimizer):
            return
        kind = self._kind(optimizer)
        if kind in self._rehearsed:
            return
        if self._usable is None:
            self._usable = self._set_up()
        if self._usable and self._queue(GO):
            self._rehearsed.add(kind)
            self._hand_over(optimizer)

    def begin(self, optimizer: Optimizer, stop: Callable[[], bool]) -> bool:
        """Pre-hook, of an update that is not decided. False: not now; nothing was done."""
        global _current
        if not cuda.exclusive.acquire(blocking=False):
            return False
        with self._lock:
            if stop() or not self._queue(0):
                cuda.exclusive.release()
                return False
            self._open, self._opened = True, time.monotonic()
        _current = self
        self._hand_over(optimizer)
        return True

    def _hand_over(self, optimizer: Optimizer) -> None:
        self._theirs = getattr(optimizer, "found_inf", None)
        found = self._found
        optimizer.found_inf = (  # type: ignore[attr-defined]
            found if self._theirs is None else torch.maximum(self._theirs, found)
        )
        self._guarded = optimizer

    def end(self, optimizer: Optimizer) -> bool:
        """Post-hook: the update is queued. Whether its word is still to be decided."""
        if self._guarded is not optimizer:
            return False
        self._opened = 0.0
        waiting = self._waiting
        self._take_back()
        return waiting

    def _take_back(self) -> None:
        if self._guarded is None:
            return
        if self._theirs is None:
            del self._guarded.found_inf  # type: ignore[attr-defined]
        else:
            self._guarded.found_inf = self._theirs  # type: ignore[attr-defined]
        self._guarded = self._theirs = None

    def wait(self, stop: Callable[[], bool]) -> None:
        """Until the gradients are complete; ConnectionAbortedError if `stop` says so before."""
        cuda.wait_for(self._event, stop)

    def decide(self, word: int) -> bool:
        """Whether the device has heard this word and not an earlier one."""
        written = self._write(word)
        if self._waiting:
            self._waiting = False
            cuda.exclusive.release()
        return written

    def close(self) -> bool:
        """Whatever happened: no word stays undecided, no optimizer changed. Whether one was."""
        was_open = self._waiting
        self.decide(SKIP)
        self._take_back()
        return was_open

    # ------------------------------------------------------------------ words

    def _write(self, word: int) -> bool:
        with self._lock:
            if not self._open:
                return False
            self._open = False
            self._raw[self._turn] = word
            return True

    def _queue(self, word: int) -> bool:
        turn = (self._turn + 1) % WORDS
        if not self._copied[turn].query():
            return False
        stream = torch.cuda.current_stream(cuda.home)
        self._event.record(stream)
        self._raw[turn] = word
        self._turn = turn
        where = self._address + 4 * turn
        if self._wait_value(stream.cuda_stream, where, GO | SKIP, _WAIT_AND) != 0:
            self._usable = False
            return False
        self._found.copy_(self._pinned[turn], non_blocking=True)
        self._copied[turn].record(stream)
        self._waiting = word == 0
        return True

    def _set_up(self) -> bool:
        """Whether streams can wait for host memory is a matter of driver and device: tried once,
        with a word that is decided already."""
        try:
            self._wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        except (OSError, AttributeError):
            return False
        self._wait_value.argtypes = [
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        ]  # fmt: skip
        self._words = torch.zeros(WORDS, pin_memory=True)
        self._pinned = list(self._words)
        self._address = self._words.data_ptr()
        self._raw = (ctypes.c_uint32 * WORDS).from_address(self._address)
        self._found = torch.ones((), device=cuda.home)
        self._event = cuda.new_event()
        self._copied = [cuda.new_event() for _ in range(WORDS)]
        if not self._queue(GO):
            return False
        deadline = time.monotonic() + PROBE_S
        while not self._copied[self._turn].query():
            if time.monotonic() > deadline:
                return False
        threading.Thread(target=self._watch, name="keepstep-guard", daemon=True).start()
        return True

    def _watch(self) -> None:
        while True:
            time.sleep(BETWEEN_HOOKS_S / 4)
            opened = self._opened
            if opened and time.monotonic() - opened > BETWEEN_HOOKS_S and self._write(SKIP):
                self._usable = False
                print(
                    "keepstep: something in the optimizer's step waits for the device; from now on "
                    "the fence is waited for before the update",
                    file=sys.stderr,
                    flush=True,
                )
                return


def apply_unguarded(optimizer: Optimizer) -> None:
    """The update itself, without hooks: of Keepstep's, of the profiler's, of a scheduler's."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def hooked(optimizer: Optimizer) -> bool:
    """By anybody but Keepstep."""
    everybody = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    )
    owners = (type(getattr(hook, "__self__", None)).__module__ for hook in everybody)
    return not all(owner.startswith("keepstep.") for owner in owners)
