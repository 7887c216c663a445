"""Tensors and arrays of the script that are large, on a device, or in a graph: a memory bank,
a queue of keys, a replay buffer, losses.

Theory of operation
-------------------
A script holds many large tensors that never change (its dataset) and many that come and go
(batches, losses). None of them is carried; a newcomer makes them itself. One that is changed *in
place* is state: from the first change on it is carried whole with the script's other variables, and
copied at every entry, so that a retry finds it as it was. So is one that a step reads under a name
that is bound to other tensors (reads.py). The script is told once what that costs. Small ones are
carried like any other value: a loss on a GPU, or one that still has its graph, which stays behind.
A copy of what lies on a GPU is begun at the entry, and is there when it is needed.

    tensors     are looked at by their version counter; and by content in the first calls and now
                and then, because `.data` and numpy's views leave the counter unchanged
    arrays      have no counter. Small ones are hashed at every look, larger ones like tensors
                without a counter, until they are found to change

What is known about a block is kept apart from its node (large_values.py); nothing keeps it alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy
import torch
import xxhash

from keepstep.errors import UsageError
from keepstep.worker.device import cuda, digest
from keepstep.worker.script import values
from keepstep.worker.script.large_values import HostCopy, version_of
from keepstep.worker.script.nodes import Graph, VariableNode
from keepstep.worker.state import codec
from keepstep.worker.state.step_inputs import summed, words_of
from keepstep.worker.state.tensors import memory, on_cpu

FIRST, EVERY = 3, 256  # calls in which contents are looked at
HASHED_BYTES_MAX: Final = 256 << 10  # of an array, at every look
# Of larger ones evenly spread samples, until they are found to change; arrays have nothing else.
FULL_BYTES_MAX: Final = 16 << 20
FULL_ARRAY_BYTES_MAX: Final = 256 << 20
COPIED_BYTES_MAX: Final = 16 << 20  # in the first calls, before it is known whether it changes
BOUND_BYTES_MAX: Final = 32 << 20


class Block(VariableNode):
    kind = "block"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        record = graph.records.of(target)
        assert record is not None
        self.record = record
        self.address = id(target)
        self.small = isinstance(target, torch.Tensor) and target.nbytes <= values.BYTES_MAX
        self._before: Any = None
        self._bound = False  # a name that is carried leads to it
        super().__init__(graph, target, label, depth)
        self.raw = record.raw
        self._pointer = _pointer(target)
        graph.fleeting.setdefault(self)
        if self.changing:
            graph.carry[self] = None
            graph.changes += 1
        if graph.journal is None:
            self._keep(graph)

    # Node's own attributes, kept with the record or not at all.
    @property
    def target(self) -> Any:  # type: ignore[override]
        return self.record.ref()

    @target.setter
    def target(self, _: Any) -> None:
        pass

    @property
    def changing(self) -> bool:  # type: ignore[override]
        return self.record.changing

    @changing.setter
    def changing(self, now: bool) -> None:
        self.record.changing = self.record.changing or now

    @property
    def carried(self) -> bool:
        return self.record.changing or self._bound

    def carry_all(self, graph: Graph) -> None:
        if not self._bound:
            self._bound = True
            if not self.small:
                graph.told.heavy[self.label] = self.target.nbytes
            graph.touch(self)

    def too_large(self, graph: Graph) -> bool:
        """To be carried because a name is bound to it, and not because it was changed."""
        large: bool = self.target.nbytes > BOUND_BYTES_MAX
        if large:
            graph.omit(self.label)
        return large

    def about(self) -> str:
        target = self.target
        return f"{type(target).__name__} {target.dtype} {list(target.shape)}"

    # ------------------------------------------------------------------ looking

    def scan(self, graph: Graph) -> None:
        target, record = self.target, self.record
        if target is None:
            return
        version = version_of(target)
        changed = version != record.version
        record.version = version
        if self._pointer != _pointer(target):  # .data is another one
            self._pointer = _pointer(target)
            graph.memory.lay(self)
            changed = True
        if not changed and (graph.deep or self._by_content(target)):
            content = _content(target, record.changing or target.nbytes <= _full_max(target))
            changed = record.content not in (b"", content)
            record.uncounted = record.uncounted or changed
            record.content = content  # and if it has changed, all of it below
        if not changed:
            return
        record.content = _content(target, full=True) if record.uncounted else b""
        if graph.journal is not None:
            graph.note(self, None, self._before)
        if not record.changing:
            record.changing = True
            if not self.small:
                graph.told.heavy[self.label] = target.nbytes
        record.raw = record.fetched = None
        graph.told.in_place.add(self.label)
        graph.touch(self)

    def _by_content(self, target: Any) -> bool:
        if not self.record.uncounted:
            return False
        return self.record.changing or target.nbytes <= HASHED_BYTES_MAX

    def wake(self, graph: Graph) -> None:
        self.scan(graph)
        self._keep(graph)

    def rest(self, graph: Graph) -> None:
        self._before = None

    def _keep(self, graph: Graph) -> None:
        target = self.target
        if target is None:
            return
        if self.small and self.record.raw is None and target.is_cuda and not self.record.uncounted:
            fetched = self.record.fetched
            if fetched is None or fetched.version != self.record.version:
                self.record.fetched = HostCopy(target, self.record.version)
        first = graph.deep and target.nbytes <= COPIED_BYTES_MAX
        if self.record.changing or first or self.label in graph.told.in_place:
            self._before = _copy(target)

    # ------------------------------------------------------------------ travelling

    def payload(self, graph: Graph) -> Any:
        target = self.target
        if isinstance(target, torch.Tensor):
            needs_grad = target.requires_grad and target.grad_fn is None
            return [codec.dumps_inline(self._on_host(target)), target.device.type, needs_grad]
        return [codec.dumps_inline(target), "", False]

    def _on_host(self, target: torch.Tensor) -> torch.Tensor:
        fetched, self.record.fetched = self.record.fetched, None
        if fetched is not None and fetched.version == version_of(target):
            return fetched.read()
        return on_cpu(target)

    def put_back(self, old: Any) -> None:
        if old is None:
            raise UsageError(
                f"{self.label} ({self.about()}) was changed in place for the first time, and could "
                "not be put back for a retry",
                hint="make it a buffer of the model, or register it: ks.register(name, save, load)",
            )
        _fill(self.target, old)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        _fill(self.target, codec.loads_inline(data[0]))
        self.record.raw = None


def made(data: Any) -> Any:
    value = codec.loads_inline(data[0])
    if not data[1]:
        return value
    device = cuda.home if data[1] == "cuda" and cuda.home is not None else data[1]
    return value.to(device).requires_grad_(data[2])


def _pointer(target: Any) -> int:
    return target.data_ptr() if isinstance(target, torch.Tensor) else 0


def _full_max(target: Any) -> int:
    return FULL_BYTES_MAX if isinstance(target, torch.Tensor) else FULL_ARRAY_BYTES_MAX


def _content(target: Any, full: bool) -> bytes:
    if isinstance(target, torch.Tensor):
        tensor = target
    else:
        word = numpy.uint8 if target.nbytes % 4 else numpy.int32
        tensor = torch.from_numpy(numpy.ascontiguousarray(target).reshape(-1).view(word))
    if not full:
        words = words_of(tensor.detach())
        return b"" if words is None else str(int(summed(words))).encode()
    if tensor.device.type != "cpu":
        return digest.digest(tensor)
    return xxhash.xxh3_128_digest(memory(on_cpu(tensor)))


def _copy(target: Any) -> Any:
    return target.detach().clone() if isinstance(target, torch.Tensor) else target.copy()


def _fill(target: Any, value: Any) -> None:
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(value)
    else:
        target[...] = value
