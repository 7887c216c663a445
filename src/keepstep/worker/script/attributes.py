"""What an optimizer keeps outside of its state_dict, in attributes of its own.

`self.t += 1` in a hand-written Adam, lists of moments beside `self.state`, the weights of a
look-ahead: no state_dict has them, and the next update depends on them. They are as equal on
replicas as the rest of the optimizer, so each is registered like other state that nobody has
attached (unasked.py), once it has changed. Values that are not plain data are left to the script's
variables (namespaces.py).
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

import torch

from keepstep.errors import UsageError
from keepstep.worker import codec
from keepstep.worker.script.values import SCALARS

# Of any optimizer, and what schedulers, scalers and Keepstep put there.
TORCHS: Final = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {
    *("step", "_step_count", "_opt_called", "found_inf", "grad_scale"),
}
PREFIX: Final = "optimizer "
DEPTH_MAX: Final = 4
DATA_BYTES_MAX: Final = 16 << 10  # looked at in every step; tensors have their counters
PLAIN: Final = (type(None), bool, int, float, str, tuple, list, dict, torch.Tensor)


class Attribute:
    """One of them, until it is registered."""

    def __init__(self, owner: torch.optim.Optimizer, name: str) -> None:
        self._namespace, self._name = vars(owner), name
        self._value: Any = None
        self._data = b""  # without its tensors
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._contents: list[bytes] = []

    def changed(self, content: Callable[[torch.Tensor], bytes], deep: bool) -> bool:
        """Since the first look."""
        value, before = self._namespace.get(self._name), (self._data, self._contents)
        same = value is self._value and [*map(_version, self._tensors)] == self._versions
        if same and not deep and (len(self._data) > DATA_BYTES_MAX or type(value) in SCALARS):
            return False
        try:
            data, tensors = codec.dumps(value)
        except UsageError:  # it has become something else than data
            return False
        if deep or not same or [*map(id, tensors)] != [*map(id, self._tensors)]:
            self._contents = [content(tensor) for tensor in tensors]
        self._value, self._data, self._tensors = value, data, tensors
        self._versions = [*map(_version, tensors)]
        return before[0] != b"" and before != (self._data, self._contents)

    def save(self) -> Any:
        return self._namespace.get(self._name)

    def load(self, theirs: Any) -> None:
        with torch.no_grad():
            self._namespace[self._name] = _put(self._namespace.get(self._name), theirs)


def find(
    optimizers: dict[str, torch.optim.Optimizer], known: Callable[[torch.Tensor], bool]
) -> dict[str, Attribute]:
    """By path. `known(tensor)`: others carry it."""
    found: dict[str, Attribute] = {}
    for key, optimizer in optimizers.items():
        for path, owner, name in _attributes(f"{PREFIX}{key}", optimizer, 0):
            try:
                tensors = codec.dumps(vars(owner)[name])[1]
            except UsageError:
                continue
            if not any(isinstance(x, torch.nn.Parameter) or known(x) for x in tensors):
                found[path] = Attribute(owner, name)
    return found


def _attributes(
    path: str, optimizer: torch.optim.Optimizer, depth: int
) -> Iterator[tuple[str, torch.optim.Optimizer, str]]:
    kind: Any = type(optimizer)
    torchs = TORCHS | _stored_by_torch(kind)
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and depth < DEPTH_MAX:
            yield from _attributes(f"{path}.{name}", value, depth + 1)
        elif name not in torchs and isinstance(value, PLAIN):
            yield f"{path}.{name}", optimizer, name


@functools.cache
def _stored_by_torch(kind: Any) -> frozenset[str]:
    """Marks of torch's own classes, such as whether a fused update has checked its tensors."""
    functions = [
        inspect.unwrap(value)
        for base in kind.__mro__
        if base.__module__.startswith("torch.")
        for value in vars(base).values()
        if isinstance(value, FunctionType)
    ]
    return frozenset(
        instruction.argval
        for function in functions
        for before, instruction in itertools.pairwise(dis.get_instructions(function))
        if instruction.opname == "STORE_ATTR" and before.argval == "self"
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _put(mine: Any, theirs: Any) -> Any:
    """The same objects, where they fit: others may refer to them."""
    if isinstance(theirs, torch.Tensor):
        if isinstance(mine, torch.Tensor) and mine.shape == theirs.shape:
            return mine.copy_(theirs) if mine.dtype == theirs.dtype else theirs.to(mine.device)
        return theirs
    if type(mine) is not type(theirs):
        return theirs
    if isinstance(theirs, dict):
        new = {key: _put(mine.get(key), value) for key, value in theirs.items()}
        mine.clear()
        mine.update(new)
        return mine
    if isinstance(theirs, list):
        mine[:] = [_put(a, b) for a, b in zip(mine + [None] * len(theirs), theirs)]
        return mine
    return theirs
