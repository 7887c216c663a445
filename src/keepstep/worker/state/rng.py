"""The random number generators of this process: capture and restore, in microseconds.

Captured at the begin of every step (a retry starts from it) and again before every fence (a
newcomer continues from it), so it is on the hot path. States travel as raw bytes.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any

import msgspec
import torch

assert array.array("I").itemsize == 4, "Python's generator is made of 32-bit words"

_encoder = msgspec.msgpack.Encoder()
_TWISTER_BYTES = 625 * 4  # of a Mersenne Twister: 624 words and the position

_numpy_seen: tuple[bytes, tuple[Any, ...]] | None = None  # raw words, and what they were read as


def capture() -> bytes:
    """Only generators that exist: CUDA once initialised, numpy once imported."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": _capture_python(),
    }
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        # A few bytes of host memory each: nothing here waits for a device.
        devices = range(cuda.device_count())
        state["cuda"] = [cuda.get_rng_state(i).numpy().tobytes() for i in devices]
        state["device"] = cuda.current_device()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _capture_numpy(numpy)
    return _encoder.encode(state)


def _capture_python() -> tuple[int, bytes, float | None]:
    if _PYTHON_WORDS:
        raw = ctypes.string_at(_PYTHON_WORDS, _TWISTER_BYTES)
        return random.Random.VERSION, raw[4:] + raw[:4], random._inst.gauss_next  # type: ignore[attr-defined]
    version, words, gauss = random.getstate()
    return version, array.array("I", words).tobytes(), gauss


def _find_python_words() -> int:
    """Where CPython keeps the position and the words of its generator, or 0. getstate() makes an
    object of every word, which takes longer than everything else here together."""
    where = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
    words = array.array("I", random.getstate()[1]).tobytes()
    if sys.implementation.name != "cpython":
        return 0
    return where if ctypes.string_at(where, _TWISTER_BYTES) == words[-4:] + words[:-4] else 0


def _capture_numpy(numpy: Any) -> tuple[Any, ...]:
    """get_state() takes longer than everything else here, and most scripts never draw from
    numpy's global generator between two captures: then the words are as they were. A pending
    second Gaussian is not among the words, so a state that had one is always read again."""
    global _numpy_seen
    source = numpy.random.mtrand._rand._bit_generator
    raw = b""
    if type(source) is numpy.random.MT19937:
        raw = ctypes.string_at(source.ctypes.state_address, _TWISTER_BYTES)
        if _numpy_seen is not None and _numpy_seen[0] == raw and not _numpy_seen[1][3]:
            return _numpy_seen[1]
    name, key, position, has_gauss, cached = numpy.random.get_state()
    state = (str(name), key.tobytes(), int(position), int(has_gauss), float(cached))
    # Made of the state itself: another thread may have drawn since the words were looked at.
    seen = state[1] + state[2].to_bytes(4, sys.byteorder)
    _numpy_seen = (seen, state) if raw else None
    return state


def restore(data: bytes) -> None:
    global _numpy_seen
    state: dict[str, Any] = msgspec.msgpack.decode(data)
    torch.set_rng_state(torch_state(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    if "cuda" in state:
        _restore_cuda(state["cuda"], state["device"])
    if "numpy" in state:
        import numpy

        name, key, position, has_gauss, cached = state["numpy"]
        words = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state((name, words, position, has_gauss, cached))
        _numpy_seen = None


def _restore_cuda(states: list[bytes], device: int) -> None:
    """A rank's device belongs to its slot: the generator it uses may have another number here."""
    own = torch.cuda.current_device()
    states = list(states)
    if own != device:
        states += [states[device]] * (own + 1 - len(states))
        states[own], states[device] = states[device], states[own]
    for index, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch_state(state), index)


def torch_state(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


_PYTHON_WORDS = _find_python_words()
