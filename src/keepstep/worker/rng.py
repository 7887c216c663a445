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
_NUMPY_BYTES = 625 * 4  # of a Mersenne Twister: 624 words and the position

_numpy_seen: tuple[bytes, tuple[Any, ...]] | None = None  # raw words, and what they were read as


def capture() -> bytes:
    """Only generators that exist: CUDA once initialised, numpy once imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": (version, array.array("I", words).tobytes(), gauss),
    }
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        devices = range(cuda.device_count())
        state["cuda"] = [cuda.get_rng_state(i).numpy().tobytes() for i in devices]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _capture_numpy(numpy)
    return _encoder.encode(state)


def _capture_numpy(numpy: Any) -> tuple[Any, ...]:
    """get_state() takes longer than everything else here, and most scripts never draw from
    numpy's global generator between two captures: then the words are as they were. A pending
    second Gaussian is not among the words, so a state that had one is always read again."""
    global _numpy_seen
    source = numpy.random.mtrand._rand._bit_generator
    raw = b""
    if type(source) is numpy.random.MT19937:
        raw = ctypes.string_at(source.ctypes.state_address, _NUMPY_BYTES)
        if _numpy_seen is not None and _numpy_seen[0] == raw and not _numpy_seen[1][3]:
            return _numpy_seen[1]
    name, key, position, has_gauss, cached = numpy.random.get_state()
    state = (str(name), key.tobytes(), int(position), int(has_gauss), float(cached))
    _numpy_seen = (raw, state) if raw else None
    return state


def restore(data: bytes) -> None:
    global _numpy_seen
    state: dict[str, Any] = msgspec.msgpack.decode(data)
    torch.set_rng_state(torch_state(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    for index, cuda in enumerate(state.get("cuda", ())):
        torch.cuda.set_rng_state(torch_state(cuda), index)
    if "numpy" in state:
        import numpy

        name, key, position, has_gauss, cached = state["numpy"]
        words = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state((name, words, position, has_gauss, cached))
        _numpy_seen = None


def torch_state(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
