"""The inputs of a step: digests of its arguments, noted when it begins.

A newcomer that repeats a step must come to the same arguments, and a retry must find them as they
were. What is in host memory is hashed at once. What is on a device is summed up there, without
waiting: the sums are queued in front of the step's own work, and the note is completed as soon as
they have come in, at the latest when the gradients are complete. A rank that is lost before that
leaves a note of its host memory alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import weakref
from collections import UserDict
from collections.abc import Iterable
from typing import Any

import numpy
import torch
import xxhash

from keepstep.worker.device import cuda
from keepstep.worker.state import shards
from keepstep.worker.state.tensors import dense, memory, on_cpu, plain

INPUT_BYTES_MAX = 256 << 10  # of a tensor; of a larger one as many in SAMPLES places
SAMPLES = 8
LEAVES_MAX = 64
ITEMS_MAX = 256  # of a container
SUMMED_MAX = 1 << 16  # words of a tensor on a device, evenly spread
COPIED_MAX = 1 << 20  # bytes of a tensor on a device whose elements do not lie side by side

# Integers as wide as an element, or of four bytes: every tensor begins at a multiple of those.
_INTEGERS = {1: torch.uint8, 2: torch.int16}
_SCALARS = (bool, int, float, str)
_SEQUENCES = (list, tuple)
_MAPPINGS = (dict, UserDict)  # tokenizers make the latter


class Inputs:
    """Of the step that runs."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._coming: _Sums | None = None

    def enter(self, arguments: Any) -> None:
        on_device: dict[str, torch.Tensor] = {}
        self._found = inputs_of(arguments, on_device=on_device)
        self._coming = _Sums(on_device) if on_device else None

    def complete(self) -> bool:
        """Whether the device's part has just come in."""
        if self._coming is None or not self._coming.there():
            return False
        self._found.update(self._coming.read())
        self._coming = None
        return True

    def note(self) -> dict[str, Any]:
        return {"inputs": self._found, "complete": self._coming is None}

    def changed(self, arguments: Any) -> str:
        """The first argument that a retry would find changed in place. Waits for the device."""
        if self._coming is not None:
            self._found.update(self._coming.read())
            self._coming = None
        found = differences(self._found, read(arguments, fresh=True))
        return found[0].partition(" ")[0] if found else ""


def other(note: dict[str, Any], arguments: Any) -> list[str]:
    """On a newcomer: what the rank had otherwise, as sentences. Waits for the device."""
    if note["complete"]:
        return differences(note["inputs"], read(arguments))
    return differences(note["inputs"], inputs_of(arguments))


def read(arguments: Any, fresh: bool = False) -> dict[str, str]:
    on_device: dict[str, torch.Tensor] = {}
    found = inputs_of(arguments, fresh=fresh, on_device=on_device)
    if on_device:
        found.update(_Sums(on_device).read())
    return found


# ------------------------------------------------------------------------------- in host memory


_kept: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}  # digests of the last batch


def inputs_of(
    arguments: Any,
    *,
    kept: bool = False,
    fresh: bool = False,
    on_device: dict[str, torch.Tensor] | None = None,
) -> dict[str, str]:
    """A digest of every tensor and the value of every number among the arguments, by path. What
    lies on a device is left out, and put into `on_device`. `kept`: a batch, of which a step is to
    follow; `fresh`: read it again, although it seems unchanged."""
    found: dict[str, str] = {}
    if kept or fresh:
        _kept.clear()
    _collect(arguments, "", found, 0, kept, {} if on_device is None else on_device)
    return found


def _collect(
    node: Any,
    path: str,
    found: dict[str, str],
    depth: int,
    kept: bool,
    on_device: dict[str, torch.Tensor],
    scalars: bool = True,
) -> None:
    """`scalars`: not those of a configuration, which may be the slot's own."""
    if depth > 4:
        return
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(node, torch.Tensor):
        if node.layout is torch.strided:
            if node.device.type == "cpu":
                found[path] = _digest_once(node, kept)
            elif node.device == cuda.home:
                on_device[path] = node
    elif isinstance(node, _SCALARS):
        if scalars:
            found[path] = repr(node)[:64]
    elif isinstance(node, _MAPPINGS):
        inside = ((f"{path}[{k!r}]" if path else str(k), item) for k, item in node.items())
    elif isinstance(node, _SEQUENCES):
        inside = ((f"{path}[{index}]", item) for index, item in enumerate(node))
    elif isinstance(node, numpy.ndarray):
        if node.dtype.kind in "?biufc":
            found[path] = f"{node.dtype}{node.shape}{_hashed(numpy.ascontiguousarray(node).data)}"
    elif dataclasses.is_dataclass(node) and not isinstance(node, type) and path != "self":
        scalars = False
        inside = ((f"{path}.{name}", item) for name, item in getattr(node, "__dict__", {}).items())
    for number, (where, item) in enumerate(inside):
        if len(found) + len(on_device) >= LEAVES_MAX or number >= ITEMS_MAX:
            return
        _collect(item, where, found, depth + 1, kept, on_device, scalars)


def _digest_once(tensor: torch.Tensor, keep: bool) -> str:
    if tensor.is_inference():
        return content(tensor)
    version = tensor._version
    known = _kept.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1] == version:
        return known[2]
    found = content(tensor)
    if keep:
        _kept[id(tensor)] = weakref.ref(tensor), version, found
    return found


def content(tensor: torch.Tensor) -> str:
    part = shards.local(tensor)
    if not part.is_contiguous() or not plain(part):
        part = on_cpu(part)
    size = part.nbytes
    if 0 < size <= INPUT_BYTES_MAX:
        return str(xxhash.xxh3_64_hexdigest(block(size).from_address(part.data_ptr())))
    return _hashed(memory(part))


def _hashed(data: memoryview) -> str:
    """Of many bytes some."""
    data = data.cast("B") if data.nbytes else data
    size = data.nbytes
    if size <= INPUT_BYTES_MAX:
        return str(xxhash.xxh3_64_hexdigest(data))
    hashed = xxhash.xxh3_64(str(size).encode())
    piece = INPUT_BYTES_MAX // SAMPLES
    for number in range(SAMPLES):
        start = (size - piece) * number // (SAMPLES - 1)
        hashed.update(data[start : start + piece])
    return hashed.hexdigest()


@functools.lru_cache(maxsize=256)
def block(size: int) -> Any:
    return ctypes.c_char * size


def differences(theirs: dict[str, str], mine: dict[str, str]) -> list[str]:
    """Sentences about what a newcomer has otherwise, or not at all."""
    return [
        f"{name} is {mine.get(name, 'missing')} and was {theirs.get(name, 'missing')}"
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name)
    ]


# ---------------------------------------------------------------------------------- on a device


class _Sums:
    """Of several tensors, on their way to the host."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        parts = {name: shards.local(tensor).detach() for name, tensor in tensors.items()}
        words = {name: words_of(part) for name, part in parts.items()}
        self._about = {
            name: f"{parts[name].dtype}{tuple(parts[name].shape)}"
            for name in tensors
            if words[name] is not None
        }
        self._event: Any = None
        self._sums = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._about:
            sums = torch.stack([summed(part) for part in words.values() if part is not None])
            if sums.is_cuda:
                self._sums = torch.empty_like(sums, device="cpu", pin_memory=True)
                self._event = cuda.new_event()
                self._sums.copy_(sums, non_blocking=True)
                cuda.record(self._event)
            else:
                self._sums = sums

    def there(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> dict[str, str]:
        if self._event is not None:
            self._event.synchronize()
        sums = self._sums.tolist()
        return {
            name: f"{about} {value & (1 << 64) - 1:016x}"
            for (name, about), value in zip(self._about.items(), sums, strict=True)
        }


def words_of(part: torch.Tensor) -> torch.Tensor | None:
    """Some of it or all, as integers. None: to read it would take a large copy."""
    if not part.numel():
        return None
    if dense(part):
        flat = part.as_strided((part.numel(),), (1,))
    elif part.nbytes <= COPIED_MAX:
        flat = part.resolve_conj().resolve_neg().contiguous().view(-1)
    else:
        return None
    words = flat.view(_INTEGERS.get(part.element_size(), torch.int32))
    # An odd distance: both halves of elements of eight bytes are among them.
    return words[:: -(-words.numel() // SUMMED_MAX) | 1]


def summed(words: torch.Tensor) -> torch.Tensor:
    """Every word counts by its place."""
    place = torch.arange(1, words.numel() + 1, device=words.device)
    return (words * place).sum()
